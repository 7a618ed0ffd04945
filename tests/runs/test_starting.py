"""What start-up says: nothing before a second of silence, then its step, on a terminal in place."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coterie.runs import starting
from coterie.runs.starting import Starting
from tests.support.waiting import printed, wait_until


class Screen(io.StringIO):
    terminal = False

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_is_said_once_after_silence(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    screen = Screen()
    screen.terminal = terminal
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(starting, "_SILENCE_S", 0.3)
    with closing(Starting("importing torch")) as start:
        wait_until(lambda: "torch" in screen.getvalue(), 30, "it says the first step")
        monkeypatch.setattr(starting, "_SILENCE_S", 1e9)
        start.doing("2 learners")
        printed(start)
        screen.write("a line\n")
        start.doing("waiting for the first rollout")
        monkeypatch.setattr(starting, "_SILENCE_S", 0.3)
        wait_until(lambda: "rollout" in screen.getvalue(), 30, "it says the third step")
    first, third = "starting: importing torch", "starting: waiting for the first rollout"
    erase = "\r\x1b[2K"
    expected = f"{erase}{first}{erase}a line\n{erase}{third}{erase}" if terminal else f"{first}\na line\n{third}\n"
    assert screen.getvalue() == expected


def test_a_short_start_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    Starting("importing torch").close()
    assert capsys.readouterr().out == ""


def test_the_command_says_that_it_imports_torch(tmp_path: Path) -> None:
    """A torch that takes long and then fails: nothing may need it before."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(2)\nraise OSError('no torch')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from coterie.cli.main import main; sys.exit(main())"
    words = ["train", "a2c", "--env", "coterie.envs.testing:CountingEnv", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "starting: importing torch"
    assert (done.returncode, done.stderr) == (1, "coterie: no torch\n")


def test_help_is_there_before_settings_presets_and_envs_are_loaded() -> None:
    heavy = "{'coterie.config', 'gymnasium', 'psutil', 'torch'} & sys.modules.keys()"
    code = f"import sys; from coterie.cli.main import main; main(['--help']); sys.exit(str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("coterie: distributed deep")
    assert done.stderr.strip() == ""

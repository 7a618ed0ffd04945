"""The folder of a run: which run may begin in it, and what one that stops or cannot start leaves there."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest

import coterie
from coterie.cli.main import main
from coterie.errors import ConfigError, CoterieError
from coterie.launch import session
from coterie.runs.config_io import load_config, replace, save_config
from coterie.runs.files import refuse_run
from tests.support.runs import last_checkpoint, read_summary, small_ppo


def test_a_folder_that_holds_a_run_cannot_be_written_or_had_another_env_is_refused(tmp_path):
    out, blocked = tmp_path / "run", tmp_path / "file"
    coterie.train(small_ppo(out, steps=100), quiet=True)
    with pytest.raises(ConfigError, match=r"^out: .* already holds a run; go on with `coterie resume"):
        coterie.train(small_ppo(out, steps=100), quiet=True)
    save_config(out / "config.json", replace(load_config(out / "config.json"), {"env": "Acrobot-v1"}))
    with pytest.raises(ConfigError, match=r": observation float32 \(4,\) in the run, float32 \(6,\) now; 2 actions in"):
        coterie.resume(out, steps=9000, quiet=True)
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"^out: cannot write to"):
        coterie.train(small_ppo(blocked / "run"), quiet=True)
    with pytest.raises(ConfigError, match=r"^config: 'ppo' is not a Config; coterie\.presets\.ppo"):
        coterie.train("ppo", quiet=True)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_stops_the_script_around_the_run(tmp_path, number, raised):
    class Stops(coterie.Callback):
        sent = False

        def on_rollout(self, run):
            if not self.sent:  # a second one stops the run without a checkpoint
                os.kill(os.getpid(), number)
            self.sent = True

    with pytest.raises(raised) as error:
        coterie.train(small_ppo(tmp_path / "run", steps=10**9), callbacks=Stops(), quiet=True)
    if number == signal.SIGINT:
        assert str(error.value) == f"SIGINT: checkpoint written; go on with coterie.resume('{tmp_path}/run')"
    else:
        assert error.value.code == 75
    assert read_summary(tmp_path / "run")["status"] == "interrupted"
    assert last_checkpoint(tmp_path / "run")[1]["env_steps"] > 0


def test_the_folder_of_a_run_that_could_not_start_can_be_used(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise CoterieError("log.wandb: no API key")

    with monkeypatch.context() as patch:
        patch.setattr("coterie.launch.coordinator.RunWriter", fail)
        with pytest.raises(CoterieError, match="no API key"):
            coterie.train(small_ppo(tmp_path / "run"), quiet=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock"}
    coterie.train(small_ppo(tmp_path / "run", steps=100), quiet=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(ConfigError, match=r"/run already holds a run, without a checkpoint so far: name another$"):
        coterie.train(small_ppo(tmp_path / "run"), quiet=True)
    with pytest.raises(ConfigError, match=r"^RUN: .*/run has no complete checkpoint to resume from"):
        coterie.resume(tmp_path / "run", quiet=True)


def test_a_run_that_another_process_has_just_begun_is_left_alone(tmp_path, monkeypatch):
    prepare, out = session._prepare, tmp_path / "run"

    def late(*args):
        out.mkdir()
        (out / "config.json").write_text("another's")
        return prepare(*args)

    monkeypatch.setattr(session, "_prepare", late)
    with pytest.raises(ConfigError, match="already holds a run"):
        coterie.train(small_ppo(out), quiet=True)
    assert (out / "config.json").read_text() == "another's"


def test_a_current_folder_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["list", "presets"]) == 2
    assert capsys.readouterr().err == "coterie: the current folder is gone: cd to another one\n"


def test_a_command_to_paste_quotes_a_folder_with_spaces(tmp_path):
    (folder := tmp_path / "my run").mkdir()
    (folder / "config.json").touch()
    (folder / "checkpoints/step_1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=re.escape(f"go on with `coterie resume '{folder}'`")):
        refuse_run(folder)

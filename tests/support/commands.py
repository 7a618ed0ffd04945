"""Commands in processes of their own: until they end, or beside the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from coterie.cli.main import main
from coterie.runs.metrics import read_metrics
from tests.support.process_table import tagged
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds; a machine may be busy


def printed(capsys: Any, *args: str) -> str:
    """What a command prints in this process, which may print nothing on stderr."""
    assert main(list(args)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return str(out)


def python(
    *words: str | Path, folder: Path | None = None, typed: str | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in `folder`, with this repository on its path. `typed`: its input; `more`: of its environment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, input=typed, capture_output=True, text=True, timeout=300
    )


def coterie(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`coterie ARGS` from `folder`, as the installed command starts it: without that folder on Python's path (-P)."""
    return python("-P", "-m", "coterie", *args, folder=folder)


def run_example(name: str, folder: Path, *words: str, **more: str) -> str:
    """What a file of examples/ prints that runs in `folder` and exits with 0. `more`: of its environment."""
    done = python(ROOT / "examples" / name, *words, folder=folder, **more)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Command:
    """A `coterie` command in a process group of its own.

    `out`: the folder of its run; the output goes to a file beside it. `tmp`: the one of its temporary files.
    """

    def __init__(
        self, args: Sequence[str], out: Path, prefix: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        self.out, self.path = out, out.with_suffix(".txt")
        self.tmp = Path(tempfile.mkdtemp(prefix="ct-"))  # a socket's path must be short
        command = [*prefix, sys.executable, "-m", "coterie", *args]
        env = {**(env or {**os.environ, "TMPDIR": str(self.tmp)}), "COTERIE_TEST": str(self.tmp)}
        with self.path.open("a") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def text(self) -> str:
        return self.path.read_text()

    def lines(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """The metrics of the run, or of another folder."""
        folder = folder or self.out
        return read_metrics(folder) if (folder / "metrics.jsonl").exists() else []

    def line(self) -> dict[str, Any]:
        lines = self.lines()
        return lines[-1] if lines else {}

    def log(self) -> str:
        file = self.out / "log.txt"
        return file.read_text() if file.exists() else ""

    def processes(self) -> dict[int, str]:
        """The command lines of all its processes, by pid, also after it has ended."""
        return tagged("COTERIE_TEST", str(self.tmp))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait, while the command runs."""

        def met() -> object:
            assert self.process.poll() is None, self.text()
            return condition()

        wait_until(met, PATIENCE, what)

    def end(self, number: int = 0, code: int = 0) -> None:
        """Send a signal if there is a number, and wait for this exit code."""
        if number:
            self.process.send_signal(number)
        assert self.process.wait(PATIENCE) == code, self.text()

    def close(self) -> None:
        """Kill all of it that has not ended."""
        for pid in self.processes():
            with suppress(psutil.Error):
                psutil.Process(pid).kill()
        self.process.wait(30)
        shutil.rmtree(self.tmp, ignore_errors=True)

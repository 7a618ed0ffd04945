"""What the tests of runs of several learners share: small runs, what holds at their end, a meddler beside them."""

from __future__ import annotations

import json
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie import presets
from coterie.cli.main import main
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics

EXCHANGES = ("allreduce", "hogwild", "store", "gossip")
ROLLOUT = 16 * 8  # rows of one rollout of one learner
ENDLESS = {"steps": 10**9, "log.checkpoint_every": 0.3, "env.delay": 0.01}
PATIENCE = 120.0  # seconds; a machine may be busy


def options(out: Path, exchange: str, **changes: object) -> list[str]:
    """The arguments of `coterie train` for two small learners."""
    fields: dict[str, object] = {
        "env.id": "CartPole-v1",
        "steps": 3000,
        "out": out,
        "learners": 2,
        "exchange": exchange,
        "log.tensorboard": False,
        "log.every": 0.1,
        **changes,
    }
    return ["train", "a2c", *(text for k, v in fields.items() for text in (f"--{k}", str(v)))]


def tiny(out: Path, exchange: str, **changes: object):
    fields = {"steps": 3000, "learners": 2, "log.tensorboard": False, "log.every": 0.0}
    return presets.a2c(env="CartPole-v1", **{**fields, "out": str(out), "exchange": exchange, **changes})


def read_summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def last_checkpoint(out: Path) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    return checkpoint.load(checkpoint.latest(out / "checkpoints"))


def check_accounts(out: Path, summary: dict[str, Any]) -> None:
    """What holds at the end of any run that was not cut short: rows, the last checkpoint, rising metrics."""
    rows = summary["rows"]
    assert rows["produced"] == rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
    assert rows["learned"] == summary["env_steps"] == summary["env_frames"]
    assert rows["in_flight"] == 0
    assert min(rows.values()) >= 0
    tensors, state = last_checkpoint(out)
    assert state["env_steps"] == summary["env_steps"] == sum(x["learned"] for x in state["learners"])
    for name in ("learner_steps", "samples_trained"):
        assert sum(x[name] for x in state["learners"]) == summary[name]
    for rank in range(2):
        assert {f"learner_{rank}/{part}" for part in ("model", "exchange", "rng")} <= set(tensors)
        assert all(torch.isfinite(x).all() for x in tensors[f"learner_{rank}/model"].values())
    lines = read_metrics(out)
    assert lines
    assert all({"env_steps", "seconds"} <= set(line) for line in lines)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    for scores in (False, True):  # a score is of a checkpoint, which is whole only when others have gone on
        steps = [line["env_steps"] for line in lines if ("eval/return" in line) == scores]
        assert steps == sorted(steps)
    assert max(line["env_steps"] for line in lines) <= summary["env_steps"]


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def put_down(process: subprocess.Popen[Any]) -> None:
    """It is gone after this, however it was."""
    if process.poll() is None:
        process.kill()
    process.wait(30)


def tagged(tag: str) -> dict[int, str]:
    """Processes of a run, found by their environment: whoever their parents are by now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if tag.encode() in (folder / "environ").read_bytes() and not gone(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return found


def family(pid: int) -> list[int]:
    """A process and all that it has started, and these have."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents.setdefault(int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(
                    int(entry.name)
                )
    found, todo = [], [pid]
    while todo:
        found.append(one := todo.pop())
        todo += parents.get(one, [])
    return found


def named_memory(pid: int) -> list[str]:
    """What a process holds of shared memory that has a name, and could stay behind."""
    found = []
    for file in [*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()]:
        with suppress(OSError):
            target = os.readlink(file)
            if target.startswith("/dev/shm") and not target.endswith("(deleted)"):
                found.append(target)
    return found


class Outside:
    """A run in a process group of its own."""

    def __init__(self, tmp_path: Path, make: Callable[[Path], list[str]]) -> None:
        self.out, self.tag = tmp_path / "run", f"COTERIE_TEST={tmp_path}"
        self.tmp = Path(tempfile.mkdtemp(prefix="ct-"))  # a socket's path must be short
        key, _, value = self.tag.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *make(self.out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, key: value, "TMPDIR": str(self.tmp)},
            start_new_session=True,
        )

    def wait_for(self, pattern: str) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return any(file.stat().st_size for file in self.out.glob(pattern))

        until(there, f"{pattern} appears")

    def processes(self) -> dict[int, str]:
        return tagged(self.tag)

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout, stderr

    def clear_up(self) -> None:
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.tmp, ignore_errors=True)


class Meddler:
    """Runs the command line in this process, with a thread beside it that knows the learners' process ids.

    Most runs go this way: the fork server is warm.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.over = out, threading.Event()
        # Rank (or "actor 1") and pid of every child, in the order of their starts.
        self.started: list[tuple[int | str, int]] = []
        start = multiprocessing.process.BaseProcess.start

        def record(process: multiprocessing.process.BaseProcess) -> None:
            start(process)
            kind, _, number = process.name.removeprefix("coterie-").rpartition("-")
            self.started.append((int(number) if kind == "learner" else f"{kind} {number}", process.pid))

        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", record)
        self.folders: list[Path] = []  # some are not where the other temporary files are
        make = tempfile.mkdtemp

        def remember(*args: Any, **kwargs: Any) -> str:
            self.folders.append(Path(make(*args, **kwargs)))
            return str(self.folders[-1])

        monkeypatch.setattr(tempfile, "mkdtemp", remember)

    def run(self, args: list[str], action: Callable[[], None]) -> int:
        self.over.clear()
        failed: list[BaseException] = []

        def meddle() -> None:
            try:
                action()
                assert self.over.wait(PATIENCE), "the run does not end"
            except BaseException as error:
                failed.append(error)
                for _ in range(2):  # the run is to end, whatever it is at
                    if not self.over.wait(0.2):
                        os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            code = main(args)
        finally:
            self.over.set()
            thread.join()
        if failed:
            raise failed[0]
        return code

    def pid(self, rank: int | str) -> int:
        return [pid for r, pid in self.started if r == rank][-1]

    def until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> object:
            over = self.over.is_set()
            found = condition()
            assert found or not over, f"the run ended before: {what}"
            return found

        until(met, what)

    def steps(self) -> int:
        """Env steps of the last line of metrics."""
        with suppress(OSError):
            lines = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
            return json.loads(lines[-1])["env_steps"] if lines else 0
        return 0

    def saved(self) -> int:
        """Env steps of the newest checkpoint; -1 where there is none."""
        path = checkpoint.latest(self.out / "checkpoints")
        return -1 if path is None else int(path.name.removeprefix("step_").removesuffix(".old"))

    def at_work(self) -> None:
        """Wait until both learners have been started and have learned, and there is a checkpoint of that."""
        self.until(lambda: self.saved() > 0 and self.steps() > 0, "a checkpoint and a line of metrics")

    def kill(self, rank: int | str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill a learner, or an actor, and wait until it has been started again; returns the env steps known before.

        They are more than the last checkpoint's, so that going back to it costs something.
        """
        self.until(lambda: self.steps() > self.saved(), "a line of metrics after the last checkpoint")
        steps, starts = self.steps(), len(self.started)
        os.kill(self.pid(rank), number)
        self.until(lambda: rank in [r for r, _ in self.started[starts:]], f"{rank} is started again")
        return steps

    def check_nothing_left(self) -> None:
        until(lambda: all(gone(pid) for _, pid in self.started), "every learner is gone", 5)
        assert not list(Path(tempfile.gettempdir()).glob("coterie-*"))
        assert not [x for x in self.folders if x.name.startswith("coterie-") and x.exists()]


def last_line(capsys) -> str:
    """The last line on stderr: one of the program's."""
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("coterie: ")
    return line

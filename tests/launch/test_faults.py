"""Runs of several learners when something goes wrong: killed, stopped, failing learners, signals, a killed parent.

Most runs go in this very process, whose fork server is warm, while a thread meddles with them.
"""

from __future__ import annotations

import json
import multiprocessing.process
import multiprocessing.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coterie import cli
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics
from tests.launch.test_learners import EXCHANGES, check_accounts, last_checkpoint, odd, options, read_summary

__all__ = ["odd"]  # the fixture

# A CountingEnv that keeps a tally of all steps of all processes: one byte for each.
TALLY = """
import os

from coterie.envs.testing import CountingEnv


class Tally(CountingEnv):
    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def step(self, action):
        os.write(self.file, b".")
        return super().step(action)

    def close(self):
        os.close(self.file)
"""
ENDLESS = {"steps": 10**9, "log.checkpoint_every": 0.3, "env.delay": 0.01}


PATIENCE = 120.0  # seconds; a machine may be busy


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


class Meddler:
    """Runs the command line in this process, with a thread beside it that knows the learners' process ids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.over = out, threading.Event()
        self.started: list[tuple[int, int]] = []  # rank and pid of every learner, in the order of their starts
        start = multiprocessing.process.BaseProcess.start

        def record(process: multiprocessing.process.BaseProcess) -> None:
            start(process)
            self.started.append((int(process.name.rpartition("-")[2]), process.pid))

        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", record)

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
            code = cli.main(args)
        finally:
            self.over.set()
            thread.join()
        if failed:
            raise failed[0]
        return code

    def pid(self, rank: int) -> int:
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
        return -1 if path is None else int(path.name.removeprefix("step_"))

    def at_work(self) -> None:
        """Wait until both learners have been started and have learned, and there is a checkpoint of that."""
        self.until(lambda: self.saved() > 0 and self.steps() > 0, "a checkpoint and a line of metrics")

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill a learner, and wait until it has been started again; returns the env steps known before.

        They are more than the last checkpoint's, so that going back to it costs something.
        """
        self.until(lambda: self.steps() > self.saved(), "a line of metrics after the last checkpoint")
        steps, starts = self.steps(), len(self.started)
        os.kill(self.pid(rank), number)
        self.until(lambda: rank in [r for r, _ in self.started[starts:]], f"learner {rank} is started again")
        return steps

    def check_nothing_left(self) -> None:
        until(lambda: all(gone(pid) for _, pid in self.started), "every learner is gone", 5)
        assert not list(Path(tempfile.gettempdir()).glob("coterie-*"))


@pytest.fixture
def meddler(tmp_path, monkeypatch) -> Iterator[Meddler]:
    (tmp_path / "tmp").mkdir()
    multiprocessing.util.get_temp_dir()  # the fork server's socket stays where such a thing belongs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    # Should a signal of these tests come when the run has just ended, it must not end pytest.
    before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
    yield Meddler(monkeypatch, tmp_path / "run")
    for number, handler in before.items():
        signal.signal(number, handler)


def last_line(capsys) -> str:
    """The last line on stderr: one of the program's."""
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("coterie: ")
    return line


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_killed_learners_come_back_and_every_row_is_accounted_for(tmp_path, monkeypatch, meddler, exchange):
    out, tally, known = meddler.out, tmp_path / "tally", []
    (tmp_path / "tally_env.py").write_text(TALLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {
        "env.id": "tally_env:Tally",
        "env.kwargs": json.dumps({"path": str(tally)}),
        "env.num_envs": 4,
        "env.groups": 1,
    }

    def kill_each() -> None:
        for rank in range(2):
            meddler.at_work()
            before = last_checkpoint(out)[1]["learners"][rank]["learned"]
            known.append((meddler.kill(rank), before))
            at = meddler.saved()
            meddler.until(lambda at=at: meddler.saved() > at, "a later checkpoint")

    total = 3000 if exchange == "gossip" else 1500  # gossip goes on meanwhile
    changes = {"steps": total, "log.checkpoint_every": 0.4, "env.delay": 0.01}
    assert meddler.run(options(out, exchange, **env, **changes), kill_each) == 0
    summary = read_summary(out)
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= total
    assert summary["restarts"] == 2
    check_accounts(out, summary)
    assert all(summary["digests"])
    log = (out / "log.txt").read_text()
    assert all(f"learner {rank} was killed by SIGKILL" in log for rank in range(2))
    rows, starts = summary["rows"], [rank for rank, _ in meddler.started]
    if exchange == "gossip":
        assert starts == [0, 1, 0, 1]
        assert rows["rolled_back"] == 0
    else:
        assert starts == [0, 1] * 3
        back = [int(step) for step in re.findall(r"go back to step_(\d+)", log)]
        assert len(back) == 2
        assert rows["rolled_back"] >= sum(max(0, steps - at) for (steps, _), at in zip(known, back, strict=True))
    for (_, before), row in zip(known, last_checkpoint(out)[1]["learners"], strict=True):
        assert row["learned"] > before  # who came back learned on
    # The envs' own count: only rows of rollouts that nobody finished are in nobody's books.
    kills = 2 if exchange == "gossip" else 4  # the others are killed with the one
    unfinished = tally.stat().st_size - rows["produced"]
    assert 0 <= unfinished <= kills * 4 * 8
    meddler.check_nothing_left()


def test_games_of_rows_that_were_rolled_back_do_not_count(meddler):
    """As after a resume. The only checkpoint is the one at step 0."""
    out = meddler.out

    def kill() -> None:
        meddler.until(lambda: meddler.steps() > 1500, "most of the run")
        meddler.kill(0)

    changes = {"steps": 3500, "env.delay": 0.01, "log.checkpoint_every": 1000, "env.max_episode_steps": 10}
    assert meddler.run(options(out, "hogwild", **changes), kill) == 0
    summary = read_summary(out)
    check_accounts(out, summary)
    assert summary["rows"]["rolled_back"] > 1500
    shortest = 8  # steps of a game, and the longest has 10
    assert 0 < summary["episodes"] <= summary["env_steps"] / shortest
    assert read_metrics(out)[-1]["episodes"] == summary["episodes"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_learners_that_die_at_the_same_moment(meddler, exchange):
    """Both ends reach the parent at once. What had been learned before is not lost."""
    out, number = meddler.out, signal.SIGUSR1
    pids: list[int] = []
    before: list[float] = []

    def rows() -> float:
        """The running normalizers tell how much of the run the weights of a checkpoint have seen."""
        tensors, _ = last_checkpoint(out)
        return sum(float(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"]) for rank in range(2))

    def kill_both() -> None:
        meddler.until(lambda: meddler.saved() >= 2500, "most of the run")
        before.append(rows())
        signal.pthread_kill(threading.main_thread().ident, number)  # the parent is held up meanwhile
        time.sleep(0.1)
        pids.extend(meddler.pid(rank) for rank in range(2))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def hold(*_: object) -> None:
        until(lambda: len(pids) == 2, "both are killed")
        time.sleep(0.3)

    handler = signal.signal(number, hold)
    changes = {"steps": 4000, "log.checkpoint_every": 0.2, "env.delay": 0.01}
    try:
        assert meddler.run(options(out, exchange, **changes), kill_both) == 0
    finally:
        signal.signal(number, handler)
    summary = read_summary(out)
    check_accounts(out, summary)
    assert summary["restarts"] == (2 if exchange == "gossip" else 1)
    assert len(meddler.started) == 4
    assert rows() > before[0]
    meddler.check_nothing_left()


def test_gossip_goes_on_saving_after_a_death_in_the_middle_of_a_checkpoint(meddler, odd):
    """Learner 0 takes its time over its part of it; learner 1, which is through, dies."""
    out = meddler.out
    drafts = out / "checkpoints"

    def kill_while_saving() -> None:
        meddler.at_work()
        meddler.until(lambda: list(drafts.glob(".draft-order_*/learner_1/rng.safetensors")), "learner 1 has saved")
        at = meddler.saved()
        meddler.kill(1)
        meddler.until(lambda: meddler.saved() > at, "a checkpoint after that")

    changes = {"steps": 6000, "log.checkpoint_every": 0.3, "model.torso": "odd:slow_save_0", "env.delay": 0.01}
    assert meddler.run(options(out, "gossip", **changes), kill_while_saving) == 0
    summary = read_summary(out)
    assert summary["restarts"] == 1
    check_accounts(out, summary)


def test_gossip_finishes_without_a_learner_that_dies_at_the_end(meddler):
    """The others are through; what is saved is enough to go on from, and to be evaluated."""
    out = meddler.out

    def kill_the_last() -> None:
        meddler.until(lambda: meddler.steps() >= 4 * 128, "learner 0 goes ahead")
        meddler.until(lambda: 0 in idle(), "learner 0 is through")
        os.kill(meddler.pid(1), signal.SIGKILL)

    def idle() -> list[int]:
        """Learner 0 has reached the total while learner 1 is in a rollout of 3 s."""
        return [0] if meddler.steps() >= 1200 else []

    changes = {"steps": 1200, "env.delay": 0.4, "env.delay_learner": 1}
    assert meddler.run(options(out, "gossip", **changes), kill_the_last) == 0
    summary = read_summary(out)
    assert summary["status"] == "finished"
    rows = summary["rows"]
    assert rows["learned"] == summary["env_steps"] >= 1200
    assert summary["digests"][0]
    assert cli.main(["eval", str(out), "--learner", "mean", "--episodes", "2"]) == 0
    tensors, _ = last_checkpoint(out)
    seen = float(tensors["learner_0/model"]["obs_norm.obs_.count"])
    # Learner 1 goes on with what was learned, not from the beginning.
    args = ["resume", str(out), "--steps", str(summary["env_steps"] + 1)]
    assert cli.main(args) == 0
    check_accounts(out, read_summary(out))
    tensors, _ = last_checkpoint(out)
    for rank in range(2):
        assert float(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"]) >= 0.9 * seen


@pytest.mark.parametrize(
    ("exchange", "rank", "number"),
    [
        ("allreduce", 0, signal.SIGKILL),
        ("hogwild", 1, signal.SIGSEGV),
        ("store", 0, signal.SIGSEGV),
        ("gossip", 1, signal.SIGKILL),
    ],
)
def test_without_restarts_a_killed_learner_ends_the_run(capsys, meddler, exchange, rank, number):
    out = meddler.out

    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid(rank), number)

    assert meddler.run(options(out, exchange, restarts=0, **ENDLESS), kill) == 1
    line = last_line(capsys)
    assert f"learner {rank} was killed by {number.name}" in line
    assert "restarts (0)" in line
    summary = read_summary(out)
    assert summary["status"] == "failed"
    assert f"learner {rank} was killed by {number.name}" in summary["reason"]
    rows = summary["rows"]
    assert rows["produced"] == rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
    last_checkpoint(out)
    meddler.check_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_signal_checkpoints_and_the_run_can_be_resumed(capsys, meddler, exchange, number):
    out = meddler.out

    def interrupt() -> None:
        meddler.at_work()
        for _, pid in meddler.started:  # shared memory has no name: nothing of it can stay behind
            files = [*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()]
            for file in files:
                with suppress(OSError):
                    target = os.readlink(file)
                    assert not target.startswith("/dev/shm") or target.endswith("(deleted)"), target
        os.kill(os.getpid(), number)

    assert meddler.run(options(out, exchange, **ENDLESS), interrupt) == 75
    assert f"{number.name}: checkpoint written" in capsys.readouterr().out
    summary = read_summary(out)
    assert (summary["status"], summary["reason"]) == ("interrupted", number.name)
    assert summary["restarts"] == 0
    check_accounts(out, summary)
    meddler.check_nothing_left()
    if number == signal.SIGINT:
        return  # one resumed run for each exchange is enough
    total = summary["env_steps"] + 1000
    assert cli.main(["resume", str(out), "--steps", str(total)]) == 0
    again = read_summary(out)
    assert again["status"] == "finished"
    assert again["rows"]["rolled_back"] == 0
    assert total <= again["env_steps"] <= total + 4 * 128
    assert again["learner_steps"] > summary["learner_steps"]
    check_accounts(out, again)
    meddler.check_nothing_left()


def test_a_second_signal_ends_it_at_once(capsys, meddler):
    """Also where a learner is in the middle of a long rollout."""
    out = meddler.out

    def interrupt_twice() -> None:
        meddler.until(lambda: meddler.saved() == 0 and meddler.steps() >= 0, "the first checkpoint")
        time.sleep(0.5)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    assert meddler.run(options(out, "gossip", **{**ENDLESS, "env.delay": 5}), interrupt_twice) == 1
    assert last_line(capsys) == "coterie: stopped at once; the last checkpoint stands"
    assert read_summary(out)["status"] == "failed"
    last_checkpoint(out)
    meddler.check_nothing_left()


@pytest.mark.parametrize(
    ("exchange", "rank", "changes"),
    [
        ("allreduce", 1, {}),
        ("hogwild", 0, {}),
        ("store", 0, {"store.fixed_turns": True}),
        ("gossip", 1, {"gossip.tau": 0}),
    ],
)
def test_a_learner_that_hangs_is_named(capsys, meddler, exchange, rank, changes):
    """Also where the others wait for it, and come forward as little."""
    stopped: list[int] = []

    def stop() -> None:
        with suppress(AssertionError):
            meddler.at_work()
            stopped.append(meddler.pid(rank))
            os.kill(stopped[-1], signal.SIGSTOP)

    for seconds in (3, 6, 12):  # on a busy machine it may take longer until they work at all
        meddler.out = out = meddler.out.with_name(f"run-{seconds}")
        args = options(out, exchange, **ENDLESS, **changes, **{"log.stall": seconds})
        assert meddler.run(args, stop) == 1
        if stopped:
            break
    line = last_line(capsys)
    assert f"learner {rank}" in line
    assert f"learner {1 - rank}" not in line
    assert "log.stall" in line
    assert read_summary(out)["status"] == "failed"
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", ["allreduce", "gossip"])
def test_a_learner_whose_envs_fail_ends_the_run_with_the_reason(capsys, meddler, exchange):
    out = meddler.out
    env = {"env.id": "coterie.envs.testing:FlakyEnv", "env.kwargs": '{"how": "raise", "at": 20}', "env.num_envs": 2}
    assert cli.main(options(out, exchange, steps=10**9, **env, **{"env.replace_budget": 0})) == 1
    line = last_line(capsys)
    assert re.match(r"coterie: learner [01]: .*env\.replace_budget 0; the last: .*flaky by design", line)
    assert "Traceback" not in (out / "log.txt").read_text()
    summary = read_summary(out)
    assert summary["status"] == "failed"
    assert "flaky by design" in summary["reason"]
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exception_in_a_learner_leaves_its_traceback(capsys, meddler, odd, exchange):
    out = meddler.out
    assert cli.main(options(out, exchange, steps=10**9, **{"model.torso": "odd:raises"})) == 1
    assert "learner 1: ValueError: odd by design" in last_line(capsys)
    log = (out / "log.txt").read_text()
    assert "learner 1:\nTraceback" in log
    assert "in fail" in log
    assert read_summary(out)["status"] == "failed"
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_nan_stays_with_the_learner_that_made_it_and_is_named(capsys, meddler, odd, exchange):
    out = meddler.out
    changes = {"model.torso": "odd:not_a_number", "log.checkpoint_every": 0.0, "steps": 10**9, "log.keep": 100}
    assert cli.main(options(out, exchange, **changes)) == 1
    assert re.match(r"coterie: learner 1: the gradient of \S+ is not finite at learner step \d+", last_line(capsys))
    for path in (out / "checkpoints").glob("step_*"):
        tensors, _ = checkpoint.load(path)
        assert all(x.isfinite().all() for name, group in tensors.items() if "rng" not in name for x in group.values())
    meddler.check_nothing_left()


def tagged(tag: str) -> dict[int, str]:
    """Processes of a run, found by their environment: whoever their parents are by now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if tag.encode() in (folder / "environ").read_bytes() and not gone(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return found


class Outside:
    """A run in a process group of its own."""

    def __init__(self, tmp_path: Path, exchange: str, **changes: object) -> None:
        self.out, self.tag = tmp_path / "run", f"COTERIE_TEST={tmp_path}"
        self.tmp = Path(tempfile.mkdtemp(prefix="ct-"))  # a socket's path must be short
        key, _, value = self.tag.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie.cli", *options(self.out, exchange, **ENDLESS, **changes)],
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

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout, stderr

    def clear_up(self) -> None:
        for pid in tagged(self.tag):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.tmp, ignore_errors=True)


@pytest.fixture
def outside(tmp_path) -> Iterator[Callable[..., Outside]]:
    runs: list[Outside] = []

    def start(exchange: str, **changes: object) -> Outside:
        runs.append(Outside(tmp_path, exchange, **changes))
        return runs[-1]

    yield start
    for run in runs:
        run.clear_up()


COUNTING = {"env.id": "coterie.envs.testing:CountingEnv", "env.num_envs": 4}


def test_everybody_goes_with_a_killed_parent(outside):
    """Learners that wait for each other, and their env workers."""
    run = outside("allreduce", **COUNTING)
    run.wait_for("metrics.jsonl")
    assert len(tagged(run.tag)) >= 6  # parent, fork server, two learners with two workers at least
    run.process.kill()
    until(lambda: not tagged(run.tag), "all are gone", 5)


@pytest.mark.parametrize(
    ("exchange", "number", "changes", "early"),
    [
        ("gossip", signal.SIGINT, COUNTING, False),
        ("hogwild", signal.SIGINT, {}, True),
        ("allreduce", signal.SIGTERM, COUNTING, False),
    ],
)
def test_a_signal_to_the_whole_process_group(outside, exchange, number, changes, early):
    """As a terminal's Ctrl-C and `timeout` or a service manager send it: to every process of the run.

    `early`: while the server that the learners are forked from still loads torch.
    """
    run = outside(exchange, **changes)
    if early:
        until(lambda: "forkserver" in " ".join(tagged(run.tag).values()), "the fork server starts")
    else:
        run.wait_for("metrics.jsonl")
    os.killpg(run.process.pid, number)
    code, stdout, stderr = run.end()
    assert (code, stderr) == (75, "")
    assert f"{number.name}: checkpoint written" in stdout
    summary = read_summary(run.out)
    assert (summary["status"], summary["envs_replaced"]) == ("interrupted", 0)
    _, state = last_checkpoint(run.out)
    assert state["env_steps"] == summary["env_steps"]
    until(lambda: not tagged(run.tag), "all are gone", 5)
    assert list(run.tmp.iterdir()) == []

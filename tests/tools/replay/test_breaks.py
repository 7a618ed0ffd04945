"""A replay that ends early: at a learner step, and where a record breaks off."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from coterie.cli.main import main
from coterie.errors import ConfigError
from coterie.flight.record import FlightRecorder, lives, read_life
from coterie.roles.callbacks import Callback
from coterie.roles.learner_process import LearnerProcess
from coterie.tools.replay import engine
from tests.support.net import free_port
from tests.tools.replay.test_replay import LAYOUTS, assert_equal, edited, replayed, run


@pytest.mark.parametrize("layout", ["impala", "ppo, synchronous", "a2c, gossip"])
def test_a_replay_stops_at_a_learner_step(tmp_path, layout):
    """The fast one of two gossiping learners goes on for the slow one, which needs its messages."""
    first = tmp_path / "first"
    uneven = {"env.id": "tests.support.fickle_env:Uneven", "env.kwargs": json.dumps({"first": str(first)})}
    run(tmp_path / "run", **LAYOUTS[layout], **uneven, **{"env.threads": 1, "gossip.tau": 2})
    assert first.exists()
    last = 16 if "ppo" in layout else 7  # there are 8 in a rollout of ppo
    results = replayed(tmp_path / "run", "", last)
    assert len(results) == LAYOUTS[layout].get("learners", 1)
    for result in results:
        assert (result.steps, result.digests, result.difference) == (last, last, "")


def cut(path, rollouts, until="rollout"):
    """Let a record end after some rollouts, before the next event of that kind, as that of a killed process."""
    life = read_life(path)
    recorder = FlightRecorder(path, lambda: life.header)
    for event in life.events:
        if rollouts <= 0 and event[0] == until:
            break
        rollouts -= event[0] == "rollout"
        recorder.note(*event)
    recorder.close()


@pytest.mark.parametrize("layout", ["a2c, gossip", "impala, gossip", "ppo, synchronous"])
def test_a_record_that_breaks_off_is_compared_up_to_there(tmp_path, layout, capsys):
    """With others that took a message of which it has no rollout, too."""
    folder = tmp_path / "run"
    run(folder, **LAYOUTS[layout], **{"gossip.tau": 2})
    cut(folder / "flight" / "learner_1.life_0", 5)
    assert main(["replay", str(folder)]) == 0
    first, second = sorted(capsys.readouterr().out.splitlines()[:2])
    steps = r"up to learner step \d+: \d+ rollouts and \d+ digests of weights are equal(, mean return \d+\.\d)?"
    why = "no further: the replay of learner 1 ended before its message \\d+"
    if "synchronous" in layout:
        why = "no further: the replay of another learner ended before this sum"
    assert re.fullmatch(rf"learner 0, life 0, {steps}; {why}", first)
    assert re.fullmatch(rf"learner 1, life 0, {steps}; the record breaks off there", second)
    assert ": 5 rollouts and" in second


def test_a_learner_without_a_rollout_keeps_no_other_waiting(tmp_path):
    folder = tmp_path / "run"
    run(folder, **LAYOUTS["ppo, synchronous"], **{"steps": 200})
    cut(folder / "flight" / "learner_1.life_0", 0)
    first, second = sorted(replayed(folder), key=lambda result: result.life.header["learner"])
    assert (first.rollouts, first.stopped) == (1, "no further: the replay of another learner ended before this sum")
    assert (second.rollouts, second.stopped) == (0, "the record breaks off there")


@pytest.mark.parametrize(("layout", "kind", "what"), [("impala", "rollout", "actor"), ("seed", "open", "env host")])
def test_a_replay_ends_where_a_remote_client_comes_in(tmp_path, recorded, layout, kind, what, capsys):
    folder, events = shutil.copytree(recorded(layout), tmp_path / "run"), 0

    def edit(event):
        nonlocal events
        events += event[0] == "rollout"
        if layout == "impala" and event[0] == "rollout" and events > 7:
            event[3][-1][0] = 1 << 16  # a remote actor's number
        elif event[0] == "open" and event[1] == max(serials):
            event[4] = -1  # no life of a host of this run

    (life,) = lives(folder, 0)
    serials = [event[0] for event in life.of("open")]
    edited(folder, edit)
    assert main(["replay", str(folder)]) == 0
    ends = rf"up to learner step \d+: .+; no further: the next .+ a remote {what}.+ no record\n"
    assert re.search(ends, capsys.readouterr().out)


class Joined(Callback):
    """Starts a remote client, and ends the run some rollouts after it was admitted. Before, the run has no token."""

    left = 20

    def __init__(self, client, at):
        env = ("--env", "CartPole-v1", "--env.threads", "1", *(("--env.num-envs", "2") if client == "envs" else ()))
        self.command = [sys.executable, "-m", "coterie", client, "--connect", at, *env]

    def on_start(self, run):
        self.path, self.end = run.folder.parent / "client.txt", time.monotonic() + 120
        with self.path.open("w") as file:
            self.client = subprocess.Popen(self.command, stdout=file, stderr=subprocess.STDOUT)

    def should_stop(self, run):
        self.left -= "CartPole-v1 for " in self.path.read_text() or self.client.poll() is not None
        return self.left < 0 or time.monotonic() > self.end

    def on_end(self, run):
        self.client.terminate()
        self.client.wait(60)


@pytest.mark.parametrize(("layout", "client", "what"), [("impala", "actor", "actor"), ("seed", "envs", "env host")])
def test_a_run_with_a_remote_client_is_compared_up_to_it(tmp_path, layout, client, what, capsys):
    at = f"127.0.0.1:{free_port()}"
    own = {"wire.bind": at, "env.delay": 0.005, "steps": 10**9}
    run(tmp_path / "run", [Joined(client, at)], **LAYOUTS[layout], **own)
    assert main(["replay", str(tmp_path / "run")]) == 0
    ends = rf"up to learner step [\d,]+: .+ are equal.*; no further: the next .+ a remote {what}.+ no record\n"
    assert re.search(ends, capsys.readouterr().out)


def settings():
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()


class Apart(LearnerProcess):
    """Learner 1 ends at once, and learner 0, which was made after it, then begins a thread."""

    made, closed, found = (threading.Event(), threading.Event()), threading.Event(), list[tuple[int, bool]]()

    def __init__(self, *given):
        assert given[2].rank == 1 or self.made[1].wait(60)
        super().__init__(*given)
        self.made[self.context.rank].set()

    def run(self, on_rollout):
        if self.context.rank == 1:
            assert self.made[0].wait(60)
        else:
            assert self.closed.wait(60)
            thread = threading.Thread(target=lambda: self.found.append(settings()))
            thread.start()
            thread.join()

    def close(self):
        super().close()
        if self.context.rank == 1:
            self.closed.set()


def test_a_replay_computes_with_one_thread_whatever_its_process_does(tmp_path, monkeypatch):
    """A learner that has ended does not change that of the others, nor torch's algorithms."""
    run(tmp_path / "run", **LAYOUTS["a2c, gossip"], deterministic=True)
    monkeypatch.setattr(engine, "LearnerProcess", Apart)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        replayed(tmp_path / "run")
        assert (Apart.found, settings()) == ([(1, True)], (3, False))
    finally:
        torch.set_num_threads(before)


def test_learners_with_a_core_each_are_replayed_by_a_process_with_more(tmp_path):
    """Of images: one group of envs on one core, two on several, each with random numbers of its own."""
    images = {"env.id": "Breakout-v5", "model.torso": "a3c", "env.decorrelate": 0, "steps": 400}
    run(tmp_path / "run", **LAYOUTS["a2c, gossip"], **images)
    results = replayed(tmp_path / "run")
    assert {result.life.header["groups"] for result in results} == {1}
    assert_equal(results)


def test_learners_that_step_apart_do_not_switch_at_a_learner_step(recorded):
    with pytest.raises(ConfigError, match="--edit: with --from STEP it needs one learner"):
        replayed(recorded("a2c, gossip"), "5", None, {"algo.entropy_coef": 0.0})

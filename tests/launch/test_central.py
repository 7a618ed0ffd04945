"""Runs of central acting with local env hosts: killed, stopped, resumed, repeated, and their row counts."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from coterie.cli.main import main
from coterie.runs.metrics import read_metrics
from tests.support.runs import CROWD, ENDLESS, central_options, check_rows, last_line

slow = pytest.mark.slow


@pytest.mark.parametrize("exchange", ["solo", pytest.param("allreduce", marks=slow)])
def test_a_run_with_env_hosts_trains_and_resumes(tmp_path, exchange):
    out = tmp_path / "run"
    assert main(central_options(out, exchange, **{"eval.every": 1000, "eval.episodes": 2})) == 0
    summary = check_rows(out)
    assert summary["status"] == "finished"
    if exchange == "allreduce":  # all learners hold equal parameters: pulling from one is pulling from all
        assert len(summary["digests"]) == 2
        assert len(set(summary["digests"])) == 1
    # A learner that has not received the end yet finishes a batch: at most its unfinished rows.
    assert 3000 <= summary["env_steps"] <= 3000 + 4 * CROWD * 5
    assert summary["rows"]["rolled_back"] == 0
    lines = read_metrics(out)
    assert any("eval/return" in line for line in lines)
    expected = {"stage/wait", "stage/host/env", "inference/batch", "inference/envs", "wire/bytes_in_per_step"}
    assert expected | {"policy_lag/mean", "latency/p50_ms"} <= {k for line in lines for k in line}
    assert sum(summary["policy_lag"].values()) == summary["env_steps"] + summary["masked_steps"]
    assert main(["resume", str(out), "--steps", "4000"]) == 0
    before, summary = summary["rows"], check_rows(out)
    assert summary["env_steps"] >= 4000
    assert summary["rows"]["dropped"] >= before["in_flight"] + before["dropped"]
    # Of each env the rollouts that wait, in a batch or for one, and the one that it is at.
    assert summary["rows"]["in_flight"] + summary["rows"]["dropped"] <= 2 * 2 * CROWD * 5 * (3 + 2 + 1)


def test_killed_hosts_are_started_again_and_every_row_is_accounted_for(meddler, tally):
    out = meddler.out
    hosts = 2

    def kill_each() -> None:
        meddler.at_work()
        for i in range(hosts):
            starts = len(meddler.started)
            os.kill(meddler.pid(f"actor {i}"), signal.SIGKILL)
            meddler.until(lambda s=starts: len(meddler.started) > s, "a host is started again")
            steps = meddler.steps()
            meddler.until(lambda s=steps: meddler.steps() > s + 20 * CROWD, "the run goes on")
        os.kill(os.getpid(), signal.SIGTERM)

    code = meddler.run(central_options(out, **{**ENDLESS, **tally.options}), kill_each)
    assert code == 75
    summary = check_rows(out)
    assert summary["status"] == "interrupted"
    log = (out / "log.txt").read_text()
    assert all(f"host {i} was killed by SIGKILL" in log for i in range(hosts))
    assert [x for x, _ in meddler.started].count(0) == 1, "no learner was started again"
    assert summary["rows"]["rolled_back"] == 0
    # A host that ends, or is killed, may have made a step of each of its two envs that did not arrive.
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + 2 * hosts * 2
    meddler.check_nothing_left()


def test_a_host_killed_twice_at_once_and_one_that_is_stopped(meddler):
    """A stopped process is one whose frames are late by as long as that; the other goes on meanwhile."""
    out = meddler.out

    def meddle() -> None:
        meddler.at_work()
        for _ in range(2):
            starts = len(meddler.started)
            os.kill(meddler.pid("actor 0"), signal.SIGKILL)
            meddler.until(lambda s=starts: len(meddler.started) > s, "it is started again")
        pid = meddler.pid("actor 1")
        os.kill(pid, signal.SIGSTOP)
        try:
            steps = meddler.steps()
            meddler.until(lambda: meddler.steps() > steps + 20 * CROWD, "the other goes on")
            time.sleep(0.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        os.kill(meddler.pid("actor 0"), signal.SIGSTOP)  # only the one that was stopped can go on now
        try:
            steps = meddler.steps()
            meddler.until(lambda: meddler.steps() > steps + 20 * CROWD, "it goes on")
        finally:
            os.kill(meddler.pid("actor 0"), signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGTERM)

    assert meddler.run(central_options(out, **ENDLESS), meddle) == 75
    summary = check_rows(out)
    assert [x for x, _ in meddler.started].count("actor 0") == 3
    assert [x for x, _ in meddler.started].count("actor 1") == 1
    assert summary["policy_lag_max"] > 0
    meddler.check_nothing_left()


def test_a_killed_learner_is_started_again_with_its_hosts(meddler, tally):
    """With long rollouts, whose rows the learner has received and not learned from."""
    out = meddler.out

    def kill() -> None:
        meddler.at_work()
        meddler.kill(0)
        at = meddler.saved()
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        os.kill(os.getpid(), signal.SIGTERM)

    long = {"algo.unroll-length": 20, "log.checkpoint_every": 4}
    assert meddler.run(central_options(out, **{**ENDLESS, **tally.options, **long}), kill) == 75
    summary = check_rows(out)
    hosts = sum(isinstance(x, str) for x, _ in meddler.started)
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + 2 * hosts * 2
    assert [x for x, _ in meddler.started].count(0) == 2
    assert [x for x, _ in meddler.started].count("actor 0") == 2
    assert summary["rows"]["rolled_back"] > 0
    meddler.check_nothing_left()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"exchange": "allreduce", "learners": 2, "actors": 2}, marks=slow),
        pytest.param({"model.core": "lstm", "model.core-size": 8, "algorithm": "a2c"}, marks=slow),
    ],
)
def test_lockstep_is_the_same_twice(tmp_path, changes):
    digests = []
    for i in range(2):
        out = tmp_path / str(i)
        assert main(central_options(out, **{"central.lockstep": True, "steps": 1000, **changes})) == 0
        summary = check_rows(out)
        assert set(summary["policy_lag"]) == {"0"}
        assert summary["rows"]["in_flight"] == summary["rows"]["dropped"] == 0
        digests.append(summary["digest"])
    assert digests[0] == digests[1]


def test_a_run_with_newest_frames_on_the_wire_learns_the_same(tmp_path):
    """Lives are lost on the way, where EnvPool's stacks go on, and games end, where they do not."""
    digests, sent = [], []
    changes = {"central.lockstep": True, "actors": 1, "steps": 1200, "algo.unroll-length": 10, "model.torso": "a3c"}
    for newest in (False, True):
        out = tmp_path / str(newest)
        args = central_options(out, **{**changes, "central.newest_frame": newest})
        args[args.index("CartPole-v1")] = "Breakout-v5"
        assert main(args) == 0
        summary = check_rows(out)
        assert 0 < summary["episodes"] < summary["masked_steps"]
        digests.append(summary["digest"])
        sent.append(
            [line["wire/bytes_in_per_step"] for line in read_metrics(out) if "wire/bytes_in_per_step" in line][-1]
        )
    assert digests[0] == digests[1]
    assert sent[1] < sent[0] / 2


def test_a_host_that_dies_again_and_again_ends_the_run(meddler, capsys):
    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid("actor 1"), signal.SIGKILL)

    assert meddler.run(central_options(meddler.out, **{**ENDLESS, "central.restarts": 0}), kill) == 1
    assert "host 1 was killed by SIGKILL" in (line := last_line(capsys))
    assert "central.restarts (0) are used up" in line
    check_rows(meddler.out)
    meddler.check_nothing_left()


@slow
def test_a_host_that_hangs_is_named(tmp_path, meddler, capsys):
    """Though the others go on."""
    env = {"env.id": "coterie.envs.testing:FlakyEnv", "log.stall": 8, "env.timeout": 60}  # more than a start takes
    env["env.kwargs"] = json.dumps({"how": "hang", "at": 30, "marker": str(tmp_path / "once")})
    assert meddler.run(central_options(meddler.out, **{**ENDLESS, **env}), lambda: None) == 1
    line = last_line(capsys)
    assert "host " in line
    assert "hangs" in line
    meddler.check_nothing_left()

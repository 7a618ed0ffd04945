"""Runs on a Ray cluster of three machines, each in a network namespace of its own with an address of its own."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from coterie.runs.metrics import read_metrics
from tests.launch.ray.ray_cluster import Cluster, cluster
from tests.support.commands import Command
from tests.support.runs import read_summary

# Three Ray nodes and a run take both cores for minutes: beside another worker's tests both would miss their times. That
# `--launch ray` works at all is shown by the commands of docs/guides/machines.md, which tests/test_docs.py runs.
pytestmark = pytest.mark.slow
LONG_S = 400.0


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


class OnRay(Command):
    """A run that was started at the cluster's head."""

    def __init__(self, machines: Cluster, folder: Path, *args: str) -> None:
        super().__init__(args, folder, env=machines.env)

    def steps(self, site: int = 0) -> int:
        lines = self.lines(self.out / "sites" / str(site) if site else self.out)
        return int(lines[-1]["env_steps"]) if lines else 0

    def finish(self, code: int = 0) -> dict[str, Any]:
        """Returns the summary, whose rows add up."""
        assert self.process.wait(LONG_S) == code, self.text()
        summary = read_summary(self.out)
        rows = summary["rows"]
        assert rows["produced"] == rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
        assert rows["learned"] == summary["env_steps"]
        return summary


def hub_node() -> int:
    """Ray's process of site 0: the parent of the watchdog of the command that listens for gossip."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"watchdog.py") for word in words) and b"--out" in words:
                config = json.loads(Path(words[words.index(b"--out") - 1].decode()).read_text())
                if config["gossip"]["bind"]:
                    return int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    raise AssertionError("no site listens for gossip")


@pytest.fixture
def start(machines: Cluster, tmp_path: Path) -> Iterator[Callable[..., OnRay]]:
    made: list[OnRay] = []

    def begin(preset: str, steps: int, **changes: object) -> OnRay:
        out = tmp_path / preset
        options = {"launch": "ray", "ray.address": machines.address, "steps": steps, "out": out, "log.every": 1}
        options |= changes
        args = [x for key, value in options.items() for x in (f"--{key}", str(value))]
        made.append(OnRay(machines, out, "train", preset, "--env", "CartPole-v1", *args))
        return made[-1]

    yield begin
    for run in made:
        run.close()


def test_gossip_over_two_machines_is_stopped_and_goes_on(tmp_path, machines, start):
    bucket = tmp_path / "bucket" / "moved"
    run = start("gala-ppo", 10**9, learners=2, **{"ray.storage": f"file://{bucket}", "log.checkpoint_every": 2})
    run.until(lambda: run.steps(0) > 3000 and run.steps(1) > 3000, "both train")
    run.until(
        lambda: all(read_metrics(f)[-1].get("gossip/peers") == 1 for f in (run.out, run.out / "sites/1")), "gossip"
    )
    run.process.send_signal(signal.SIGTERM)
    summary = run.finish(75)
    assert (summary["status"], summary["reason"], summary["ray"]) == (
        "interrupted", "SIGTERM", {"machines": 3, "restarts": 0},
    )  # fmt: skip
    assert summary["env_steps"] == sum(one["env_steps"] for one in summary["sites"])
    assert "site 1: a learner at" in (run.out / "ray.txt").read_text()
    before = [(run.out / name / "metrics.jsonl").read_text().count("\n") for name in ("", "sites/1")]
    again = OnRay(machines, run.out, "resume", str(run.out), "--steps", str(summary["env_steps"] + 4000))
    try:
        summary = again.finish()
    finally:
        again.close()
    assert summary["status"] == "finished"
    after = [(run.out / name / "metrics.jsonl").read_text().count("\n") for name in ("", "sites/1")]
    assert all(x > y for x, y in zip(after, before, strict=True))  # the same curves, longer
    assert main(["eval", str(run.out), "--episodes", "2"]) == 0
    assert json.loads((bucket / "config.json").read_text())["launch"] == "ray"
    assert list(bucket.glob("checkpoints/step_*/manifest.json"))


def test_learners_that_are_lost_go_on_from_their_checkpoint(machines, start):
    """The worker of the site that the other one and a host depend on is killed, as when memory runs out."""
    run = start("seed-vtrace", 10**9, exchange="gossip", learners=2, **{"log.checkpoint_every": 1})
    run.until(lambda: min(run.steps(0), run.steps(1)) > 1500, "both train")
    os.kill(hub_node(), signal.SIGKILL)
    run.until(lambda: "all go on from their checkpoints" in run.text(), "it is placed again")
    before = run.steps(0), run.steps(1)
    run.until(lambda: run.steps(0) > before[0] + 1000 and run.steps(1) > before[1] + 1000, "both train again")
    run.process.send_signal(signal.SIGTERM)
    summary = run.finish(75)
    assert summary["ray"]["restarts"] == 1, run.text()


def test_a_failure_names_a_checkpoint_of_the_run_folder(machines, start):
    run = start("gala-ppo", 10**9, learners=2, callbacks="tests.launch.ray.test_node:Fails")
    run.end(code=1)
    reason = read_summary(run.out)["reason"]
    assert re.fullmatch(r"site [01]: Fails.on_rollout: KeyError: 'oops'", reason)  # the one that was first
    assert run.text().count(reason) == 1
    last = run.text().splitlines()[-1]
    assert last.startswith(f"coterie: {reason}; last good checkpoint: {run.out}/checkpoints/step_")


def test_a_cluster_that_cannot_be_reached_is_named(start):
    run = start("a2c", 1000, **{"ray.address": "127.0.0.1:1"})
    run.end(code=1)
    assert run.text().splitlines()[-1].startswith("coterie: ray.address: cannot connect to 127.0.0.1:1")


@pytest.mark.parametrize(
    ("preset", "steps", "changes"),
    [
        ("ppo", 200_000, {"learners": 3, "allreduce.trusted_network": True}),  # more than a machine has room for
        ("impala", 150_000, {}),
        ("seed-vtrace", 150_000, {}),
        ("gala-ppo", 300_000, {"learners": 3}),
    ],
)
def test_cartpole_is_solved_across_machines(start, preset, steps, changes):
    assert start(preset, steps, **changes).finish()["mean_return"] >= 400


def test_hosts_on_three_machines_of_which_one_is_lost(machines, start):
    """The last of those that share the cluster: the machine does not come back, and there is no other place."""
    run = start("seed-vtrace", 10**9)
    run.until(lambda: run.steps() > 3000, "it trains")
    found = re.findall(r"^envs \d: at ([0-9.]+), for site 0$", run.text(), re.MULTILINE)
    assert set(found) == {machine.address for machine in machines.machines}
    machines.machines.pop().kill()
    run.until(lambda: "not scheduled yet, no report for 20 s; free are 0 of 4 CPUs" in run.text(), "it is missed")
    before = run.steps()
    run.until(lambda: run.steps() > before + 1000, "the others go on")
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)

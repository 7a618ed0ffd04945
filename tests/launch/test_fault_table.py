"""Four architectures on three machines (network namespaces), of which one is lost, slow, or cut off.

`make chaos` runs it and writes its measurements to runs/faults.json: the table of docs/benchmarks/faults.md.
"""

from __future__ import annotations

import itertools
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coterie.cli.main import main
from tests.launch.namespaces import bridged
from tests.launch.slow_link import SlowLink
from tests.support.commands import Command
from tests.support.net import free_port
from tests.support.runs import check_rows, keep
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PATIENCE_S = 900.0  # synchronous learners on a slow link take 8 minutes
SOLVED = 400.0  # mean return of 100 episodes while training
DELAY_S, RATE = 0.02, 1e6  # each way, and bytes per second
CUT_S = 10.0
NOTICED_S = 30.0  # within which a machine that went dark is missed; docs/explanation/faults.md says 10 to 20 s
COUNTED = {  # the metric that counts the machines, or what runs on them
    "sync PPO": "allreduce/machines",
    "GALA-PPO": "gossip/peers",
    "IMPALA": "slots/remote_envs",
    "SEED": "inference/envs",
}
ENDLESS = "1000000000"


class Part(Command):
    """A command on one of the machines."""

    def __init__(self, args: list[str], prefix: tuple[str, ...], folder: Path, name: str) -> None:
        self.trains = args[0] == "train"
        out = folder / name
        more = ["--out", str(out), "--steps", ENDLESS, "--log.every", "0.25", "--log.tensorboard", "False"]
        super().__init__([*args, *(more if self.trains else [])], out, prefix)


def commands(kind: str, here: str, keys: Path) -> tuple[list[str], list[str]]:
    """The command of the first machine, and that of each other one."""
    at = f"{here}:{free_port()}"
    env = ["--env", "CartPole-v1"]
    token = ["token-file", f"{keys}/token", "cert", f"{keys}/cert.pem"]
    wire = [word if i % 2 else f"--wire.{word}" for i, word in enumerate([*token, "key", f"{keys}/key.pem"])]
    client = ["--connect", at, *env, *(word if i % 2 else f"--{word}" for i, word in enumerate(token))]
    sync = ["train", "ppo", *env, "--exchange", "allreduce", "--learners", "1", *wire[:2]]
    sync += ["--allreduce.trusted-network", "True"]
    gala = ["train", "gala-ppo", *env, "--learners", "1"]
    return {
        "sync PPO": ([*sync, "--allreduce.bind", at, "--allreduce.machines", "3"], [*sync, "--allreduce.connect", at]),
        "GALA-PPO": ([*gala, "--gossip.bind", at, *wire], [*gala, "--gossip.connect", at, *wire[:4]]),
        "IMPALA": (["train", "impala", *env, "--actors", "1", "--wire.bind", at, *wire], ["actor", *client]),
        "SEED": (["train", "seed-vtrace", *env, "--actors", "0", "--wire.bind", at, *wire], ["envs", *client]),
    }[kind]


@pytest.fixture
def machines() -> Iterator[tuple[str, list[tuple[str, str, str]], list[SlowLink]]]:
    links: list[SlowLink] = []
    with bridged(2, "f", links) as (here, made):
        yield here, made, links


def until(condition: Callable[[], object], what: str, parts: list[Part]) -> None:
    def met() -> object:
        for part in parts:
            assert part.process.poll() is None, part.text()[-2000:]
        return condition()

    wait_until(met, PATIENCE_S, what)


def solved(part: Part) -> bool:
    return bool(part.lines()) and (part.lines()[-1]["mean_return"] or 0) >= SOLVED


class Watch:
    """The env steps of a run by time, from its lines of metrics."""

    def __init__(self, part: Part) -> None:
        self.part, self.times, self.steps = part, [time.monotonic()], [0.0]

    def look(self) -> None:
        lines = self.part.lines()
        if lines and lines[-1]["env_steps"] != self.steps[-1]:
            self.times.append(time.monotonic())
            self.steps.append(lines[-1]["env_steps"])

    def rate(self, begin: float, end: float) -> float:
        i, j = (min(bisect_left(self.times, t), len(self.times) - 1) for t in (begin, end))
        return (self.steps[j] - self.steps[i]) / max(1e-9, self.times[j] - self.times[i]) if j > i else 0.0

    def still(self, since: float) -> float:
        """The longest time without a step."""
        after = self.times[max(0, bisect_left(self.times, since) - 1) :]
        return max((b - a for a, b in itertools.pairwise(after)), default=0.0)


@pytest.mark.parametrize("fault", ["none", "lost", "dark", "slow", "cut"])
@pytest.mark.parametrize("kind", ["sync PPO", "GALA-PPO", "IMPALA", "SEED"])
def test_cartpole_is_solved_across_machines(tmp_path, machines, kind, fault):
    here, made, links = machines
    keys = tmp_path / "keys"
    assert main(["keys", str(keys), "--host", here]) == 0
    first, other = commands(kind, here, keys)
    parts = [Part(first, (), tmp_path, "0")]
    try:
        for k, (name, _, _) in enumerate(made, 1):
            seed = ["--seed", str(k)] if other[0] == "train" else []
            parts.append(Part([*other, *seed], ("ip", "netns", "exec", name), tmp_path, str(k)))
        hub = Watch(parts[0])
        learners = [part for part in parts if part.trains]

        def goes_on(seconds: float = 0.0) -> None:
            end = time.monotonic() + seconds
            until(lambda: hub.look() or time.monotonic() >= end, f"{seconds} s", parts)

        until(
            lambda: hub.look() or all(p.lines() and p.lines()[-1]["env_steps"] > 5000 for p in learners), "all", parts
        )
        goes_on(5.0)
        at = time.monotonic()
        before, noticed = hub.rate(at - 4.0, at), 0.0
        if fault == "lost":
            parts.pop(1).close()
            learners = [part for part in parts if part.trains]
        elif fault == "dark":  # as without power: no FIN, no RST, for ever
            there = parts[0].lines()[-1][COUNTED[kind]]
            links[0].down = True
            until(lambda: hub.look() or parts[0].lines()[-1].get(COUNTED[kind], there) < there, "it is noticed", parts)
            noticed = time.monotonic() - at
            assert noticed < NOTICED_S
            parts.pop(1).close()
            learners = [part for part in parts if part.trains]
        elif fault == "slow":
            links[0].delay, links[0].rate = DELAY_S, RATE
        elif fault == "cut":
            links[0].down = True
            goes_on(CUT_S)
            links[0].down = False
        # Synchronous learners wait for a slow link at every sum; after anything else they are soon as fast as before.
        share, window = (0.01, 20.0) if fault == "slow" else (0.25, 2.0)
        until(
            lambda: hub.look() or hub.rate(max(at, time.monotonic() - window), time.monotonic()) > share * before,
            "it goes on",  # after the fault
            parts,
        )
        goes_on(window + 8.0)
        after = hub.rate(time.monotonic() - window - 6.0, time.monotonic())
        until(lambda: hub.look() or all(solved(part) for part in learners), "all solve it", parts)
        for part in reversed(parts):
            part.process.send_signal(signal.SIGTERM)
            assert part.process.wait(120) == (75 if part.trains else 0), part.text()[-2000:]
        found = [check_rows(part.out) for part in learners]
        row = {
            "what": kind,
            "fault": fault,
            "steps_per_s_before": round(before),
            "steps_per_s_after": round(after),
            **({"seconds_to_notice": round(noticed, 1)} if noticed else {}),
            "seconds_without_a_step": round(hub.still(at), 1),
            "steps_dropped": sum(one["rows"]["dropped"] + one["rows"]["rolled_back"] for one in found),
            "updates_lost": max((part.lines()[-1].get("allreduce/updates_lost", 0) for part in learners), default=0),
            "seconds_to_solved": round(hub.times[-1] - hub.times[0]),
        }
        keep("COTERIE_FAULTS", [row], "what", "fault")
    finally:
        for part in parts:
            part.close()

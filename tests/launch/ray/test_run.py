"""The process that started a run on Ray, without a cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.config import Config, Ray
from coterie.launch.ray import run as runs
from coterie.launch.ray.allocation import Machine, Site
from coterie.launch.ray.cluster import Cluster
from coterie.launch.ray.node import Outcome
from coterie.launch.ray.run import RayRun, sum_up
from coterie.parallel.signals import on_signals
from coterie.runs.starting import Starting
from coterie.types import CoterieError
from tests.support.waiting import PATIENCE


def test_the_end_waits_for_the_other_sites_of_one_that_is_silent():
    machine, ended = Machine("a", "127.0.0.1", 2, 0), iter([[], [], ["second"]])
    silent, busy = (Site(k, machine, 1, 1, 0) for k in (0, 1))

    def result(name: str, call: Any) -> Any:
        return Outcome(75, "") if call == "second" else ([], {silent.name: 601.0, busy.name: 1.0})

    run: Any = RayRun.__new__(RayRun)
    run.board = SimpleNamespace(stop=SimpleNamespace(remote=print), collect=SimpleNamespace(remote=lambda: "collect"))
    ray = SimpleNamespace(wait=lambda *_, **__: (next(ended), []))
    run.cluster, run.starting, run.log = SimpleNamespace(ray=ray, result=result, free=str), Starting(quiet=True), None
    run.storage = SimpleNamespace(poll=list)
    run.pending, run.silent, run.codes = {"first": silent, "second": busy}, {silent.name: 601.0, busy.name: 1.0}, {}
    run.begin, run.stopping = 0.0, False
    with pytest.raises(CoterieError, match=r"no report of site 0 for 600 s"):
        run._poll()
    run._stop(Site, PATIENCE)
    assert run.codes == {busy.name: 75}


def test_a_site_whose_checkpoint_is_damaged_does_not_cost_the_summary(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_000000000007"
    checkpoint.mkdir(parents=True)
    for name in ("manifest.json", "state.json"):
        (checkpoint / name).write_text("{")
    assert sum_up([tmp_path]) == {"env_steps": 0, "mean_return": None, "rows": {}}


def test_a_full_disk_and_a_closed_terminal_do_not_end_the_run(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space, and nobody to read")

    run = RayRun.__new__(RayRun)
    run.starting, run.log = Starting(), None  # type: ignore[assignment]
    monkeypatch.setattr("builtins.print", fail)
    run.say("a line")
    run.starting.close()
    assert not run.starting.stuck


@pytest.mark.parametrize(
    ("at", "status", "hurried"),
    [
        ((), "finished", False),
        (("start",), "interrupted", False),
        (("work",), "interrupted", False),
        (("close",), "finished", True),
        (("start", "close"), "interrupted", True),
        (("start", "work", "close"), "failed", True),
    ],
)
def test_signals_are_the_runs_from_its_first_file_to_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Sequence[str], status: str, hurried: bool
) -> None:
    def receive(name: str) -> None:
        if name in at:
            os.kill(os.getpid(), signal.SIGTERM)

    def work(run: RayRun) -> tuple[str, str]:
        receive("work")
        return ("interrupted", "SIGTERM") if run.signal else ("finished", "")

    def finish(is_hurried: Any) -> list[str]:
        receive("close")
        assert is_hurried() == hurried
        return []

    storage = SimpleNamespace(push=lambda *names: None, finish=finish)
    nothing = SimpleNamespace(machines=[], close=lambda: None, result=lambda *_: {}, sites=[0])
    nothing.board = SimpleNamespace(summary=SimpleNamespace(remote=lambda: None))

    def start(run: RayRun, notes: list[str]) -> None:
        run.board, run.log = nothing.board, (tmp_path / "ray.txt").open("a")
        receive("start")

    for name, made in (("Cluster", nothing), ("allocate", nothing), ("Storage", storage)):
        monkeypatch.setattr(runs, name, lambda *_, made=made: made)
    monkeypatch.setattr(RayRun, "start", start)
    monkeypatch.setattr(RayRun, "work", work)
    outer, starting = list[signal.Signals](), Starting("connecting", quiet=True)
    with on_signals(outer.append), ExitStack() as held:
        if status == "failed":
            with pytest.raises(KeyboardInterrupt):
                runs.run_on_ray(Config(), tmp_path, False, starting, held)
        else:
            assert runs.run_on_ray(Config(), tmp_path, False, starting, held)["status"] == status
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == status
    assert (outer, starting.step) == ([], "")


def test_ray_does_not_take_over_the_commands_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    context = SimpleNamespace(get_node_id=lambda: "a")
    ray = SimpleNamespace(init=init, exceptions=None, get_runtime_context=lambda: context, nodes=list)
    monkeypatch.setitem(sys.modules, "ray", ray)
    seen = list[signal.Signals]()
    with on_signals(seen.append):
        Cluster(Ray())
        os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM]

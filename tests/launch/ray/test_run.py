"""The process that started a run on Ray, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coterie.launch.ray.allocation import Machine, Site
from coterie.launch.ray.node import Outcome
from coterie.launch.ray.run import RayRun, sum_up
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
    run.cluster, run.quiet, run.log = SimpleNamespace(ray=ray, result=result, free=str), True, None
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
    run.quiet, run.log = False, None  # type: ignore[assignment]
    monkeypatch.setattr("builtins.print", fail)
    run.say("a line")

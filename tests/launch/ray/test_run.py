"""The process that started a run on Ray, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coterie.launch.ray.allocation import Machine, Site
from coterie.launch.ray.node import Outcome
from coterie.launch.ray.run import RayRun, copied_down, sum_up
from coterie.types import ConfigError, CoterieError
from tests.support.waiting import PATIENCE


def test_a_storage_holds_the_run_that_is_resumed_and_no_other(tmp_path):
    folder, storage = tmp_path / "run", tmp_path / "storage"
    with pytest.raises(CoterieError, match=r"^ray.storage: \S+/storage does not hold this run$"):
        copied_down(str(storage), folder, resumed=True)  # not mounted, perhaps
    assert copied_down(str(storage), folder, resumed=False) is not None
    storage.mkdir()
    (storage / "config.json").write_text("a run's")
    (storage / "metrics.jsonl").write_text("its metrics")
    with pytest.raises(
        ConfigError, match=r"^ray.storage: \S+/storage holds a run: resume that, or name another folder"
    ):
        copied_down(str(storage), folder, resumed=False)
    assert copied_down(str(storage), folder, resumed=True) is not None
    assert (folder / "metrics.jsonl").read_text() == "its metrics"
    (tmp_path / "link").symlink_to(storage)
    assert copied_down(str(tmp_path / "link"), storage, resumed=True) is None


def test_the_end_waits_for_the_other_sites_of_one_that_is_silent():
    machine, ended = Machine("a", "127.0.0.1", 2, 0), iter([[], [], ["second"]])
    silent, busy = (Site(k, machine, 1, 1, 0) for k in (0, 1))

    def result(name: str, call: Any) -> Any:
        return Outcome(75, "") if call == "second" else ([], {silent.name: 601.0, busy.name: 1.0})

    run: Any = RayRun.__new__(RayRun)
    run.board = SimpleNamespace(stop=SimpleNamespace(remote=print), collect=SimpleNamespace(remote=lambda: "collect"))
    ray = SimpleNamespace(wait=lambda *_, **__: (next(ended), []))
    run.cluster, run.down, run.quiet, run.log = SimpleNamespace(ray=ray, result=result, free=str), None, True, None
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

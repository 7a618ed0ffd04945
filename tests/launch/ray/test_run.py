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
from coterie.errors import ConfigError, CoterieError
from coterie.launch.ray import run as runs
from coterie.launch.ray.allocation import Machine, Site, Worker
from coterie.launch.ray.cluster import Cluster
from coterie.launch.ray.mirror import site_url
from coterie.launch.ray.node import Outcome
from coterie.launch.ray.run import RayRun, sum_up
from coterie.parallel.clock import awake
from coterie.parallel.signals import on_signals
from coterie.runs.starting import Starting
from tests.conftest import make_config
from tests.support.runs import save_checkpoint
from tests.support.waiting import PATIENCE


def test_the_end_waits_for_the_other_sites_of_one_that_is_silent():
    machine, ended = Machine("a", "127.0.0.1", 2, 0), iter([[], [], ["second"]])
    silent, busy = (Site(k, machine, 1, 1, 0) for k in (0, 1))

    def result(name: str, call: Any) -> Any:
        return Outcome(75, "") if call == "second" else ([], {silent.name: 601.0, busy.name: 1.0})

    run: Any = RayRun.__new__(RayRun)
    run.board = SimpleNamespace(stop=SimpleNamespace(remote=print), collect=SimpleNamespace(remote=lambda: "collect"))
    run.board.finish = run.board.stop
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


def test_each_site_of_a_resumed_run_keeps_its_learners(tmp_path):
    for k, learners in enumerate((2, 14, 0, 0)):
        (own := Path(site_url(str(tmp_path), k))).mkdir(parents=True, exist_ok=True)
        if learners:
            save_checkpoint(own / "checkpoints", 7, {}, {"learners": [{}] * learners})
    assert runs._sites_of(tmp_path, make_config(learners=19)) == [2, 14, 1, 2]
    next(tmp_path.glob("sites/1/checkpoints/*/state.json")).write_text("{")
    with pytest.raises(CoterieError, match="is damaged"):
        runs._sites_of(tmp_path, make_config(learners=19))


def test_the_sites_summaries_are_summed_up(tmp_path):
    lags = {"2": 5}, {"2": 1, "3": 4}
    for k in (0, 1):
        (tmp_path / str(k)).mkdir()
        one = {"env_steps": 100 + k, "seconds": 9.0 - k, "policy_lag": lags[k], "rows": {"learned": 50}, "digest": "a"}
        text = json.dumps({**one, "mean_return": [None, 4.0][k], "restarts": k, "policy_lag_max": 2 + k})
        (tmp_path / str(k) / "summary.json").write_text(text)
    total = sum_up([tmp_path / "0", tmp_path / "1"])
    sites = total.pop("sites")
    assert [site["digest"] for site in sites] == ["a", "a"]
    assert total == {
        "env_steps": 201, "seconds": 9.0, "policy_lag": {"2": 6, "3": 4}, "rows": {"learned": 100},
        "mean_return": 4.0, "restarts": 1, "policy_lag_max": 3,
    }  # fmt: skip


def test_paths_of_a_new_run_are_those_of_the_folder_it_is_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for dataset, path in (("data", f"{tmp_path}/data"), ("d/e-v0", "d/e-v0")):  # the latter is a name of Minari's
        config = runs._from_anywhere(make_config(**{"bc.dataset": dataset, "replay.disk": "here"}))
        assert (config.bc.dataset, config.replay.disk) == (path, f"{tmp_path}/here")
    with pytest.raises(ConfigError, match="init_from"):
        runs._from_anywhere(make_config(init_from="nothing"))


def test_a_part_that_was_never_scheduled_and_one_that_is_silent_are_distinguished(monkeypatch):
    run: Any = RayRun.__new__(RayRun)
    said, part = list[str](), Worker("envs", 0, 0, Machine("a", "a", 4, 0))
    run.stopping, run.begin, run.silent, run.cluster = (
        False,
        awake() - 30,
        {},
        SimpleNamespace(free=lambda: "free are 4 CPUs"),
    )
    monkeypatch.setattr(run, "say", said.append)
    run._check_silence(part, None)
    run._check_silence(part, 5.0)
    run._check_silence(part, 25.0)
    run._check_silence(part, 26.0)
    assert said == [
        f"{part.name}: not scheduled yet, no report for 20 s; free are 4 CPUs",
        f"{part.name}: no report for 20 s; free are 4 CPUs",
    ]


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
        (("start", "start again", "close"), "interrupted", False),  # SIGHUP three times, of one cause
    ],
)
def test_signals_are_the_runs_from_its_first_file_to_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Sequence[str], status: str, hurried: bool
) -> None:
    def receive(name: str) -> None:
        if name in at:
            os.kill(os.getpid(), signal.SIGHUP if "start again" in at else signal.SIGINT)

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
        receive("start again")

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

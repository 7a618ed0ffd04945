"""The process that started a run on Ray, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.launch.ray.allocation import Machine, allocate
from coterie.launch.ray.run import RayRun, sum_up
from coterie.types import ConfigError
from tests.conftest import make_config


def test_a_storage_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "config.json").write_text("another run's")
    config = make_config(**{"learners": 1, "launch": "ray", "ray.storage": str(tmp_path / "storage")})
    allocation, no_cluster = allocate(config, [Machine("a", "127.0.0.1", 2, 0)]), None
    with pytest.raises(
        ConfigError, match=r"^ray.storage: \S+/storage holds a run: resume that, or name another folder"
    ):
        RayRun(no_cluster, allocation, tmp_path / "run", quiet=True, resumed=False)  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["config.json"]


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

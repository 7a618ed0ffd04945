"""CartPole solved across the machines of a Ray cluster, of which there can be one at a time: it has their addresses."""

from __future__ import annotations

import pytest

from tests.launch.harness import put_down
from tests.launch.ray.ray_cluster import cluster
from tests.launch.ray.test_ray import OnRay

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("preset", "steps", "changes"),
    [
        ("ppo", 200_000, {"learners": 3, "allreduce.trusted_network": True}),  # more than a machine has room for
        ("impala", 150_000, {}),
        ("seed-vtrace", 150_000, {}),
        ("gala-ppo", 300_000, {"learners": 3}),
    ],
)
def test_cartpole_is_solved_across_machines(tmp_path_factory, tmp_path, preset, steps, changes):
    with cluster(tmp_path_factory.mktemp("solved")) as machines:
        options = {"launch": "ray", "ray.address": machines.address, "steps": steps, "out": tmp_path / "run", **changes}
        args = [x for key, value in options.items() for x in (f"--{key}", str(value))]
        run = OnRay(machines, tmp_path / "run", "train", preset, "--env", "CartPole-v1", *args)
        try:
            summary = run.end()
        finally:
            put_down(run.process)
        assert summary["mean_return"] >= 400

"""The rollout service accepts what real recorders write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from coterie import presets
from coterie.acting.actor import RolloutLoop
from coterie.acting.base import Stopped
from coterie.acting.recorder import Recorder, local_fields
from coterie.build.factory import cpu_share, make_agent
from coterie.build.resources import resolve_config
from coterie.envs.make import make_spec
from coterie.remote.rollout_service import check_rollout
from coterie.types import Array, Spec
from tests.support.services import Rollout

BREAKS = '"probability": 0.05}'
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "in place": ("impala", "CountingEnv", {"env.time_limit": "terminate", "env.groups": 2}),
    "continuous": ("impala", "CountingEnv", {"env.kwargs": '{"continuous": true}'}),
    "lstm": ("impala", "CountingEnv", {"model.core": "lstm", "model.core_size": 8}),
    "nan obs": ("impala", "FlakyEnv", {"env.kwargs": '{"how": "nan_obs", ' + BREAKS}),
    "raise": ("impala", "FlakyEnv", {"env.kwargs": '{"how": "raise", ' + BREAKS}),
    "certain": ("dqn", "CountingEnv", {"acting": "decoupled", "q.epsilon": 1e-6, "q.epsilon_end": 1e-6}),
    "text": ("impala", "Mission", {}),
    "lives": ("impala", "Breakout-v5", {"model.torso": "a3c", "env.num_envs": 8, "algo.unroll_length": 40}),
}


class Sink:
    """Keeps the rollouts, and stops the actor after enough of them."""

    def __init__(self, spec: Spec, unroll: int, width: int, core: tuple[int, ...], groups: list[slice]) -> None:
        self.fields = local_fields(spec, unroll, width, torch.device("cpu"), core)
        self.first = Recorder(self.fields, groups, torch.device("cpu"))
        self.kept: list[Rollout] = []

    def pull(self) -> int:
        return len(self.kept)

    def next(self) -> Recorder:
        return self.first

    def check(self) -> None:
        pass

    def deliver(self) -> None:
        self.kept.append({k: x.numpy().copy() for k, x in self.fields.items()})
        if sum(np.count_nonzero(x["episode_length"]) for x in self.kept) > 8:
            raise Stopped


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x == "lives")) for x in CASES])
def test_what_recorders_write_is_accepted(case: str):
    preset, env, changes = CASES[case]
    env_id = env if "-" in env else f"coterie.envs.testing:{env}"
    own = {"env.num_envs": 4, "algo.unroll_length": 7, "env.threads": 1, "env.replace_budget": 10_000, "device": "cpu"}
    config = resolve_config(getattr(presets, preset)(env=env_id, **{**own, **changes, "learners": 1, "actors": 1}))
    spec = make_spec(config.env, config.atari)
    core, sinks = (2, 8) if case == "lstm" else (), list[Sink]()

    def make_sink(agent: Any, groups: list[slice], stages: Any) -> Sink:
        sinks.append(Sink(spec, config.algo.unroll_length, config.env.num_envs, core, groups))
        return sinks[0]

    share = cpu_share(config, config, spec, 0, 0)
    loop = RolloutLoop(share, make_agent(config, spec), lambda rows: None, make_sink)
    try:
        loop.run(lambda: None)
    finally:
        loop.close()
    kept = sinks[0].kept
    for arrays in kept:
        check_rollout(spec, arrays)

    def count(of: Callable[[Rollout], Array]) -> int:
        return sum(int(np.count_nonzero(of(x))) for x in kept)

    fake, ended = count(lambda x: x["is_first"][1:]), count(lambda x: x["terminated"] | x["truncated"])
    episodes = count(lambda x: x["episode_length"])
    assert fake > 5, "there are steps that are none"
    assert (ended > episodes) == (case == "lives")
    assert (loop.envs.replaced > 0) == (env == "FlakyEnv")

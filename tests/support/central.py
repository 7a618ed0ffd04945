"""What central acting in a test's process is made of, and what an env host sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from coterie.acting.base import Agent, EnvShare, LearnerSetup
from coterie.build.resources import resolve_config
from coterie.parallel.board import Board
from coterie.parallel.stages import Stages
from coterie.types import Array, Spec
from tests.conftest import VECTOR, make_config

CPU = torch.device("cpu")
NONE: Any = None


class OneWeight(nn.Module):
    """A network for a policy that a test makes up: one weight, and one number as an env's recurrent state."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(1))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 1)


def learner_setup(
    policy: Callable[..., Any], model: nn.Module, options: dict[str, Any], spec: Spec = VECTOR, **changes: Any
) -> LearnerSetup:
    """The parts of a learner with central acting and these options, whose actions `policy` chooses."""
    config = resolve_config(make_config(acting="central", learners=1, **options))
    setup = LearnerSetup(
        config=config,
        unroll_length=config.algo.unroll_length,
        max_envs=config.central.max_envs,
        agent=Agent(cast(Any, model), NONE, NONE, policy, NONE, policy, lambda env_steps: 0),
        actor=NONE,
        refresh_actor=NONE,
        envs=EnvShare(config, spec, 0, 1, CPU, torch.float32, NONE, lambda key: torch.Generator()),
        threads=1,
        board=Board(1),
        rank=0,
        stages=Stages(),
        servers=NONE,
        timeout=900.0,
        on_produced=lambda: None,
        is_over=lambda: False,
        worker=NONE,
    )
    return replace(setup, **changes)


def time_step(obs: Array, **changes: Array) -> dict[str, Array]:
    """Arrays as a host sends them; flags and reward are 0 unless given."""
    n = len(obs)
    flags = {name: np.zeros(n, bool) for name in ("terminated", "truncated", "is_first")}
    ends = {name: np.full(n, np.nan) for name in ("episode_return", "episode_length")}
    return {"obs/": obs, "reward": np.zeros(n, np.float32), **flags, **ends, **changes}

"""Run folders with untrained weights, and envs and a network that only the export's tests need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from coterie import presets
from coterie.build.factory import make_model
from coterie.envs.make import make_spec
from coterie.models.build import Network
from coterie.models.heads import QHead
from coterie.runs.config_io import save_config
from coterie.runs.trust import sign
from coterie.tools.export.check import made_up
from tests.support.runs import save_checkpoint


def make_run(folder: Path, preset: str, env: str, **changes: Any) -> Path:
    """An untrained run whose normalizers have statistics and whose heads distinguish actions."""
    torch.manual_seed(0)
    config = presets.make(preset, env, **changes)
    spec = make_spec(config.env, config.atari)
    model = make_model(config, spec)
    rng = np.random.default_rng(0)
    obs = {k: torch.from_numpy(made_up(s, rng, 64)) * (3 if s.dtype == "float32" else 1) for k, s in spec.obs.items()}
    model.observe(obs[""] if list(obs) == [""] else obs, torch.ones(64, dtype=torch.bool))
    for p in _heads(model):
        nn.init.normal_(p, std=0.3)
    folder.mkdir()
    sign(folder, config)
    save_config(folder / "config.json", config)
    (folder / "spec.json").write_text(json.dumps(spec.to_json()))
    save_checkpoint(folder / "checkpoints", 5, {"learner_0/model": model.state_dict()}, {"env_steps": 5})
    return folder


def _heads(model: Network) -> list[nn.Parameter]:
    if model.body is not None or model.squashes:
        return [*model.parameters()]
    heads = model.q if isinstance(model.q, QHead) else nn.ModuleList([model.policy, model.value])
    return [*heads.parameters(), *([model.log_std] if model.log_std is not None else [])]


class Many(gymnasium.Env[Any, Any]):
    """Nested entries of every kind, several discrete choices that do not begin with 0; episodes of five steps."""

    def __init__(self) -> None:
        inner = spaces.Dict({"flags": spaces.MultiBinary(3), "kind": spaces.Discrete(4, start=2)})
        self.observation_space = spaces.Dict(
            {"inner": inner, "far": spaces.Box(-np.inf, np.inf, (2,), np.float64), "is_first": spaces.Box(0, 1, ())}
        )
        self.action_space = spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [5, -1]])
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action)), action
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


class Stubborn(nn.Module):
    """A torso with control flow that depends on its input, which cannot be traced."""

    def __init__(self, obs: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(4, 4), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)


class Swimmer(gymnasium.Env[Any, Any]):
    """Continuous actions in a matrix, some of them without bounds."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        low, high = np.array([[-2, 0], [-np.inf, -1]]), np.array([[6, 1], [np.inf, 1]])
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action)), action
        return self.np_random.random(3, np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}

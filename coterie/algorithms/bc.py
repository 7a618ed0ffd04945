"""Behavior cloning: the policy imitates the actions of a data set, and the value learns its returns.

The loss is A2C's with advantage 1: minus the log-probability of the actions in the data. The run's own env steps are
not learned from: they set the pace, and their episodes show what the policy can do by now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.a2c import A2C, RolloutBatch
from coterie.algorithms.base import ON_CPU, Compute
from coterie.config import Config, Refusal
from coterie.envs.make import env_adapters
from coterie.envs.spaces import flatten
from coterie.errors import ConfigError, reason_of
from coterie.extras import needs
from coterie.models.base import Model
from coterie.types import Array, Inputs, Obs, Rollout, Spec, entries, from_entries, map_obs


@dataclass
class Steps:
    """N steps of a data set, one episode after another."""

    obs: Obs  # [N, ...] each
    action: Tensor  # [N, ...], as a policy chooses them
    reward: Tensor  # [N]
    is_first: Tensor  # [N] bool


def read_episodes(config: Config, spec: Spec) -> Iterator[tuple[dict[str, Array], Array, Array]]:
    """Observations, actions and rewards of each episode of `bc.dataset`, as a policy sees them. Raises a `ConfigError`
    if it cannot be read, or is of another env.
    """
    with needs("bc.dataset", "minari"):
        import minari
    name = os.path.expanduser(config.bc.dataset)
    _, fields, actions, mask = env_adapters(config.env, config.atari)
    if mask:
        raise ConfigError(f"bc.dataset: {spec.env_id} has its action mask in {mask}, which data sets do not keep")
    try:
        found = minari.MinariDataset(Path(name) / "data") if Path(name).is_dir() else minari.load_dataset(name, True)
        for episode in found.iterate_episodes():
            n = len(episode.rewards)  # there is one observation more
            seen = entries(flatten(episode.observations, fields))
            obs = {k: np.asarray(seen[k][:n], s.dtype).reshape(n, *s.shape) for k, s in spec.obs.items()}
            action = actions.from_env(episode.actions).reshape(n, *spec.action.shape)
            choices = action.reshape(n, -1)[:, : len(spec.action.sizes)]
            if ((choices < 0) | (choices >= spec.action.sizes)).any():
                raise ValueError("an action is none of the env's")
            yield obs, action, np.asarray(episode.rewards, np.float32)
    except Exception as error:  # no such data set, no network, damage, other spaces: of many libraries
        raise ConfigError(f"bc.dataset {name!r} cannot be used for {spec.env_id}: {reason_of(error)[:300]}") from error


def read_steps(config: Config, spec: Spec) -> Steps:
    """All steps of `bc.dataset`."""
    obs, *others = zip(*read_episodes(config, spec), strict=True)
    lengths = [len(reward) for reward in others[1]]
    first = np.zeros(sum(lengths), bool)
    first[np.cumsum([0, *lengths[:-1]])] = True
    joined = {k: torch.from_numpy(np.concatenate([x[k] for x in obs])) for k in spec.obs}
    return Steps(from_entries(joined), *(torch.from_numpy(x) for x in (*map(np.concatenate, others), first)))


def returns_of(reward: Tensor, is_first: Tensor, gamma: float) -> Tensor:
    """Discounted sums of rewards `[N]` to the end of each episode."""
    total, out = 0.0, []
    for r, first in zip(reward.flip(0).tolist(), is_first.flip(0).tolist(), strict=True):
        out.append(total := r + gamma * total)
        total = 0.0 if first else total
    return torch.tensor(out[::-1], dtype=torch.float32)


class BC(A2C):
    """A2C on a data set: rows drawn one by one, or with a core sequences of `algo.unroll_length` from a zero state."""

    on_policy = False
    refusals = (Refusal(lambda c, s: not c.bc.dataset, "bc.dataset", "must be a Minari data set, or its folder"),)

    def __init__(self, config: Config, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.bc, self.rng = config.bc, torch.Generator().manual_seed(seed)
        self.owed = 0.0  # samples that are due
        self.steps: tuple[Steps, Tensor] | None = None  # with their returns; read by learners only

    @staticmethod
    def check_data(config: Config, spec: Spec) -> None:
        if next(read_episodes(config, spec), None) is None:
            raise ConfigError(f"bc.dataset: {config.bc.dataset} has no episodes")

    @staticmethod
    def lockstep_settings(config: Config) -> tuple[object, ...]:
        return (config.bc, config.env.num_envs)

    @staticmethod
    def updates(config: Config, columns: int, unroll: int) -> tuple[float, float]:
        return columns * unroll * config.bc.intensity / config.bc.batch_size, config.bc.batch_size

    def batches(self, model: Model, rollout: Rollout) -> Iterator[RolloutBatch]:
        """Random steps of the data set, `bc.intensity` for each env step of the rollout."""
        if self.steps is None:
            self.steps = self._prepare(model)
        t = min(self.algo.unroll_length, len(self.steps[1])) if model.recurrent else 1
        b = max(1, self.bc.batch_size // t)
        self.owed += rollout.mask.numel() * self.bc.intensity
        while self.owed >= t * b:
            self.owed -= t * b
            yield self._draw(model, *self.steps, t, b, rollout.mask.device)

    def _prepare(self, model: Model) -> tuple[Steps, Tensor]:
        """The data and its returns, which a new network's normalizers are set by."""
        steps = read_steps(self.config, self.spec)
        returns = returns_of(self.rewards.clipped(steps.reward), steps.is_first, self.algo.gamma)
        device = model.return_norm.mean.device
        if not float(model.return_norm.count):
            if not self.config.init_from:  # which brings the normalizers of observations
                everything = torch.ones(len(returns), dtype=torch.bool, device=device)
                model.observe(map_obs(lambda x: x.to(device), steps.obs), everything)
            model.return_norm.update(returns.to(device))
        return steps, returns / model.return_norm.deviation.cpu() if self.config.reward.normalize else returns

    def _draw(self, model: Model, steps: Steps, returns: Tensor, t: int, b: int, device: torch.device) -> RolloutBatch:
        start = torch.randint(len(returns) - t + 1, (b,), generator=self.rng)
        rows = start + torch.arange(t)[:, None] if model.recurrent else start

        def take(x: Tensor, rows: Tensor = rows) -> Tensor:
            return x[rows].to(device)

        before = (rows - 1).clamp(min=0)  # the network ignores them where an episode begins
        last = take(steps.action, before), take(steps.reward, before)
        inputs = Inputs(map_obs(take, steps.obs), take(steps.is_first), *last)
        ones = torch.ones(rows.shape, device=device)
        state = model.initial_state(b) if model.recurrent else None
        return RolloutBatch(
            inputs, take(steps.action), ones, take(returns), 0 * ones, 0 * ones, ones > 0, state, t * b, self.chunk
        )

    def after_rollout(self, model: Model, rollout: Rollout) -> None:
        """The data has set the normalizers."""

    def state_dict(self) -> dict[str, Tensor]:
        owed = torch.tensor([self.owed], dtype=torch.float64)
        return {**super().state_dict(), "data_rng": self.rng.get_state(), "owed": owed}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.rng.set_state(state["data_rng"])
        self.owed = float(state["owed"])

"""The base of value methods: exploration, and the target network."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from coterie.algorithms.base import ON_CPU, AlgorithmBase, Compute
from coterie.algorithms.replay_base import R, ReplayLearning
from coterie.config import ResolvedConfig
from coterie.envs.tasks import envs_per_child, tasks
from coterie.models.base import Model
from coterie.models.build import Network, acting_copy
from coterie.ops.dist import ILLEGAL
from coterie.parallel.graphs import recordable
from coterie.types import AgentOutput, Inputs, Spec


def greedy(values: Tensor, explore: Tensor | None, rng: torch.Generator, masked: bool = False) -> tuple[Tensor, Tensor]:
    """The argmax of `values` `[B, A]`, or with probability `explore` a random legal action; and its log-probability.
    `masked`: values may be `ILLEGAL`.
    """
    best = values.argmax(-1)
    if explore is None:
        return best, torch.zeros(len(best), device=best.device)
    n: int | Tensor = values.shape[-1]
    uniform = torch.rand(2, len(best), generator=rng, device=best.device)
    other = (uniform[1] * n).long().clamp_(max=values.shape[-1] - 1)
    if masked:  # the legal action of that number among the legal ones
        legal = values > ILLEGAL
        n = legal.sum(-1)
        place = (uniform[1] * n).long().minimum(n - 1)
        other = (legal.cumsum(-1) > place[:, None]).byte().argmax(-1)
    action = torch.where(uniform[0] < explore, other, best)
    probability = explore / n + (1 - explore) * (action == best)
    return action, probability.clamp_(min=1e-12).log_()


class EpsilonGreedy(AlgorithmBase):
    """Acting by the values of actions: the best one, or with probability epsilon a random one."""

    value_based = True
    config: ResolvedConfig

    def __init__(self, config: ResolvedConfig, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.q = config.q
        self.sampled = config.q.eval_epsilon  # share of random actions
        self._envs = config.env.num_envs * config.learners
        self._width = envs_per_child(config) if len(tasks(config.env.id)) > 1 else 0  # envs in a row of one task

    def gauges(self) -> dict[str, float]:
        return {**super().gauges(), "epsilon": float(self.explore(torch.arange(self._envs)).mean())}

    def acts_at(self, version: int) -> None:
        """In an actor: estimate the run's env steps from the learner step of the weights."""
        columns, unroll = self.config.env.num_envs, self.unroll_length(self.config)
        steps, _ = self.updates(self.config, columns, unroll)
        of_one = version * columns * unroll / steps + self.q.learn_start * (version > 0 and self.has_replay)
        self.clock.env_steps = int(min(self.config.steps, of_one * self.config.learners))

    def explore(self, env_id: Tensor) -> Tensor:
        """Share of random actions of each env `[B]`."""
        if self.q.noisy:
            return torch.zeros(len(env_id), device=env_id.device)
        if self.q.ladder:
            place, width = env_id % self._envs, self._width
            if width:  # neighbors on the ladder go to different tasks
                place = place % width * (self._envs // width) + place // width
            return self.q.epsilon_end ** (1 + self.q.ladder * place.float() / max(1, self._envs - 1))
        left = max(0.0, 1 - self.clock.env_steps / max(1, self.q.epsilon_steps))
        epsilon = self.q.epsilon_end + (self.q.epsilon - self.q.epsilon_end) * left
        return torch.full((len(env_id),), epsilon, device=env_id.device)

    @recordable
    def act(
        self, model: Model, inputs: Inputs, core_state: Tensor | None, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]:
        """Epsilon-greedy actions. The value is that of the chosen action, which a replay's first priorities need, or of
        the best one, which returns bootstrap from. Builds no graph.
        """
        with torch.inference_mode():
            if self.q.noisy:
                model.resample(None if explore is None else rng)
            params, value, core_state = model(inputs, core_state)
            values = model.expected(params)
            action, log_prob = greedy(values, explore, rng, self.spec.masked)
            if self.has_replay:
                value = values.gather(-1, action[..., None])[..., 0]
            return AgentOutput(action, log_prob, value), core_state


class QLearning(EpsilonGreedy, ReplayLearning[R]):
    """The base of DQN and R2D2: a target network that is copied whole."""

    copy_weights: Callable[[], None]  # into the target network

    @property
    def target_model(self) -> Network:
        """The target network, from the first rollout on."""
        return cast(Network, self.target)

    def make_target(self, model: Model) -> Network:
        target, self.copy_weights = acting_copy(cast(Network, model), self.compute.dtype, always_copy=True)
        return target

    def copy_target(self) -> None:
        self.copy_weights()

    def before_batch(self, model: Model) -> None:
        if self.q.noisy:
            model.resample(self.rng)

    def before_look_ahead(self) -> None:
        if self.q.noisy:
            self.target_model.resample(self.rng)

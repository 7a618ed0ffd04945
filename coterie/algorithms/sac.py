"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905): off-policy learning of continuous actions.

Two critics, a policy of squashed normals, and a learned temperature, all in one flat vector of weights, so that every
exchange between learners averages or mixes them as it does any network's. Policy, critics and temperature take their
steps at once, from the same weights; public code takes them one after another.

With decoupled or central acting and several learners this is SEED RL's distributed SAC (its code's `agents/sac`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.algorithms.base import ON_CPU, Compute, Loss, combine
from coterie.algorithms.replay_base import ReplayBatch, ReplayLearning, single_steps
from coterie.algorithms.replay_size import bounded, replay_refusals
from coterie.config import Config, Q, Refusal, ResolvedConfig
from coterie.config import Model as ModelConfig
from coterie.models.base import Model
from coterie.models.build import Network
from coterie.models.heads import init
from coterie.models.mlp import compute_dtype, scale_of
from coterie.parallel.graphs import recordable
from coterie.replay.transitions import Transitions
from coterie.types import AgentOutput, Inputs, Obs, ObsSpec, Spec, entries, from_entries

_LOG_STD = (-20.0, 2.0)  # the range of public code
_LOG_2PI = math.log(2 * math.pi)


class Critics(nn.Module):
    """Two MLPs over observation and action, side by side: one batched product for each layer of both."""

    def __init__(self, size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        for k, (a, b) in enumerate(pairwise((size, *hidden, 1))):
            weight, bound = torch.empty(2, a, b), a**-0.5
            self.register_parameter(f"weight_{k}", nn.Parameter(weight.uniform_(-bound, bound)))
            self.register_parameter(f"bias_{k}", nn.Parameter(torch.empty(2, 1, b).uniform_(-bound, bound)))

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        """`[N, size]` -> `[2, N]`. `frozen`: no gradient for the weights, only for `x`."""
        found = [cast(Tensor, p) for p in self._parameters.values()]  # to walk all modules takes longer
        layers = [p.detach() for p in found] if frozen else found
        x = x.expand(2, -1, -1)
        for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
            x = torch.baddbmm(bias, x, weight).relu_()
        return (x * layers[-2].mT).sum(-1) + layers[-1][..., 0]  # a batched product of one column is slow


class FlatTorso(nn.Sequential):
    """Layers over the observations side by side."""

    def forward(self, obs: Obs) -> Tensor:
        x, weight = _flat(obs), next(self.parameters(), None)
        x = x if weight is None else x.to(compute_dtype(weight))
        return cast(Tensor, super().forward(x))  # type: ignore[no-untyped-call]


class SACNetwork(Network):
    """A policy's means and log deviations `[.., 2 A]`, and critics. Its value output is 0: acting needs none."""

    squashes = True

    def __init__(self, spec: Spec, config: ModelConfig, alpha: float) -> None:
        super().__init__(spec, config)
        self.log_std = None  # the policy head has them
        self.scales = {key: scale for key, x in spec.obs.items() if (scale := scale_of(x)) != 1}  # of bytes
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))

    def _build(self, obs: dict[str, ObsSpec], q: Q | None) -> None:
        inputs, actions = sum(math.prod(s.shape) for s in obs.values()), len(self.spec.action.low)
        layers, sizes = list[nn.Module](), (inputs, *self.config.hidden)
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU(inplace=True)]
        self.torso, self.value_torso, self.paired = FlatTorso(*layers), None, False
        self.policy = init(nn.Linear(sizes[-1], 2 * actions), 0.01)
        self.critics = Critics(inputs + actions, self.config.hidden)

    def _heads(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.policy(x.float()).chunk(2, -1)
        return torch.cat((mean, log_std.clamp(*_LOG_STD)), -1), torch.zeros_like(mean[..., :1])

    def _normalized(self, obs: Obs) -> Obs:
        obs = super()._normalized(obs)
        if not self.scales:
            return obs
        return from_entries({key: x * self.scales[key] if key in self.scales else x for key, x in entries(obs).items()})

    def features(self, obs: Obs) -> Tensor:
        """What the critics see of observations: normalized and flat, `[N, size]`."""
        return _flat(self._normalized(obs))


def _flat(obs: Obs) -> Tensor:
    return torch.cat([x.flatten(1).float() for x in entries(obs).values()], -1)


def squashed(params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + deviation x noise) `[N, A]` in -1 to 1, and its log-density `[N]` (arXiv 1812.05905, appendix C)."""
    mean, log_std = params.chunk(2, -1)
    x = mean + log_std.exp() * noise
    normal = (-0.5 * noise.square() - log_std - 0.5 * _LOG_2PI).sum(-1)
    slope = 2 * (math.log(2) - x - F.softplus(-2 * x))  # log (1 - tanh^2 x), without a difference of equal numbers
    return torch.tanh(x), normal - slope.sum(-1)


class SAC(ReplayLearning[Transitions]):
    """Single transitions, without a recurrent core."""

    refusals = (
        Refusal(
            lambda c, s: not bounded(s.action),
            "algorithm",
            "needs continuous actions between finite bounds (a Box); use ppo, or dqn for a Discrete action space",
        ),
        Refusal(
            lambda c, s: any(o.is_image or o.text or o.codes for o in s.obs.values()),
            "algorithm",
            "needs observations that are vectors of numbers; use ppo for images and text",
        ),
        Refusal(
            lambda c, s: c.model.core != "none" or bool(c.model.network),
            "MEMORY",
            "cannot be used with sac, which has a network of its own",
        ),
        *replay_refusals(),
    )

    def __init__(self, config: ResolvedConfig, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.sac, self.actions = config.sac, len(spec.action.low)
        self.noise = torch.empty(0)  # of the batch that comes next
        self.sampled = 0.0  # of the policy; 1 is uniform-random, see `explore`
        given = self.sac.target_entropy
        self.target_entropy = -float(self.actions) if given == "auto" else given
        self.pairs: tuple[list[Tensor], list[Tensor]] = ([], [])  # weights of the target and of what it follows

    @staticmethod
    @recordable
    def make_model(config: Config, spec: Spec) -> SACNetwork:
        return SACNetwork(spec, config.model, config.sac.alpha)

    @staticmethod
    def training_threads(config: Config, most: int, dtype: torch.dtype) -> int:
        return 1  # of two, the second gathers the next batch

    def explore(self, env_id: Tensor) -> Tensor:
        """1: uniform-random actions, until the learner trains; 0: the policy's."""
        random = self.clock.env_steps < self.q.learn_start * self.config.learners
        return torch.full((len(env_id),), float(random), device=env_id.device)

    def acts_at(self, version: int) -> None:
        """In an actor: from the first trained weights on, actions are the policy's."""
        self.clock.env_steps = self.config.steps if version else 0

    @recordable
    def act(
        self, model: Model, inputs: Inputs, core_state: Tensor | None, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]:
        """Actions in -1 to 1; greedy where `explore` is None: tanh of the mean."""
        with torch.inference_mode():
            params, value, _ = model(inputs)
            noise = torch.zeros_like(params[..., : self.actions])
            if explore is None:
                action, log_prob = squashed(params, noise)
                return AgentOutput(action, torch.zeros_like(log_prob), value), None
            action, log_prob = squashed(params, noise.normal_(generator=rng))
            uniform = torch.empty_like(action).uniform_(-1, 1, generator=rng)
            random = explore == 1
            action = torch.where(random[:, None], uniform, action)
            log_prob = torch.where(random, -self.actions * math.log(2), log_prob)
            return AgentOutput(action, log_prob, value), None

    def make_target(self, model: Model) -> Critics:
        critics = cast(SACNetwork, model).critics
        target = copy.deepcopy(critics).requires_grad_(False)
        self.pairs = list(target.parameters()), list(critics.parameters())
        return target

    def before_look_ahead(self) -> None:
        self.noise = torch.randn(self.q.batch_size, 2, self.actions, generator=self.rng)

    def look_ahead(self, target: Critics, rows: Transitions, at: slice) -> Tensor:
        """The noise of the actions after and of those at the samples `[n, 2, A]`. Targets need the newest policy."""
        return self.noise[at].to(rows.n_step.device)

    @recordable
    def loss(self, model: Model, batch: ReplayBatch[Transitions]) -> Loss:
        """Critics: the squared error to r + discount (min Q'(s', a') - alpha log pi(a'|s')) (equations 5 and 6).
        Policy: alpha log pi(a|s) - min Q(s, a) (equation 9). Temperature: equation 18 with log alpha in
        place of alpha, as in public code.
        """
        rows, net = batch.rows, cast(SACNetwork, model)
        target, alpha = cast(Critics, self.target), net.log_alpha.exp().detach()
        # First: older torch would train on the casts of weights that are made without a gradient.
        action, log_prob = squashed(net(single_steps(rows.obs, rows.action))[0], batch.ahead[:, 1])
        with torch.no_grad():
            then = net(single_steps(rows.next_obs, rows.action))[0]
            after, log_prob_after = squashed(then, batch.ahead[:, 0])
            value = target(torch.cat((net.features(rows.next_obs), after), -1)).amin(0) - alpha * log_prob_after
            wanted = rows.n_step + rows.discount * value
        seen = net.features(rows.obs)
        error = net.critics(torch.cat((seen, rows.action), -1)) - wanted
        q = net.critics(torch.cat((seen, action), -1), frozen=True).amin(0)
        terms = {
            "critic_loss": (0.5, rows.weight * error.square().sum(0)),
            "policy_loss": (1.0, alpha * log_prob - q),
        }
        if self.sac.learn_alpha:
            terms["alpha_loss"] = (1.0, -net.log_alpha * (log_prob.detach() + self.target_entropy))
        watched = {"q": q.detach(), "entropy": -log_prob.detach(), "alpha": alpha.expand_as(q)}
        loss = combine(terms, watched, batch.mask, batch.count)
        return replace(loss, priority=error.detach().abs().amax(0))

    @torch.no_grad()
    def after_step(self, model: Model, batch: ReplayBatch[Transitions]) -> None:  # type: ignore[override]
        """The target moves a share `sac.tau` of the way to the critics."""
        super().after_step(model, batch)
        torch._foreach_lerp_(*self.pairs, self.sac.tau)

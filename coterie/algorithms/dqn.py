"""DQN (Mnih et al. 2015) with double, dueling, n-step, prioritised, distributional (C51) and noisy variants, which
together are Rainbow (arXiv 1710.02298). Accelerated Methods' epsilon-Rainbow is all of them but the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithms.a2c import Loss, combine
from coterie.algorithms.values import Values, size_of, stack_of
from coterie.config import Config
from coterie.models.build import Network
from coterie.ops.q import cross_entropy, divergence, huber, project
from coterie.replay.ring import Ring, Transitions
from coterie.types import Inputs, Obs, Rollout, Spec

_FREE = 0.8  # of the machine's memory that replay may take


@dataclass
class Batch:
    """Drawn transitions; a part holds at most `chunk` of them (0: all)."""

    rows: Transitions
    chunk: int
    count: int
    begin: int = 0
    priority: Tensor = field(default_factory=lambda: torch.zeros(0))  # [n], written by the parts' losses
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> int:
        return self.count

    def parts(self, ways: int = 1) -> Iterator[Batch]:
        n = len(self.rows.action)
        pieces = min(n, math.ceil(math.ceil(n / (self.chunk or n)) / ways) * ways)
        for i in range(pieces):
            at = slice(n * i // pieces, n * (i + 1) // pieces)
            r = self.rows
            part = Transitions(
                _cut(r.obs, at), r.action[at], r.n_step[at], r.discount[at], _cut(r.next_obs, at), r.weight[at], r.picks
            )
            yield Batch(part, self.chunk, self.count, at.start, self.priority[at])


def _cut(obs: Obs, at: slice) -> Obs:
    return {k: x[at] for k, x in obs.items()} if isinstance(obs, dict) else obs[at]


class DQN:
    """Single transitions, without a recurrent core."""

    def __init__(self, config: Config, spec: Spec, chunk: int = 0, seed: int = 0) -> None:
        self.base = base = Values(config, spec, seed)
        self.clock, self.explore, self.acts_at, self.sampled = base.clock, base.explore, base.acts_at, base.sampled
        self.act, self.after_rollout = base.act, base.after_rollout
        self.config, self.spec, self.own, self.chunk, self.seed = config, spec, config.q, chunk, seed
        self.ring: Ring | None = None
        self.kept: dict[str, Tensor] = {}  # the replay of a checkpoint
        self.ahead = ThreadPoolExecutor(1, "coterie-replay")  # puts the next batch together meanwhile

    @staticmethod
    def replay_bytes(config: Config, spec: Spec) -> int:
        """What the replay of one learner takes when it is full."""
        return Ring.bytes_for(spec, *size_of(config), stack_of(config))

    def batches(self, model: Network, rollout: Rollout) -> Iterator[Batch]:
        """Keep the rollout, then draw what is due."""
        due = self.base.begin(model, rollout)
        ring = self._keep(rollout)
        device, ahead = rollout.reward.device, None
        for i in range(due):
            rows = (ahead or self._fetch(ring)).result()
            ahead = self._fetch(ring) if i + 1 < due else None
            if self.own.noisy:
                self.base.resample(model)
            rows = _to(rows, device)
            yield Batch(rows, self.chunk, self.own.batch_size, priority=torch.zeros(self.own.batch_size, device=device))
        self.base.refresh_target(model)

    def _fetch(self, ring: Ring) -> Future[Transitions]:
        return self.ahead.submit(ring.gather, ring.draw(self.own.batch_size, self.base.beta()))

    def _keep(self, rollout: Rollout) -> Ring:
        own = self.config.replay
        if self.ring is None:
            self.ring = Ring(
                self.spec, *size_of(self.config), self.config.algo.gamma, self.own.n_step, alpha=own.alpha,
                frames=stack_of(self.config), seed=self.seed, disk=own.disk,
            )  # fmt: skip
            if self.kept:
                self.ring.load_state_dict(self.kept)
                self.kept = {}
        value = rollout.behavior_value.cpu().numpy() if own.initial == "acting" else None
        self.ring.add(rollout, self.base.rewards(rollout).cpu().numpy(), value)
        return self.ring

    def loss(self, model: Network, part: Batch) -> Loss:
        """The error of what was drawn, weighted; its size is left in `part.priority`."""
        rows, target = part.rows, self.base.target
        assert target is not None
        params = model(_inputs(rows.obs, rows.action))[0]
        with torch.no_grad():
            after_inputs = _inputs(rows.next_obs, rows.action)
            after = target(after_inputs)[0]
            chooser = model(after_inputs)[0] if self.own.double else after
            best = model.expected(chooser).argmax(-1)
        value = model.expected(params.detach()).gather(-1, rows.action[:, None])[:, 0]
        if self.own.atoms:
            each = torch.arange(len(best), device=best.device)
            logits = params.unflatten(-1, (-1, self.own.atoms))[each, rows.action]
            probs = after.unflatten(-1, (-1, self.own.atoms))[each, best].softmax(-1)
            wanted = project(probs, rows.n_step, rows.discount, model.atoms)
            error, priority = cross_entropy(wanted, logits), divergence(wanted, logits.detach())
        else:
            wanted = rows.n_step + rows.discount * after.gather(-1, best[:, None])[:, 0]
            found = params.gather(-1, rows.action[:, None])[:, 0]
            error, priority = huber(found - wanted, self.own.huber), (found - wanted).detach().abs()
        part.priority.copy_(priority)
        mask = torch.ones_like(best, dtype=torch.bool)
        return combine({"q_loss": (1.0, rows.weight * error)}, {"q": value, "q_error": priority}, mask, part.count)

    def after_step(self, model: Network, batch: Batch) -> None:
        """Give what was drawn the priority of its error."""
        assert self.ring is not None
        if self.config.replay.alpha:
            self.ring.update(batch.rows.picks, batch.priority.cpu().numpy().astype("float64"))

    def gauges(self) -> dict[str, float]:
        size = 0 if self.ring is None else self.ring.size
        return {"replay/size": size, "epsilon": float(self.explore(torch.arange(self.config.env.num_envs)).mean())}

    def state_dict(self) -> dict[str, Tensor]:
        kept = self.ring.state_dict() if self.ring is not None and self.config.replay.save else {}
        return {**self.base.state_dict(), **kept}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.base.load_state_dict(state)
        self.kept = {k: x for k, x in state.items() if k.startswith("replay/")}


def _inputs(obs: Obs, action: Tensor) -> Inputs:
    """What a network without a core looks at."""
    n = len(action)
    first = torch.ones(n, dtype=torch.bool, device=action.device)
    return Inputs(obs, first, action, torch.zeros(n, device=action.device))


def _to(rows: Transitions, device: torch.device) -> Transitions:
    if device.type == "cpu":
        return rows

    def up(x: Obs) -> Obs:
        return {k: y.to(device) for k, y in x.items()} if isinstance(x, dict) else x.to(device)

    return Transitions(
        up(rows.obs),
        up(rows.action),
        up(rows.n_step),
        up(rows.discount),
        up(rows.next_obs),
        up(rows.weight),
        rows.picks,
    )

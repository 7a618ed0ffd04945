"""The learner: the one loop that trains, whatever the algorithm, the acting and the exchange."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import SupportsFloat, cast

import torch
from torch import Tensor, nn

from coterie.acting.base import Acting
from coterie.algorithms.base import Algorithm, AnyAlgorithm, AnyBatch, Batch, BatchPart, Clock, Compute, Loss, checked
from coterie.errors import CoterieError
from coterie.exchange.base import Exchange, NonFinite
from coterie.models.base import Model
from coterie.parallel.graphs import Graphed
from coterie.parallel.params import FlatParams, pieces
from coterie.parallel.stages import Stages
from coterie.types import Rollout


class Observer:
    """Measures training without changing it (`instruments/`, and `FlightNotes`). A run has none by default."""

    def begin(self, rollout: Rollout, env_steps: int) -> None:
        """Called before the first batch of a rollout. `env_steps`: of all learners."""

    def gradient(self, env_steps: int, algorithm: AnyAlgorithm, batch: AnyBatch) -> None:
        """Called after a batch's gradient is computed. `env_steps`: env steps learned before this rollout."""

    def step(self) -> None:
        """Called after each learner step."""

    def rollout(self, rollout: Rollout, lr: float) -> None:
        """Called after the last batch of a rollout."""

    def end(self) -> None:
        """Called after the last rollout of a training that `on_rollout` ended."""

    def gauges(self) -> dict[str, float]:
        """Values for the metrics."""
        return {}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors for the checkpoint, by name."""
        return {}

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Restore what `tensors` returned."""


@dataclass
class Progress:
    """The counts of a learner: saved in checkpoints, and reported in `summary.json`."""

    valid: int = 0  # rows of the rollout that is being learned, without masked ones
    env_steps: int = 0  # rows learned, each counted once; without masked rows
    learner_steps: int = 0
    samples_trained: int = 0  # with reuse
    masked: int = 0  # masked rows: fake autoreset steps, replaced envs, waiting envs
    policy_lag_max: int = 0
    episodes: int = 0  # finished episodes
    lags: Counter[int] = field(default_factory=Counter)  # rows by policy lag, in learner steps
    lag_by_row: list[float] = field(default_factory=list)  # mean lag of each row of a rollout, summed over rollouts
    rollouts: int = 0  # rollouts in `lag_by_row`
    metrics: dict[str, float] = field(default_factory=dict)  # sums over the batches since the last report
    batches: int = 0  # since the last report

    def count_lag(self, version: Tensor) -> None:
        """Count the lags of a rollout. `version` `[T, B]`: learner step whose weights chose each action."""
        newest, oldest = (int(x) for x in version.aminmax()[::-1])
        if newest == oldest:
            self.lags[self.learner_steps - newest] += version.numel()
        else:
            found = torch.unique(version, return_counts=True)
            for v, count in zip(*(x.tolist() for x in found), strict=True):
                self.lags[self.learner_steps - v] += count
        self.policy_lag_max = max(self.policy_lag_max, self.learner_steps - oldest)
        means = (self.learner_steps - version.double().mean(1)).tolist()
        self.lag_by_row = [a + b for a, b in zip(self.lag_by_row, means, strict=True)] if self.rollouts else means
        self.rollouts += 1

    def begin(self, rollout: Rollout, exchange: Exchange, clock: Clock, learners: int) -> int:
        """Count a rollout before training on it, and set the algorithm's clock; returns the run's env steps."""
        total = exchange.env_steps
        self.episodes += len(rollout.episodes)
        clock.env_steps, clock.episodes = total, self.episodes * learners  # an estimate: only steps are exchanged
        self.valid = int(rollout.mask.sum())
        exchange.count(self.valid)
        self.count_lag(rollout.policy_version)
        return total

    def count(self, batch: AnyBatch) -> None:
        """Count a learner step and add up its metrics."""
        self.learner_steps += 1
        self.samples_trained += int(batch.count)  # a user's may be a tensor
        if not math.isfinite(batch.metrics.get("grad_norm", 0.0)):
            return  # a skipped batch is not in the means
        self.batches += 1
        for name, value in batch.metrics.items():
            if math.isfinite(value):  # a number of a custom algorithm's `after_step` may be NaN: it counts as 0
                self.metrics[name] = self.metrics.get(name, 0.0) + value

    def end(self, rollout: Rollout) -> None:
        """Count a rollout after training on it."""
        self.env_steps += self.valid
        self.masked += rollout.mask.numel() - self.valid


class Gradients:
    """Backward passes over the parts of a batch, by a team whose members share the weights but not the gradient."""

    def __init__(self, model: Model, params: FlatParams, compute: Compute) -> None:
        self.params, self.team = params, compute.team
        self.autocast, self.record = compute.autocast, compute.record
        twins = [params.replica(cast(nn.Module, model)) for _ in range(self.team.size - 1)]
        self.models = [model, *(cast(Model, twin) for twin, _ in twins)]
        self.grads = [grad for _, grad in twins]
        self.recorded: dict[object, Graphed[tuple[dict[str, Tensor], Tensor | None]]] = {}  # by the loss

    def compute(self, algorithm: Algorithm[BatchPart], batch: Batch[BatchPart]) -> dict[str, float]:
        """Add the batch's gradient to `params.grad`, and set its priorities; returns means over its valid rows."""
        ways, loss = len(self.models), algorithm.loss
        self.params.check_views()
        if loss not in self.recorded:
            self.recorded[loss] = Graphed(partial(self._backward, loss), self.record, loss)
        backward = self.recorded[loss]
        algorithm.update_factors()
        parts = list(batch.parts(ways))
        priority: list[Tensor | None] = [None] * len(parts)

        def work(k: int) -> dict[str, Tensor]:
            sums: dict[str, Tensor] = {}
            for i in range(k, len(parts), ways):  # a fixed share in a fixed order, so that runs repeat
                metrics, priority[i] = backward(self.models[k], parts[i])
                for name, term in metrics.items():
                    sums[name] = sums[name] + term if name in sums else term
            return sums

        done = self.team.run([partial(work, k) for k in range(min(ways, len(parts)))])
        if self.grads:
            self.team.run([partial(self._add, at) for at in pieces(len(self.params.grad), ways)])
        known = [x for x in priority if x is not None]
        batch.priority = torch.cat(known) if known else None
        found = [_floats(sums) for sums in done]
        scale = batch.count / max(1, batch.valid)  # the loss is divided by T x B, masked rows and all
        return {name: scale * sum(each[name] for each in found) for name in found[0]}

    def _add(self, at: slice) -> None:
        """Add the twins' gradients to the first one, and clear them."""
        for grad in self.grads:
            self.params.grad[at].add_(grad[at])
            grad[at].zero_()

    def _backward(
        self, loss: Callable[[Model, BatchPart], Loss], model: Model, part: BatchPart
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add a part's gradient; returns its metrics and priorities."""
        with self.autocast():
            found = checked(loss(model, part))
        found.total.backward()  # type: ignore[no-untyped-call]
        return found.metrics, found.priority


def _floats(scalars: dict[str, Tensor]) -> dict[str, float]:
    if any(x.is_cuda for x in scalars.values()):  # waits for the GPU once
        return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))
    return {name: float(x) for name, x in scalars.items()}


def take_step(exchange: Exchange, params: FlatParams, metrics: dict[str, float], lr: float, where: str) -> float:
    """Apply a batch's gradient and return its norm; a non-finite metric counts as a non-finite gradient."""
    if odd := [name for name, v in metrics.items() if not math.isfinite(v)]:
        params.grad.fill_(math.nan)  # reject a non-finite loss even if its gradient is finite
    try:
        if isinstance(norm := exchange.step(params, lr), SupportsFloat):
            params.check_cleared()
            return float(norm)
        raise CoterieError(f"exchange: step must return the norm of the gradient, not {norm!r:.40}")
    except CoterieError as error:
        shown = ", ".join(f"{k} {v:.4g}" for k, v in metrics.items())
        reason = f"{odd[0]} is not finite" if odd and isinstance(error, NonFinite) else error
        raise type(error)(f"{reason} at {where} ({shown})") from None


@dataclass
class LearnerParts:
    """The parts of a learner."""

    model: Model
    params: FlatParams
    algorithm: AnyAlgorithm
    acting: Acting
    exchange: Exchange
    gradients: Gradients
    lr: Callable[[int], float]  # the run's env steps -> learning rate
    learners: int = 1
    progress: Progress = field(default_factory=Progress)
    stages: Stages = field(default_factory=Stages)
    observers: list[Observer] = field(default_factory=list)

    def refresh(self) -> None:
        """Take what the exchange has, and act with it from now on."""
        self.stages.start()
        self.exchange.pull(self.params)
        self.stages.lap("pull")
        self.acting.publish(self.progress.learner_steps)


def learn(parts: LearnerParts, on_rollout: Callable[[Rollout], bool]) -> None:
    """Train until `on_rollout`, called after every rollout, returns True. Call this inside `with parts.exchange`."""
    model, params, algorithm, exchange = parts.model, parts.params, parts.algorithm, parts.exchange
    progress, stages = parts.progress, parts.stages
    for rollout in parts.acting.rollouts(parts.refresh):
        stages.start()
        total = progress.begin(rollout, exchange, algorithm.clock, parts.learners)
        lr = parts.lr(total)
        for observer in parts.observers:
            observer.begin(rollout, total)
        for batch in algorithm.batches(model, rollout):
            batch.metrics = parts.gradients.compute(algorithm, batch)
            stages.lap("train")
            for observer in parts.observers:
                observer.gradient(progress.env_steps, algorithm, batch)
            where = f"learner step {progress.learner_steps + 1}"
            batch.metrics["grad_norm"] = take_step(exchange, params, batch.metrics, lr, where)
            for observer in parts.observers:
                observer.step()
            algorithm.after_step(model, batch)
            stages.lap("exchange")
            progress.count(batch)
        algorithm.after_rollout(model, rollout)
        exchange.after_rollout(params)
        stages.lap("train")
        progress.end(rollout)
        for observer in parts.observers:
            observer.rollout(rollout, lr)
        if on_rollout(rollout):
            for observer in parts.observers:
                observer.end()
            return

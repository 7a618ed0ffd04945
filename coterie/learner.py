"""The learner: the one loop that trains, whatever the algorithm, the acting and the exchange."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from coterie.acting.recorder import Stages
from coterie.algorithms.base import Algorithm, Batch
from coterie.exchange.solo import Guard, Steps
from coterie.instruments.norms import Norms
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.types import CoterieError, Rollout


class Exchange(Protocol):
    """How learners agree. A context manager: entering gets the first weights, leaving tells the others."""

    guard: Guard

    @property
    def steps(self) -> Steps: ...  # the whole run's, as far as this learner knows
    def __enter__(self) -> Exchange: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def pull(self, params: FlatParams) -> None: ...  # make the local weights current
    def step(self, params: FlatParams, lr: float) -> float: ...  # agree, clip, check, update, clear the gradient
    def after_rollout(self, params: FlatParams) -> None: ...
    def agree(self, order: bool, stop: bool) -> tuple[bool, bool]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class Acting(Protocol):
    """Where actions are chosen: a source of rollouts that takes published weights."""

    def publish(self, version: int) -> None: ...
    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]: ...


@dataclass
class Progress:
    """What a learner has done; saved in checkpoints, and the base of `summary.json`."""

    env_steps: int = 0  # rows learned once, masked rows apart
    learner_steps: int = 0
    samples_trained: int = 0  # with reuse
    masked: int = 0  # rows that had no meaning: fake autoreset steps, replaced envs, waiting envs
    policy_lag_max: int = 0
    episodes: int = 0  # games that have ended
    lags: Counter[int] = field(default_factory=Counter)  # rows that were acted with weights so many learner steps old
    lag_by_row: list[float] = field(default_factory=list)  # mean lag of each row of a rollout, summed over rollouts
    rollouts: int = 0  # that `lag_by_row` is of
    metrics: dict[str, float] = field(default_factory=dict)  # sums over the batches since the last `read`
    batches: int = 0  # since the last `read`

    def count_lag(self, version: Tensor) -> None:
        """`version` `[T, B]`: learner step whose weights chose each action of what is about to be learned from."""
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

    def add(self, name: str, value: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    def read(self) -> dict[str, float]:
        """Means over the batches since the last call."""
        means = {k: v / max(1, self.batches) for k, v in self.metrics.items()}
        self.metrics, self.batches = {}, 0
        return means


class Gradients:
    """Backward passes over the parts of a batch, by a team: each member has the weights and a gradient of its own."""

    def __init__(
        self, model: Network, params: FlatParams, team: Team, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.params, self.team, self.autocast = params, team, autocast
        twins = [params.replica(model) for _ in range(team.size - 1)]
        self.models = [model, *(cast(Network, twin) for twin, _ in twins)]
        self.grads = [grad for _, grad in twins]

    def compute(self, algorithm: Algorithm, batch: Batch, half: Tensor | None = None) -> dict[str, float]:
        """Add the batch's gradient to `params.grad`, and that of half of it to `half`; returns the loss's metrics."""
        ways = len(self.models)
        if half is None:
            return self._add(algorithm, list(batch.parts(ways)))
        parts = list(batch.parts(2 * ways))
        first, rest = parts[::2], parts[1::2]
        found = self._add(algorithm, first)
        if rest:
            half.copy_(self.params.grad)
            for name, value in self._add(algorithm, rest).items():
                found[name] += value
        return found

    def _add(self, algorithm: Algorithm, parts: list[Any]) -> dict[str, float]:
        ways = len(self.models)

        def work(k: int) -> dict[str, Tensor]:
            sums: dict[str, Tensor] = {}
            for part in parts[k::ways]:  # a fixed share in a fixed order: the same sums at every run
                with self.autocast():
                    loss = algorithm.loss(self.models[k], part)
                loss.total.backward()  # type: ignore[no-untyped-call]
                for name, term in loss.metrics.items():
                    sums[name] = sums[name] + term if name in sums else term
            return sums

        done = self.team.run([partial(work, k) for k in range(min(ways, len(parts)))])
        for grad in self.grads:
            self.params.grad.add_(grad)
            grad.zero_()
        return {name: sum(float(sums[name]) for sums in done) for name in done[0]}


def take_step(exchange: Exchange, params: FlatParams, totals: dict[str, float], lr: float, where: str) -> None:
    """Let the gradient of a batch with the metrics `totals` have its effect, and add its norm to them."""
    if any(not math.isfinite(v) for v in totals.values()):
        params.grad.fill_(math.nan)  # a loss that is not finite must not pass because its gradient is
    try:
        totals["grad_norm"] = exchange.step(params, lr)
    except CoterieError as error:
        shown = ", ".join(f"{k} {v:.4g}" for k, v in totals.items())
        raise type(error)(f"{error} at {where} ({shown})") from None


def learn(
    model: Network,
    params: FlatParams,
    algorithm: Algorithm,
    acting: Acting,
    exchange: Exchange,
    gradients: Gradients,
    progress: Progress,
    settings: LearnSettings,
) -> None:
    """Train until `settings.on_rollout` says stop (it is asked after every rollout)."""

    stages = settings.stages

    def refresh() -> None:
        begin = time.perf_counter()
        exchange.pull(params)
        stages.add("pull", begin)
        acting.publish(progress.learner_steps)

    for rollout in acting.rollouts(refresh):
        begin = time.perf_counter()
        total = exchange.steps.total
        lr, algorithm.clock.env_steps = settings.lr(total), total
        progress.episodes += len(rollout.episodes)
        algorithm.clock.episodes = progress.episodes * settings.learners  # nobody asks the others for theirs
        valid = int(rollout.mask.sum())
        exchange.steps.add(valid)
        progress.count_lag(rollout.policy_version)
        for batch in algorithm.batches(model, rollout):
            half = settings.norms.begin(progress.env_steps) if settings.norms is not None else None
            totals = gradients.compute(algorithm, batch, half)
            begin = stages.add("train", begin)
            if half is not None:
                cast(Norms, settings.norms).gradient(half)
            take_step(exchange, params, totals, lr, f"learner step {progress.learner_steps}")
            if half is not None:
                cast(Norms, settings.norms).step()
            batch.metrics = totals
            algorithm.after_step(model, batch)
            begin = stages.add("exchange", begin)
            progress.learner_steps += 1
            progress.samples_trained += batch.count
            progress.batches += 1
            for name, value in totals.items():
                if math.isfinite(value):  # a skipped batch leaves no NaN in the means
                    progress.add(name, value)
        algorithm.after_rollout(model, rollout)
        exchange.after_rollout(params)
        progress.env_steps += valid
        progress.masked += rollout.mask.numel() - valid
        stages.add("train", begin)
        if settings.on_rollout(rollout):
            return


@dataclass
class LearnSettings:
    """What the loop needs besides its parts."""

    lr: Callable[[int], float]  # env steps so far -> learning rate
    stages: Stages
    on_rollout: Callable[[Rollout], bool]  # True: stop
    learners: int = 1
    norms: Norms | None = None  # looks at some of the steps


def autocast(device: torch.device, dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    """Mixed precision for the loss's forward pass; float32 where `dtype` is."""
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)

"""The base of algorithms with a replay: the replay ratio, and batches that are prepared ahead of training.

Each rollout adds `q.intensity` times its rows to the samples due; batches are sampled while a whole batch is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.base import ON_CPU, AlgorithmBase, Batch, Compute, Loss, slices
from coterie.algorithms.replay_size import fits_gpu, replay_capacity
from coterie.config import Config, ResolvedConfig
from coterie.errors import ConfigError
from coterie.models.base import Model
from coterie.parallel.graphs import Graphed
from coterie.replay.priority import Picks, rng_state, set_rng_state
from coterie.replay.sequences import Sequences
from coterie.replay.storage import Capacity, EnvReplay
from coterie.replay.transitions import TransitionReplay, Transitions
from coterie.types import Inputs, Obs, Rollout, Spec, map_tensors

R = TypeVar("R", Transitions, Sequences)  # what a replay gathers


@dataclass
class ReplayBatch(Generic[R]):
    """`n` samples of the replay, along the last axis of `mask`. A part has at most `chunk` of them (0: all)."""

    rows: R
    ahead: Tensor  # what was computed ahead of training, with the samples along the same axis
    mask: Tensor  # of the rows that are trained on
    chunk: int
    count: int  # rows of the whole batch, masked or not
    metrics: dict[str, float] = field(default_factory=dict)
    priority: Tensor | None = None  # [n], after it was trained on

    @cached_property
    def valid(self) -> int:
        """How many of the `count` rows are learned from."""
        return int(self.mask.sum())

    def parts(self, ways: int = 1) -> Iterator[ReplayBatch[R]]:
        pieces = slices(len(self.rows.weight), self.chunk, ways)
        yield from map(self._part, pieces) if len(pieces) > 1 else [self]

    def half(self) -> ReplayBatch[R]:
        return self._part(slice(0, None, 2))  # they are in the order of the replay

    def _part(self, at: slice) -> ReplayBatch[R]:
        cut = (*(slice(None),) * (self.mask.dim() - 1), at)
        return ReplayBatch(self.rows.part(at), self.ahead[cut], self.mask[cut], self.chunk, self.count)


def single_steps(obs: Obs, action: Tensor) -> Inputs:
    """Inputs `[N]` of a network without a core, which reads observations only."""
    first = torch.ones(len(action), dtype=torch.bool, device=action.device)
    return Inputs(obs, first, action, torch.zeros(len(action), device=action.device))


class ReplayLearning(AlgorithmBase, ABC, Generic[R]):
    """The base of DQN, R2D2 and SAC. They add `act`, `loss`, and the abstract methods below. Samples are single
    transitions, unless a subclass overrides this.
    """

    has_replay = True
    config: ResolvedConfig
    batch_axis: ClassVar[int] = 0  # of what `look_ahead` returns

    def __init__(self, config: ResolvedConfig, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.q = config.q
        self.batch_rows = config.q.batch_size * self.rows_per_sample(config)  # env steps that a batch trains on
        self.chunk = max(1, self.chunk // self.rows_per_sample(config)) if self.chunk else 0  # samples of a part
        self.team = compute.team  # looks ahead
        self.sampling: np.random.Generator | None = None  # a secondary learner's own, else the replay's
        self.replay: EnvReplay[R] | None = None
        self.lender: ReplayLearning[R] | None = None  # a secondary learner samples from this one's replay
        self.target: torch.nn.Module | None = None
        self.saved: dict[str, Tensor] = {}  # a checkpoint's, until replay and target network exist
        # Env steps so far, those stored in the replay, samples to train on, env steps at the last target copy.
        self.rows, self.stored, self.copied = 0, 0, -1
        self.due = 0.0
        self.seed, self.rng = seed, torch.Generator().manual_seed(seed)
        self.prefetcher = ThreadPoolExecutor(1, "coterie-replay")
        self._look_ahead = Graphed(self.look_ahead, compute.record)

    @classmethod
    def updates(cls, config: Config, columns: int, unroll: int) -> tuple[float, float]:
        samples = config.q.batch_size * cls.rows_per_sample(config)
        return columns * unroll * config.q.intensity / samples, samples

    @staticmethod
    def rows_per_sample(config: Config) -> int:
        """Env steps that one sample of the replay trains on."""
        return 1

    @classmethod
    def first_rows(cls, config: Config) -> int:
        return 2 * config.env.num_envs * (cls.unroll_length(config) + config.q.n_step)

    @staticmethod
    def replay_bytes(config: ResolvedConfig, spec: Spec) -> int:
        return TransitionReplay.bytes_for(replay_capacity(config, spec))

    def make_replay(self, room: Capacity) -> EnvReplay[R]:
        """An empty replay."""
        replay = self.config.replay
        first = self.value_based and replay.initial == "acting"
        made = TransitionReplay(
            room, self.config.algo.gamma, self.q.n_step, alpha=replay.alpha, seed=self.seed, from_values=first
        )
        return cast(EnvReplay[R], made)

    @abstractmethod
    def make_target(self, model: Model) -> torch.nn.Module:
        """The target network: a copy of `model`, or of a part of it."""

    def copy_target(self) -> None:
        """Every `q.target_every` env steps: update the target network, unless it follows in every step."""

    @abstractmethod
    def look_ahead(self, target: Any, rows: R, at: slice) -> Tensor:
        """Compute for the samples `at` of a batch what does not depend on the trained network: the target network's
        output, or noise. A thread does so while the batch before is trained on. Samples lie along `batch_axis`.
        """

    def trained(self, rows: R) -> Tensor:
        """The mask of the rows that are trained on, samples last."""
        return torch.ones_like(rows.weight, dtype=torch.bool)

    @abstractmethod
    def loss(self, model: Model, batch: ReplayBatch[R]) -> Loss:
        """The loss of one part of a batch."""

    def borrow(self, lender: ReplayLearning[R]) -> None:
        """Sample from another learner's replay, with separate random numbers, and without writing priorities."""
        self.lender, self.clock, self.sampling = lender, lender.clock, np.random.default_rng(lender.seed + 1)

    def batches(self, model: Model, rollout: Rollout) -> Iterator[ReplayBatch[R]]:
        """Store the rollout, then sample the batches that are due, on the rollout's device. Their number depends only
        on the number of rows, so learners with equal numbers of rows make equal numbers of steps.
        """
        self._begin(model, rollout)
        rows, device, replay = rollout.reward.numel(), rollout.reward.device, self.replay
        assert replay is not None
        if self.lender is None:
            replay.add(rollout, self.rewards.clipped(rollout.reward).cpu().numpy())
        if self.stored >= self.q.learn_start and replay.size:
            if self.copied < 0:
                self._copy()  # its normalizers have seen observations by now
            self.due += rows * self.q.intensity
        self.rows, self.stored = self.rows + rows, self.stored + rows
        prefetched = None
        while self.due >= self.batch_rows:
            self.due -= self.batch_rows
            found, ahead = (prefetched or self._fetch(device))()
            ahead = self.ahead(found) if ahead is None else ahead
            prefetched = self._fetch(device) if self.due >= self.batch_rows else None
            self.before_batch(model)
            yield ReplayBatch(found, ahead, self.trained(found), self.chunk, self.batch_rows)
        if self.rows - self.copied >= self.q.target_every:
            self._copy()

    def _begin(self, model: Model, rollout: Rollout) -> None:
        """Make the target network and the replay at the first rollout, with a checkpoint's state if there is one."""
        if self.target is None:
            self.target = self.make_target(model)
            if target := {k.removeprefix("target/"): x for k, x in self.saved.items() if k.startswith("target/")}:
                self.target.load_state_dict(target)
        if self.lender is not None:
            self.replay, self.stored = self.lender.replay, self.lender.stored - rollout.reward.numel()
        elif self.replay is None:
            self.replay = self._replay_for(rollout.reward.device)
            self.sampling = self.replay.priorities.rng
            if state := {k: x for k, x in self.saved.items() if k.startswith("replay/")}:
                self.replay.load_state_dict(state)
            else:
                self.stored, self.due = 0, 0.0  # the replay was not saved and is refilled
        if self.sampling is not None and "sampling" in self.saved:
            set_rng_state(self.sampling, self.saved["sampling"].numpy())
        self.saved = {}

    def _replay_for(self, device: torch.device) -> EnvReplay[R]:
        room = replay_capacity(self.config, self.spec)
        if fits_gpu(self.config, self.spec, device):
            with suppress(torch.OutOfMemoryError):  # another process was faster
                return self.make_replay(replace(room, device=device))
        return self.make_replay(room)

    def _copy(self) -> None:
        self.copied = self.rows
        self.copy_target()

    def before_batch(self, model: Model) -> None:
        """Called before each batch is trained on. By default nothing."""

    def before_look_ahead(self) -> None:
        """Called for each batch, in their order: draw its random numbers. By default none."""

    def _fetch(self, device: torch.device) -> Callable[[], tuple[R, Tensor | None]]:
        """Draw a batch. A thread gathers it, and looks ahead for it, while the previous one trains, unless several
        threads train: these also look ahead. Where a GPU has the observations, this is done when the batch is due:
        there is little to do but launch kernels.
        """
        assert self.replay is not None
        replay, share = self.config.replay, min(1.0, self.clock.env_steps / self.config.steps)
        beta = replay.beta + (replay.beta_end - replay.beta) * share if replay.alpha else 0.0
        picks = self.replay.priorities.draw(self.q.batch_size, beta, self.sampling)
        self.before_look_ahead()  # here and not in the thread: random numbers are drawn in a fixed order
        prepare = partial(self._prepare, self.replay, picks, device)
        return prepare if self.replay.room.device is not None else self.prefetcher.submit(prepare).result

    def _prepare(self, replay: EnvReplay[R], picks: Picks, device: torch.device) -> tuple[R, Tensor | None]:
        rows = replay.gather(picks)
        if device.type != "cpu":
            rows = map_tensors(lambda x: x.to(device), rows)
        return rows, self.ahead(rows) if self.team.size == 1 else None

    def ahead(self, rows: R) -> Tensor:
        """`look_ahead` for a whole batch, shared by the team."""
        ways = self.team.size
        pieces = slices(self.q.batch_size, self.chunk, ways)

        def work(k: int) -> list[Tensor]:
            with torch.no_grad():
                return [self._look_ahead(self.target, rows, at) for at in pieces[k::ways]]

        done = self.team.run([partial(work, k) for k in range(min(ways, len(pieces)))])
        return torch.cat([done[i % ways][i // ways] for i in range(len(pieces))], self.batch_axis)

    def after_step(self, model: Model, batch: Batch[ReplayBatch[R]]) -> None:
        """Write the errors of the batch as the priorities of its samples."""
        assert self.replay is not None and isinstance(batch, ReplayBatch)  # noqa: PT018
        if self.config.replay.alpha:
            if batch.priority is None or batch.priority.shape != batch.rows.picks.index.shape:
                raise ConfigError("algorithm: loss must return a priority for each sample, or set replay.alpha 0")
            self.replay.priorities.update(batch.rows.picks, batch.priority.double().cpu().numpy())

    def gauges(self) -> dict[str, float]:
        size = 0 if self.replay is None else self.replay.size
        return {"replay/size": size}

    def state_dict(self) -> dict[str, Tensor]:
        if self.saved:  # loaded, and unchanged since
            return self.saved
        target = {} if self.target is None else self.target.state_dict()
        saves = self.config.replay.save and self.lender is None
        replay = self.replay.state_dict() if self.replay is not None and saves else {}
        rng = None if replay else self.sampling  # a saved replay has it
        sampling = {} if rng is None else {"sampling": torch.from_numpy(rng_state(rng))}
        return {
            "entropy_adjustment": torch.zeros(1, dtype=torch.float64),  # part of the digests in older flight records
            **super().state_dict(),
            **{f"target/{k}": x for k, x in target.items()},
            **replay,
            **sampling,
            "counts": torch.tensor([self.rows, self.stored, self.copied, self.due], dtype=torch.float64),
            "rng": self.rng.get_state(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        *counts, self.due = state["counts"].tolist()
        self.rows, self.stored, self.copied = (int(x) for x in counts)
        self.rng.set_state(state["rng"])
        self.saved = state

    def close(self) -> None:
        """Release the replay at once: the garbage collector may find it much later."""
        self.prefetcher.shutdown(wait=False, cancel_futures=True)
        self.replay, self.saved = None, {}

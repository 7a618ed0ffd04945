"""The protocol of an algorithm, and what all algorithms share: their defaults and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.algorithms.rewards import Rewards
from coterie.config import Config, Refusal, ResolvedConfig
from coterie.errors import ConfigError, CoterieError, json_object, reason_of
from coterie.models.base import Model
from coterie.ops.policy import masked_mean
from coterie.parallel.graphs import Record, recordable
from coterie.parallel.threads import ALONE, Team
from coterie.types import AgentOutput, Inputs, Rollout, Spec


@dataclass
class Clock:
    """The whole run's progress, for schedules. The learner sets it before each rollout's batches."""

    env_steps: int = 0
    episodes: int = 0


@dataclass(frozen=True)
class Compute:
    """Where and how a batch is computed."""

    dtype: torch.dtype = torch.float32  # of the torsos
    chunk: int = 0  # most samples at once; 0: all
    team: Team = ALONE  # threads that share a batch
    record: Record | None = None  # of learner steps as graphs, where the network can be recorded
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision for the loss's forward pass; none where `dtype` is float32."""
        plain = self.dtype == torch.float32
        return nullcontext() if plain else torch.autocast(self.device.type, dtype=self.dtype)


ON_CPU = Compute()


@dataclass
class Loss:
    """The tensor to minimize, and named scalars without a graph. Each is a sum over the valid rows of a part, divided
    by the whole batch's count (`masked_mean`), so that parts add up. As a metric it is shown as a mean of valid rows.
    """

    total: Tensor
    metrics: dict[str, Tensor]
    priority: Tensor | None = None  # [n] of the part's samples, where a replay draws by it


def checked(loss: Loss) -> Loss:
    """What `loss` of an algorithm has returned, which may be a user's. Raises a `CoterieError`."""
    if not isinstance(loss, Loss):
        raise CoterieError(f"algorithm: loss must return a Loss, as combine does, not {type(loss).__name__}")
    if not isinstance(total := loss.total, Tensor) or total.numel() != 1:
        what = f"a tensor {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise CoterieError(f"algorithm: the total of a Loss must be a tensor of one number, not {what}")
    if not total.requires_grad:
        raise CoterieError("algorithm: the total of a Loss has no gradient; was it detached?")
    for name, x in loss.metrics.items():
        if not isinstance(x, Tensor) or x.numel() != 1:
            raise CoterieError(f"algorithm: the metric {name} of a Loss must be a tensor of one number")
    return loss


BatchPart = TypeVar("BatchPart")  # of a batch: the argument of `loss`, of a type that each algorithm defines
BatchPartOut = TypeVar("BatchPartOut", covariant=True)


class Batch(Protocol[BatchPartOut]):
    """The data of one optimizer step."""

    count: int  # T x B of all of it, masked or not
    metrics: dict[str, float]  # the whole batch's, after it was trained on
    priority: Tensor | None  # of its samples, after it was trained on

    @property
    def valid(self) -> int: ...  # how many of the `count` rows are learned from
    def parts(self, ways: int = 1) -> Iterator[BatchPartOut]: ...  # their losses and gradients add up to the batch's
    def half(self) -> Batch[BatchPartOut]: ...  # the samples of half of the envs, or half of independent samples


class Algorithm(Protocol[BatchPart]):
    """A learning algorithm. Its `state_dict` holds all of its state."""

    clock: Clock
    sampled: float  # what `explore` is in an evaluation that samples

    def act(
        self, model: Model, inputs: Inputs, core_state: Tensor | None, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]: ...  # greedy where `explore` is None; builds no graph
    def explore(self, env_id: Tensor) -> Tensor: ...  # how much each env explores, [B]
    def update_factors(self) -> None: ...  # before each batch: update the numbers that change during a run
    def acts_at(self, version: int) -> None: ...  # in an actor: its weights are those of learner step `version`
    def batches(self, model: Model, rollout: Rollout) -> Iterator[Batch[BatchPart]]: ...
    def loss(self, model: Model, batch: BatchPart) -> Loss: ...  # of one part, after `update_factors`
    def after_step(self, model: Model, batch: Batch[BatchPart]) -> None: ...  # once per batch
    def after_rollout(self, model: Model, rollout: Rollout) -> None: ...  # after its last batch
    def gauges(self) -> dict[str, float]: ...  # for the metrics, beside the loss's
    def warning(self) -> str: ...  # one line for the user, or nothing
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...
    def close(self) -> None: ...  # at the end of its process's run


# Where the type of the parts does not matter.
AnyAlgorithm = Algorithm[Any]
AnyBatch = Batch[Any]


class AlgorithmBase:
    """Class attributes that Coterie reads, and defaults for all algorithms. They add `act`, `batches` and `loss`."""

    on_policy: ClassVar[bool] = False
    value_based: ClassVar[bool] = False  # the network outputs action values
    has_replay: ClassVar[bool] = False
    refusals: ClassVar[tuple[Refusal, ...]] = ()
    Settings: ClassVar[Callable[..., Any] | None] = None  # a dataclass of the settings that only this algorithm has

    def __init__(self, config: Config, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        self.config, self.spec = config, spec
        self.chunk, self.clock, self.rewards = compute.chunk, Clock(), Rewards(config.reward, config.algo)
        self.sampled, self.settings = 1.0, self.read_settings(config)
        self.compute, self._factors = compute, dict[str, Tensor]()

    @classmethod
    def read_settings(cls, config: Config) -> Any:
        """`config.settings` as `Settings`. Raises a `ConfigError` where they do not fit."""
        given = json_object("settings", config.settings)
        if cls.Settings is None and given:
            raise ConfigError(f"settings: {cls.__name__} has no settings of its own, but got {', '.join(given)}")
        try:
            return cls.Settings(**given) if cls.Settings else None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"settings: {reason_of(error)}") from error

    @classmethod
    def corrects(cls, config: Config) -> bool:
        """Whether it can learn from rollouts of older weights."""
        return not cls.on_policy

    @staticmethod
    @recordable
    def make_model(config: Config, spec: Spec) -> Model | None:
        """A network of the algorithm's own, with initial weights. None: that of section `model`."""
        return None

    @staticmethod
    def check_data(config: Config, spec: Spec) -> None:
        """Raise an error if data that the algorithm reads cannot be used. Called once, before a run writes anything."""

    @staticmethod
    def unroll_length(config: Config) -> int:
        """Steps of each env in a rollout."""
        return config.algo.unroll_length

    @staticmethod
    def training_threads(config: Config, most: int, dtype: torch.dtype) -> int:
        """Threads that share a batch, at most `most`. `dtype`: of the torso."""
        return most

    @staticmethod
    def lockstep_settings(config: Config) -> tuple[object, ...]:
        """Settings that decide how many steps a learner makes per rollout: all-reduce needs them equal in all."""
        return ()

    @staticmethod
    def updates(config: Config, columns: int, unroll: int) -> tuple[float, float]:
        """Optimizer steps for `columns` rollouts of `unroll` rows, and the samples in each. For `coterie plan`."""
        return 1, columns * unroll

    @staticmethod
    def replays_rollouts(config: Config) -> bool:
        """Whether batches hold rollouts of earlier batches, too."""
        return False

    @staticmethod
    def first_rows(config: Config) -> int:
        """Env steps of a learner after which it can train."""
        return 0

    @staticmethod
    def replay_bytes(config: ResolvedConfig, spec: Spec) -> int:
        """Bytes of one learner's full replay, in memory or on disk; 0 without one."""
        return 0

    def acts_at(self, version: int) -> None:
        """Called in an actor, whose weights are those of learner step `version`. By default it is ignored."""

    def explore(self, env_id: Tensor) -> Tensor:
        """How much each env explores, `[B]`. By default each samples from the policy as it is."""
        return _ones(len(env_id), env_id.device)

    def changing(self) -> dict[str, float]:
        """Numbers that change during a run and that `loss` reads by `factor`."""
        return {}

    def factor(self, name: str) -> float | Tensor:
        """One of `changing`. Where losses are recorded: as of the last update, a scalar at a fixed address."""
        if self.compute.record is None:
            return self.changing()[name]
        if name not in self._factors:
            self.update_factors()
        return self._factors[name]

    def update_factors(self) -> None:
        """Write the scalars that recorded losses read."""
        for name, value in self.changing().items() if self.compute.record else ():
            if name not in self._factors:  # float64, as Python's numbers: a float tensor with axes keeps its dtype
                self._factors[name] = torch.zeros((), dtype=torch.float64, device=self.compute.device)
            self._factors[name].fill_(value)

    def after_step(self, model: Model, batch: Batch[Any]) -> None:
        """Called once per batch, after its optimizer step. By default it does nothing."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the metrics, beside those of the loss."""
        return {}

    def warning(self) -> str:
        """One line for the user, or nothing."""
        return ""

    def after_rollout(self, model: Model, rollout: Rollout) -> None:
        """Update the running normalizers, once the last batch has used the old ones."""
        self.rewards.update(model, rollout)

    def state_dict(self) -> dict[str, Tensor]:
        return self.rewards.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rewards.load_state_dict(state)

    def close(self) -> None:
        """Called at the end of the run, to release resources. By default none."""


@cache
def _ones(length: int, device: torch.device) -> Tensor:
    """Kept: acting asks for the same again and again. No one writes to it."""
    with torch.inference_mode(False):
        return torch.ones(length, device=device)


def slices(length: int, size: int, ways: int) -> list[slice]:
    """Even pieces of at most `size` (0: any), in a multiple of `ways` if `length` allows."""
    return even(length, min(length, math.ceil(math.ceil(length / (size or length)) / ways) * ways))


def even(length: int, pieces: int) -> list[slice]:
    """Slices of `length` whose sizes differ by 1 at most."""
    return [slice(length * i // pieces, length * (i + 1) // pieces) for i in range(pieces)]


Terms = Mapping[str, tuple[float | Tensor, Tensor]]  # of a loss: each with its factor


def combine(terms: Terms, watched: dict[str, Tensor], mask: Tensor, count: int) -> Loss:
    """The weighted sum of the terms' means, and as metrics these means and those of `watched`, over the valid rows.

    Few calls, which take most of a small net's time: one sum with a graph, and one reduction of all metrics without.
    """
    for name, x in chain(((name, x) for name, (_, x) in terms.items()), watched.items()):
        if x.shape != mask.shape:
            one = f"{name!r} has shape {list(x.shape)}, not {list(mask.shape)}: one number for each row of the batch"
            raise CoterieError(f"algorithm: the loss's {one}")
    (first, x), *rest = terms.values()
    rows = x * first if isinstance(first, Tensor) or first != 1 else x
    for weight, x in rest:
        rows = rows + x * weight if isinstance(weight, Tensor) else torch.add(rows, x, alpha=weight)
    with torch.no_grad():
        columns = torch.stack([*(x for _, x in terms.values()), *watched.values()])
        means = masked_mean(columns, mask, count).unbind()
    return Loss(masked_mean(rows, mask, count), dict(zip([*terms, *watched], means, strict=True)))

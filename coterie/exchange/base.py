"""The base of all exchanges, the guard against gradients that are not finite, and the record of each choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from coterie.config import Config, Refusal, ResolvedConfig
from coterie.errors import ConfigError, CoterieError
from coterie.flight.life import Note, RecordedLife, unrecorded
from coterie.models.heads import Moments
from coterie.ops.optim import Rule, flat_norm_clip
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from coterie.plugins import label, named, substitute
from coterie.types import Array

_MOST_IN_A_ROW = 1000  # batches that are skipped, until it is clear that nothing more is learned


class NonFinite(CoterieError):
    """A gradient or weight that is NaN or infinite; the message names the tensor."""


def check_finite(params: FlatParams) -> None:
    """Raise `NonFinite` if a weight is not finite."""
    norm = float(params.data.dot(params.data))
    if norm - norm != 0:  # NaN or infinity
        raise NonFinite(f"the weights of {params.nonfinite(params.data) or 'the whole net'} are not finite")


class GradientGuard:
    """Clips gradients. A non-finite one raises, or is dropped and counted in `skipped`."""

    def __init__(self, max_grad_norm: float, skip: bool) -> None:
        self.max_grad_norm, self.skip, self.skipped, self.in_a_row = max_grad_norm, skip, 0, 0

    def clip(self, params: FlatParams) -> tuple[float, bool]:
        """The norm before clipping, and whether the gradient may be used; one that may not is cleared."""
        norm = flat_norm_clip(params.grad, self.max_grad_norm)
        if norm - norm == 0:  # neither NaN nor infinity
            self.in_a_row = 0
            return norm, True
        self.refuse(params.nonfinite(params.grad), params)
        return norm, False

    @property
    def raises(self) -> bool:
        """Whether the next gradient that is not finite ends the run."""
        return not self.skip or self.in_a_row >= _MOST_IN_A_ROW

    def refuse(self, name: str | None, params: FlatParams) -> None:
        """Clear a gradient that is not finite."""
        params.grad.zero_()
        if self.raises:
            before = f", nor were {_MOST_IN_A_ROW} before it" if self.skip else ""
            raise NonFinite(f"the gradient of {name or 'the whole net (its norm overflows)'} is not finite{before}")
        self.in_a_row += 1
        self.skipped += 1


class Exchange(ABC):
    """How learners synchronize. A context manager: the learner joins the others at entry and leaves them at exit.

    What is not abstract counts on the run's board, decides without others, and keeps the weights local.
    """

    guard: GradientGuard
    board: Board
    rank: int  # this learner's row of the board
    counts_alike = False  # whether `env_steps` is the same number in all learners, after each learner step

    @property
    def env_steps(self) -> int:
        """Rows that the run's learners have begun to learn from."""
        return self.board.sum("started")

    def start(self, own: int, total: int) -> None:
        """Restore the counts of env steps: this learner's, and the run's."""
        self.board.counts["started"][self.rank] = own

    def count(self, rows: int) -> None:
        """This learner begins to learn from more rows."""
        self.board.counts["started"][self.rank] += rows

    def __enter__(self) -> Exchange:
        return self

    def agree(self, order: bool, stop: bool) -> tuple[bool, bool]:
        """Whether all learners carry out an order, and whether they stop, after this rollout."""
        return order, stop

    def gauges(self) -> dict[str, float]:
        """For the metrics."""
        return {}

    def __exit__(self, *error: object) -> None:
        """Leave the other learners."""

    def pull(self, params: FlatParams) -> None:
        """Make the local weights current, before a rollout."""

    @abstractmethod
    def step(self, params: FlatParams, lr: float) -> float:
        """Agree on a gradient, clip and check it, update the weights, clear it; returns its norm before clipping."""

    def after_rollout(self, params: FlatParams) -> None:
        """Called after a rollout was trained on, to exchange what is not a gradient."""

    def report_to(self, log: Callable[[str], None]) -> None:
        """Where to print lines about other machines."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the weights and normalizers that a checkpoint must hold."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Peers:
    """A learner's place among the learners of its run, and the memory that they share."""

    rank: int = 0
    board: Board = field(default_factory=lambda: Board(1))
    memory: SharedArrays | None = None  # made by `ExchangeKind.memory`
    rendezvous: Path | None = None  # the file where learners in lockstep find each other, if each has a GPU
    mixing: list[Array] | None = None  # gossip: the matrices of the run's learners
    rejoin: bool = False  # the other learners are training already
    core: int = -1  # the core that this learner shares with others; -1: it has its own
    recorded_life: RecordedLife | None = None  # in a replay: what is repeated
    shared_in_replay: Any = None  # and what its learners share, made by `ExchangeKind.shared_in_replay`

    @property
    def learners(self) -> int:
        return self.board.learners


@dataclass(frozen=True)
class Setup:
    """The parts of a learner that its exchange is made of: the one argument of every exchange."""

    config: Config
    params: FlatParams
    moments: Moments  # the running normalizers
    peers: Peers
    timeout: float  # seconds to wait for another learner
    rule: Rule
    guard: GradientGuard
    lockstep_settings: tuple[object, ...] = ()  # of the algorithm, which all learners in lockstep must share
    note: Note = unrecorded  # an event of the flight record
    flush: Callable[[], None] = unrecorded  # the events so far stay even if the learner is killed


@dataclass(frozen=True)
class ExchangeKind:
    """One choice of exchange, for the rest of the program. Each module of this folder has its `KIND`."""

    exchange: Callable[[Setup], Exchange]  # made in the learner's process
    memory: Callable[[Setup], SharedArrays | None] = lambda setup: None  # in the parent: shared by all learners
    # Restores that memory from a checkpoint if the learners share the state.
    restore: Callable[[SharedArrays, dict[str, Tensor], Tensor], None] = lambda memory, state, moments: None
    mixing: Callable[[Config, int], list[Array] | None] = lambda config, learners: None
    leave: Callable[[SharedArrays, int], None] = lambda memory, rank: None  # the learner of this rank was killed
    one_learner: bool = False  # valid with one learner only
    spans_machines: bool = False  # learners of several machines form one group
    trusts_network: Callable[[Config], bool] = lambda config: False  # the user declared that network private
    link: str = ""  # package.module:function that makes the `Link` of a run to other runs (exchange/mailboxes.py)
    address: Callable[[Config], str] = lambda config: ""  # where learners meet those of other machines, if they do
    link_settings: Callable[[str, str, int], dict[str, Any]] = lambda bind, connect, machines: {}  # for that
    in_lockstep: bool = False  # all learners make every step together
    shared_weights: bool = False  # one set of weights: the learning rate is that of one learner
    rejoins: bool = False  # a killed learner can restart alone, and take the weights of another one
    on_gpu: bool = True
    gpu_learners: int = 1  # that share a machine's only GPU where learners are auto
    refusals: tuple[Refusal, ...] = ()
    # For replays along flight records: package.module:callable; empty: there is none, and nothing is shared.
    replay: str = ""  # (setup) -> exchange along `setup.peers.recorded_life`
    shared_in_replay: str = ""  # lives that ran together -> what their learners share, in one process
    simulation: str = ""  # package.module:class, a `SimExchange` of `coterie plan`; empty: plan leaves it out

    def is_alone(self, config: ResolvedConfig) -> bool:
        """True if the exchange needs several learners and the run has one."""
        return config.learners == 1 and not self.one_learner and not self.address(config)

    def restarts_one(self, config: ResolvedConfig) -> bool:
        """Whether a killed learner restarts alone, and joins others. Else all restart from the checkpoint."""
        return self.rejoins and not self.is_alone(config)

    def check_replay(self, config: Config, folder: Path) -> None:
        """Raise a `ConfigError` if the learners of a run cannot be replayed."""
        if not self.replay:
            why = "the order of writes to shared weights is not recorded" if self.shared_weights else "no `replay`"
            raise ConfigError(f"exchange: {config.exchange} cannot be replayed: {why}")
        if own := config.plugins.exchange:
            raise ConfigError(f"plugins.exchange: {label(own)} cannot be replayed, only built-in exchanges can")
        if self.address(config) or (folder / "sites").exists():  # of a run on Ray
            raise ConfigError(
                f"exchange: {config.exchange} with other machines cannot be replayed: they are not recorded"
            )

    def connect(self, setup: Setup) -> Exchange:
        if setup.peers.recorded_life is not None:
            return cast(Exchange, named("exchange", self.replay)(setup))
        return substitute(setup.config, "exchange", self.exchange)(setup)

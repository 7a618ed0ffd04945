"""The `Acting` protocol, the parts that an acting mode is made of, and `ActingKind`, its entry in `acting/table.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from coterie.acting.recorder import Envs
from coterie.config import Central, Config, Decoupled, Refusal, ResolvedConfig
from coterie.envs.news import EnvNews, Means
from coterie.errors import ConfigError, CoterieError
from coterie.flight.life import Note, RecordedLife, unrecorded
from coterie.models.base import Model
from coterie.models.heads import Moments
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.stages import Stages
from coterie.plugins import named
from coterie.types import AgentOutput, Inputs, Needs, Post, Rollout, Spec

# (network, inputs, core state, global ids of the envs, random numbers) -> output and the next core state
ActingPolicy = Callable[[Model, Inputs, Tensor | None, Tensor, torch.Generator], tuple[AgentOutput, Tensor | None]]


class Stopped(Exception):
    """The run has ended: an actor abandons its unfinished rollout."""


class Acting(Protocol):
    """Where actions are chosen: a source of rollouts that takes published weights. The methods with a body are
    optional: they suit acting that is idle between rollouts, and whose env processes report their own news.
    """

    def publish(self, version: int) -> None: ...  # the weights of learner step `version`
    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]: ...
    def counts(self) -> dict[str, int]: ...  # since it began, see `COUNTS`: "produced", "dropped", "replaced"; once
    # closed also "in_flight", the valid rows that it finds in its memory and has not handed to the learner
    def close(self) -> None: ...

    def rest(self) -> int:  # block until acting is idle; returns the number of waiting batches (for benchmarks)
        return 0

    def news(self) -> EnvNews:  # of its envs, since the last call
        return EnvNews([], Means())

    def gauges(self) -> dict[str, float]:  # for the metrics
        return {}


class Worker(Protocol):
    """The work of a child process."""

    def run(self, post: Post) -> None: ...
    def close(self) -> None: ...


class Memory(Protocol):
    """The memory shared by a learner and its child processes; made in the parent. By default the work
    of a dead child is not given to another one, and the learner counts the rows that it receives.
    """

    def close(self) -> None: ...

    def abandon(self, child: int) -> None:
        """A child has died: others may take over its work."""

    def delivered(self, child: int) -> int:  # rows that a child's learner has received, as far as the memory shows
        return 0


class Servers(Protocol):
    """The gRPC servers of a learner."""

    def serve(self, address: str, services: Mapping[str, Any], field: str = "") -> None: ...  # see remote/admission.py


def core_shape(model: Model) -> tuple[int, ...]:
    """Shape of one env's recurrent state; empty without a core."""
    state = model.initial_state(1)
    return () if state is None else tuple(state.shape[1:])


@dataclass(frozen=True)
class Agent:
    """A process's network, and how its actions are chosen."""

    model: Model
    params: FlatParams
    moments: Moments  # the network's running normalizers
    policy: ActingPolicy
    acts_at: Callable[[int], None]  # to be called with the learner step of new weights
    inference_policy: ActingPolicy  # for another thread; it explores by what `set_exploration_steps` was given
    set_exploration_steps: Callable[[int | None], int]  # None: the learner's env steps now; returns them


@dataclass(frozen=True)
class EnvShare:
    """The envs of one process. `config`: the run's, with these envs."""

    config: ResolvedConfig
    spec: Spec
    first_env: int  # global id
    groups: int
    device: torch.device  # where the policy acts for them
    dtype: torch.dtype
    make: Callable[[int], Envs]  # with this number of env threads; 0: what suits the machine
    make_rng: Callable[[int], torch.Generator]  # argument: the number of one stream of random numbers


@dataclass(frozen=True)
class GroupPolicy:
    """How the actions of each group of envs are chosen."""

    act: Callable[[int, Inputs, Tensor | None], tuple[AgentOutput, Tensor | None]]  # group, inputs, core state
    initial_state: Callable[[int], Tensor | None]
    refresh: Callable[[], None]  # take the learner's weights


def group_policy(share: EnvShare, envs: Envs, agent: Agent, model: Model, refresh: Callable[[], None]) -> GroupPolicy:
    """Act with `model`, the agent's copy for acting. Each group has its own generator, since groups may run in
    different threads.
    """
    first, device = share.first_env, share.device
    ids = [torch.arange(first + cols.start, first + cols.stop, device=device) for cols in envs.groups]
    rngs = [share.make_rng(first + cols.start) for cols in envs.groups]

    def act(g: int, inputs: Inputs, state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        return agent.policy(model, inputs, state, ids[g], rngs[g])

    return GroupPolicy(act, model.initial_state, refresh)


@dataclass(frozen=True)
class MemorySetup:
    """What decides the size of a learner's shared memory."""

    config: ResolvedConfig
    spec: Spec
    unroll_length: int
    core: tuple[int, ...]
    weights: int
    moments: int
    updates: int = 1  # learner steps for each batch of rollouts


@dataclass(frozen=True)
class WorkerSetup:
    """The parts of a child process. `number`: among its learner's children; `row`: its row of the board."""

    envs: EnvShare
    make_agent: Callable[..., Agent]  # on a device; default: the CPU
    board: Board
    rank: int
    number: int
    row: int
    timeout: float  # seconds to wait for the learner
    life_number: int = 0  # different at each start of the process


@dataclass(frozen=True)
class LearnerSetup:
    """The parts of a learner that its acting is made of."""

    config: ResolvedConfig
    unroll_length: int
    max_envs: int  # that the algorithm has room for
    agent: Agent
    actor: Model  # the copy of the network that acts
    refresh_actor: Callable[[], None]
    envs: EnvShare
    threads: int  # that may act at once
    board: Board
    rank: int
    stages: Stages
    servers: Servers
    timeout: float  # seconds to wait for rollouts
    on_produced: Callable[[], None]  # to be called when rows have arrived from another process
    is_over: Callable[[], bool]  # whether to end instead of waiting for rollouts
    worker: Callable[[int, int], WorkerSetup]  # of a child process, by its number and its life's; for a replay
    updates: int = 1  # learner steps for each batch of rollouts
    note: Note = unrecorded  # an event of the flight record
    recorded_life: RecordedLife | None = None  # in a replay: what is repeated


M = TypeVar("M")


def _no_worker(setup: WorkerSetup, memory: Any) -> Worker:
    raise CoterieError("acting: a kind with child processes needs a `worker`")


Section = Decoupled | Central  # the settings of an acting mode with child processes


@dataclass(frozen=True)
class ActingKind(Generic[M]):
    """One choice of acting, as the rest of the program knows it. Each module of this folder has its `KIND`.

    `M` is the type of its `Memory`, None for an acting mode that shares nothing.
    """

    connect: Callable[[LearnerSetup, M], Acting]  # in the learner's process
    describe: Callable[[ResolvedConfig, int, int], str]  # of a learner's envs, groups and env threads: one line
    memory: Callable[[MemorySetup], M | None] = lambda setup: None  # in the parent, for each learner
    worker: Callable[[WorkerSetup, M], Worker] = _no_worker  # in a child process
    child: str = ""  # what its child processes are called; empty: the learner steps the envs itself
    own_policy: bool = False  # the children choose actions, one core each; else the learner does for them
    niceness: int = 0  # by which they are below the learner, so that it does not wait for a core
    section: Callable[[Config], Section | None] = lambda config: None  # its settings
    # Overrides that set lockstep and batch_size.
    batch_settings: Callable[[bool, int], dict[str, Any]] = lambda lockstep, batch_size: {}
    replay: str = ""  # package.module:callable, a `connect` along `setup.recorded_life`; empty: impossible
    publish_every: Callable[[Config], int] = lambda config: 1  # learner steps between updates of the acting weights
    # Policy lag: learner steps between the choice of an action and the first batch that it is in, where each batch of
    # rollouts has `updates` learner steps: the most (None: no bound), and the lowest `max_lag` that can be kept.
    worst_lag: Callable[[ResolvedConfig, int], int | None] = lambda config, updates: 0
    least_lag: Callable[[ResolvedConfig, int], int] = lambda config, updates: 0
    max_envs: Callable[[Config], int] = lambda config: sys.maxsize  # of one learner
    batch_max: Callable[[Config], int] = lambda config: 0  # most envs in one forward pass; 0: no limit
    one_group: Callable[[Config], bool] = lambda config: False  # all envs of a process are acted on at once
    refusals: tuple[Refusal, ...] = ()
    needs: Callable[[Config], Needs] = lambda config: {}  # its options that some runs do not use
    simulation: str = ""  # package.module:class, a `SimActing` of `coterie plan`; empty: plan leaves it out

    def from_record(self, setup: LearnerSetup) -> Acting:
        """Acting that repeats `setup.recorded_life`."""
        if not self.replay:
            raise ConfigError(f"acting: {setup.config.acting} cannot be replayed: it has no `replay`")
        return cast(Acting, named("acting", self.replay)(setup, None))

    @property
    def has_children(self) -> bool:
        """Whether child processes step the envs."""
        return bool(self.child)

    @property
    def hosted(self) -> bool:
        """Whether child processes step the envs, and the learner chooses the actions."""
        return self.has_children and not self.own_policy

    def batch_size(self, config: Config) -> int:
        """Rollouts of one env each in a learner's batch."""
        section = self.section(config)
        return (section.batch_size if section is not None else 0) or config.env.num_envs

    def lockstep(self, config: Config) -> bool:
        """Whether every action is chosen with the newest weights."""
        section = self.section(config)
        return section is None or section.lockstep

    def restarts(self, config: Config) -> int:
        """Children that may be restarted before the run fails."""
        section = self.section(config)
        return 0 if section is None else section.restarts

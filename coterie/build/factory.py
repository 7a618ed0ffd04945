"""The parts of a run's processes, built from its config: algorithm, model, exchange, memory."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from coterie.acting.base import ActingPolicy, Agent, EnvShare, Memory, MemorySetup, WorkerSetup, core_shape
from coterie.acting.table import acting_kind
from coterie.algorithms.base import ON_CPU, AnyAlgorithm, Clock, Compute
from coterie.algorithms.table import algorithm_class
from coterie.build.resources import Resources, resolve_resources
from coterie.config import Config, ResolvedConfig
from coterie.envs.events import EnvEvents
from coterie.envs.group import Envs
from coterie.envs.make import backends, make_spec
from coterie.envs.tasks import child_env
from coterie.errors import ConfigError, counted
from coterie.exchange.base import GradientGuard, Peers, Setup
from coterie.exchange.table import exchange_kind
from coterie.flight.life import Note, unrecorded
from coterie.flight.record import FlightRecorder, begun, path_of, read_life
from coterie.models.base import Model
from coterie.models.build import Network
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import Divided, make_rule
from coterie.parallel.board import Board
from coterie.parallel.graphs import MOST_RECORDINGS, Graphed, Record
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from coterie.parallel.threads import ALONE, Team, making, making_alone
from coterie.parallel.weights import Weights
from coterie.plugins import in_one_line, label
from coterie.types import AgentOutput, Inputs, Spec


def seed_for(seed: int, *key: int) -> int:
    """An independent seed for one purpose: seeds of different keys never share a stream."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> np.uint64(1))


ENV_SEED, POLICY_SEED, BATCH_SEED, EVAL_SEED, GLOBAL_SEED = range(5)


def seed_globals(config: Config, life_number: int, row: int) -> None:
    """Seed torch's and NumPy's own random numbers, which a user's parts may draw from, for one process of a run: its
    row of the board. Else all that are forked from one server begin with the same ones.
    """
    with making_alone:  # in a replay, learners are threads
        torch.manual_seed(seed := seed_for(config.seed, GLOBAL_SEED, life_number, row))
        np.random.seed(seed % 2**32)


def make_algorithm(config: ResolvedConfig, spec: Spec, compute: Compute = ON_CPU, rank: int = 0) -> AnyAlgorithm:
    make = cast(Callable[..., AnyAlgorithm], algorithm_class(config))  # each class has the whole protocol
    with in_one_line(f"algorithm: {label(config.algorithm)} cannot be made"):
        made = make(config, spec, compute, seed_for(config.seed, BATCH_SEED, rank))
    if not hasattr(made, "clock"):
        raise ConfigError(f"algorithm: {label(config.algorithm)}: its __init__ must call super().__init__")
    return made


def env_share(
    config: Config, mine: ResolvedConfig, spec: Spec, life_number: int, first_env: int, board: Board | None = None,
    events: EnvEvents | None = None, resources: Resources | None = None,
) -> EnvShare:  # fmt: skip
    """The envs of one process: those of `mine`, with global ids from `first_env` on. `config`: the run's. `resources`:
    a learner's; actors and env hosts have the CPU.
    """
    own = resources or resolve_resources(replace(mine, device="cpu"), spec)

    def make(threads: int) -> Envs:
        envs = Envs(
            backends(mine.env, mine.atari, threads or own.env_threads, own.groups),
            mine.env,
            seed=seed_for(mine.seed, ENV_SEED, life_number),
            first_env_id=first_env,
            groups=own.groups,
            union=mine.env.id != config.env.id,
            events=events,
        )
        envs.board = board
        return envs

    def make_rng(key: int) -> torch.Generator:
        return torch.Generator(own.device).manual_seed(seed_for(mine.seed, POLICY_SEED, life_number, key))

    return EnvShare(mine, spec, first_env, own.groups, own.device, own.dtype, make, make_rng)


def acting_policy(algorithm: AnyAlgorithm, record: Record | None = None, most: int = MOST_RECORDINGS) -> ActingPolicy:
    """How actions are chosen: each env explores by its id. `record`: of graphs, `most` of them."""
    act = Graphed(algorithm.act, record, most=most)

    def policy(
        model: Model, inputs: Inputs, core_state: Tensor | None, env_id: Tensor, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]:
        found = act(model, inputs, core_state, algorithm.explore(env_id), rng)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], AgentOutput)):
            raise ConfigError(f"algorithm: act must return an AgentOutput and the next core state, not {found!r:.40}")
        out, core_state = found
        if out.action.shape != (shape := inputs.prev_action.shape):
            raise ConfigError(f"algorithm: act chose actions of shape {tuple(out.action.shape)}, not {tuple(shape)}")
        for name in ("log_prob", "value"):  # others would be broadcast to all envs
            if getattr(x := getattr(out, name), "shape", None) != inputs.is_first.shape:
                given = f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                needed = f"a tensor {list(inputs.is_first.shape)}"
                raise ConfigError(f"algorithm: act must give {needed} as {name}, not {given}")
        return out, core_state

    return policy


def agent_of(
    algorithm: AnyAlgorithm, model: Network, params: FlatParams, moments: Moments, record: Record | None = None
) -> Agent:
    twin = copy.copy(algorithm)
    twin.clock = Clock()

    def set_exploration_steps(env_steps: int | None) -> int:
        twin.clock.env_steps = algorithm.clock.env_steps if env_steps is None else env_steps
        return twin.clock.env_steps

    own = acting_policy(algorithm, record)
    inference = acting_policy(twin, record, 2 * MOST_RECORDINGS)  # it acts with two copies of the network
    return Agent(model, params, moments, own, algorithm.acts_at, inference, set_exploration_steps)


def make_agent(config: ResolvedConfig, spec: Spec, device: torch.device = ON_CPU.device) -> Agent:
    """The network and policy of an actor."""
    record = resolve_resources(replace(config, device="cpu"), spec).record_acting
    model = make_model(config, spec).to(device)
    return agent_of(make_algorithm(config, spec), model, FlatParams(model), normalizers(config, model), record)


def make_model(config: Config, spec: Spec) -> Network:
    """The network with the run's initial weights: the same for every learner."""
    with making(seed_for(config.seed)):
        kind = algorithm_class(config)
        with in_one_line(place := f"algorithm: make_model of {label(config.algorithm)}"):
            own = kind.make_model(config, spec)
        if not isinstance(own, Network | None):
            raise ConfigError(f"{place} must return a coterie.models.build.Network or None, not {type(own).__name__}")
        return own or Network(spec, config.model, config.q if kind.value_based else None)


def memory_setup(config: ResolvedConfig, spec: Spec, model: Network, params: FlatParams) -> MemorySetup:
    """The sizes of what a learner shares with its child processes."""
    unroll, moments = algorithm_class(config).unroll_length(config), normalizers(config, model).size
    return MemorySetup(config, spec, unroll, core_shape(model), len(params.data), moments, updates_of(config))


def updates_of(config: ResolvedConfig) -> int:
    """Learner steps for each batch of rollouts, at most."""
    kind, columns = algorithm_class(config), acting_kind(config).batch_size(config)
    return max(1, math.ceil(kind.updates(config, columns, kind.unroll_length(config))[0]))


def stated_lag(config: ResolvedConfig) -> str:
    """The worst policy lag of a learner, in words."""
    kind, updates = algorithm_class(config), updates_of(config)
    if (lag := acting_kind(config).worst_lag(config, updates)) is None:
        return "without a bound"
    stated = f"up to {counted(lag, 'learner step')}"
    if exchange_kind(config).shared_weights and config.learners > 1:
        return f"{stated} of its own, without a bound on those of other learners"
    if kind.has_replay:
        return f"{stated}, more for replayed samples"
    more = ", more for replayed rollouts" if kind.replays_rollouts(config) else ""
    return stated + (f" (and {updates - 1} within a batch)" if updates > 1 else "") + more


@dataclass(frozen=True)
class ProcessContext(Peers):
    """A process's place in the run: its learner's peers, and the memory that it shares."""

    gradients: SharedArrays | None = None  # where learners leave gradients for comparison
    changes: SharedArrays | None = None  # and the lengths of their updates, for the bound on their distance
    gpu: int = 0
    acting: Memory | None = None  # shared with the child processes
    kept: Weights | None = None  # where a lone learner leaves what must outlive it
    folder: Path | None = None  # of the run, for its flight record
    note: Note | None = None  # a replay: takes the events


def worker_setup(
    config: ResolvedConfig, life_number: int, context: ProcessContext, number: int, row: int
) -> WorkerSetup:
    """The parts of child process `number` of a learner, with the board's row `row`."""
    if (recorded := context.recorded_life) is not None:
        config = replace(config, precision=recorded.header.get("actor_precision", config.precision))
    spec, (mine, first_env) = make_spec(config.env, config.atari), child_env(config, number, context.rank)
    events = worker_events(config, context, number, life_number)
    share = env_share(config, mine, spec, life_number, first_env, context.board, events)
    make = partial(make_agent, config, spec)
    return WorkerSetup(share, make, context.board, context.rank, number, row, patience(config), life_number)


def worker_events(config: ResolvedConfig, context: ProcessContext, number: int, life_number: int) -> EnvEvents:
    """A child process notes its env events in a flight record of its own, made at the first event."""
    if context.recorded_life is not None:
        path = path_of(context.recorded_life.path.parents[1], context.rank, life_number, number)
        return EnvEvents(recorded=read_life(path).events if begun(path) else ())
    if context.folder is None or not config.log.flight:
        return EnvEvents()
    header = {"learner": context.rank, "worker": number, "life": life_number}
    return EnvEvents(FlightRecorder(path_of(context.folder, context.rank, life_number, number), lambda: header).note)


def normalizers(config: Config, model: Network) -> Moments:
    """The running normalizers that learners must agree on."""
    used = [*model.obs_norm.values(), *([model.return_norm] if config.reward.normalize else [])]
    return Moments(cast(list[Normalizer], used))


def network_digest(model: Network) -> str:
    """A digest of what the weights are called and how large they are: learners with other ones cannot average."""
    shapes = [(name, list(p.shape)) for name, p in model.state_dict().items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def patience(config: Config) -> float:
    """Seconds that a process waits for another. The parent's stall time-out is shorter, so that it reports first."""
    return 10 + 2 * config.log.stall


def exchange_setup(
    config: Config,
    params: FlatParams,
    moments: Moments,
    peers: Peers,
    team: Team = ALONE,
    note: Note = unrecorded,
    flush: Callable[[], None] = unrecorded,
) -> Setup:
    """What the exchange of one learner is made of. `team`: the threads that train; the rest: of its flight record."""
    rule, optim = make_rule(config.optim), config.optim
    shared = rule if team.size == 1 else Divided(rule, team)
    guard = GradientGuard(optim.max_grad_norm, optim.on_nonfinite == "skip")
    settings = algorithm_class(config).lockstep_settings(config)
    return Setup(config, params, moments, peers, patience(config), shared, guard, settings, note, flush)

"""The parts of a run's processes, built from its config: algorithm, model, exchange, memory."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from coterie.acting.recorder import rollout_layout
from coterie.acting.table import batch_size
from coterie.algorithms.base import ON_CPU, Algorithm, Compute
from coterie.algorithms.table import algorithm_class, is_value_based, unroll_length
from coterie.build.resources import Resources
from coterie.config import Config, ResolvedConfig
from coterie.envs.group import Envs
from coterie.envs.make import make_envs
from coterie.envs.tasks import task_config, tasks
from coterie.exchange.base import Exchange, Guard, Peers, Setup
from coterie.exchange.table import exchange_kind
from coterie.models.build import Network
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import make_rule
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.plugins import in_place_of
from coterie.types import AgentOutput, Inputs, Spec


def seed_for(seed: int, *key: int) -> int:
    """An independent seed for one purpose: seeds of different keys never share a stream."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> np.uint64(1))


ENV_SEED, POLICY_SEED, BATCH_SEED, EVAL_SEED = range(4)


# (group, inputs, core state) -> output and the next core state
Policy = Callable[[int, Inputs, Tensor | None], tuple[AgentOutput, Tensor | None]]


def make_algorithm(config: ResolvedConfig, spec: Spec, compute: Compute = ON_CPU, rank: int = 0) -> Algorithm:
    """The run's algorithm, or the user's in its place."""
    make: Callable[..., Algorithm] = algorithm_class(config)
    return in_place_of(config, "algorithm", make)(config, spec, compute, seed_for(config.seed, BATCH_SEED, rank))


def envs_of(
    config: Config, layout: Resources, life: int, first: int, union: bool = False
) -> tuple[Envs, list[torch.Generator]]:
    """Envs with global ids from `first` on, and random numbers for each group: their threads must not race for them."""
    envs = make_envs(
        config.env,
        config.atari,
        seed=seed_for(config.seed, ENV_SEED, life),
        first_env_id=first,
        threads=layout.env_threads,
        groups=layout.groups,
        union=union,
    )
    rngs = [
        torch.Generator(layout.device).manual_seed(seed_for(config.seed, POLICY_SEED, life, first + cols.start))
        for cols in envs.groups
    ]
    return envs, rngs


def policy_of(algorithm: Algorithm, model: Network, rngs: list[torch.Generator], ids: list[Tensor]) -> Policy:
    """How a group's actions are chosen; `ids`: each group's envs."""
    ids = [x.to(rngs[0].device) for x in ids]

    def policy(g: int, inputs: Inputs, core_state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        return algorithm.act(model, inputs, core_state, algorithm.explore(ids[g]), rngs[g])

    return policy


def ids_of(envs: Envs, first: int) -> list[Tensor]:
    """The global ids of each group's envs."""
    return [torch.arange(first + cols.start, first + cols.stop) for cols in envs.groups]


def make_model(config: Config, spec: Spec) -> Network:
    """The network with the run's initial weights: the same for every learner."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed))
        return Network(spec, config.model, config.q if is_value_based(config) else None)


def actor_env(config: ResolvedConfig, number: int, rank: int) -> tuple[ResolvedConfig, int]:
    """The config of actor `number` of learner `rank`, with its share of the simulators, and its first env's id."""
    width = config.env.num_envs * config.learners // max(1, config.actors)
    several = tasks(config.env.id)
    mine = task_config(config, several[(rank * (config.actors // config.learners) + number) % len(several)])
    delayed = config.env.delay_learner in (-1, rank)
    env = replace(mine.env, num_envs=width, delay=config.env.delay * delayed, delay_learner=-1)
    return replace(mine, env=env), rank * config.env.num_envs + number * width


def task_of(config: ResolvedConfig, env_id: int) -> str:
    """The task of an env by its id."""
    rank, place = divmod(env_id, config.env.num_envs)
    number = place * max(1, config.actors) // (config.env.num_envs * config.learners)
    return actor_env(config, number, rank)[0].env.id


def acting_memory(config: ResolvedConfig, spec: Spec, model: Network) -> tuple[Slots, Weights]:
    """Where a learner's actors get weights from and leave rollouts."""
    state = model.initial_state(1)
    layout = rollout_layout(spec, unroll_length(config), batch_size(config), () if state is None else state.shape[1:])
    width = actor_env(config, 0, 0)[0].env.num_envs
    batches = 1 if config.decoupled.lockstep else 2 + config.decoupled.queue
    slots = Slots(layout, batches, batch_size(config), width, max(1, config.actors // config.learners))
    size = len(FlatParams(copy.deepcopy(model)).data)
    return slots, Weights(size, normalizers(config, model).size)


@dataclass(frozen=True)
class Links(Peers):
    """A learner's place in the run: its peers, its GPUs, and how it reaches its actors or env hosts."""

    gradients: SharedArrays | None = None  # where gradients are left to be compared
    gpu: int = 0
    slots: Slots | None = None  # decoupled: where this learner's actors leave rollouts
    weights: Weights | None = None  # and take weights
    address: str = ""  # central: where this learner's hosts find it


def normalizers(config: Config, model: Network) -> Moments:
    """The running normalizers that learners must agree on."""
    used = [*model.obs_norm.values(), *([model.return_norm] if config.reward.normalize else [])]
    return Moments(cast(list[Normalizer], used))


def net_of(model: Network) -> str:
    """A digest of what the weights are called and how large they are: learners with other ones cannot average."""
    shapes = [(name, list(p.shape)) for name, p in model.state_dict().items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def patience(config: Config) -> float:
    """Seconds that one process waits for another: the parent, which sees everybody, is to say first who hangs."""
    return 10 + 2 * config.log.stall


def exchange_setup(config: Config, params: FlatParams, moments: Moments, peers: Peers) -> Setup:
    """What the exchange of one learner is made of."""
    same, substitute = algorithm_class(config).steps_kind(config), partial(in_place_of, config, "exchange")
    rule, optim = make_rule(config.optim), config.optim
    guard = Guard(optim.max_grad_norm, optim.on_nonfinite == "skip")
    return Setup(config, params, moments, peers, patience(config), rule, guard, same, substitute)


def make_exchange(config: Config, params: FlatParams, moments: Moments, peers: Peers) -> Exchange:
    return exchange_kind(config).connect(exchange_setup(config, params, moments, peers))

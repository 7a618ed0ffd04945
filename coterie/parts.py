"""The parts of a run's processes, built from its config: what `auto` comes to, algorithm, model, exchange, memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from coterie.actor import rollout_layout
from coterie.algorithms.a2c import A2C
from coterie.algorithms.dqn import DQN
from coterie.algorithms.ppo import PPO, horizon
from coterie.algorithms.r2d2 import R2D2
from coterie.algorithms.values import Means
from coterie.algorithms.vtrace import VTrace
from coterie.config import Config, elsewhere
from coterie.envs.make import make_envs, make_spec
from coterie.envs.owner import Envs
from coterie.envs.pool import has_env
from coterie.exchange.allreduce import AllReduce
from coterie.exchange.central import Central, Shift, central_memory
from coterie.exchange.gossip import Gossip, gossip_memory
from coterie.exchange.hogwild import Hogwild
from coterie.exchange.solo import Guard, Solo
from coterie.exchange.store import Store, Turns
from coterie.exchange.topology import matrices
from coterie.learner import Exchange
from coterie.matrix import VALUE, first_rows
from coterie.models.build import Network
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import make_rule
from coterie.parallel.affinity import available_cores, bf16_is_fast
from coterie.parallel.board import Board, BoardSteps, OwnSteps
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import own_folder
from coterie.parallel.shm import SharedArrays
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.tasks import task_config, tasks
from coterie.types import AgentOutput, ConfigError, Inputs, Spec

# For each core where env.num_envs is auto.
_IMAGE_ENVS, _VECTOR_ENVS = 16, 32
_CPU_CHUNK = 320  # samples of images whose activations still fit the cache (docs/benchmarks.md)


def seed_for(seed: int, *key: int) -> int:
    """An independent seed for one purpose: seeds of different keys never share a stream."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> np.uint64(1))


ENV_SEED, POLICY_SEED, BATCH_SEED, EVAL_SEED = range(4)


@dataclass(frozen=True)
class Layout:
    """What `auto` came to on this machine."""

    device: torch.device
    dtype: torch.dtype  # of the torsos
    env_threads: int
    torch_threads: int  # threads that train parts of a batch side by side, torch on one core in each
    groups: int
    chunk: int

    @property
    def means(self) -> Means:
        return Means(self.dtype, self.chunk, self.torch_threads)


def resolve(config: Config, spec: Spec, gpu: int = 0) -> Layout:
    """Turn every `auto` and 0 into a choice, by rules that depend on the machine and the env, never on timing."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here; use cpu or auto")
    cuda = config.device == "cuda" or (
        config.device == "auto" and torch.cuda.is_available() and config.exchange != "hogwild"
    )
    device = torch.device(f"cuda:{gpu}" if cuda else "cpu")
    image = any(s.is_image for s in spec.obs.values())
    bf16 = config.precision == "bf16" or (config.precision == "auto" and image and bf16_is_fast(device.type))
    cores = len(available_cores())
    # A second thread pays where a forward pass takes long; a small net's calls would only wait for the interpreter.
    threads = config.torch_threads or (cores if image and not cuda else 1)
    # Two groups: for images each has a thread; otherwise one thread acts for them in turns, which pays while a group's
    # step is short beside the threads' wake-ups (LunarLander, acting: 32 envs 51,200 steps/s with two groups and 38,700
    # with one; 256 envs 86,700 and 93,700).
    n = config.env.num_envs
    workers = config.env.backend == "workers" or not has_env(config.env.id)
    apart = image or cuda or workers or 32 <= n <= 128
    # In lockstep a host's envs are acted on all at once.
    apart = apart and not (config.acting == "central" and config.central.lockstep)
    groups = config.env.groups or (2 if apart and n % 2 == 0 else 1)
    return Layout(
        device=device,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        env_threads=config.env.threads or cores,
        torch_threads=threads,
        groups=groups,
        chunk=config.optim.chunk or (_CPU_CHUNK if image and not cuda else 0),
    )


_PLAIN = Means()
AnyAlgorithm = A2C | PPO | VTrace | DQN | R2D2
# (group, inputs, core state) -> output and the next core state
Policy = Callable[[int, Inputs, Tensor | None], tuple[AgentOutput, Tensor | None]]


def make_algorithm(config: Config, spec: Spec, means: Means = _PLAIN, rank: int = 0) -> AnyAlgorithm:
    seed = seed_for(config.seed, BATCH_SEED, rank)
    if config.algorithm == "dqn":
        return DQN(config, spec, seed, means)
    if config.algorithm == "r2d2":
        return R2D2(config, spec, seed, means)
    if config.algorithm == "ppo":
        return PPO(config, spec, means.chunk, seed)
    return VTrace(config, spec, means.chunk, seed) if config.algorithm == "vtrace" else A2C(config, spec, means.chunk)


def replay_bytes(config: Config, spec: Spec) -> int:
    """What the replay of all learners takes when it is full: 0 where there is none, or it is on disk."""
    if config.algorithm not in VALUE or config.replay.disk:
        return 0
    own = R2D2 if config.algorithm == "r2d2" else DQN
    return own.replay_bytes(config, spec) * (config.learners if isinstance(config.learners, int) else 1)


def envs_of(
    config: Config, layout: Layout, life: int, first: int, union: bool = False
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


def policy_of(algorithm: AnyAlgorithm, model: Network, rngs: list[torch.Generator], ids: list[Tensor]) -> Policy:
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
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(config.seed))
        return Network(spec, config.model, config.q if config.algorithm in VALUE else None)


def simulators(config: Config, learners: int) -> int:
    """Each learner's, where `env.num_envs` is auto: so many for each of its cores, or for each of its actors, that the
    columns of a batch and the tasks are shared out evenly, and what has to be there before learning begins comes of
    `q.learn_start` env steps.
    """
    one = replace(config, env=replace(config.env, num_envs=1))
    spec = make_spec(one.env, config.atari)
    width = _IMAGE_ENVS if any(s.is_image for s in spec.obs.values()) else _VECTOR_ENVS
    cores, several = max(1, len(available_cores()) // learners), len(tasks(config.env.id))
    batch = elsewhere(config).batch_size if config.acting != "inline" else 0
    if batch and elsewhere(config).lockstep:
        return batch
    most = config.central.max_envs if config.acting == "central" else sys.maxsize
    if config.algorithm in VALUE:
        most = min(most, int(config.q.learn_start // first_rows(one)))
    step = 2 if config.env.groups == 2 else 1
    if isinstance(config.actors, int):
        actors = max(1, config.actors // learners)
    elif config.acting == "decoupled":
        fair = [k for k in range(1, cores + several) if k * learners % several == 0]
        actors = max([k for k in fair if k <= cores and k * step <= most], default=fair[0])
    else:
        actors = several if config.acting == "central" else 1  # a host has threads for all cores
    if config.acting != "decoupled":
        width, batch = -(-width * cores // actors), 0
    fitting = [w for w in range(step, width + 1, step) if batch % w == 0 and actors * w <= most]
    return actors * max(fitting, default=step)


def settle(config: Config) -> Config:
    """`auto` learners, simulators, actors and exchange as what they are on this machine: one learner for each GPU, or
    else each core; one actor for each core, as far as the simulators can be shared out evenly.
    """
    learners = config.learners
    if learners == "auto":
        gpus = 0 if config.device == "cpu" or config.exchange == "hogwild" else torch.cuda.device_count()
        learners = 1 if config.exchange == "solo" else gpus or len(available_cores())
    exchange = config.exchange
    if exchange == "auto":
        exchange = "solo" if learners == 1 else "allreduce"
    if not config.env.num_envs:
        config = replace(config, env=replace(config.env, num_envs=simulators(config, learners)))
    actors = config.actors
    if actors == "auto" and config.acting == "central":
        actors = learners * len(tasks(config.env.id))  # a host has threads for all cores
    elif actors == "auto" and config.acting == "decoupled":
        most = max(1, len(available_cores()) // learners)
        envs, several = config.env.num_envs, len(tasks(config.env.id))
        # Each learner's, so that its simulators, the tasks, and the columns of a batch are shared out evenly.
        fitting = [
            k
            for k in range(1, envs + 1)
            if envs % k == 0
            and batch_size(config) % (envs // k) == 0
            and k * learners % several == 0
            and (config.env.groups != 2 or envs // k % 2 == 0)
        ] or [1]
        actors = learners * max([k for k in fitting if k <= most], default=fitting[0])
    return replace(config, learners=learners, exchange=exchange, actors=actors)


def batch_size(config: Config) -> int:
    """Rollouts of one env each that a learner trains on at once."""
    return (config.acting != "inline" and elsewhere(config).batch_size) or config.env.num_envs


def actor_env(config: Config, number: int, rank: int) -> tuple[Config, int]:
    """The config of actor `number` of learner `rank`, with its share of the simulators, and its first env's id."""
    assert isinstance(config.learners, int) and isinstance(config.actors, int)  # noqa: PT018
    width = config.env.num_envs * config.learners // max(1, config.actors)
    several = tasks(config.env.id)
    mine = task_config(config, several[(number * config.learners + rank) % len(several)])
    delayed = config.env.delay_learner in (-1, rank)
    env = replace(mine.env, num_envs=width, delay=config.env.delay * delayed, delay_learner=-1)
    return replace(mine, env=env), rank * config.env.num_envs + number * width


def task_of(config: Config, env_id: int) -> str:
    """The task of an env by its id."""
    assert isinstance(config.learners, int) and isinstance(config.actors, int)  # noqa: PT018
    rank, place = divmod(env_id, config.env.num_envs)
    number = place * max(1, config.actors) // (config.env.num_envs * config.learners)
    return actor_env(config, number, rank)[0].env.id


def acting_memory(config: Config, spec: Spec, model: Network) -> tuple[Slots, Weights]:
    """Where a learner's actors get weights from and leave rollouts."""
    state = model.initial_state(1)
    layout = rollout_layout(spec, horizon(config), batch_size(config), () if state is None else state.shape[1:])
    width = actor_env(config, 0, 0)[0].env.num_envs
    batches = 1 if config.decoupled.lockstep else 2 + config.decoupled.queue
    assert isinstance(config.learners, int) and isinstance(config.actors, int)  # noqa: PT018
    slots = Slots(layout, batches, batch_size(config), width, max(1, config.actors // config.learners))
    size = len(FlatParams(copy.deepcopy(model)).data)
    return slots, Weights(size, normalizers(config, model).size)


@dataclass(frozen=True)
class Links:
    """What ties a learner to the others: its place among them, the board, and the memory that its exchange needs."""

    rank: int = 0
    board: Board = field(default_factory=lambda: Board(1))
    memory: SharedArrays | None = None
    rendezvous: Path | None = None  # allreduce: the file where they meet
    gradients: SharedArrays | None = None  # where gradients are left to be compared
    rejoin: bool = False  # gossip: the others are at work already
    gpu: int = 0
    core: int = -1  # the core that this learner shares with others; -1: it has cores of its own
    slots: Slots | None = None  # decoupled: where this learner's actors leave rollouts
    weights: Weights | None = None  # and take weights
    address: str = ""  # central: where this learner's hosts find it

    @property
    def learners(self) -> int:
        return len(self.board.here)


def normalizers(config: Config, model: Network) -> Moments:
    """The running normalizers that learners must agree on."""
    used = [*model.obs_norm.values(), *([model.return_norm] if config.reward.normalize else [])]
    return Moments(cast(list[Normalizer], used))


def exchange_memory(config: Config, params: FlatParams, moments: Moments, learners: int) -> SharedArrays | None:
    """The memory that the learners' exchange needs, with these weights where it holds any."""
    if config.exchange == "gossip":
        return gossip_memory(learners, len(params.data), moments.size)
    if config.exchange in ("hogwild", "store"):
        chunks = config.store.chunks if config.exchange == "store" else 1
        return central_memory(params.data.cpu(), make_rule(config.optim), chunks, moments.read())
    return None


def patience(config: Config) -> float:
    """Seconds that one process waits for another: the parent, which sees everybody, is to say first who hangs."""
    return 10 + 2 * config.log.stall


def make_exchange(config: Config, params: FlatParams, moments: Moments, links: Links) -> Exchange:
    rule = make_rule(config.optim)
    timeout = patience(config)
    guard = Guard(config.optim.max_grad_norm, config.optim.on_nonfinite == "skip")
    if config.exchange == "solo":
        return Solo(params, rule, guard)
    rank, learners, board = links.rank, links.learners, links.board
    if config.exchange == "allreduce":
        meeting = links.rendezvous or own_folder() / "meeting"
        return AllReduce(params, rule, guard, moments, board, rank, meeting, timeout)
    memory = links.memory or exchange_memory(config, params, moments, learners)
    assert memory is not None
    if config.exchange == "gossip":
        lockstep = config.gossip.tau == 0
        return Gossip(
            params, rule, guard, moments, memory, board,
            OwnSteps(learners) if lockstep else BoardSteps(board, rank), rank,
            matrices(config.gossip.topology, learners, config.gossip.peers),
            tau=config.gossip.tau, mix_every=config.gossip.mix_every, timeout=timeout, rejoin=links.rejoin,
        )  # fmt: skip
    if config.exchange == "hogwild":
        central = Central(memory, moments, 1, timeout)
        # Bytes 0 and 1 of the memory are the locks of the weights and of the normalizers.
        shift = Shift(central.locks, 2 + links.core, board, rank) if links.core >= 0 else None
        own = config.hogwild.statistics == "own"
        return Hogwild(params, rule, guard, central, BoardSteps(board, rank), own, shift)
    central = Central(memory, moments, config.store.chunks, timeout)
    turns = Turns(board, rank, timeout) if config.store.fixed_turns else None
    steps = OwnSteps(learners) if turns else BoardSteps(board, rank)
    betas = (config.optim.beta1, config.optim.beta2)
    return Store(params, rule, guard, central, steps, config.store.local_steps, betas, turns)

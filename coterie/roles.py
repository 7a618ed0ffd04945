"""Roles: what one process of a run is made of. Here the learner that acts inline.

A role is built from a config and its links to the other learners, so that a bench, a test and every launch place the
same parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from coterie.acting.inline import Inline
from coterie.actor import Recorder, Stages
from coterie.algorithms.a2c import A2C
from coterie.algorithms.ppo import PPO, horizon
from coterie.config import Config
from coterie.envs.make import make_envs, make_spec
from coterie.envs.pool import has_env
from coterie.exchange.allreduce import AllReduce
from coterie.exchange.central import Central, Shift, central_memory
from coterie.exchange.diagnostics import Sampled
from coterie.exchange.gossip import Gossip, gossip_memory
from coterie.exchange.hogwild import Hogwild
from coterie.exchange.solo import Guard, Solo
from coterie.exchange.store import Store, Turns
from coterie.exchange.topology import matrices
from coterie.learner import Exchange, Gradients, LearnSettings, Progress, autocast, learn
from coterie.matrix import check
from coterie.models.build import ActorCritic, acting_copy
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import make_rule, scaled_lr, schedule_value
from coterie.parallel.affinity import available_cores, bf16_is_fast
from coterie.parallel.board import Board, BoardSteps, OwnSteps
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from coterie.parallel.threads import Team
from coterie.types import AgentOutput, ConfigError, Inputs, Rollout, Spec

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
    groups = config.env.groups or (2 if apart and n % 2 == 0 else 1)
    return Layout(
        device=device,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        env_threads=config.env.threads or cores,
        torch_threads=threads,
        groups=groups,
        chunk=config.optim.chunk or (_CPU_CHUNK if image and not cuda else 0),
    )


def make_algorithm(config: Config, spec: Spec, chunk: int = 0, rank: int = 0) -> A2C | PPO:
    if config.algorithm == "ppo":
        return PPO(config, spec, chunk, seed_for(config.seed, BATCH_SEED, rank))
    return A2C(config, spec, chunk)


def make_model(config: Config, spec: Spec) -> ActorCritic:
    """The network with the run's initial weights: the same for every learner."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(config.seed))
        return ActorCritic(spec, config.model)


def settle(config: Config) -> Config:
    """`auto` learners and exchange as what they are on this machine: one learner for each GPU, or else each core."""
    learners = config.learners
    if learners == "auto":
        gpus = 0 if config.device == "cpu" or config.exchange == "hogwild" else torch.cuda.device_count()
        learners = 1 if config.exchange == "solo" else gpus or len(available_cores())
    exchange = config.exchange
    if exchange == "auto":
        exchange = "solo" if learners == 1 else "allreduce"
    return replace(config, learners=learners, exchange=exchange)


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

    @property
    def learners(self) -> int:
        return len(self.board.here)


def normalizers(config: Config, model: ActorCritic) -> Moments:
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


def make_exchange(config: Config, params: FlatParams, moments: Moments, links: Links) -> Exchange:
    rule = make_rule(config.optim)
    timeout = 10 + 2 * config.log.stall  # the parent, which sees everybody, is to say first who hangs
    guard = Guard(config.optim.max_grad_norm, config.optim.on_nonfinite == "skip")
    if config.exchange == "solo":
        return Solo(params, rule, guard)
    rank, learners, board = links.rank, links.learners, links.board
    if config.exchange == "allreduce":
        meeting = links.rendezvous or Path(tempfile.mkdtemp(prefix="coterie-")) / "meeting"
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


class InlineLearner:
    """A learner that acts in its own process: builds the parts and runs the loop.

    `life` counts the starts of this run (0, then one more at each resume), so that a resumed run does not see the
    episodes of its first minutes again.
    """

    def __init__(self, config: Config, life: int = 0, links: Links | None = None) -> None:
        self.links = links = links or Links()
        self.config = config = settle(replace(config, learners=links.learners))
        self.spec = make_spec(config.env, config.atari)
        check(config, self.spec)
        self.layout = layout = resolve(config, self.spec, links.gpu)
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.model = make_model(config, self.spec).to(layout.device)
        self.params = FlatParams(self.model)
        self.algorithm = make_algorithm(config, self.spec, layout.chunk, links.rank)
        self.progress, self.stages = Progress(), Stages()
        self.before: dict[str, int] = {}  # this learner's counts when it was started
        self.exchange = make_exchange(config, self.params, normalizers(config, self.model), links)
        if links.gradients is not None:
            self.exchange = Sampled(self.exchange, links.gradients, links.rank, config.log.cosines)
        self.actor, self.refresh_actor = acting_copy(self.model, layout.dtype)
        first = links.rank * config.env.num_envs
        self.envs = make_envs(
            config.env,
            config.atari,
            seed=seed_for(config.seed, ENV_SEED, life),
            first_env_id=first,
            threads=layout.env_threads,
            groups=layout.groups,
        )
        self.rngs = [  # one for each group: their threads must not race for random numbers
            torch.Generator(layout.device).manual_seed(seed_for(config.seed, POLICY_SEED, life, first + cols.start))
            for cols in self.envs.groups
        ]
        everyone = torch.ones(config.env.num_envs, device=layout.device)
        recorder = Recorder(self.spec, config.env.num_envs, self.envs.groups, horizon(config), layout.device)

        def policy(g: int, inputs: Inputs, core_state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
            return self.algorithm.act(self.actor, inputs, core_state, everyone, self.rngs[g])

        self.actors = Team(min(layout.groups, layout.torch_threads))
        self.acting = Inline(
            self.envs, policy, recorder, self.model.initial_state, self.refresh_actor, self.stages, self.actors,
            config.algo.poll,
        )  # fmt: skip
        self.trainers = Team(layout.torch_threads if config.model.compile == "none" else 1)
        self.gradients = Gradients(self.model, self.params, self.trainers, autocast(layout.device, layout.dtype))
        if config.model.compile != "none":  # acting has other shapes, and stays as it is
            compiled = torch.compile(self.model, mode=config.model.compile, dynamic=False)
            self.gradients.models[0] = cast(ActorCritic, compiled)

    def lr(self, env_steps: int) -> float:
        optim, alone = self.config.optim, self.config.exchange in ("hogwild", "store")
        envs = self.config.env.num_envs * (1 if alone else self.links.learners)
        return scaled_lr(optim, envs) * schedule_value(optim.schedule, env_steps, self.config.steps)

    def describe(self) -> str:
        """What `auto` came to, for the person who started the run."""
        lay, count = self.layout, sum(p.numel() for p in self.model.parameters())
        kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[lay.dtype]
        return (
            f"{self.config.env.num_envs} envs in {lay.groups} group(s) on {lay.env_threads} thread(s), "
            f"{lay.torch_threads} training thread(s), {lay.device}, {kind}; {count:,} weights"
        )

    def start(self, counts: dict[str, int], total: int) -> None:
        """Go on from what this learner had counted before, and from the env steps of the whole run."""
        for name in ("learner_steps", "samples_trained", "masked", "policy_lag_max", "episodes"):
            setattr(self.progress, name, counts.get(name, 0))
        self.progress.env_steps = counts.get("learned", 0)
        self.before = counts
        self.exchange.guard.skipped = counts.get("skipped", 0)
        self.exchange.steps.start(self.progress.env_steps, total)

    def counts(self) -> dict[str, int]:
        """What the board tells of this learner."""
        p = self.progress
        return {
            "produced": self.before.get("learned", 0) + self.acting.produced,
            "learned": p.env_steps,
            "masked": p.masked,
            "learner_steps": p.learner_steps,
            "samples_trained": p.samples_trained,
            "policy_lag_max": p.policy_lag_max,
            "episodes": p.episodes,
            "skipped": self.exchange.guard.skipped,
            "replaced": self.before.get("replaced", 0) + self.envs.replaced,
        }

    def gauges(self) -> dict[str, float]:
        """What the algorithm and the exchange can tell about themselves, for the metrics."""
        tell = getattr(self.exchange, "gauges", None)
        return self.algorithm.gauges() | (tell() if tell is not None else {})

    def run(self, on_rollout: Callable[[Rollout], bool]) -> None:
        """Train until `on_rollout` returns True."""
        settings = LearnSettings(self.lr, self.stages, on_rollout, self.links.learners)
        with self.exchange, self.acting:
            learn(
                self.model,
                self.params,
                self.algorithm,
                self.acting,
                self.exchange,
                self.gradients,
                self.progress,
                settings,
            )

    def close(self) -> None:
        self.actors.close()
        self.trainers.close()
        self.envs.close()
        torch.set_num_threads(self._torch_threads)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint must hold besides counters."""
        return {
            "model": dict(self.model.state_dict()),
            "exchange": self.exchange.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "rng": {f"policy_{g}": rng.get_state() for g, rng in enumerate(self.rngs)},
        }

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.model.load_state_dict(tensors["model"])  # copies into the flat views
        self.exchange.load_state_dict(tensors["exchange"])
        self.algorithm.load_state_dict(tensors["algorithm"])
        for g, rng in enumerate(self.rngs):
            if (saved := tensors["rng"].get(f"policy_{g}")) is not None:  # another machine may have fewer groups
                rng.set_state(saved)

"""The process layout of a preset's run on given hardware, for each acting mode x exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from coterie.acting.actor import batches_of
from coterie.acting.base import ActingKind
from coterie.acting.table import ACTING, acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.build import validity
from coterie.build.resources import resolve_config, resolve_resources
from coterie.config import Config, ResolvedConfig
from coterie.envs.tasks import envs_per_child, tasks
from coterie.errors import ConfigError
from coterie.exchange.table import EXCHANGES
from coterie.parallel.hardware import assign_cores
from coterie.runs.config_io import replace as changed
from coterie.types import Spec

_HERE = "127.0.0.1:1"  # placeholder, never opened


@dataclass(frozen=True)
class Hardware:
    """Rented machines: `machines`, which the learners share evenly, and `hosts`, which have no learners."""

    cores: int = 1  # of each machine of learners
    gpus: int = 0  # of each
    machines: int = 1  # of learners
    hosts: int = 0  # machines for decoupled and central acting; 0: the learners' machines do that, too
    host_cores: int = 1  # of each
    latency: float = 0.0  # seconds one way between two machines
    bandwidth: float = math.inf  # bytes/s into a machine of learners, and as many out of it
    # Assumptions, not today's offers: about what a cloud's list said of a core and of a P100 in 2019.
    core_hour: float = 0.0475  # dollars for one core and hour
    gpu_hour: float = 1.46


@dataclass(frozen=True)
class RunLayout:
    """A run, as the simulation needs it."""

    acting: str
    exchange: str
    config: Config  # the settings of its acting and exchange, for their simulations
    hardware: Hardware
    unroll: int
    samples: float  # of each optimizer step
    learners: int = 1
    producers: int = 0  # actors or env hosts of each learner; inline: 0
    width: int = 1  # envs of a producer; inline: of a learner
    groups: int = 1
    env_threads: int = 1  # of each group
    act_threads: int = 1  # inline: that act side by side
    train_threads: int = 1
    batch: int = 1  # rollouts of one env that are trained on together
    steps: float = 1.0  # optimizer steps for each batch
    chunk: int = 0  # samples of one part at most; 0: any
    batches: int = 1  # that there is memory for
    lockstep: bool = False
    frame_share: float = 1.0  # of an observation's bytes: one frame of each stack

    @property
    def kind(self) -> ActingKind[Any]:
        return ACTING[self.acting]

    @property
    def gpus(self) -> int:
        """GPUs of each machine."""
        most = self.hardware.gpus if EXCHANGES[self.exchange].on_gpu else 0
        return min(most, self.learners // self.hardware.machines)

    @property
    def hosts(self) -> int:
        return self.hardware.hosts if self.kind.has_children else 0

    @property
    def envs(self) -> int:
        """Envs of the whole run."""
        return self.width * max(1, self.producers) * self.learners

    @property
    def dollars_per_hour(self) -> float:
        h = self.hardware
        cores = h.machines * h.cores + self.hosts * h.host_cores
        return cores * h.core_hour + h.machines * self.gpus * h.gpu_hour

    @property
    def name(self) -> str:
        return f"{self.acting} {self.exchange}"


def layout(config: Config, spec: Spec, hardware: Hardware, acting: str, exchange: str, learners: int) -> RunLayout:
    """The layout of one acting x exchange. `learners`: of exchanges between several; a lone learner has one of the
    machines. `env.num_envs` counts for each host; without hosts, for each learner.
    """
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: plan needs a single task")
    h, kind, exchange_kind = hardware, ACTING[acting], EXCHANGES[exchange]
    if exchange_kind.one_learner:
        h, learners = replace(hardware, machines=1), 1
    if h.machines > 1 and not (exchange_kind.spans_machines or exchange_kind.link):
        raise ConfigError("machines: learners of several machines need exchange allreduce or gossip")
    if learners % h.machines:
        raise ConfigError(f"machines: {learners} learners cannot be shared out evenly among {h.machines} machines")
    everywhere, learners = learners, learners // h.machines  # of one machine from here on
    cell = _cell(config, acting, exchange, learners)
    hosts = h.hosts if kind.has_children else 0
    # A host has the actors and simulators that a learner on its own would have there.
    one, cores = (replace(cell, learners=1, exchange="solo"), h.host_cores) if hosts else (cell, h.cores)
    whole = resolve_config(one, cores)
    actors = whole.actors * max(1, hosts)
    if hosts and config.acting == acting and isinstance(config.actors, int):
        actors = config.actors
    served = everywhere if hosts else learners  # by those actors
    if actors % served:
        raise ConfigError(f"hosts: {actors} actors or hosts cannot be shared out evenly among {served} learners")
    producers = actors // served
    width = envs_per_child(whole) if actors else whole.env.num_envs
    env = replace(cell.env, num_envs=width * max(1, producers))
    own = replace(whole, learners=learners, exchange=exchange, actors=producers * learners, env=env)
    batch = kind.batch_size(own)
    _check(own, spec, h.machines, hosts > 0)
    gpu = h.gpus > 0 and exchange_kind.on_gpu
    place_cores = len(assign_cores(learners, range(h.cores), h.gpus if gpu else 0)[0].cores)
    mine = resolve_resources(replace(own, device="cpu"), spec, cores=place_cores)
    if kind.has_children:  # an actor has one core; a host has all
        acts_on = 1 if kind.own_policy else h.host_cores if hosts else place_cores
        narrow = replace(own, env=replace(own.env, num_envs=width), device="cpu")
        groups = resolve_resources(narrow, spec, cores=acts_on).groups
        threads = own.env.threads or (acts_on * groups if kind.hosted else 1)
    else:
        groups = mine.groups if not gpu else (own.env.groups or 2 - width % 2)
        threads = own.env.threads or (place_cores - 1 if gpu and place_cores > 1 else place_cores)
    unroll = algorithm_class(own).unroll_length(own)
    steps, samples = algorithm_class(own).updates(own, batch, unroll)
    section, lockstep = kind.section(own), kind.has_children and kind.lockstep(own)
    waiting = 2 + (0 if section is None else section.queue)
    batches = batches_of(own, math.ceil(steps)) if kind.own_policy else 1 if lockstep else waiting
    trainers = 1 if gpu else mine.torch_threads
    frames = replace(spec, obs={k: replace(x, shape=x.shape[1:]) if x.is_image else x for k, x in spec.obs.items()})
    return RunLayout(
        acting=acting, exchange=exchange, config=own, hardware=h, learners=everywhere, producers=producers, width=width,
        groups=groups, env_threads=max(1, -(-threads // groups)), act_threads=min(groups, trainers),
        train_threads=trainers, unroll=unroll, batch=batch, steps=steps, samples=samples,
        chunk=own.optim.chunk if gpu else mine.chunk, batches=batches,
        lockstep=lockstep, frame_share=frames.obs_bytes / max(1, spec.obs_bytes),
    )  # fmt: skip


def _check(config: ResolvedConfig, spec: Spec, machines: int, hosted: bool) -> None:
    """Refuse what a run would. Hosts and learners elsewhere connect to this machine, which not every run allows."""
    overrides: dict[str, Any] = {"wire.bind": _HERE} if hosted else {}
    if machines > 1:
        overrides |= EXCHANGES[config.exchange].link_settings(_HERE, "", machines)
    validity.check(resolve_config(changed(config, overrides)), spec)


def _cell(config: Config, acting: str, exchange: str, learners: int) -> Config:
    """The config with another acting mode and exchange, and the same batches; in lockstep if the algorithm needs it."""
    kind = acting_kind(config)
    was = kind.section(config)
    batch = 0 if was is None else was.batch_size
    held = config.acting == acting and was is not None and was.lockstep
    lockstep = held or not algorithm_class(config).corrects(config)
    batch = 0 if lockstep else batch
    actors = config.actors if config.acting == acting and kind.has_children else "auto"
    if EXCHANGES[exchange].one_learner and actors != "auto" and config.learners != "auto":
        actors = max(1, actors // config.learners)
    overrides = {"acting": acting, "exchange": exchange, "learners": learners, "actors": actors}
    overrides |= ACTING[acting].batch_settings(lockstep, batch)
    if lockstep and ACTING[acting].hosted:
        overrides["env.groups"] = 0
    return changed(config, overrides)

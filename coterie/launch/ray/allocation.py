"""Which part of a run goes to which machine of a cluster, and each part's config. It does not need Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from coterie.acting.table import acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.build.resources import fitting_actors, largest, simulators
from coterie.choices import resolve_exchange
from coterie.config import Config, Env
from coterie.envs.tasks import tasks
from coterie.errors import ConfigError
from coterie.exchange.table import EXCHANGES, exchange_kind
from coterie.ops.optim import scaled_lr
from coterie.plugins import NETWORKS
from coterie.remote.admission import ENV_SETTINGS
from coterie.runs.config_io import get
from coterie.runs.config_io import replace as changed
from coterie.runs.trust import IMPORTED_BY_ACTORS, code_of
from coterie.wire.auth import join
from coterie.wire.keys import token_file

_LINKS = [setting for kind in EXCHANGES.values() for setting in kind.link_settings("", "", 0).items()]
_ADDRESSES = ("wire.bind", *(name for name, value in _LINKS if value == ""))
_SCHEDULES = ("optim.schedule", "algo.entropy_schedule", "ppo.clip_schedule")
_OF_ALL = (  # settings that count env steps, or episodes, of all learners
    "q.epsilon_steps", "replay.capacity", "eval.every", *(f"{x}.{y}" for x in _SCHEDULES for y in ("at", "warmup")),
)  # fmt: skip
# Of `env`: passed separately, unused by a worker, or sent by the run.
_NOT_PASSED_ON = ("id", "num_envs", "threads", "delay_learner", *ENV_SETTINGS)


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster: its id, its address, and what it offers."""

    id: str
    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Site:
    """Learners that share a machine's memory. The first site is number 0."""

    site: int
    machine: Machine
    learners: int
    cpus: int
    gpus: int

    @property
    def name(self) -> str:
        return f"site {self.site}"


@dataclass(frozen=True)
class Worker:
    """A process that steps envs for the learners of a site. `kind`: its command, `envs` or `actor`."""

    kind: str
    number: int
    site: int
    machine: Machine
    cpus: int = 1
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True)
class Allocation:
    """All parts of a run, with its resolved config."""

    config: Config
    sites: tuple[Site, ...]
    workers: tuple[Worker, ...]
    width: int = 0  # envs of each actor or env host, where machines without a learner can step envs

    @property
    def learners(self) -> int:
        return sum(site.learners for site in self.sites)


RunPart = Site | Worker


def acts_elsewhere(config: Config) -> bool:
    """Whether machines without a learner can step envs: in lockstep, and with several tasks, all is at the site."""
    kind = acting_kind(config)
    return kind.has_children and not kind.lockstep(config) and len(tasks(config.env.id)) == 1


def allocate(config: Config, machines: list[Machine], sites: Sequence[int] = ()) -> Allocation:
    """Spread gossiping learners over the machines, and synchronous ones over as few as have room for them if the
    network is trusted. All others share the memory of one machine, the first with a GPU if any has one. Workers take
    the cores that are left. `sites`: the learners of each site, in a resumed run.
    """
    for name in _ADDRESSES:
        if get(config, name):
            raise ConfigError(f"{name}: must be empty with launch ray, which connects the machines itself")
    if config.log.checkpoint_on_warning and not sites:
        raise ConfigError("log.checkpoint_on_warning: cannot be used with launch ray")
    gpus = config.device != "cpu" and exchange_kind(config).on_gpu and any(m.gpus for m in machines)
    # A stable order: this machine is the first among equals.
    ordered = sorted(machines, key=lambda m: -m.gpus) if gpus else machines
    beside = acts_elsewhere(config) and acting_kind(config).own_policy  # each learner has an actor beside it
    cpus = 2 if beside else 1
    room = {m.id: m.gpus if gpus else m.cpus // cpus for m in ordered}  # for learners
    learners = _learners(config, list(room.values()), gpus)
    config = replace(config, learners=learners)
    config = replace(config, exchange=resolve_exchange(config))
    num_envs = config.env.num_envs or simulators(config, learners)
    config = replace(config, env=replace(config.env, num_envs=num_envs))
    places = [m for m in ordered if room[m.id]] or ordered
    count = len(sites) or _sites(config, learners, [room[m.id] for m in places])
    if sites:  # the largest one to the machine with most room
        places = sorted(places, key=lambda m: -room[m.id])
    order = sorted(range(count), key=lambda k: -sites[k] if sites else k)
    places = [places[order.index(k) % len(places)] for k in range(count)]  # there may be fewer than there were
    shares = [*sites] or [1] * count
    for _ in range(learners - sum(shares)):  # to the machine with most room
        shares[max(range(count), key=lambda k: room[places[k].id] - shares[k])] += 1
    found = tuple(Site(k, places[k], n, n * cpus, n if gpus else 0) for k, n in enumerate(shares))
    free = Counter({m.id: m.cpus for m in machines})
    for site in found:
        free[site.machine.id] -= site.cpus
        if site.gpus > site.machine.gpus and not sites:
            have = f"a machine that has {site.machine.gpus} GPUs"
            raise ConfigError(f"ray: {site.gpus} learners would share {have}: fewer learners")
    workers: list[Worker] = []
    width = 0
    if acts_elsewhere(config):
        actors = _actors(config, learners, sum(max(0, n) for n in free.values()))
        config, width = replace(config, actors=actors), num_envs * learners // actors
        owners = [site.site for site in found for _ in range(site.learners)]  # each learner has as many workers
        for i in range(actors - learners * beside):
            machine = max(machines, key=lambda m: free[m.id])
            free[machine.id] -= 1
            workers.append(Worker("actor" if beside else "envs", i, owners[i % learners], machine))
    if min(free.values()) < 0 and not sites:  # a resumed run's parts wait for their places
        need = sum(site.cpus for site in found) + len(workers)
        raise ConfigError(
            f"ray: the run needs {need} CPUs ({', '.join(f'{s.cpus} on one machine' for s in found)}), the machines "
            f"have {', '.join(str(m.cpus) for m in machines)}: fewer learners or actors"
        )
    return Allocation(config, found, tuple(workers), width)


def _spreads(config: Config) -> bool:
    """Whether learners on several machines can take part in one run."""
    kind = exchange_kind(replace(config, learners="auto"))
    return bool(kind.link) or (kind.trusts_network(config) and not algorithm_class(config).has_replay)


def _sites(config: Config, learners: int, room: list[int]) -> int:
    """Over how many machines the learners are spread. `room`: learners that each machine has room for."""
    if exchange_kind(config).link:
        return min(learners, len(room))
    enough = (k for k in range(1, len(room) + 1) if sum(room[:k]) >= learners)
    return next(enough, len(room)) if _spreads(config) else 1


def _learners(config: Config, room: list[int], gpus: bool) -> int:
    """Learners of the run. `auto`: one for each GPU, or core, or (if workers step the envs) for each machine."""
    if config.learners != "auto":
        return config.learners
    if config.exchange != "auto" and exchange_kind(config).one_learner:
        return 1
    machines = room if _spreads(config) else room[:1]
    return len(machines) if acting_kind(config).has_children and not gpus else max(1, sum(machines))


def _actors(config: Config, learners: int, free: int) -> int:
    """Actors or env hosts of the run. `auto`: one for each of the `free` cores, as far as the envs can be shared out
    evenly; actors have a core beside each learner, too.
    """
    asked, fitting = config.actors, fitting_actors(config, learners)
    if asked == "auto":
        return learners * largest(fitting, free // learners + acting_kind(config).own_policy)
    if asked % learners or asked // learners not in fitting:
        raise ConfigError(
            f"actors: {asked} do not share out the envs of {learners} learners evenly; each learner can have "
            f"{', '.join(map(str, fitting[:12]))}"
        )
    return asked


def targets(allocation: Allocation, reached: list[int]) -> list[int]:
    """Env steps at which each site ends, from those that it has `reached`: its learners' share of what is left."""
    left = allocation.config.steps - sum(reached)
    if left <= 0:
        raise ConfigError(f"--steps: the run already has {sum(reached):,} env steps; give a larger total")
    all_learners = allocation.learners
    return [n + -(-left * site.learners // all_learners) for n, site in zip(reached, allocation.sites, strict=True)]


def site_config(
    allocation: Allocation, site: Site, address: tuple[str, int], hub: tuple[str, int], keys: bool, steps: int
) -> Config:
    """The config of a site, as a run at `address` (a host, and the first of its ports) that is connected to the first
    site, at `hub`. Paths of keys begin with {here}, the folder of the site's node.
    """
    config, k, learners, all_learners = allocation.config, site.site, site.learners, allocation.learners
    total = config.env.num_envs * (1 if exchange_kind(config).shared_weights else all_learners)
    wire = config.wire
    if keys:
        wire = replace(wire, token_file="{here}/token", cert="{here}/cert.pem", key="{here}/key.pem")
    if acts_elsewhere(config):
        wire = replace(wire, bind=join(*address))
        config = _with_actors_beside(config, learners, allocation.width)
    elif config.actors != "auto":
        config = replace(config, actors=config.actors * learners // all_learners)
    if len(allocation.sites) > 1:

        def share(n: Any) -> Any:
            return list(map(share, n)) if isinstance(n, tuple) else -(-n * learners // all_learners)

        at = join(hub[0], hub[1] + allocation.sites[0].learners)
        bind, connect = ("", at) if k else (at, "")
        link = exchange_kind(config).link_settings(bind, connect, len(allocation.sites))
        config = changed(config, link | {name: share(get(config, name)) for name in _OF_ALL})
    return replace(
        config,
        launch="local",
        learners=learners,
        steps=steps,
        seed=config.seed + 1_000_003 * k,
        chaos=replace(config.chaos, seed=config.chaos.seed + k),  # or all are disturbed at once
        optim=replace(config.optim, lr=scaled_lr(config.optim, total), sqrt_scaling_from=0),
        wire=wire,
        out="",
    )


def _with_actors_beside(config: Config, learners: int, width: int) -> Config:
    """What a site has of the actors: one beside each learner, as wide as those elsewhere, or no env hosts."""
    kind = acting_kind(config)
    if not kind.own_policy:
        return replace(config, actors=0)
    return replace(
        changed(config, kind.batch_settings(False, kind.batch_size(config))),
        actors=learners,
        replay=replace(config.replay, envs=config.replay.envs or config.env.num_envs),
        env=replace(config.env, num_envs=width),
    )


def worker_args(allocation: Allocation, worker: Worker, address: tuple[str, int], keys: bool) -> list[str]:
    """The command line of a worker, for the site at `address`."""
    config = allocation.config
    args = [worker.kind, "--connect", join(*address), "--env", config.env.id]
    args += ["--env.threads", "1"]
    left_out = set(_NOT_PASSED_ON)
    if worker.kind == "actor":  # which has as many envs and groups as the run says
        left_out.add("groups")
    else:
        args += ["--env.num-envs", str(allocation.width)]
    for field in fields(Env):
        value = getattr(config.env, field.name)
        if field.name not in left_out and value != field.default:
            args += [f"--env.{field.name.replace('_', '-')}", str(value)]
    code, needed = code_of(config), IMPORTED_BY_ACTORS if worker.kind == "actor" else NETWORKS
    for name in (name for name in needed if name in code):
        args += [f"--{name}", *code[name].split()]
    if keys:
        args += ["--wire.token-file", f"{{here}}/{token_file(worker.kind)}", "--wire.cert", "{here}/cert.pem"]
    return args

"""Which part of a run goes to which machine of a cluster, and what each part is told. It knows no Ray."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Literal

from coterie.acting.table import acting_kind, batch_size
from coterie.algorithms.table import is_value_based
from coterie.build.resources import simulators
from coterie.config import Config, Env
from coterie.envs.tasks import tasks
from coterie.exchange.table import exchange_kind
from coterie.ops.optim import scaled_lr
from coterie.types import ConfigError

_OWN = ("id", "num_envs", "threads", "delay_learner")  # of a lender's env options, said apart or not at all


@dataclass(frozen=True)
class Machine:
    """A machine that is there: its id, its address, and what it offers."""

    id: str
    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Site:
    """Learners that share a machine's memory."""

    machine: Machine
    learners: int
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Lender:
    """Steps envs for the learners of a site; `kind`: `envs` or `actor`, the command that it is."""

    kind: str
    number: int
    site: int
    machine: Machine


@dataclass(frozen=True)
class Layout:
    """Everything, with `config` as it is meant: nothing is `auto` any more."""

    config: Config
    sites: tuple[Site, ...]
    lenders: tuple[Lender, ...]

    @property
    def learners(self) -> int:
        return sum(site.learners for site in self.sites)


def acts_elsewhere(config: Config) -> bool:
    """Whether machines without a learner can step envs: in lockstep, and with several tasks, all is at the site."""
    return acting_kind(config).apart and not acting_kind(config).lockstep(config) and len(tasks(config.env.id)) == 1


def lay_out(config: Config, machines: list[Machine], sites: int = 0) -> Layout:
    """Gossiping learners are spread over the machines (`sites`: over so many, as they were before), synchronous ones
    over as few as have room for them where the network is trusted; all others share the memory of one, the first that
    has a GPU where any has. What steps envs elsewhere takes the cores that are left.
    """
    for field, value in (
        ("wire.bind", config.wire.bind),
        ("gossip.bind", config.gossip.bind),
        ("gossip.connect", config.gossip.connect),
        ("allreduce.bind", config.allreduce.bind),
        ("allreduce.connect", config.allreduce.connect),
    ):
        if value:
            raise ConfigError(
                f"{field}: with launch ray a run's machines find each other by themselves: leave it empty"
            )
    gpus = sum(m.gpus for m in machines) if config.device != "cpu" and exchange_kind(config).on_gpu else 0
    ordered = (
        sorted(machines, key=lambda m: -m.gpus) if gpus else machines
    )  # stable: this machine is first among equals
    per_learner = 2 if acts_elsewhere(config) and acting_kind(config).own_policy else 1  # with an actor beside it
    learners = config.learners if config.learners != "auto" else _learners(config, ordered, per_learner, bool(gpus))
    exchange = config.exchange if config.exchange != "auto" else "solo" if learners == 1 else "allreduce"
    config = replace(config, learners=learners, exchange=exchange)
    if not config.env.num_envs:
        config = replace(config, env=replace(config.env, num_envs=simulators(config, learners)))
    room = [m for m in ordered if _room(m, per_learner, bool(gpus))] or ordered
    count = sites or _sites(config, learners, [_room(m, per_learner, bool(gpus)) for m in room])
    places_of = [room[k % len(room)] for k in range(count)]  # a resumed run may have fewer machines than it had
    shares = [1] * count
    for _ in range(learners - count):  # to whoever has most room
        shares[max(range(count), key=lambda k: _room(places_of[k], per_learner, bool(gpus)) - shares[k])] += 1
    for m, n in zip(places_of, shares, strict=True):
        if gpus and n > m.gpus and not sites:
            raise ConfigError(f"ray: {n} learners would share a machine that has {m.gpus} GPUs: fewer learners")
    places = tuple(Site(m, n, n * per_learner, n if gpus else 0) for m, n in zip(places_of, shares, strict=True))
    taken = Counter[str]()
    for site in places:
        taken[site.machine.id] += site.cpus
    free = {m.id: m.cpus - taken[m.id] for m in machines}
    config = replace(config, actors=_actors(config, sum(max(0, n) for n in free.values())))
    lenders: list[Lender] = []
    if acts_elsewhere(config):
        assert isinstance(config.actors, int)
        kind, beside = ("actor", learners) if acting_kind(config).own_policy else ("envs", 0)
        for i in range(config.actors - beside):
            machine = max(machines, key=lambda m: free[m.id])
            free[machine.id] -= 1
            lenders.append(Lender(kind, i, i % count, machine))
    if any(n < 0 for n in free.values()) and not sites:  # a resumed run's parts wait for their places
        need = sum(site.cpus for site in places) + len(lenders)
        raise ConfigError(
            f"ray: the run needs {need} CPUs ({', '.join(f'{s.cpus} on one machine' for s in places)}), the machines "
            f"have {', '.join(str(m.cpus) for m in machines)}: fewer learners or actors"
        )
    return Layout(config, places, tuple(lenders))


def _spreads(config: Config) -> bool:
    """Whether learners on several machines can have part in one run."""
    kind = exchange_kind(replace(config, learners="auto"))
    across = kind.in_lockstep and config.allreduce.trusted_network
    return kind.rejoins or (across and not is_value_based(config))


def _sites(config: Config, learners: int, room: list[int]) -> int:
    """Over how many machines the learners are spread, which have room for so many each."""
    if exchange_kind(config).rejoins:
        return min(learners, len(room))
    enough = (k for k in range(1, len(room) + 1) if sum(room[:k]) >= learners)
    return next(enough, len(room)) if _spreads(config) else 1


def _room(machine: Machine, per_learner: int, gpus: bool) -> int:
    """Learners that a machine has room for."""
    return machine.gpus if gpus else machine.cpus // per_learner


def _learners(config: Config, machines: list[Machine], per_learner: int, gpus: bool) -> int:
    """`auto`: one for each GPU, else one for each core, or one for each machine where others step the envs."""
    if config.exchange != "auto" and exchange_kind(config).one_learner:
        return 1
    own = machines if _spreads(config) else machines[:1]
    if acting_kind(config).apart and not gpus:
        return len(own)
    return max(1, sum(_room(m, per_learner, gpus) for m in own))


def _actors(config: Config, free: int) -> int | Literal["auto"]:
    """How many step envs in all: `auto` is as many as there are cores left, as far as the simulators can be shared."""
    assert isinstance(config.learners, int)
    if not acts_elsewhere(config):
        return config.actors
    learners, envs, beside = config.learners, config.env.num_envs, acting_kind(config).own_policy
    fitting = [
        k
        for k in range(1, envs + 1)
        if envs % k == 0
        and (not beside or batch_size(config) % (envs // k) == 0)
        and (config.env.groups != 2 or envs // k % 2 == 0)
    ]
    if config.actors == "auto":
        most = free // learners + beside
        return learners * max([k for k in fitting if k <= most], default=1)
    if config.actors % learners or config.actors // learners not in fitting:
        raise ConfigError(
            f"actors: {config.actors} do not share out the simulators of {learners} learners evenly; each learner can "
            f"have {', '.join(map(str, fitting[:12]))}"
        )
    return config.actors


def width(config: Config) -> int:
    """Simulators of each actor or host."""
    assert isinstance(config.learners, int) and isinstance(config.actors, int)  # noqa: PT018
    return config.env.num_envs * config.learners // config.actors


def targets(layout: Layout, reached: list[int]) -> list[int]:
    """Env steps that each site is to come to, from those that it has: what is left is shared out by its learners."""
    left = layout.config.steps - sum(reached)
    if left <= 0:
        raise ConfigError(f"--steps: the run has its {sum(reached):,} env steps already; give a larger total")
    return [n + -(-left * site.learners // layout.learners) for n, site in zip(reached, layout.sites, strict=True)]


def site_config(
    layout: Layout, k: int, address: tuple[str, int], hub: tuple[str, int], keys: bool, steps: int = 0
) -> Config:
    """The config of site `k`, a run of its own at `address` (HOST, first of its ports), linked to the first at `hub`.
    `steps`: its own. Paths of keys begin with {here}, which is the machine's to fill in.
    """
    config, own, all_learners = layout.config, layout.sites[k].learners, layout.learners
    total = config.env.num_envs * (1 if exchange_kind(config).shared_weights else all_learners)
    optim = replace(config.optim, lr=scaled_lr(config.optim, total), sqrt_scaling_from=0)
    wire, gossip = config.wire, config.gossip
    if keys:
        wire = replace(wire, token_file="{here}/token", cert="{here}/cert.pem", key="{here}/key.pem")
    config = replace(
        config,
        launch="local",
        learners=own,
        steps=steps or config.steps,
        seed=config.seed + 1_000_003 * k,
        chaos=replace(config.chaos, seed=config.chaos.seed + k),  # or all are disturbed at once
        optim=optim,
        out="",
    )
    if acts_elsewhere(config):
        host, port = address
        wire = replace(wire, bind=f"{_host(host)}:{port}")
        if acting_kind(config).own_policy:
            envs = config.env.num_envs
            config = replace(
                config,
                actors=own,
                decoupled=replace(config.decoupled, batch_size=batch_size(config)),
                replay=replace(config.replay, envs=config.replay.envs or envs),
                env=replace(config.env, num_envs=width(layout.config)),
            )
        else:
            config = replace(config, actors=0)
    elif config.actors != "auto":
        config = replace(config, actors=config.actors * own // all_learners)
    if len(layout.sites) > 1:
        at = f"{_host(hub[0])}:{hub[1] + layout.sites[0].learners}"
        bind, connect = ("", at) if k else (at, "")
        if exchange_kind(config).rejoins:
            gossip = replace(gossip, bind=bind, connect=connect, seats=0 if k else all_learners)
        else:
            ring = replace(config.allreduce, bind=bind, connect=connect, machines=len(layout.sites))
            config = replace(config, allreduce=ring)
    return replace(config, wire=wire, gossip=gossip)


def lender_args(layout: Layout, lender: Lender, address: tuple[str, int], keys: bool) -> list[str]:
    """The command of a lender, for the site at `address`."""
    config = layout.config
    args = [lender.kind, "--connect", f"{_host(address[0])}:{address[1]}", "--env", config.env.id]
    args += ["--env.num-envs", str(width(config)), "--env.threads", "1"]
    for field in fields(Env):
        value = getattr(config.env, field.name)
        if field.name not in _OWN and value != field.default:
            args += [f"--env.{field.name.replace('_', '-')}", str(value)]
    if ":" in config.model.torso:
        args += ["--model.torso", config.model.torso]
    if config.own.algorithm and lender.kind == "actor":
        args += ["--own.algorithm", config.own.algorithm]
    if keys:
        args += ["--token-file", "{here}/token", "--cert", "{here}/cert.pem"]
    return args


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host

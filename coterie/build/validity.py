"""Which combinations work. ONE list of (predicate, field, reason): README and tests are made from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, get_args, get_type_hints

from coterie.algorithms.q_base import size_of
from coterie.config import Config, elsewhere
from coterie.plugins import check_own
from coterie.envs.tasks import tasks
from coterie.types import ConfigError, Spec
from coterie.wire.auth import is_local, split

ALGORITHMS: tuple[str, ...] = get_args(get_type_hints(Config)["algorithm"])
ACTING: tuple[str, ...] = get_args(get_type_hints(Config)["acting"])
EXCHANGES: tuple[str, ...] = tuple(x for x in get_args(get_type_hints(Config)["exchange"]) if x != "auto")
LAUNCHES: tuple[str, ...] = get_args(get_type_hints(Config)["launch"])


ON_POLICY = ("a2c", "ppo")  # they cannot correct for an older policy
VALUE = ("dqn", "r2d2")  # they learn what actions are worth


class Refusal(NamedTuple):
    """A cell or setting that makes no sense: refused when `applies`, with one line that names `field`."""

    applies: Callable[[Config, Spec], bool]
    field: str
    reason: str


def _image(spec: Spec) -> bool:
    return any(s.is_image for s in spec.obs.values())


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c, s: c.exchange == "solo" and c.learners != 1,
        "learners",
        "exchange solo is one learner; with several use allreduce, hogwild, store or gossip",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and s.action.kind != "categorical",
        "algorithm",
        "dqn and r2d2 choose one of so many actions, which this env has not: use a2c, ppo or vtrace",
    ),
    Refusal(
        lambda c, s: c.algorithm == "dqn" and c.model.core != "none",
        "model.core",
        "dqn learns from single steps and has no memory: use none, or algorithm r2d2",
    ),
    Refusal(
        lambda c, s: c.algorithm == "r2d2" and c.model.core == "none",
        "model.core",
        "r2d2 replays sequences for a memory: use lstm, or algorithm dqn",
    ),
    Refusal(
        lambda c, s: c.algorithm == "r2d2" and any(x % c.algo.unroll_length for x in _lengths(c)),
        "r2d2.length",
        "r2d2.length, burn_in and stride must be multiples of algo.unroll_length: recurrent states are kept at each",
    ),
    Refusal(
        lambda c, s: c.algorithm == "r2d2" and (c.q.atoms > 0 or c.r2d2.stride < 1 or c.r2d2.length < 1),
        "q.atoms",
        "r2d2 learns values, on sequences of some length and stride: leave q.atoms at 0, the others above",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and c.reward.normalize,
        "reward.normalize",
        "value learning keeps rewards, which must not change their scale afterwards: use reward.clip or reward.scale",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and c.q.learn_start < first_rows(c),
        "q.learn_start",
        "must be at least 2 x env.num_envs x (algo.unroll_length + q.n_step), for r2d2 env.num_envs x (r2d2.burn_in + "
        "length + stride + algo.unroll_length): there is nothing to draw before",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and _ring(c) <= _least_ring(c),
        "replay.capacity",
        "is too small: each env of each learner needs more than algo.unroll_length + q.n_step + atari.stack rows, for "
        "r2d2 more than r2d2.burn_in + r2d2.length, rounded down to whole rollouts",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and 0 < c.replay.envs < c.env.num_envs,
        "replay.envs",
        "must not be below env.num_envs",
    ),
    Refusal(
        lambda c, s: c.q.secondary_batch > 0 and (c.algorithm not in VALUE or c.exchange != "solo"),
        "q.secondary_batch",
        "a secondary learner follows one learner that has a replay: dqn or r2d2 with exchange solo",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and c.q.atoms > 0 and c.q.v_min >= c.q.v_max,
        "q.v_min",
        "must be below q.v_max",
    ),
    Refusal(
        lambda c, s: c.algorithm in VALUE and c.q.atoms > 0 and c.replay.initial == "acting",
        "replay.initial",
        "acting tells values, and the priority of distributions is a divergence: use highest",
    ),
    Refusal(
        lambda c, s: c.exchange == "allreduce" and c.ppo.target_kl > 0 and c.algorithm == "ppo",
        "ppo.target_kl",
        "learners under allreduce must make as many steps: set it to 0",
    ),
    Refusal(
        lambda c, s: _only_lockstep(c.algorithm, c.acting) and not elsewhere(c).lockstep,
        "ACTING.lockstep",
        "a2c and ppo cannot correct for an older policy: set it to True, or use vtrace",
    ),
    Refusal(
        lambda c, s: c.acting == "decoupled" and c.algorithm in ON_POLICY and c.decoupled.publish_every > 1,
        "decoupled.publish_every",
        "a2c and ppo cannot correct for an older policy: leave it at 1",
    ),
    Refusal(
        lambda c, s: c.algorithm == "vtrace" and 0 < c.vtrace.replay_capacity < max(_batch(c), _replayed(c)),
        "vtrace.replay_capacity",
        "must hold a batch, new and replayed: more, or 0",
    ),
    Refusal(
        lambda c, s: c.algo.entropy_target != 0 and c.algo.entropy_coef == 0,
        "algo.entropy_target",
        "adapts algo.entropy_coef, which must not be 0 to begin with",
    ),
    Refusal(
        lambda c, s: c.acting == "inline" and c.actors != "auto",
        "acting",
        "actors are of decoupled or central acting: set acting, or leave actors at auto",
    ),
    Refusal(
        lambda c, s: c.acting != "inline" and _even(c) and c.env.groups == 2 and _width(c) % 2 == 1,
        "env.groups",
        "2 groups need an even number of envs in each actor (env.num_envs x learners / actors)",
    ),
    Refusal(
        lambda c, s: c.acting != "inline" and elsewhere(c).lockstep and _batch(c) != c.env.num_envs,
        "ACTING.batch_size",
        "in lockstep a batch has one rollout of each env: leave it at 0",
    ),
    Refusal(
        lambda c, s: c.acting != "inline" and not _even(c),
        "actors",
        "must be a multiple of the learners and of the tasks, and share out env.num_envs x learners evenly: give other "
        "numbers, or leave both at auto",
    ),
    Refusal(
        lambda c, s: len(tasks(c.env.id)) > 1 and c.acting == "inline",
        "env.id",
        "several tasks need actors or hosts of their own: set acting decoupled or central",
    ),
    Refusal(
        lambda c, s: c.acting == "decoupled" and _even(c) and _batch(c) % _width(c) != 0,
        "decoupled.batch_size",
        "must be a multiple of the envs of an actor (env.num_envs x learners / actors)",
    ),
    Refusal(
        lambda c, s: c.acting == "central" and c.env.reset != "in_place",
        "env.reset",
        "hosts do not know where a rollout ends: leave it at in_place",
    ),
    Refusal(
        lambda c, s: c.acting == "central" and c.central.lockstep and c.env.groups == 2,
        "env.groups",
        "in lockstep all envs of a host are acted on at once: leave it at 0",
    ),
    Refusal(
        lambda c, s: c.acting == "central" and c.env.num_envs > c.central.max_envs,
        "central.max_envs",
        "must not be below env.num_envs",
    ),
    Refusal(
        lambda c, s: c.acting == "central" and 0 < c.central.batch_max < c.central.batch_min,
        "central.batch_max",
        "must not be below central.batch_min",
    ),
    Refusal(
        lambda c, s: bool(c.wire.bind) and (c.acting == "inline" or elsewhere(c).lockstep or len(tasks(c.env.id)) > 1),
        "wire.bind",
        "hosts and actors that come by themselves are for decoupled or central acting, one task, and no lockstep",
    ),
    Refusal(
        lambda c, s: c.chaos.every > 0 and c.acting == "inline" and c.exchange == "solo",
        "chaos.every",
        "a lone learner that acts itself has no processes to disturb: give it learners, actors or hosts",
    ),
    Refusal(
        lambda c, s: bool(c.allreduce.address) and c.exchange != "allreduce",
        "allreduce.bind",
        "and allreduce.connect are for exchange allreduce",
    ),
    Refusal(
        lambda c, s: bool(c.allreduce.bind) and bool(c.allreduce.connect),
        "allreduce.connect",
        "a run listens (allreduce.bind) or connects, not both",
    ),
    Refusal(
        lambda c, s: bool(c.allreduce.bind) and split(c.allreduce.bind)[0] in ("0.0.0.0", "::"),
        "allreduce.bind",
        "needs the address by which the other machines know this one, not that of all its networks",
    ),
    Refusal(
        lambda c, s: bool(c.allreduce.address) and c.algorithm in VALUE,
        "algorithm",
        "a machine that comes later has nothing to replay yet, while the others wait for its gradient: use gossip",
    ),
    Refusal(
        lambda c, s: (
            bool(c.allreduce.address) and not c.allreduce.trusted_network and not is_local(c.allreduce.address)
        ),
        "allreduce.trusted_network",
        "torch.distributed has neither TLS nor a token: true says that nobody else is on the network in between",
    ),
    Refusal(
        lambda c, s: bool(c.gossip.bind or c.gossip.connect) and c.exchange != "gossip",
        "gossip.bind",
        "and gossip.connect are for exchange gossip",
    ),
    Refusal(
        lambda c, s: bool(c.gossip.bind) and bool(c.gossip.connect),
        "gossip.connect",
        "a run listens (gossip.bind) or connects, not both",
    ),
    Refusal(
        lambda c, s: bool(c.gossip.bind) and isinstance(c.learners, int) and 0 < c.gossip.seats <= c.learners,
        "gossip.seats",
        "counts all learners, here and elsewhere: more than learners",
    ),
    Refusal(
        lambda c, s: bool(c.gossip.bind or c.gossip.connect) and c.gossip.topology not in ("auto", "complete"),
        "gossip.topology",
        "between machines all hear all, since anybody may come and go: use auto",
    ),
    Refusal(
        lambda c, s: c.algorithm == "vtrace" and not 0 <= c.vtrace.replay_share < 1,
        "vtrace.replay_share",
        "is a share of a batch: at least 0 and below 1",
    ),
    Refusal(
        lambda c, s: c.algorithm == "vtrace" and c.vtrace.minibatch > 0 and _batch(c) % c.vtrace.minibatch != 0,
        "vtrace.minibatch",
        "must divide the rollouts of a batch (env.num_envs, or the acting's batch_size)",
    ),
    Refusal(
        lambda c, s: c.algorithm == "vtrace" and 0 < c.vtrace.rho_bar < (c.vtrace.c_bar or float("inf")),
        "vtrace.rho_bar",
        "must not be below vtrace.c_bar: V-trace would not converge",
    ),
    Refusal(
        lambda c, s: c.exchange == "store" and c.store.local_steps > 1 and not c.optim.rule.startswith("adam"),
        "store.local_steps",
        "several local steps are worked out for Adam only: set optim.rule adam or adam_eps_hat",
    ),
    Refusal(
        lambda c, s: c.exchange == "hogwild" and c.device == "cuda",
        "device",
        "hogwild writes into shared memory of the host: use cpu or auto",
    ),
    Refusal(
        lambda c, s: c.model.last_action_reward and c.model.core == "none",
        "model.last_action_reward",
        "is fed to a core: set model.core lstm",
    ),
    Refusal(
        lambda c, s: c.model.share == "no" and c.model.core != "none",
        "model.share",
        "a core is shared by policy and value: use yes or auto",
    ),
    Refusal(
        lambda c, s: c.env.groups == 2 and c.env.num_envs % 2 == 1, "env.groups", "2 groups need an even env.num_envs"
    ),
    Refusal(
        lambda c, s: c.algorithm == "ppo" and c.model.core == "none" and c.ppo.minibatch_size > _rows(c),
        "ppo.minibatch_size",
        "is larger than a rollout (algo.unroll_length x env.num_envs, or ppo.batch_size)",
    ),
    Refusal(
        lambda c, s: c.model.normalize_obs and not any(o.is_numeric for o in s.obs.values()),
        "model.normalize_obs",
        "has nothing to do: the env's observations are bytes or text",
    ),
)


def room_of(config: Config) -> int:
    """Simulators that a learner can learn from: in value learning each has a ring of its replay."""
    return size_of(config)[0] if config.algorithm in VALUE else sys.maxsize


def first_rows(config: Config) -> int:
    """Env steps of a learner after which there is something to draw in any case."""
    if config.algorithm == "r2d2":
        return config.env.num_envs * (sum(_lengths(config)) + config.algo.unroll_length)
    return 2 * config.env.num_envs * (config.algo.unroll_length + config.q.n_step)


def _ring(config: Config) -> int:
    """Rows that a learner's replay keeps of each env; of r2d2 whole rollouts."""
    envs, capacity = size_of(config)
    rows = capacity // envs
    return rows // config.algo.unroll_length * config.algo.unroll_length if config.algorithm == "r2d2" else rows


def _least_ring(config: Config) -> int:
    if config.algorithm == "r2d2":
        return config.r2d2.burn_in + config.r2d2.length
    return config.algo.unroll_length + config.q.n_step + config.atari.stack


def _lengths(config: Config) -> tuple[int, int, int]:
    return config.r2d2.length, config.r2d2.burn_in, config.r2d2.stride


def _learners(config: Config) -> int:
    return config.learners if isinstance(config.learners, int) else 1


def _actors(config: Config) -> int:
    return config.actors if isinstance(config.actors, int) else _learners(config)


def _even(config: Config) -> bool:
    actors, learners = _actors(config), _learners(config)
    return (
        (actors > 0 or (config.acting == "central" and bool(config.wire.bind)))
        and actors % learners == actors % len(tasks(config.env.id)) == 0
        and config.env.num_envs * learners % max(1, actors) == 0
    )


def _width(config: Config) -> int:
    return config.env.num_envs * _learners(config) // max(1, _actors(config))


def _replayed(config: Config) -> int:
    share = min(config.vtrace.replay_share, 0.999)
    return round(_batch(config) * share / (1 - share))


def _batch(config: Config) -> int:
    return (config.acting != "inline" and elsewhere(config).batch_size) or config.env.num_envs


def _rows(config: Config) -> int:
    from coterie.algorithms.ppo import horizon

    return horizon(config) * config.env.num_envs


def check(config: Config, spec: Spec) -> None:
    """Raise a one-line `ConfigError` for a combination that cannot work."""
    for refusal in REFUSALS:
        if refusal.applies(config, spec):
            raise ConfigError(f"{refusal.field.replace('ACTING', config.acting)}: {refusal.reason}")
    check_own(config)


def _only_lockstep(algorithm: str, acting: str) -> bool:
    return acting != "inline" and algorithm in ON_POLICY


def table() -> str:
    """The combinations that work today, as a Markdown table."""
    rows = ["| algorithm | acting | exchange | launch |", "|---|---|---|---|"]
    exchanges, launches = ", ".join(EXCHANGES), ", ".join(LAUNCHES)
    for a in ALGORITHMS:
        rows += [f"| {a} | {b}{' (lockstep)' * _only_lockstep(a, b)} | {exchanges} | {launches} |" for b in ACTING]
    return "\n".join(rows)

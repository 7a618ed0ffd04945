"""Which combinations work. ONE list of (predicate, field, reason): README and tests are made from it."""

from __future__ import annotations

import sys
from typing import get_args, get_type_hints

from coterie.algorithms.q_base import replay_size
from coterie.algorithms.table import ALGORITHMS, algorithm_class, is_value_based
from coterie.config import Config, Refusal, batch_size, elsewhere
from coterie.plugins import check_own
from coterie.envs.tasks import tasks
from coterie.exchange.table import EXCHANGES, exchange_kind
from coterie.types import ConfigError, Spec

ACTING: tuple[str, ...] = get_args(get_type_hints(Config)["acting"])
LAUNCHES: tuple[str, ...] = get_args(get_type_hints(Config)["launch"])


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c, s: c.q.secondary_batch > 0 and (not is_value_based(c) or not exchange_kind(c).one_learner),
        "q.secondary_batch",
        "a secondary learner follows one learner that has a replay: dqn or r2d2 with exchange solo",
    ),
    Refusal(
        lambda c, s: _only_lockstep(c.algorithm, c.acting) and not elsewhere(c).lockstep,
        "ACTING.lockstep",
        "a2c and ppo cannot correct for an older policy: set it to True, or use vtrace",
    ),
    Refusal(
        lambda c, s: c.acting == "decoupled" and algorithm_class(c).on_policy and c.decoupled.publish_every > 1,
        "decoupled.publish_every",
        "a2c and ppo cannot correct for an older policy: leave it at 1",
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
        lambda c, s: c.acting != "inline" and elsewhere(c).lockstep and batch_size(c) != c.env.num_envs,
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
        lambda c, s: c.acting == "decoupled" and _even(c) and batch_size(c) % _width(c) != 0,
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
        lambda c, s: c.chaos.every > 0 and c.acting == "inline" and exchange_kind(c).one_learner,
        "chaos.every",
        "a lone learner that acts itself has no processes to disturb: give it learners, actors or hosts",
    ),
    Refusal(
        lambda c, s: bool(c.allreduce.address) and not exchange_kind(c).in_lockstep,
        "allreduce.bind",
        "needs exchange allreduce, and so does allreduce.connect",
    ),
    Refusal(
        lambda c, s: bool(c.gossip.bind or c.gossip.connect) and not exchange_kind(c).rejoins,
        "gossip.bind",
        "needs exchange gossip, and so does gossip.connect",
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
        lambda c, s: c.model.normalize_obs and not any(o.is_numeric for o in s.obs.values()),
        "model.normalize_obs",
        "has nothing to do: the env's observations are bytes or text",
    ),
)


def room_of(config: Config) -> int:
    """Simulators that a learner can learn from: in value learning each has a ring of its replay."""
    return replay_size(config)[0] if is_value_based(config) else sys.maxsize


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


def every_refusal() -> list[Refusal]:
    """All refusals, each once: the general ones and those of every choice."""
    found = [*REFUSALS, *(one for kind in (*EXCHANGES.values(), *ALGORITHMS.values()) for one in kind.refusals)]
    return list({(one.field, one.reason): one for one in found}.values())


def check(config: Config, spec: Spec) -> None:
    """Raise a one-line `ConfigError` for a combination that cannot work."""
    for refusal in (*exchange_kind(config).refusals, *algorithm_class(config).refusals, *REFUSALS):
        if refusal.applies(config, spec):
            raise ConfigError(f"{refusal.field.replace('ACTING', config.acting)}: {refusal.reason}")
    check_own(config)


def _only_lockstep(algorithm: str, acting: str) -> bool:
    return acting != "inline" and ALGORITHMS[algorithm].on_policy


def table() -> str:
    """The combinations that work today, as a Markdown table."""
    rows = ["| algorithm | acting | exchange | launch |", "|---|---|---|---|"]
    exchanges, launches = ", ".join(EXCHANGES), ", ".join(LAUNCHES)
    for a in ALGORITHMS:
        rows += [f"| {a} | {b}{' (lockstep)' * _only_lockstep(a, b)} | {exchanges} | {launches} |" for b in ACTING]
    return "\n".join(rows)

"""Options that a run does not use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

from coterie.acting.table import acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.choices import SECTIONS, is_own, uses
from coterie.config import Config, Plugins
from coterie.envs.make import in_pool
from coterie.envs.pool import is_atari
from coterie.envs.tasks import tasks
from coterie.envs.vector import APART
from coterie.exchange.table import exchange_kind
from coterie.models.torsos import torsos_of
from coterie.types import MASK, Needs, Spec


def unused(options: Iterable[str], config: Config, spec: Spec) -> Iterator[tuple[str, str]]:
    """Those of these fields that have no effect, and what each needs."""
    if config.plugins != Plugins() or is_own("acting", config) or is_own("exchange", config):  # they may use all
        return
    rows: Needs = {name: (uses(name, config), " or ".join(sorted(used))) for name, used in SECTIONS.items()}
    rows |= _envs(config) | _networks(config, spec) | _runs(config)
    rows |= acting_kind(config).needs(config)
    if not is_own("algorithm", config):
        rows |= _algorithms(config)
    needs = {name: need for names, (used, need) in rows.items() if not used for name in names.split()}
    for name in options:
        places = accumulate(name.split("."), "{}.{}".format)
        if found := [needs[place] for place in places if place in needs]:
            yield name, found[-1]  # the most specific


def _envs(config: Config) -> Needs:
    apart = config.env.backend in APART
    workers = apart and not all(in_pool(replace(config.env, id=task)) for task in tasks(config.env.id))
    return {
        "env.delay_learner": (config.env.delay, "env.delay"),
        "env.threads": (apart, "env.backend auto, pool or workers"),
        "env.timeout env.on_error": (workers, "envs in worker processes"),
        "atari": (any(map(is_atari, tasks(config.env.id))), "one of EnvPool's Atari games"),
    }


def _networks(config: Config, spec: Spec) -> Needs:
    core, whole, sac = config.model.core, not config.model.network, config.algorithm == "sac"
    own = not whole or ":" in core  # a network or core of the user's, which may read these
    seen = {name: obs for name, obs in spec.obs.items() if name != MASK}
    mlp = ":" in config.model.torso or "mlp" in torsos_of(seen, config.model).values()
    return {
        "model.hidden": (mlp or own, "the torso mlp"),
        "model.activation": ((mlp or own) and not sac, "another algorithm than sac" if sac else "the torso mlp"),
        "model.torso": (whole and not sac, "another algorithm than sac" if sac else "no model.network"),
        "model.core model.share": (whole, "no model.network"),
        "model.clip_last_reward": (config.model.last_action_reward or own, "model.last_action_reward"),
        "model.core_size": (core != "none" or own, "model.core"),
        "model.forget_bias": (core == "lstm" or own, "model.core lstm"),
        "model.core_layers model.core_heads model.core_memory": (core == "gtrxl" or own, "model.core gtrxl"),
        "model.init_log_std": (spec.action.low and not sac, "continuous actions, and another algorithm than sac"),
    }


def _algorithms(config: Config) -> Needs:
    algorithm, q, alpha = algorithm_class(config), config.q, config.replay.alpha
    values, policy, bc = algorithm.value_based, not algorithm.has_replay, uses("bc", config)
    correction = config.vtrace.correction
    epsilon, n_step = values and not q.noisy, policy and not (bc or uses("vtrace", config))
    return {
        "model.share": (policy and not config.model.network, "an algorithm without a replay, and no model.network"),
        "q.double q.dueling q.atoms q.noisy q.eval_epsilon q.target_every": (values, "dqn or r2d2"),
        "q.v_min q.v_max": (values and q.atoms, "dqn, with q.atoms"),
        "q.huber": (values and not q.atoms, "dqn or r2d2, without q.atoms"),
        "q.epsilon_end q.ladder": (epsilon, "dqn or r2d2, without q.noisy"),
        "q.epsilon q.epsilon_steps": (epsilon and not q.ladder, "dqn or r2d2, without q.noisy or q.ladder"),
        "replay.beta replay.beta_end replay.initial": (alpha, "a replay, with replay.alpha"),
        "algo.value_coef algo.entropy_coef algo.entropy_schedule algo.entropy_target": (
            policy,
            "an algorithm without a replay",
        ),
        "algo.gae_lambda algo.normalize_advantage": (policy and not bc, "a2c, ppo or vtrace"),
        "algo.value_target": (n_step, "a2c or ppo"),
        "algo.unroll_length": (not (uses("ppo", config) and config.ppo.batch_size), "ppo.batch_size 0"),
        "ppo.rho_max": (config.ppo.proximal, "ppo, with ppo.proximal"),
        "vtrace.replay_share": (config.vtrace.replay_capacity, "vtrace, with vtrace.replay_capacity"),
        "vtrace.rho_bar vtrace.c_bar vtrace.q_from": (correction == "vtrace", "vtrace.correction vtrace"),
        "vtrace.pg_rho_bar": (correction in ("vtrace", "one-step"), "vtrace.correction vtrace or one-step"),
        "sac.target_entropy": (config.sac.learn_alpha, "sac.learn_alpha"),
        "r2d2.eta": (alpha, "replay.alpha"),
        "q.secondary_lr": (q.secondary_batch, "q.secondary_batch"),
    }


def _runs(config: Config) -> Needs:
    adam, kind = config.optim.rule.startswith("adam"), acting_kind(config)
    shared = exchange_kind(config).shared_weights
    rows: Needs = {
        "reward.scale": (not config.reward.normalize, "reward.normalize False"),
        "algo.poll": (
            not kind.hosted and (shared or (kind.own_policy and not kind.lockstep(config))),
            "exchange hogwild or store, or acting decoupled without lockstep",
        ),
        "optim.alpha": (not adam, "optim.rule rmsprop or rmsprop_tf"),
        "optim.beta1 optim.beta2": (adam, "optim.rule adam or adam_eps_hat"),
        "eval.episodes eval.sampled": (config.eval.every, "eval.every"),
        "log.cosines": (config.learners != 1, "several learners"),
        "log.consensus": (uses("gossip", config), "gossip"),
        "log.wandb_group log.wandb_tags": (config.log.wandb, "log.wandb"),
    }
    for name in ("algo.entropy_schedule", "ppo.clip_schedule", "optim.schedule"):
        kind = attrgetter(name)(config).kind
        rows[f"{name}.end"] = kind == "linear", f"{name}.kind linear"
        rows[f"{name}.at {name}.by {name}.factors"] = kind == "steps", f"{name}.kind steps"
    return rows

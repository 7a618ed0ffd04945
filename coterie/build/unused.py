"""Options that a run does not use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from coterie.algorithms.table import algorithm_class
from coterie.choices import SECTIONS, uses
from coterie.config import Config, Plugins
from coterie.envs.make import in_pool
from coterie.envs.pool import is_atari
from coterie.envs.tasks import tasks
from coterie.envs.vector import APART
from coterie.models.torsos import torso_of
from coterie.types import Spec

_OF_VALUES = ("double", "dueling", "atoms", "v_min", "v_max", "noisy", "huber", "eval_epsilon")
_OF_POLICIES = ("gae_lambda", "value_target", "value_coef", "entropy_coef", "entropy_target", "normalize_advantage")


def unused(options: Iterable[str], config: Config, spec: Spec) -> Iterator[tuple[str, str]]:
    """Those of these fields that have no effect, and what each needs."""
    if config.plugins != Plugins():  # parts of the user's may use all
        return
    apart = config.env.backend in APART
    workers = apart and not all(in_pool(replace(config.env, id=task)) for task in tasks(config.env.id))
    core, whole = config.model.core, not config.model.network
    own = not whole or ":" in core  # a network or core of the user's, which may read these
    mlp = any(":" in config.model.torso or torso_of(o, config.model) == "mlp" for o in spec.obs.values())
    adam = config.optim.rule.startswith("adam")
    algorithm = algorithm_class(config)
    yours = not algorithm.__module__.startswith("coterie.")  # it may read all
    values = yours or algorithm.value_based
    epsilon = values and not config.q.noisy
    fixed = epsilon and not config.q.ladder
    sized = uses("ppo", config) and config.ppo.batch_size and not yours
    fields = {
        "env.threads": (apart, "envs that run apart"),
        **dict.fromkeys(("env.timeout", "env.on_error"), (workers, "envs in worker processes")),
        "atari": (any(map(is_atari, tasks(config.env.id))), "one of EnvPool's Atari games"),
        **dict.fromkeys(("model.hidden", "model.activation"), (mlp or own, "the torso mlp")),
        **dict.fromkeys(
            ("model.torso", "model.core", "model.share", "model.last_action_reward"), (whole, "no model.network")
        ),
        "model.core_size": (core != "none" or own, "model.core"),
        "model.forget_bias": (core == "lstm" or own, "model.core lstm"),
        **{f"model.core_{x}": (core == "gtrxl" or own, "model.core gtrxl") for x in ("layers", "heads", "memory")},
        "model.init_log_std": (bool(spec.action.low), "continuous actions"),
        "optim.alpha": (not adam, "optim.rule rmsprop or rmsprop_tf"),
        **dict.fromkeys(("optim.beta1", "optim.beta2"), (adam, "optim.rule adam or adam_eps_hat")),
        **dict.fromkeys((f"q.{x}" for x in _OF_VALUES), (values, "dqn or r2d2")),
        **dict.fromkeys(("q.epsilon_end", "q.ladder"), (epsilon, "dqn or r2d2, without q.noisy")),
        **dict.fromkeys(("q.epsilon", "q.epsilon_steps"), (fixed, "dqn or r2d2, without q.noisy or q.ladder")),
        **dict.fromkeys(
            (f"algo.{x}" for x in _OF_POLICIES), (yours or not algorithm.has_replay, "an algorithm without a replay")
        ),
        "algo.unroll_length": (not sized, "ppo.batch_size 0"),
        "algo.poll": (config.acting != "central", "acting inline or decoupled"),
        "log.cosines": (config.learners != 1, "several learners"),
        "log.consensus": (uses("gossip", config), "gossip"),
        **{name: (uses(name, config), " or ".join(sorted(used))) for name, used in SECTIONS.items()},
    }
    for name in options:
        used, needs = fields.get(name) or fields.get(name.partition(".")[0], (True, ""))
        if not used:
            yield name, needs

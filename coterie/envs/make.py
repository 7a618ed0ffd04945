"""`make_envs` and `make_spec`: from the config to environments, on EnvPool or in worker processes."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import gymnasium

from coterie import config
from coterie.envs.backend import START_S, Backend, Declared, MakeBackend
from coterie.envs.group import Envs
from coterie.envs.gym import ALE, OWN_ID, PLAY, is_gym_id
from coterie.envs.local import LocalBackend
from coterie.envs.pool import PoolBackend, has_env, modules, pool_declared
from coterie.envs.repeat import Repeat
from coterie.envs.tasks import tasks
from coterie.envs.team import ZOO, zoo_ids
from coterie.envs.vector import APART, make_together, together_declared
from coterie.envs.workers import WorkerBackend, worker_declared
from coterie.errors import ConfigError, json_object
from coterie.extras import install, missing
from coterie.parallel.signals import time_limit
from coterie.plugins import LAB, label
from coterie.types import Array, Spec


def in_pool(env: config.Env) -> bool:
    """Whether EnvPool runs this env. Raises `ConfigError` where no package has it."""
    json_object("env.kwargs", env.kwargs)
    pool = has_env(env.id)
    if env.backend == "pool" and not pool:
        if not modules():
            raise missing("env.backend: pool", "envpool")
        raise _unknown(env.id, [*modules()], "EnvPool has no such environment")
    game = env.id.removeprefix(ALE)
    if game != env.id and find_spec("ale_py") is None:
        other = f"; EnvPool's {game} is the same game, preprocessed" if has_env(game) else ""
        raise ConfigError(f"env.id {env.id!r} needs ale-py (pip install ale-py){other}")
    for prefix, what in ((ZOO, "parallel environment"), (PLAY, "game")):
        if env.id.startswith(prefix) and ":" not in env.id and env.id not in (known := zoo_ids(prefix)):
            turns = PLAY + env.id.removeprefix(ZOO)  # a game of turns is played against oneself
            other = f", but there is {turns}" if prefix == ZOO and turns in zoo_ids(PLAY) else ""
            raise _unknown(env.id, known, f"PettingZoo has no such {what}{other}")
    named = ":" in env.id or env.id.startswith((LAB, ALE, PLAY, ZOO))  # not imported before it is made
    if not pool and not named:
        _check_registered(env.id, env.backend in APART)
    return pool and env.backend in ("auto", "pool")


def _check_registered(env_id: str, apart: bool) -> None:
    """Raise a `ConfigError` for an id that gymnasium does not have; `apart`: in a process that imports it alone."""
    if env_id not in gymnasium.registry:
        alone = f"gymnasium does not have it, and EnvPool is missing ({install('envpool')})"
        why = "neither EnvPool nor gymnasium has it" if modules() else alone
        raise _unknown(env_id, [*modules(), *gymnasium.registry], why)
    made = gymnasium.registry[env_id].entry_point
    module = made.partition(":")[0] if isinstance(made, str) else getattr(made, "__module__", "")
    if apart and module.partition(".")[0] != "gymnasium":
        why = "worker processes do not import the module that registers it"
        raise ConfigError(f"env.id {env_id!r}: {why}; give MODULE:{env_id}, of that module, or the class itself")


def _unknown(env_id: str, known: Sequence[str], why: str) -> ConfigError:
    lower = {k.lower(): k for k in known}
    cutoff = 0.6 if modules() else 0.8  # without EnvPool, Pong-v5 is not a wrong Ant-v5
    near = [lower[k] for k in difflib.get_close_matches(env_id.lower(), lower, n=4, cutoff=cutoff)]
    hint = f"nearest: {', '.join(near)}" if near else "try `coterie list envs`, or give package.module:callable"
    return ConfigError(f"env.id {env_id!r}: {why}; {hint}; {OWN_ID}")


def _declared(env: config.Env, atari: config.Atari) -> Declared:
    limit = env.timeout + START_S
    slow = f"not made within {limit:g} s, env.timeout and {START_S:g}: a slower one needs a larger env.timeout"
    with time_limit(limit, f"env.id {label(env.id)!r}: {slow}"):
        if env.backend not in APART:
            return together_declared(env)
        return pool_declared(env, atari) if in_pool(env) else worker_declared(env)


def make_spec(env: config.Env, atari: config.Atari) -> Spec:
    """What the environment takes and gives. EnvPool declares it; a gymnasium env is made once and closed. Several tasks
    have the same observations, and as many actions as the one with the most.
    """
    if len(several := tasks(env.id)) > 1:
        full = replace(atari, full_action_set=True)
        return _union(env.id, [make_spec(replace(env, id=task), full) for task in several])
    spec = _declared(env, atari).spec
    if spec.masked and env.action_repeat > 1:
        raise ConfigError(f"env.action_repeat: must be 1; {spec.env_id} has action masks, by each step's observation")
    return replace(spec, action_repeat=spec.action_repeat * env.action_repeat)


def _union(env_id: str, specs: list[Spec]) -> Spec:
    first = specs[0]
    for spec in specs[1:]:
        differ = {
            "observations": spec.to_json()["obs"] != first.to_json()["obs"],  # whatever their bounds
            "numbers of frames in a step": spec.action_repeat != first.action_repeat,
            "numbers of agents": spec.agents != first.agents,
            "actions": spec.action != first.action and {spec.action.kind, first.action.kind} != {"categorical"},
        }
        if what := " and ".join(name for name, differs in differ.items() if differs):
            raise ConfigError(f"env.id: {first.env_id} and {spec.env_id} have different {what}")
    obs = {
        k: replace(x, low=min(s.obs[k].low for s in specs), high=max(s.obs[k].high for s in specs))
        for k, x in first.obs.items()
    }
    action, limit = max((s.action for s in specs), key=lambda a: a.sizes), max(s.max_episode_steps for s in specs)
    return replace(first, env_id=env_id, obs=obs, action=action, max_episode_steps=limit)


def env_adapters(env: config.Env, atari: config.Atari) -> Declared:
    """How the env's observations become arrays, and a policy's actions the env's. Of several tasks: those of the one
    with the most actions.
    """
    if len(several := tasks(env.id)) > 1:
        atari = replace(atari, full_action_set=True)
    return max((_declared(replace(env, id=task), atari) for task in several), key=lambda d: d.spec.action.sizes)


def make_envs(
    env: config.Env,
    atari: config.Atari,
    *,
    seed: int,
    first_env_id: int = 0,
    threads: int = 1,
    groups: int = 1,
    training: bool = True,
    union: bool = False,
) -> Envs:
    """`env.num_envs` environments in `groups` groups, on `threads` threads or worker processes in all.

    `union`: the policy has the actions of several tasks; an action that this env does not have is taken as its first.
    `training=False` switches episodic life off: an evaluated episode has all its lives.
    """
    make = backends(env, atari, threads, groups, training)
    return Envs(make, env, seed=seed, first_env_id=first_env_id, groups=groups, union=union)


def backends(env: config.Env, atari: config.Atari, threads: int, groups: int, training: bool = True) -> MakeBackend:
    """Return the function that makes a group's backend."""
    if env.num_envs % groups:
        raise ConfigError(f"env.num_envs must be even for env.groups 2, not {env.num_envs}")
    each = max(1, -(-threads // groups))
    numbers = itertools.count()

    def make(seeds: Sequence[int]) -> Backend:
        if env.backend not in APART:
            return make_together(env, seeds)
        if in_pool(env):
            return PoolBackend(env, atari, seeds, each, training)
        return WorkerBackend(env, seeds, each, f"coterie-env-{next(numbers)}")

    return _repeated(make, env)


def _repeated(make: MakeBackend, env: config.Env) -> MakeBackend:
    return make if env.action_repeat == 1 else lambda seeds: Repeat(make(seeds), env.action_repeat)


def make_rendered(
    env: config.Env, atari: config.Atari, *, seed: int, union: bool = False
) -> tuple[Envs, Callable[[], Array]]:
    """One environment with all its lives, and a call that returns its current frame: `[H, W, 3]` uint8."""
    if env.backend not in APART and not (env.backend == "vector" and is_gym_id(env.id)):
        shown = label(env.backend)
        raise ConfigError(f"env.backend: frames cannot be drawn with {shown}; the env's own viewer may show them")
    made: list[PoolBackend | LocalBackend] = []
    env = replace(env, num_envs=make_spec(env, atari).agents)

    def make(seeds: Sequence[int]) -> Backend:
        pool = in_pool(env)
        made.append(PoolBackend(env, atari, seeds, 1, False, True) if pool else LocalBackend(env, seeds))
        return made[0]

    envs = Envs(_repeated(make, env), env, seed=seed, union=union)
    return envs, made[0].render

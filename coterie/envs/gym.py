"""One gymnasium environment: made by id, described, and stepped with its numbers in arrays. Loads no torch."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit

from coterie.envs.answers import STEP, check_kwargs, fitting, number, parts_of, refused, reset_env
from coterie.envs.backend import Backend, Declared, StepResults, declare
from coterie.envs.spaces import action_map, obs_fields, on_host
from coterie.envs.team import ZOO, Team
from coterie.errors import ConfigError, CoterieError, one_line
from coterie.extras import missing
from coterie.plugins import LAB, label, named_env, prepare_import, raised
from coterie.types import MASK, Array, Spec, from_entries

ALE = "ALE/"  # before a game of ale-py, which registers it
PLAY = "selfplay/"  # before a game for two, of PettingZoo
OWN_ID = "an id that your own module registers with gymnasium is MODULE:ID"
_LAB_EXAMPLE = "dmlab:DMLab"  # examples/envs/dmlab.py
_DEEPEST = 8  # dicts in an info, one in the other: some hold themselves
_METHOD = "action_masks"  # of an env: the name that Stable-Baselines3's contributions use
GymEnv = gymnasium.Env[Any, Any]


def is_gym_id(env_id: str) -> bool:
    """Whether gymnasium makes this env: by its id, or by `module:Id-v0`, where importing the module registers the id.
    No Python name has a dash.
    """
    _, colon, name = env_id.partition(":")
    return "-" in name if colon else not env_id.startswith((LAB, ZOO, PLAY))


def make_gym(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int) -> GymEnv:
    """The environment of a gymnasium id, of `module:Id-v0` or of `package.module:callable`; one of several agents is a
    `Team`. `max_episode_steps` > 0 truncates its episodes, 0 leaves them as they are.
    """
    path = f"ale_py:{env_id}" if env_id.startswith(ALE) else env_id
    if env_id.startswith(ZOO):
        import pettingzoo

        return Team(env_id, pettingzoo.make("parallel", env_id.removeprefix(ZOO), **kwargs), max_episode_steps)
    if env_id.startswith(LAB):
        path, kwargs = _LAB_EXAMPLE, {"level": env_id.removeprefix(LAB), **kwargs}
    if env_id.startswith(PLAY):
        path, kwargs = "coterie.tools.duel:Duel", {**kwargs, "game": env_id.removeprefix(PLAY)}
    if is_gym_id(env_id):
        prepare_import("env.id", env_id.rpartition(":")[0])
        check_kwargs(kwargs, "max_episode_steps", "disable_env_checker")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium on older versions and on the precision of bounds
            try:
                return gymnasium.make(path, max_episode_steps or None, disable_env_checker=True, **kwargs)
            except gymnasium.error.UnregisteredEnv as error:
                raise ConfigError(f"env.id {env_id!r} cannot be made: {one_line(error)}; {OWN_ID}") from error
    try:
        make = named_env("env.id", path)
    except ConfigError as error:
        hint = " (put the repository's examples/envs on PYTHONPATH)" * (path == _LAB_EXAMPLE)
        raise ConfigError(f"{error}{hint}") from error
    for kind, setting in ((VectorEnv, "vector"), (Backend, path)):
        if isinstance(make, type) and issubclass(make, kind):
            raise ConfigError(f"env.id {label(env_id)!r}: it is a {kind.__name__}: set env.backend to {setting}")
    if isinstance(make, partial) and (twice := kwargs.keys() & make.keywords.keys()):
        raise ConfigError(f"env.kwargs: {min(twice)} is also given by functools.partial: leave it out of one of them")
    env: Any = make(**kwargs)
    if isinstance(env, VectorEnv):
        why = "it made a VectorEnv: set env.backend to vector"
    elif hasattr(env, "agent_iter"):
        why = f"it is a game by turns: use {PLAY}..., or make a parallel env of it (pettingzoo.utils.aec_to_parallel)"
    elif hasattr(env, "possible_agents"):
        return Team(env_id, env, max_episode_steps)
    elif lacks := [name for name in ("reset", "step", "observation_space", "action_space") if not hasattr(env, name)]:
        why = f"it made {type(env).__name__}, which has no {' and no '.join(lacks)}, as a gymnasium or parallel env has"
    elif isinstance(env, gymnasium.Env):
        return TimeLimit(env, max_episode_steps) if max_episode_steps else env
    elif not callable(env.action_space):
        why = f"{type(env).__name__} is not a gymnasium.Env: inherit from it"
    else:
        why = "an env of several agents needs the list possible_agents"
    raise ConfigError(f"env.id {label(env_id)!r}: {why}")


def open_gym(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int, make: Any = make_gym) -> Any:
    """`make`, such as `make_gym`, with the user's own settings. Raises a one-line `ConfigError` where gymnasium or a
    missing package refuses them, a `CoterieError` with the traceback of any other exception.
    """
    try:
        return make(env_id, kwargs, max_episode_steps)
    except CoterieError:
        raise
    except Exception as error:
        unknown = isinstance(error, TypeError) and "unexpected keyword" in str(error)
        if unknown or refused(error, "missing .*required"):
            limit = max_episode_steps and "'max_episode_steps'" in str(error)
            field = "env.max_episode_steps or eval.max_episode_steps" if limit else "env.kwargs"
            raise ConfigError(f"{field}: {one_line(error)}") from error
        if re.search(r"gymnasium\[(box2d|mujoco)\]", str(error)):  # as gymnasium says it
            raise missing(f"env.id {label(env_id)!r}", "gym") from error
        if isinstance(error, gymnasium.error.Error | ImportError) or isinstance(error.__cause__, ImportError):
            raise ConfigError(f"env.id {label(env_id)!r} cannot be made: {one_line(error)}") from error
        why = f"env.id {label(env_id)!r} cannot be made: {raised(error)}"
        raise CoterieError(why, traceback.format_exc()) from error


def describe(env_id: str, env: GymEnv, max_episode_steps: int) -> Declared:
    """What `env` takes and gives. Frames per env step: its `action_repeat`; 1 if it has none. An env with discrete
    actions is reset once, to see whether its info has an action mask.
    """
    env_id = label(env_id)
    actions, mask = action_map(env_id, env.action_space), ""
    fields = obs_fields(env_id, env.observation_space)
    if actions.spec.sizes and MASK not in (f.name for f in fields):
        mask = "method" if env.has_wrapper_attr(_METHOD) else "info" if _info_has_mask(env) else ""
    repeat = getattr(env.unwrapped, "action_repeat", 1)
    frames = repeat if isinstance(repeat, int) and repeat > 0 else 1
    limit = max_episode_steps or getattr(env.spec, "max_episode_steps", None) or 0
    agents = len(env.members) if isinstance(env, Team) else 1
    return declare(env_id, env.observation_space, env.action_space, frames, limit, agents, mask)


def _info_has_mask(env: GymEnv) -> bool:
    with suppress(Exception):  # it is raised again where the env is run
        info = env.reset(seed=0)[1]
        return MASK in (info[env.playing[0]] if isinstance(env, Team) else info)
    return False


def layout(declared: Declared, n: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays of `n` instances: actions as the env takes them, and the fields of `StepResults`."""
    spec, fields, actions, _ = declared
    action = actions.to_env(np.zeros((1, *spec.action.shape), spec.action.dtype))
    arrays = {f"obs/{f.name}": ((n, *f.spec.shape), f.spec.dtype) for f in fields}
    arrays |= {"action": ((n, *action.shape[1:]), spec.action.dtype), "reward": ((n,), "float32")}
    return arrays | dict.fromkeys(("terminated", "truncated", "first"), ((n,), "bool"))


class Instance:
    """An environment that reads its action from row `rows[0]` of `arrays` and writes what follows there. `restart`: the
    next step is a reset. `mask`: of its `Declared`.
    """

    def __init__(self, env_id: str, env: GymEnv, seed: int, rows: range, arrays: dict[str, Array], mask: str) -> None:
        self.env, self.rows, self.arrays, self.mask = env, rows, arrays, mask
        self.seed: int | None = seed  # of the first reset
        self.restart = True
        self.infos: dict[int, Mapping[str, Any]] = {}  # of the last step, by row, as the env gave them
        declared = declare(label(env_id), env.observation_space, env.action_space, mask=mask)
        self.spec, self.fields, self.actions, _ = declared
        self.space, self.masked = env.action_space, self.spec.masked

    def reset(self) -> None:
        self._begin(*reset_env(self.env, self.seed))
        self.seed, self.restart, self.infos = None, False, {}

    def _begin(self, obs: Any, info: dict[str, Any]) -> None:
        self._outcome(self.rows[0], 0.0, False, False, True)
        self.write(self.rows[0], obs, info, True)

    def step(self) -> None:
        obs, reward, terminated, truncated, info = parts_of("step", self.env.step(self.choice(self.rows[0])), STEP)
        self.restart, self.infos = bool(terminated or truncated), {self.rows[0]: info}
        self._outcome(self.rows[0], number(reward), bool(terminated), bool(truncated), False)
        self.write(self.rows[0], obs, info, not terminated)

    def choice(self, row: int) -> Any:
        return only(self.space, self.actions.nested(self.arrays["action"][row : row + 1].copy()))  # the env may keep it

    def write(self, row: int, obs: Any, info: Mapping[str, Any], goes_on: bool) -> None:
        """An observation, after `_outcome`. All actions are legal if not `goes_on`, or if truncated without a mask."""
        for f in self.fields:
            target = self.arrays[f"obs/{f.name}"]
            if f.name == MASK and self.masked and not goes_on:
                target[row] = True
            elif f.name == MASK and self.mask:
                if self.mask != "method" and MASK not in info and not self.arrays["truncated"][row]:
                    raise CoterieError(f"info has no {MASK} at this step; every reset and step needs one")
                given = self.env.get_wrapper_attr(_METHOD)() if self.mask == "method" else info.get(MASK)
                target[row] = mask_row(given, self.space, target.shape[1])
            else:
                target[row] = fitting(f, obs, target)

    def _outcome(self, row: int, reward: float, terminated: bool, truncated: bool, first: bool) -> None:
        self.arrays["reward"][row], self.arrays["first"][row] = reward, first
        self.arrays["terminated"][row], self.arrays["truncated"][row] = terminated, truncated


class TeamInstance(Instance):
    """A `Team`, whose agents have a row each. That of an absent agent keeps its last observation."""

    env: Team

    def _begin(self, obs: Any, info: dict[str, Any]) -> None:
        self._write_all({}, obs, {}, {}, {}, info)

    def step(self) -> None:
        rows = dict(zip(self.env.members, self.rows, strict=True))
        if new := {*self.env.playing} - rows.keys():
            raise CoterieError(f"agents contains {sorted(new)}, which possible_agents does not")
        actions = {agent: self.choice(rows[agent]) for agent in self.env.playing}
        self._write_all(actions, *self.env.noted(parts_of("step", self.env.step(actions), STEP)))
        self.restart = not self.env.playing

    def _write_all(self, actions: Any, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        playing, rows = set(self.env.playing), dict(zip(self.env.members, self.rows, strict=True))
        self.infos = {rows[agent]: info.get(agent, {}) for agent in actions}
        for agent, row in rows.items():
            acted, goes_on = agent in actions, agent in playing
            over = acted and bool(terminated.get(agent))
            cut = acted and not over and (bool(truncated.get(agent)) or not goes_on)
            self._outcome(row, number(reward.get(agent, 0.0)) if acted else 0.0, over, cut, not acted)
            if agent in obs:
                self.write(row, obs[agent], info.get(agent, {}), goes_on or cut)
            elif self.masked and not cut:  # then the last observation keeps its mask
                self.arrays[f"obs/{MASK}"][row] = True


def only(space: spaces.Space[Any], batch: Any) -> Any:
    """The action of a batch `[1, ...]`, as `space` has it."""
    if isinstance(space, spaces.Dict):
        return {key: only(child, batch[key]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(only, space.spaces, batch))
    return int(batch[0]) if isinstance(space, spaces.Discrete) else batch[0]


def mask_row(mask: Any, space: spaces.Space[Any], size: int) -> Array:
    """One env's mask as `size` bools: flat, a list of its components' masks, or nested like the action space, as its
    `sample` takes it.
    """
    try:
        row = np.concatenate(list(_masks(mask, space)))
    except (AttributeError, KeyError, TypeError, ValueError):  # of something else than the space
        row = np.zeros(0, bool)
    if len(row) != size:
        raise CoterieError(f"{MASK} {mask!r:.80} does not fit the {size} choices of {space}")
    return row


def _masks(mask: Any, space: Any) -> Iterator[Array]:
    if isinstance(mask, Mapping):
        for key, child in space.spaces.items():
            yield from _masks(mask[key], child)
    elif isinstance(mask, tuple | list):
        nested = isinstance(space, spaces.Tuple) and len(space) == len(mask)
        for part, child in zip(mask, space.spaces if nested else [space] * len(mask), strict=True):
            yield from _masks(part, child)
    elif mask is None:  # everything is legal
        yield np.ones(sum(action_map("", space).spec.sizes), bool)
    else:
        yield on_host(mask).astype(bool).reshape(-1)


def numbers(info: Any, n: int, depth: int = _DEEPEST) -> dict[str, Array]:
    """The numbers in the info of `n` envs, by name, those in dicts as `outer/inner`: `[n]` float64, NaN where the bool
    array `_name` `[n]` beside `name` says that an env has none. A single number holds for all envs; all else is left
    out, and so is every name that begins with an underscore.
    """
    found, has = dict[str, Array](), dict[str, Array]()
    for name, x in info.items() if isinstance(info, Mapping) else ():
        if isinstance(x, Mapping):
            found |= {f"{name}/{inner}": y for inner, y in (numbers(x, n, depth - 1) if depth else {}).items()}
        elif isinstance(x, int | float) or hasattr(x, "dtype"):
            y = np.asarray(on_host(x))
            if y.dtype == bool and y.shape == (n,):
                has[str(name)] = y
            if y.dtype.kind in "biuf" and (y.size == 1 or y.shape in ((n,), (n, 1))):
                found[str(name)] = np.full(n, y.reshape(-1), np.float64)
    return {k: np.where(has.get(f"_{k}", True), y, np.nan) for k, y in found.items() if not k.startswith("_")}


def make_instance(env_id: str, env: GymEnv, seed: int, rows: range, arrays: dict[str, Array], mask: str) -> Instance:
    return (TeamInstance if isinstance(env, Team) else Instance)(env_id, env, seed, rows, arrays, mask)


def read_batch(
    arrays: Mapping[str, Array],
    spec: Spec,
    ids: Array,
    failed: Mapping[int, str],
    given: Mapping[int, Mapping[str, float]] = {},
) -> StepResults:
    """Copies of the rows `ids`. `given`: numbers in the info of some of them."""
    obs = from_entries({k: arrays[f"obs/{k}"][ids] for k in spec.obs})
    terminated, truncated = arrays["terminated"][ids], arrays["truncated"][ids]
    info = {name: np.array([given.get(i, {}).get(name, np.nan) for i in ids.tolist()])
            for name in {name for one in given.values() for name in one}}  # fmt: skip
    reward, over, first = arrays["reward"][ids], terminated | truncated, arrays["first"][ids]
    return StepResults(obs, reward, terminated, truncated, over, info, failed, first)

"""One gymnasium environment: made by id, described, and stepped with its numbers in arrays. Loads no torch."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from coterie.envs.backend import Declared, StepResults
from coterie.envs.spaces import ActionMap, action_map, mask_row, obs_fields, with_mask
from coterie.plugins import label, named
from coterie.types import MASK, Array, ConfigError, CoterieError, Spec, from_entries, one_line

LAB = "dmlab/"  # before a level of DeepMind Lab
ALE = "ALE/"  # before a game of ale-py, which registers it
_LAB_EXAMPLE = "dmlab:DMLab"  # examples/envs/dmlab.py
_NUMBER: Any = int | float | np.number | np.bool_
_MOST_INFO = 1e15  # more is not averaged
_METHOD = "action_masks"  # of an env: the name that Stable-Baselines3's contributions use
GymEnv = gymnasium.Env[Any, Any]
Layout = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype by name


def is_gym_id(env_id: str) -> bool:
    """Whether gymnasium makes this env: by its id, or by `module:Id-v0`, where importing the module registers the id.
    No Python name has a dash.
    """
    _, colon, name = env_id.partition(":")
    return "-" in name if colon else not env_id.startswith(LAB)


def make_gym(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int) -> GymEnv:
    """The environment of a gymnasium id, of `module:Id-v0` or of `package.module:callable`. `max_episode_steps` > 0
    truncates its episodes, 0 leaves them as they are.
    """
    path = env_id
    if env_id.startswith(LAB):
        path, kwargs = _LAB_EXAMPLE, {"level": env_id.removeprefix(LAB), **kwargs}
    if is_gym_id(env_id):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium on older versions and on the precision of bounds
            return gymnasium.make(
                f"ale_py:{env_id}" if env_id.startswith(ALE) else env_id,
                max_episode_steps=max_episode_steps or None,
                disable_env_checker=True,
                **kwargs,
            )
    try:
        make = named("env.id", path)
    except ConfigError as error:
        hint = " (put the folder examples/envs of the repository on PYTHONPATH)" if path == _LAB_EXAMPLE else ""
        raise ConfigError(f"{error}{hint}") from error
    env: GymEnv = make(**kwargs)
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space") and hasattr(env, "step")):
        raise ConfigError(f"env.id {label(env_id)!r} returned {type(env).__name__}, not a gymnasium environment")
    return TimeLimit(env, max_episode_steps) if max_episode_steps else env


def open_gym(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int) -> GymEnv:
    """`make_gym` for the user's own settings. Raises a one-line `ConfigError` where gymnasium or a missing package
    refuses them, a `CoterieError` with the traceback of any other exception.
    """
    try:
        return make_gym(env_id, kwargs, max_episode_steps)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise ConfigError(f"env.kwargs: {one_line(error)}") from error
        if isinstance(error, gymnasium.error.Error | ImportError):
            raise ConfigError(f"env.id {label(env_id)!r} cannot be made: {one_line(error)}") from error
        raise CoterieError(
            f"env.id {label(env_id)!r} cannot be made: {raised(error)}", traceback.format_exc()
        ) from error


def describe(env_id: str, env: GymEnv, max_episode_steps: int) -> Declared:
    """What `env` takes and gives. Frames per env step: its `action_repeat`; 1 if it has none. An env with discrete
    actions is reset once, to see whether its info has an action mask.
    """
    env_id = label(env_id)
    actions, mask = action_map(env_id, env.action_space), ""
    fields = obs_fields(env_id, env.observation_space)
    if actions.spec.sizes and MASK not in (f.name for f in fields):
        mask = "method" if env.has_wrapper_attr(_METHOD) else "info" if _info_has_mask(env) else ""
    fields = with_mask(env_id, fields, actions.spec, bool(mask))
    repeat = getattr(env.unwrapped, "action_repeat", 1)
    frames = repeat if isinstance(repeat, int) and repeat > 0 else 1
    limit = max_episode_steps or getattr(env.spec, "max_episode_steps", None) or 0
    spec = Spec(env_id, {f.name: f.spec for f in fields}, actions.spec, frames, limit)
    return Declared(spec, fields, actions, mask)


def _info_has_mask(env: GymEnv) -> bool:
    with suppress(Exception):  # it is raised again where the env is run
        return MASK in env.reset(seed=0)[1]
    return False


def layout(declared: Declared, n: int) -> Layout:
    """The arrays of `n` instances: actions as the env takes them, and the fields of `StepResults`."""
    spec, fields, actions, _ = declared
    action = actions.to_env(np.zeros((1, *spec.action.shape), spec.action.dtype))
    arrays: Layout = {f"obs/{f.name}": ((n, *f.spec.shape), f.spec.dtype) for f in fields}
    arrays |= {"action": ((n, *action.shape[1:]), spec.action.dtype), "reward": ((n,), "float32")}
    return arrays | {"terminated": ((n,), "bool"), "truncated": ((n,), "bool")}


class Instance:
    """An environment that reads its action from row `row` of `arrays` and writes what follows there. `mask`: of its
    `Declared`.
    """

    def __init__(self, env_id: str, env: GymEnv, seed: int, row: int, arrays: Mapping[str, Array], mask: str) -> None:
        self.env, self.row, self.arrays, self.mask = env, row, arrays, mask
        self.seed: int | None = seed  # of the first reset
        self.restart = True
        self.info: Mapping[str, Any] = {}  # of the last step, as the env gave it
        self.actions: ActionMap = action_map(env_id, env.action_space)
        self.fields = with_mask(env_id, obs_fields(env_id, env.observation_space), self.actions.spec, bool(mask))
        self.discrete = isinstance(env.action_space, spaces.Discrete)
        self.action_dtype = env.action_space.dtype

    def reset(self) -> None:
        obs, info = self.env.reset(seed=self.seed)
        self.seed, self.restart, self.info = None, False, {}
        self._write(obs, info, 0.0, False, False)

    def step(self) -> None:
        if self.restart:
            self.reset()
            return
        action = self.arrays["action"][self.row]
        given: Any
        if self.actions.leaves:
            given = _only(self.actions.nested(action[None]))
        else:
            given = int(action) if self.discrete else action.astype(self.action_dtype)
        obs, reward, terminated, truncated, info = self.env.step(given)
        self.restart, self.info = bool(terminated or truncated), info
        self._write(obs, info, float(reward), bool(terminated), bool(truncated))

    def _write(self, obs: Any, info: Mapping[str, Any], reward: float, terminated: bool, truncated: bool) -> None:
        for f in self.fields:
            if self.mask and f.name == MASK:
                given = self.env.get_wrapper_attr(_METHOD)() if self.mask == "method" else info.get(MASK)
                if given is None and not self.restart:
                    raise CoterieError(f"info has no {MASK} at this step, but at the reset")
                self.arrays[f"obs/{MASK}"][self.row] = True if given is None else mask_row(given)
                continue
            x = obs
            for key in f.path:
                x = x[key]
            self.arrays[f"obs/{f.name}"][self.row] = x if f.convert is None else f.convert(np.asarray(x)[None])[0]
        self.arrays["reward"][self.row] = reward
        self.arrays["terminated"][self.row] = terminated
        self.arrays["truncated"][self.row] = truncated


def _only(row: Any) -> Any:
    """A structure of arrays `[1, ...]` without their first axis."""
    if isinstance(row, dict):
        return {key: _only(x) for key, x in row.items()}
    return tuple(map(_only, row)) if isinstance(row, tuple) else row[0]


def numbers(info: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers in a step's `info`, those in its dicts as `outer/inner`."""
    found: dict[str, float] = {}
    for name, x in info.items():
        if isinstance(x, Mapping):
            found |= numbers(x, f"{prefix}{name}/")
        elif isinstance(x, _NUMBER) and abs(x) <= _MOST_INFO:
            found[f"{prefix}{name}"] = float(x)
    return found


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
    return StepResults(obs, arrays["reward"][ids], terminated, truncated, terminated | truncated, info, failed)


def raised(error: Exception) -> str:
    """`one_line`, and where the exception was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({last.filename}, line {last.lineno}, in {last.name})"

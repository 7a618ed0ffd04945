"""The backend on EnvPool: any of its families, many environments stepped by C++ threads.

One EnvPool in synchronous mode (`batch_size == num_envs`) serves one backend; it takes requests for a subset and
answers in that order. Left out: multi-agent environments, a watchdog (a single C++ thread that hangs cannot be
killed) and replacing an instance by a new one: `replace` leaves it to the reset that follows.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from coterie import config
from coterie.envs.answers import check_kwargs
from coterie.envs.backend import Backend, Declared, StepResults, declare
from coterie.envs.families import import_envpool
from coterie.envs.gym import numbers
from coterie.errors import ConfigError, first_line
from coterie.types import Array, from_entries

# The Debian 12 package of each shared library (Debian 13 has the same names, ending in t64, and accepts these).
_PACKAGES = {
    "libQt5Core": "libqt5core5a",
    "libQt5Gui": "libqt5gui5",
    "libQt5Widgets": "libqt5widgets5",
    "libGL.": "libgl1",
    "libEGL": "libegl1",
    "libOpenGL": "libopengl0",
    "libOSMesa": "libosmesa6",
    "libGLU": "libglu1-mesa",
    "libX11": "libx11-6",
    "libSDL2": "libsdl2-2.0-0",
    "libopenal": "libopenal1",
}
_INFO = "info:"
_NO_INFO = {"env_id", "players.env_id", "reward", "terminated", "lives"}  # what other fields say
_RESERVED = {"num_envs", "batch_size", "num_threads", "env_seed", "seed", "max_episode_steps", "gym_reset_return_info"}
_NO_LIMIT = 2**31 - 1
# Observations that are text, as bytes that zeros end.
_TEXT = {"minigrid": ("mission",)}


@functools.cache
def modules() -> dict[str, str]:
    """EnvPool's module of each env id; empty where EnvPool is not installed."""
    try:
        specs = import_envpool().registration.registry.specs
    except ImportError:
        return {}
    return {env_id: spec[0].removeprefix("envpool.") for env_id, spec in specs.items()}


def has_env(env_id: str) -> bool:
    return env_id in modules()


def is_atari(env_id: str) -> bool:
    return modules().get(env_id) == "atari"


def _is_doom(env_id: str) -> bool:
    return modules().get(env_id) == "vizdoom"


def _options(env: config.Env, atari: config.Atari) -> dict[str, Any]:
    """What EnvPool's constructor takes, besides counts and seeds."""
    options: dict[str, Any] = {}
    if is_atari(env.id):
        options = {
            "frame_skip": atari.frame_skip,
            "repeat_action_probability": atari.sticky_actions,
            "noop_max": atari.noop_max,
            "use_fire_reset": atari.fire_reset,
            "full_action_space": atari.full_action_set,
            "img_height": atari.height,
            "img_width": atari.width,
            "stack_num": atari.stack,
        }
    elif _is_doom(env.id):
        options = {"use_combined_action": True}  # a number for each set of buttons, not a value for each button
    if env.max_episode_steps:
        options["max_episode_steps"] = env.max_episode_steps
    kwargs = json.loads(env.kwargs)
    check_kwargs(kwargs, *_RESERVED)
    return {**options, **kwargs}


def _missing_library(env_id: str, error: ImportError) -> ConfigError:
    """One line that names the Debian package of the library that could not be loaded."""
    text = f"{error} {error.__cause__ or ''}"
    found = re.search(r"(lib[\w+.-]+\.so[.\d]*)", text)
    library = found.group(1) if found else ""
    packages = [package for prefix, package in _PACKAGES.items() if library.startswith(prefix)]
    # One missing Qt library means that all are: EnvPool's Procgen links the two.
    if "Qt" in text:
        packages = ["libqt5gui5", "libqt5core5a"]
    if packages:
        needs = f"the system library {library or 'Qt 5'}, which Debian has in: apt install {' '.join(packages)}"
    else:
        needs = f"the system library {library}" if library else str(error).splitlines()[0]
    return ConfigError(f"env.id {env_id!r}: EnvPool needs {needs}")


@contextmanager
def _without_jax() -> Iterator[None]:
    """EnvPool imports JAX where it is installed, in 0.7 s, for an interface that is not used here."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        yield
    finally:
        del sys.modules["jax"]


def _guarded(env_id: str, make: Any, options: dict[str, Any]) -> Any:
    """Call an EnvPool constructor; its errors become a one-line `ConfigError`."""
    try:
        with warnings.catch_warnings(), _without_jax():
            warnings.simplefilter("ignore")
            return make(env_id, **options)
    except ImportError as error:
        raise _missing_library(env_id, error) from error
    except TypeError as error:
        if found := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            hint = "gymnasium's options need env.backend workers"
            raise ConfigError(f"env.kwargs: EnvPool's {env_id!r} has no option {found.group(1)!r}; {hint}") from error
        raise ConfigError(f"env.id {env_id!r}: an option has a wrong type: {json.dumps(options)}") from error
    except (AssertionError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"env.id {env_id!r}: EnvPool reports: {first_line(error)}") from error


def pool_declared(env: config.Env, atari: config.Atari) -> Declared:
    """What an EnvPool environment takes and gives; nothing is started."""
    return _declared(env.id, json.dumps(_options(env, atari)))


@functools.lru_cache(maxsize=64)
def _declared(env_id: str, options: str) -> Declared:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium on the precision of the bounds that EnvPool declares
        found = _guarded(env_id, import_envpool().make_spec, json.loads(options))
        if found.config.max_num_players > 1 or len(found.action_array_spec) != 3:
            raise ConfigError(f"env.id {env_id!r} has several players or actions; Coterie runs envs with one of each")
        frames = found.config.frame_skip if is_atari(env_id) or _is_doom(env_id) else 1
        limit = int(found.config.max_episode_steps)
        limit, text = limit if 0 < limit < _NO_LIMIT else 0, _TEXT.get(modules()[env_id], ())
        return declare(env_id, found.observation_space, found.action_space, frames, limit, text=text)


class PoolBackend(Backend):
    """`len(seeds)` instances of one EnvPool environment."""

    def __init__(
        self,
        env: config.Env,
        atari: config.Atari,
        seeds: Sequence[int],
        threads: int,
        training: bool = True,
        render: bool = False,
    ) -> None:
        super().__init__(pool_declared(env, atari), n := len(seeds))
        counts = {"num_envs": n, "batch_size": n, "num_threads": min(threads, n), "env_seed": list(seeds)}
        options = {**_options(env, atari), **counts}
        if env.max_episode_steps:
            # Enforced here, since EnvPool takes an end at its limit for a truncation.
            options["max_episode_steps"] = min(env.max_episode_steps + 1, _NO_LIMIT)
        if render:
            options["render_mode"] = "rgb_array"
        self._pool = _guarded(env.id, functools.partial(import_envpool().make, env_type="gymnasium"), options)
        action = list(self._pool.spec.action_array_spec.values())[-1]
        self._action_dtype, self._action_shape = action.dtype, tuple(s for s in action.shape if s != -1)
        names = list(self._pool._state_keys)
        obs = ((k.partition(":"), i) for i, k in enumerate(names))
        self._obs_at = {name.replace(":", "."): i for (kind, _, name), i in obs if kind == "obs"}
        self._at = {k: i for i, k in enumerate(names)}
        # Atari's info has the raw reward, and distinguishes the end of an episode from the loss of a life.
        self._atari = is_atari(env.id)
        self._info, keys = env.info, [name for name in names if name.startswith(_INFO)]
        self._info_at = {k: self._at[_INFO + k] for name in keys if (k := name.removeprefix(_INFO)) not in _NO_INFO}
        self._reward_at = self._at["info:reward" if self._atari else "reward"]
        # A lost life ends an episode here and not in EnvPool, which would play no-ops and FIRE after each one.
        self._lives = np.zeros(n, np.int32) if self._atari and atari.episodic_life and training else None
        self._lost = np.zeros(n, bool)  # a life, at the step before: the next one is a no-op
        # Not every family enforces EnvPool's time limit (2048, Highway and football do not): it is enforced here, too.
        self._limit = env.max_episode_steps
        self._expired = np.zeros(n, bool)
        self._late: tuple[Array, Array] | None = None  # (ids to reset, where they stand among those asked)
        self._early = True  # a step or reset was sent

    # EnvPool's `_send`, `_recv` and `_reset` are what its public methods call around conversions of nested dicts;
    # without those a step of 64 CartPoles takes 78 us instead of 105 (EnvPool 1.2.5, one thread).
    def step(self, ids: Array, actions: Array) -> None:
        actions = np.ascontiguousarray(actions, self._action_dtype).reshape(len(ids), *self._action_shape)
        if self._lives is not None and self._lost[ids].any():
            actions = np.where(self._lost[ids], self._action_dtype.type(0), actions)
        if self._limit and self._expired[ids].any():
            expired = self._expired[ids]
            self._late = ids[expired], np.argsort(np.argsort(expired, kind="stable"), kind="stable")
            self._expired[ids] = False
            ids, actions = ids[~expired], actions[~expired]
        self._early = len(ids) > 0
        if self._early:
            self._pool._send([ids, ids, actions])

    def reset(self, ids: Array) -> None:
        self._early = True
        self._expired[ids] = False
        self._pool._reset(ids)

    def recv(self) -> StepResults:
        values: list[Array] = self._pool._recv() if self._early else []
        if self._late is not None:
            values = self._reset_late(values)
        done, truncated = values[self._at["done"]], values[self._at["trunc"]]
        ended, terminated = done, done & ~truncated
        if self._atari:  # EnvPool calls whatever ends at its limit a truncation
            ended = values[self._at["info:terminated"]].astype(bool)
            terminated = terminated | ended
        if self._limit:
            truncated = self._enforce_limit(values, done, truncated)
        over = ended | truncated
        if self._lives is not None:
            terminated = terminated | self._lost_life(values, done | truncated)
        obs = self._obs(values)
        wanted = self._info == "steps" or (self._info == "episodes" and over.any())
        info = numbers({name: values[at] for name, at in self._info_at.items()}, len(over)) if wanted else {}
        return StepResults(obs, values[self._reward_at], terminated, truncated, over, info)

    def _lost_life(self, values: list[Array], over: Array) -> Array:
        """Which rows lost a life and have another one."""
        assert self._lives is not None
        ids, lives = values[self._at["info:env_id"]], values[self._at["info:lives"]]
        lost = (lives < self._lives[ids]) & (lives > 0) & ~over & ~self._lost[ids]
        self._lives[ids], self._lost[ids] = lives, lost
        return lost

    def _reset_late(self, values: list[Array]) -> list[Array]:
        """Reset the instances at a time limit that EnvPool does not enforce, and merge their rows with the others'."""
        assert self._late is not None
        (ids, order), self._late = self._late, None
        self._pool._reset(ids)
        rows = self._pool._recv()
        if not values:
            return list(rows)
        return [np.concatenate([a, b])[order] for a, b in zip(values, rows, strict=True)]

    def _enforce_limit(self, values: list[Array], done: Array, truncated: Array) -> Array:
        elapsed, ids = values[self._at["elapsed_step"]], values[self._at["info:env_id"]]
        late = elapsed >= self._limit
        if not late.any():
            return truncated
        self._expired[ids] = late & ~done
        return truncated | late

    def render(self) -> Array:
        """The frame `[H, W, 3]` uint8 of what instance 0 showed last; needs `render=True`."""
        try:
            return np.asarray(self._pool.render()[0])
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"env.id: EnvPool cannot draw {self.spec.env_id!r}: {error}") from error

    def _obs(self, values: list[Array]) -> Any:
        given = ((f, values[self._obs_at[f.name]]) for f in self.fields)
        return from_entries({f.name: x if f.convert is None else f.convert(x) for f, x in given})

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Do nothing: EnvPool cannot replace one instance; the reset that follows sets its whole state."""

    def close(self) -> None:
        """End the threads (EnvPool does that when the pool is freed)."""
        self._pool = None

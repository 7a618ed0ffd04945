"""Envs that one simulator steps together, in this process: gymnasium's vector envs, and the user's own backends.

Observations may be on a device, as torch tensors or what DLPack shares with torch, and stay there. Rewards, flags and
action masks, a few bytes for each env, are copied to the host. Loads torch only where a backend has tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from coterie import config
from coterie.envs.answers import STEP, check_kwargs, parts_of
from coterie.envs.backend import CLOSE_S, Backend, Declared, StepResults, declare
from coterie.envs.gym import is_gym_id, numbers, open_gym
from coterie.envs.pool import has_env
from coterie.envs.spaces import flatten, leaf_of, on_host
from coterie.errors import ConfigError, CoterieError, json_object
from coterie.parallel.signals import time_limit
from coterie.plugins import label, named_env, prepare_import
from coterie.types import MASK, Array, Obs, Spec, entries, from_entries, map_obs

_LARGEST_CODE = 31  # in a grid; MiniGrid has 11 objects, and envs may add some
_MOST_IDLE = 100  # steps that nothing can be learned from
_FINAL = ("final_obs", "final_observation", "final_info")
_FLAGS = ("terminated", "truncated", "game_over", "first")
_SMALL = {"reward": np.dtype("float32"), **dict.fromkeys(_FLAGS, np.dtype(bool))}
APART = ("auto", "pool", "workers")  # the other values of env.backend are simulators that step all envs together


def make_together(env: config.Env, seeds: Sequence[int]) -> Backend:
    """The run's simulator, with `len(seeds)` envs."""

    def make(env_id: str, kwargs: Mapping[str, Any], limit: int) -> Any:
        check_kwargs(kwargs, *["num_envs"] * (env.backend == "vector"), *["max_episode_steps"] * bool(limit))
        kwargs = {"max_episode_steps": limit, **kwargs} if limit else kwargs
        if env.backend != "vector":
            return _own_backend(env.backend)(env_id, seeds, **kwargs)
        made = _vector_maker(env_id)(num_envs=len(seeds), **kwargs)
        return VectorBackend(env, made, seeds[0]) if hasattr(made, "single_observation_space") else _no_vector(env_id)

    with chdir("."):  # an env may change to another folder
        made = open_gym(env.id, json_object("env.kwargs", env.kwargs), env.max_episode_steps, make)
    if not isinstance(made, Backend):
        raise ConfigError(f"env.backend {label(env.backend)}: returned {type(made).__name__}, not a Backend")
    if not hasattr(made, "action_map"):
        raise ConfigError(f"env.backend {label(env.backend)}: its __init__ must call super().__init__")
    if made.num_instances != len(seeds):
        raise ConfigError(f"env.num_envs: {label(env.id)} has {made.num_instances} envs instead of {len(seeds)}")
    return made


def _own_backend(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = named_env("env.backend", name)
    if isinstance(found, type) and not issubclass(found, Backend):
        raise ConfigError(f"env.backend {label(name)}: it is not a Backend; envs go to env.id, a VectorEnv with vector")
    return found


def _vector_maker(env_id: str) -> Callable[..., Any]:
    """What makes a vector env, called with `num_envs`."""
    if is_gym_id(env_id):
        prepare_import("env.id", env_id.rpartition(":")[0])
        pools = has_env(env_id) and env_id not in gymnasium.registry
        return _no_vector(env_id) if pools else partial(gymnasium.make_vec, env_id)
    make: Callable[..., Any] = named_env("env.id", env_id) if ":" in env_id else _no_vector(env_id)
    try:
        inspect.signature(make).bind_partial(num_envs=1)
    except TypeError:
        _no_vector(env_id)
    return make


def _no_vector(env_id: str) -> NoReturn:
    what = "env.backend vector needs a VectorEnv, made with num_envs; for a single env leave env.backend auto"
    raise ConfigError(f"env.id {label(env_id)!r}: {what}")


def together_declared(env: config.Env) -> Declared:
    """What the envs take and give. Refuses settings of envs that run apart."""
    if env.backend != "vector" and ":" not in env.backend:
        raise ConfigError(f"env.backend: {env.backend!r} is not auto, pool, workers, vector or package.module:callable")
    for name, value in {"on_error": "fail", "action_repeat": 1, "decorrelate": 0}.items():
        if getattr(env, name) != value:
            raise ConfigError(f"env.{name}: must be {value}; env.backend {label(env.backend)} steps all envs together")
    return _declared(config.Env(env.id, env.backend, kwargs=env.kwargs, max_episode_steps=env.max_episode_steps))


@lru_cache(maxsize=32)
def _declared(env: config.Env) -> Declared:
    """The same, found by making one of them, once for each simulator."""
    made = make_together(env, [0])
    with suppress(Exception, SystemExit), time_limit(CLOSE_S, "close() did not end"):  # it was of use
        made.close()
    return made.declared


class VectorBackend(Backend):
    """The envs of one `VectorEnv`, or of what has its attributes. Its mode of autoreset decides what a fake step is.

    NEXT_STEP: the env's own. DISABLED, and SAME_STEP of gymnasium's Sync- and AsyncVectorEnv: one that a reset of the
    finished envs undoes. SAME_STEP of others, which cannot hold an env back: the first step of the new episode; its
    reward is in the episode's return, and is not trained on.
    """

    def __init__(self, env: config.Env, made: Any, seed: int) -> None:
        limit = env.max_episode_steps or getattr(getattr(made, "spec", None), "max_episode_steps", None) or 0
        spaces = made.single_observation_space, made.single_action_space
        super().__init__(declare(label(env.id), *spaces, max_episode_steps=limit), made.num_envs)
        self.env, self._seed, self._bootstraps = made, seed, env.time_limit == "truncate"
        self._info = env.info
        mode = made.metadata.get("autoreset_mode")
        if mode not in [*AutoresetMode, *(m.value for m in AutoresetMode)]:
            raise ConfigError(f"env.id {label(env.id)!r}: metadata['autoreset_mode'] is {mode}, not an AutoresetMode")
        self._mode = AutoresetMode(mode)
        # Whether reset(options={"reset_mask": ...}) restarts some of the envs.
        own = isinstance(getattr(made, "unwrapped", made), SyncVectorEnv | AsyncVectorEnv)
        self._masks = self._mode is AutoresetMode.DISABLED or own
        self._done = np.zeros(made.num_envs, bool)
        self._idle = 0  # steps in a row that began an episode in all envs, and so were lost, and ended it

    def reset(self, ids: Array) -> None:
        self._done[ids] = False
        if len(ids) < self.num_instances:
            begun = self._restarted(np.isin(np.arange(self.num_instances), ids))
            obs = map_obs(lambda x: x[np.searchsorted(np.sort(ids), ids)], begun)
        else:
            given, info = self.env.reset(seed=self._seed)
            if MASK in (info or {}) or (self.spec.masked and self._mode is not AutoresetMode.NEXT_STEP):
                raise ConfigError(f"env.id {self.spec.env_id!r}: {MASK} must be in the observation, with NEXT_STEP")
            obs = self._flat(given)
            own = [_rows(leaf_of(given, f.path)) for f in self.fields]  # not yet converted on the host
            self.device = next((x.device for x in own if not isinstance(x, np.ndarray)), None)
            self.tensors = self.device is not None
        self._answer = StepResults(obs, np.zeros(len(ids), np.float32), *np.zeros((3, len(ids)), bool))

    def step(self, ids: Array, actions: Any) -> None:
        fake = self._done
        if fake.any() and self._mode is AutoresetMode.DISABLED:
            self.restart(fake)  # an env that has ended must not be stepped
        answer = self.env.step(self.action_map.nested(actions))
        given, reward, terminated, truncated, info = parts_of(f"env.id {self.spec.env_id!r}: step", answer, STEP)
        info = info if isinstance(info, Mapping) else {}
        obs, reward = self._flat(given), np.array(on_host(reward), np.float32)
        terminated, truncated = (np.array(on_host(x), bool) for x in (terminated, truncated))
        if fake.any() and self._masks and self._mode is not AutoresetMode.NEXT_STEP:
            obs = _with(obs, fake, self._restarted(fake))
            reward[fake], terminated[fake], truncated[fake] = 0, False, False
        self._done = done = terminated | truncated
        if done.any() and self._mode is AutoresetMode.SAME_STEP:
            self._idle = 0 if self._masks or not (fake & done).all() else self._idle + 1
            if self._idle > _MOST_IDLE:
                what = "episodes of one step need autoreset NEXT_STEP or DISABLED"
                raise CoterieError(f"env.id {self.spec.env_id!r}: {what}")
            obs = self._with_final(obs, info, done, truncated)
        wanted = self._info == "steps" or (self._info == "episodes" and done.any())
        numbers = self._numbers(info, done) if wanted else {}
        self._answer = StepResults(obs, reward, terminated, truncated, done.copy(), numbers)

    def recv(self) -> StepResults:
        return self._answer

    def _restarted(self, which: Array) -> Obs:
        """Begin new episodes in some of the envs; returns their observations."""
        return self._flat(self.restart(which), which)

    def restart(self, which: Array) -> Any:
        """Begin new episodes in some of the envs; returns the env's answer, whose other rows may hold anything."""
        return self.env.reset(options={"reset_mask": which.copy()})[0]

    def _flat(self, obs: Any, which: Array | None = None) -> Obs:
        """An observation of the env's own structure, or its rows `which`."""
        return map_obs(_shared, flatten(obs, self.fields, lambda x: x if which is None else _rows(x)[which]))

    def _with_final(self, obs: Obs, info: Mapping[str, Any], done: Array, truncated: Array) -> Obs:
        """`obs` with the last observations of episodes in place of the first ones of the next."""
        final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            if self._bootstraps and truncated.any():
                raise CoterieError(f"env.id {self.spec.env_id!r}: no final_obs in info; set env.time_limit terminate")
            return obs
        if isinstance(final, np.ndarray) and final.dtype == object:  # an observation for each of these envs
            space, rows = self.env.single_observation_space, list(final[done])
            batch = concatenate(space, rows, create_empty_array(space, len(rows)))  # type: ignore[arg-type]
            return _with(obs, done, self._flat(batch))
        return _with(obs, done, self._flat(final, done))

    def _numbers(self, info: Mapping[str, Any], done: Array) -> dict[str, Array]:
        """The numbers in info; `final_info` has those of steps that ended an episode."""
        found = numbers({name: x for name, x in info.items() if name not in _FINAL}, len(done))
        for name, x in numbers(info.get("final_info"), len(done)).items():
            found[name] = np.where(done, x, found.get(name, np.nan))
        return found

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        if not self._masks:
            super().replace(ids, seeds)  # which refuses it; otherwise the reset that follows does it

    def close(self) -> None:
        self.env.close()


def _with(obs: Obs, which: Array, rows: Obs) -> Obs:
    """A copy of `obs` with other rows in the places `which`."""
    new = map_obs(lambda x: x.copy() if isinstance(x, np.ndarray) else x.clone(), obs)
    for key, x in entries(new).items():
        y = entries(rows)[key]
        x[which] = y if isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) else x.new_tensor(y)
    return new


def _rows(x: Any) -> Any:
    """The rows of an array; gymnasium has texts in a tuple."""
    return np.asarray(x, object) if isinstance(x, tuple | list) else _shared(x)


def _shared(x: Any) -> Any:
    """A NumPy array or torch tensor as it is; another array as a torch tensor on its device."""
    if isinstance(x, np.ndarray):
        return x
    import torch

    return x if isinstance(x, torch.Tensor) else torch.utils.dlpack.from_dlpack(x).clone()  # JAX's is not to be written


def receive(backend: Backend) -> StepResults:
    """The backend's answer, with observations that are NumPy arrays or torch tensors, and all else on the host."""
    if not isinstance(batch := backend.recv(), StepResults):
        raise ConfigError(f"env.backend: recv returned {type(batch).__name__}, not StepResults")
    if not backend.tensors and [getattr(x, "dtype", 0) for x in (*batch[1:5], batch.first)] == [*_SMALL.values()]:
        return batch
    small: Any = {k: np.array(on_host(getattr(batch, k)), kind) for k, kind in _SMALL.items()}
    if backend.tensors:
        obs = {k: np.array(on_host(x), bool) if k == MASK else _shared(x) for k, x in entries(batch.obs).items()}
        small["obs"] = from_entries(obs)
    return batch._replace(**small)


def check_results(spec: Spec, batch: StepResults, n: int) -> None:
    """Raise where the results of `n` instances have other names, shapes or dtypes than `spec`, and would be broadcast
    or cut silently.
    """
    obs, what = entries(batch.obs), f"env.id {spec.env_id!r}:"
    if obs.keys() != spec.obs.keys():
        raise ConfigError(f"{what} the observations are {sorted(obs)}, where the space has {sorted(spec.obs)}")
    want = {f"observation {k!r}" if k else "observation": (obs[k], s.shape, s.dtype) for k, s in spec.obs.items()}
    want |= {k: (getattr(batch, k), (), kind.name) for k, kind in _SMALL.items() if k != "first"}
    for name, (x, row, dtype) in want.items():
        if (shape := tuple(getattr(x, "shape", ()))) != (n, *row):
            raise ConfigError(f"{what} {name} has shape {shape}, not {(n, *row)}")
        if "int" in dtype and "float" in str(x.dtype):
            raise ConfigError(f"{what} {name} has type {x.dtype}, but its space has {dtype}")
    for key, s in spec.obs.items():
        if s.codes and on_host(obs[key]).max() > _LARGEST_CODE:
            why = "pixels, not MiniGrid's codes: its id must not begin with MiniGrid or BabyAI"
            raise ConfigError(f"{what} observation {key!r} has {why}")


def place_of(backend: Backend, obs: Obs) -> Any:
    """The device of the observations, for a `VectorEnv` before some are converted on the host."""
    if isinstance(backend, VectorBackend) and backend.device is not None:
        return backend.device
    return next((x.device for x in entries(obs).values() if hasattr(x, "detach")), "cpu")


def action_adapter(backend: Backend, first: StepResults) -> Callable[[Any], Any]:
    """A function that makes a policy's actions the backend's, on the device of its `first` observations."""
    actions = backend.action_map
    if not backend.tensors or actions.leaves:
        return lambda a: actions.to_env(on_host(a))
    import torch

    device = place_of(backend, first.obs)
    constants = ((k, getattr(actions, k)) for k in ("offset", "scale", "low", "high"))
    there: Any = {k: torch.as_tensor(x, device=device) for k, x in constants if x is not None}
    return lambda a: replace(actions, **there).to_env(torch.as_tensor(a, device=device))


def not_finite(x: Any) -> Array:
    """Rows of `x` with a number that is not finite."""
    host = isinstance(x, np.ndarray)
    if host and (x.dtype.kind != "f" or np.isfinite(x).all()):
        return np.zeros(0, int)
    return np.flatnonzero(~on_host((np.isfinite(x) if host else x.isfinite()).reshape(len(x), -1).all(1)))

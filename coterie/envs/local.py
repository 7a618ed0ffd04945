"""The backend that steps one gymnasium environment in the caller's process: for `watch`, which needs its frames."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from coterie import config
from coterie.envs.backend import Backend, StepResults
from coterie.envs.gym import PLAY, describe, is_gym_id, layout, make_instance, open_gym, read_batch
from coterie.envs.team import ZOO
from coterie.errors import ConfigError, CoterieError, one_line
from coterie.plugins import named_env
from coterie.types import Array


class LocalBackend(Backend):
    """One env with `render_mode="rgb_array"`, an instance for each agent. One that breaks ends the program."""

    def __init__(self, env: config.Env, seeds: Sequence[int]) -> None:
        make_vec = ("vectorization_mode", "vector_kwargs") if env.backend == "vector" else ()  # its arguments
        kwargs = {name: x for name, x in json.loads(env.kwargs).items() if name not in make_vec}
        registered = is_gym_id(env.id) or (env.id.startswith((PLAY, ZOO)) and ":" not in env.id)
        if not registered and _takes_render_mode(env.id.removeprefix(PLAY)):
            kwargs.setdefault("render_mode", "rgb_array")
        make = partial(open_gym, env.id, max_episode_steps=env.max_episode_steps)
        self.env: Any = None
        self.undrawn = ""  # why its constructor took no render_mode
        if registered:
            try:
                self.env = make({**kwargs, "render_mode": "rgb_array"})
            except CoterieError as error:
                self.undrawn = str(error)
        self.env = self.env or make(kwargs)
        declared = describe(env.id, self.env, env.max_episode_steps)
        super().__init__(declared, n := declared.spec.agents)
        self.arrays: dict[str, Array] = {k: np.zeros(*shape_dtype) for k, shape_dtype in layout(declared, n).items()}
        self.instance = make_instance(env.id, self.env, int(seeds[0]), range(n), self.arrays, self.mask)

    def step(self, ids: Array, actions: Array) -> None:
        self.arrays["action"][ids] = actions
        self.instance.reset() if self.instance.restart else self.instance.step()

    def reset(self, ids: Array) -> None:
        self.instance.reset()

    def recv(self) -> StepResults:
        return read_batch(self.arrays, self.spec, np.arange(self.num_instances), {})

    def render(self) -> Array:
        """The current frame `[H, W, 3]` uint8."""
        try:
            frame = self.env.render()
        except Exception as error:
            missing = isinstance(error, NotImplementedError) and not str(error)  # gymnasium's own
            why = "it has no render() of its own" if missing else one_line(error)
            raise ConfigError(f"env.id: {self.spec.env_id!r} cannot be drawn: {why}") from error
        if not isinstance(frame, np.ndarray):
            how = self.undrawn or "its render() gave no array (a constructor with render_mode gets rgb_array)"
            raise ConfigError(f"env.id: {self.spec.env_id!r} gives no frames: {how}")
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            given = f"{frame.dtype} {list(frame.shape)}"
            raise ConfigError(f"env.id: {self.spec.env_id!r} draws {given}; a frame must be uint8 [H, W, 3]")
        return frame

    def close(self) -> None:
        with suppress(Exception, SystemExit):
            self.env.close()


def _takes_render_mode(env_id: str) -> bool:
    with suppress(Exception):  # what cannot be made says why when it is made
        make = named_env("env.id", env_id)
        modes = getattr(make, "metadata", {}).get("render_modes") or ["rgb_array"]  # gymnasium's default is empty
        given = isinstance(make, partial) and "render_mode" in make.keywords
        return not given and "rgb_array" in modes and "render_mode" in inspect.signature(make).parameters
    return False

"""The backend that steps one gymnasium environment in the caller's process: for `watch`, which needs its frames."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from coterie import config
from coterie.envs.backend import StepResults
from coterie.envs.gym import Instance, describe, is_gym_id, layout, open_gym, read_batch
from coterie.types import Array, ConfigError, CoterieError, one_line


class LocalBackend:
    """One instance with `render_mode="rgb_array"`. An env that breaks ends the program: no training depends on it."""

    num_instances = 1

    def __init__(self, env: config.Env, seeds: Sequence[int]) -> None:
        kwargs = json.loads(env.kwargs)
        if is_gym_id(env.id):
            kwargs["render_mode"] = "rgb_array"
        self.env = open_gym(env.id, kwargs, env.max_episode_steps)
        declared = describe(env.id, self.env, env.max_episode_steps)
        self.spec, _, self.action_map, mask = declared
        self.arrays: dict[str, Array] = {k: np.zeros(*shape_dtype) for k, shape_dtype in layout(declared, 1).items()}
        self.instance = Instance(env.id, self.env, int(seeds[0]), 0, self.arrays, mask)

    def step(self, ids: Array, actions: Array) -> None:
        self.arrays["action"][ids] = actions
        self.instance.step()

    def reset(self, ids: Array) -> None:
        self.instance.reset()

    def recv(self) -> StepResults:
        return read_batch(self.arrays, self.spec, np.zeros(1, np.int32), {})

    def render(self) -> Array:
        """The current frame `[H, W, 3]` uint8."""
        try:
            frame = self.env.render()
        except Exception as error:
            raise ConfigError(f"env.id: {self.spec.env_id!r} cannot be drawn: {one_line(error)}") from error
        if not isinstance(frame, np.ndarray):
            raise ConfigError(f"env.id: {self.spec.env_id!r} gives no frames: it has no rgb_array render mode")
        return frame

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        raise CoterieError(f"env.id: {self.spec.env_id!r} gave numbers that are not finite")

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """No callback sets any."""

    def close(self) -> None:
        self.env.close()

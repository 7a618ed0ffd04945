"""The backend that steps one gymnasium environment in the caller's process: for `watch`, which wants its frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from coterie import config
from coterie.envs.backend import Batch
from coterie.envs.gym import frames_per_step, make_gym, one_line
from coterie.envs.spaces import action_map, flatten, obs_fields
from coterie.types import Array, ConfigError, CoterieError, Spec


class LocalBackend:
    """One instance with `render_mode="rgb_array"`. An env that breaks ends the program: nobody trains on it."""

    num_instances = 1

    def __init__(self, env: config.Env, seeds: Sequence[int]) -> None:
        kwargs = json.loads(env.kwargs)
        try:
            if env.id in gymnasium.registry:
                kwargs["render_mode"] = "rgb_array"
            self.env = make_gym(env.id, kwargs, env.max_episode_steps)
        except CoterieError:
            raise
        except Exception as error:
            raise ConfigError(f"env.id {env.id!r}: {one_line(error)}") from error
        self.fields = obs_fields(env.id, self.env.observation_space)
        self.action_map = action_map(env.id, self.env.action_space)
        obs = {f.name: f.spec for f in self.fields}
        self.spec = Spec(env.id, obs, self.action_map.spec, frames_per_step(self.env))
        self.seed: int | None = int(seeds[0])
        self.restart = True
        self.answer: Batch

    def step(self, ids: Array, actions: Array) -> None:
        if self.restart:
            self.reset(ids)
            return
        space = self.env.action_space
        given = int(actions[0]) if isinstance(space, spaces.Discrete) else np.asarray(actions[0], space.dtype)
        obs, reward, terminated, truncated, _ = self.env.step(given)
        self.restart = bool(terminated or truncated)
        self._answer(obs, float(reward), bool(terminated), bool(truncated))

    def reset(self, ids: Array) -> None:
        obs, _ = self.env.reset(seed=self.seed)
        self.seed, self.restart = None, False
        self._answer(obs, 0.0, False, False)

    def _answer(self, obs: Any, reward: float, terminated: bool, truncated: bool) -> None:
        batched, over = flatten(_add_axis(obs), self.fields), np.array([terminated or truncated])
        rewards = np.array([reward], np.float32)
        self.answer = Batch(batched, rewards, np.array([terminated]), np.array([truncated]), over)

    def recv(self) -> Batch:
        return self.answer

    def render(self) -> Array:
        """The frame `[H, W, 3]` uint8 of what was seen last."""
        try:
            frame = self.env.render()
        except Exception as error:
            raise ConfigError(f"env.id: {self.spec.env_id!r} cannot be drawn: {one_line(error)}") from error
        if not isinstance(frame, np.ndarray):
            raise ConfigError(f"env.id: {self.spec.env_id!r} gives no frames: it has no rgb_array render mode")
        return frame

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        raise CoterieError(f"env.id: {self.spec.env_id!r} gave numbers that are not finite")

    def close(self) -> None:
        self.env.close()


def _add_axis(obs: Any) -> Any:
    return {k: _add_axis(x) for k, x in obs.items()} if isinstance(obs, dict) else np.asarray(obs)[None]

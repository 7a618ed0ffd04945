"""An env whose action mask counts: an illegal choice raises."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Masked(gymnasium.Env[Any, Any]):
    """Choice k of each component is legal unless (count + k) is a multiple of 3; nothing is at an episode's end. The
    mask is `where`: in the observation ("obs"), in info, there also as `Space.sample` takes it ("sample"), or behind
    `action_masks()` ("method"). Others cannot be used. `stuck`: at this count nothing is legal.
    """

    def __init__(self, where: str = "obs", kind: str = "discrete", length: int = 5, stuck: int = -1) -> None:
        self.where, self.kind, self.length, self.stuck = where, kind, length, stuck
        choices = spaces.Tuple((spaces.Discrete(4), spaces.MultiDiscrete([3, 2])))
        self.action_space: spaces.Space[Any] = {
            "discrete": spaces.Discrete(4, start=1),
            "multi": choices,
            "mixed": spaces.Dict({"a": choices, "b": spaces.Box(0, 2, (2,), np.float32)}),
        }[kind]
        self.sizes = [4] if kind == "discrete" else [4, 3, 2]
        count = spaces.Box(0, np.inf, (1,), np.float32)
        mask = spaces.MultiBinary(sum(self.sizes))
        self.observation_space = spaces.Dict({"count": count, "action_mask": mask}) if where == "obs" else count
        if where == "inside":
            self.observation_space = spaces.Dict({"count": count, "in": spaces.Dict({"action_mask": mask})})
        if where == "method":
            self.action_masks = self._masks
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._see()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        a = action["a"] if self.kind == "mixed" else action
        chosen = [action - 1] if self.kind == "discrete" else [a[0], *a[1]]
        for legal, k in zip(self._masks(), chosen, strict=True):
            assert legal[k], f"{k} is not legal at {self.count}"
        self.count += 1
        obs, info = self._see()
        return obs, float(chosen[0]), self.count == self.length, False, info

    def _masks(self) -> list[Any]:
        if self.count in (self.length, self.stuck):
            return [np.zeros(n, np.int8) for n in self.sizes]
        return [((self.count + np.arange(n)) % 3 != 0).astype(np.int8) for n in self.sizes]

    def _see(self) -> tuple[Any, dict[str, Any]]:
        count = np.array([self.count], np.float32)
        first, *more = self._masks()
        flat, nested = np.concatenate([first, *more]), (first, tuple(more)) if more else first
        if self.where == "obs":
            return {"count": count, "action_mask": flat}, {}
        sample = {"a": nested, "b": None} if self.kind == "mixed" else nested
        masks = {"info": (first, *more), "sample": sample, "short": flat[1:], "number": 1, "dict": {"x": flat}}
        return count, {"action_mask": masks[self.where]} if self.where in masks else {}

"""Small gymnasium environments for tests: one whose rewards check alignment, and three to learn.

Name them as `coterie.envs.testing:CountingEnv` and so on.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from coterie.types import Array

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class CountingEnv(gymnasium.Env[Any, Any]):
    """The observation counts up from a seeded start; the reward is `16 * count + action`, of the count before the step.

    The vector observation is `[count, episode]`, the image is filled with count modulo 256 but for its corner, the
    episode; `dict` has both. Even episodes end terminated, odd ones truncated, each after `length` steps. A continuous
    action (2 numbers) adds its sum.
    """

    def __init__(
        self,
        length: int = 5,
        obs: Literal["vector", "image", "dict"] = "vector",
        continuous: bool = False,
        actions: int = 4,
    ) -> None:
        self.length, self.kind = length, obs
        vector = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        image = spaces.Box(0, 255, (1, 6, 6), np.uint8)
        both = spaces.Dict({"inner": spaces.Dict({"vector": vector}), "image": image})
        choices: dict[str, spaces.Space[Any]] = {"vector": vector, "image": image, "dict": both}
        self.observation_space = choices[obs]
        self.action_space = spaces.Box(-2, 6, (2,), np.float32) if continuous else spaces.Discrete(actions)
        self.episode, self.count, self.steps = 0, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.count, self.steps = int(self.np_random.integers(1000)), 0
        return self._see(), {}

    def step(self, action: Any) -> Step:
        reward = 16.0 * self.count + float(np.sum(action))
        self.count += 1
        self.steps += 1
        done = self.steps >= self.length
        odd = self.episode % 2 == 1
        return self._see(), reward, done and not odd, done and odd, {}

    def _see(self) -> Any:
        vector = np.array([self.count, self.episode], np.float32)
        image = np.full((1, 6, 6), self.count % 256, np.uint8)
        image[0, 0, 0] = self.episode % 256
        return {"vector": vector, "image": image, "dict": {"inner": {"vector": vector}, "image": image}}[self.kind]


class Cue(gymnasium.Env[Any, Any]):
    """One of `cues` is shown at the first step; `delay` steps later the action of its number earns 1, any other -1. The
    observations in between are the same for all cues: without memory one guess in `cues` is right (mean return
    2 / cues - 1 at best).
    """

    def __init__(self, cues: int = 4, delay: int = 10) -> None:
        self.cues, self.delay = cues, delay
        self.observation_space = spaces.Box(0, 1, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)
        self.cue = self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(self.cues)), 0
        return self._see(), {}

    def step(self, action: Any) -> Step:
        self.steps += 1
        done = self.steps > self.delay
        reward = (1.0 if int(action) == self.cue else -1.0) if done else 0.0
        return self._see(), reward, done, False, {}

    def _see(self) -> Array:
        seen = np.zeros(self.cues + 1, np.float32)
        if self.steps == 0:
            seen[self.cue] = 1
        seen[-1] = self.steps == self.delay  # the next action counts
        return seen


class Catch(gymnasium.Env[Any, Any]):
    """A ball falls through 10 rows of 5 columns; move the paddle under it. Reward 1 or -1 at the end of 9 steps.

    `blank`: after the first row the frame is all zeros. Without memory only the three columns that one informed step
    reaches can be caught (mean return 0.2 at best); with memory all of them (1.0). `scale`: pixels of an image's side
    for each cell.
    """

    rows, columns = 10, 5

    def __init__(self, image: bool = False, blank: bool = False, scale: int = 1) -> None:
        self.image, self.blank, self.scale = image, blank, scale
        shape = (1, self.rows * scale, self.columns * scale)
        vector = spaces.Box(0, 1, (self.rows * self.columns,), np.float32)
        self.observation_space: spaces.Space[Any] = spaces.Box(0, 255, shape, np.uint8) if image else vector
        self.action_space = spaces.Discrete(3)  # left, stay, right
        self.ball, self.row, self.paddle = 0, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.ball, self.row, self.paddle = int(self.np_random.integers(self.columns)), 0, self.columns // 2
        return self._see(), {}

    def step(self, action: Any) -> Step:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        self.row += 1
        done = self.row == self.rows - 1
        reward = (1.0 if self.paddle == self.ball else -1.0) if done else 0.0
        return self._see(), reward, done, False, {}

    def _see(self) -> Array:
        frame = np.zeros((self.rows, self.columns), np.uint8)
        if not (self.blank and self.row > 0):
            frame[self.row, self.ball] = 255
            frame[self.rows - 1, self.paddle] = 255
        if self.image:
            return frame.repeat(self.scale, 0).repeat(self.scale, 1)[None]
        return (frame.reshape(-1) / 255).astype(np.float32)


class Mission(gymnasium.Env[Any, Any]):
    """Only the mission, a text, names the right one of three actions: "please go left not right", for example.

    An episode has one mission and 4 steps, each worth 0.25 if it is right; by chance the return is 1/3. Every mission
    names two actions, so that the order of its words matters. `blank`: the mission is "", and chance is all there is.
    """

    actions, filler = ("left", "right", "stay"), ("please", "now", "then", "the", "agent")

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank
        vector = spaces.Box(0, 1, (1,), np.float32)  # the part of the episode that is over
        text = spaces.Text(80, min_length=0, charset="abcdefghijklmnopqrstuvwxyz ")
        self.observation_space = spaces.Dict({"vector": vector, "mission": text})
        self.action_space = spaces.Discrete(3)
        self.right, self.steps, self.mission = 0, 0, ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.right, wrong = (int(a) for a in self.np_random.permutation(3)[:2])
        before, after = (list(self.np_random.choice(self.filler, self.np_random.integers(3))) for _ in range(2))
        words = [*before, "go", self.actions[self.right], "not", self.actions[wrong], *after]
        self.mission, self.steps = "" if self.blank else " ".join(words), 0
        return self._see(), {}

    def step(self, action: Any) -> Step:
        self.steps += 1
        return self._see(), 0.25 * (int(action) == self.right), self.steps == 4, False, {}

    def _see(self) -> Any:
        return {"vector": np.array([self.steps / 4], np.float32), "mission": self.mission}

"""Envs of several agents, whose rewards check alignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Crowd(ParallelEnv[str, Any, int]):
    """Agent k is there from step `lives[k][0]` to step `lives[k][1]`: then it terminates (even k) or is truncated (odd
    k). Its observation is `[step, episode, k]`, its reward `16 * step + 4 * k + action` of the step before.

    `mask`: the action `step % 4` is illegal, by "obs" or "info", and an illegal one raises; at an end all are. `how`
    the env breaks at step `at` of its first life: "raise", "nan", of the last agent's reward, or "new", by an unknown
    agent. `odd`: the last agent has one more action. `bare`: what leaves is not in the observations any more.
    """

    metadata: dict[str, Any] = {"name": "crowd"}  # noqa: RUF012

    def __init__(
        self,
        lives: Sequence[tuple[int, int]] = ((0, 5), (0, 2), (3, 5)),
        mask: str = "",
        how: str = "",
        at: int = 0,
        odd: bool = False,
        bare: bool = False,
    ) -> None:
        self.possible_agents = [f"agent_{k}" for k in range(len(lives))]
        self.lives = dict(zip(self.possible_agents, lives, strict=True))
        self.mask, self.how, self.at, self.odd, self.bare = mask, how, at, odd, bare
        self.episode, self.steps, self.bonus = 0, 0, 0.0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        seen = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        return spaces.Dict({"seen": seen, "action_mask": spaces.MultiBinary(4)}) if self.mask == "obs" else seen

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(4 + (self.odd and agent == self.possible_agents[-1]))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.episode, self.steps = 0 if seed is not None else self.episode + 1, 0
        self.agents = [a for a, (begin, _) in self.lives.items() if begin == 0]
        return self._see(self.agents), self._infos(self.agents)

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        assert list(actions) == self.agents
        if self.mask:
            assert all(a != self.steps % 4 for a in actions.values()), actions
        before, numbers = self.steps, {a: k for k, a in enumerate(self.possible_agents)}
        rewards = {a: 16.0 * before + 4 * numbers[a] + actions[a] + self.bonus for a in actions}
        self.steps += 1
        if self.how and self.episode == 0 and self.steps == self.at:
            if self.how == "raise":
                raise ValueError("broken by design")
            if self.how == "new":
                self.agents.append("x")
                return self._see([]), rewards, {}, {}, {}
            rewards[list(rewards)[-1]] = np.nan
        over = {a: self.lives[a][1] == self.steps for a in actions}
        terminated = {a: over[a] and numbers[a] % 2 == 0 for a in actions}
        truncated = {a: over[a] and numbers[a] % 2 == 1 for a in actions}
        new = [a for a, (begin, _) in self.lives.items() if begin == self.steps]
        self.agents = [a for a in self.possible_agents if (a in actions and not over[a]) or a in new]
        shown = self.agents if self.bare else [*actions, *new]
        return self._see(shown), rewards, terminated, truncated, self._infos(shown)

    def _see(self, agents: Sequence[str]) -> dict[str, Any]:
        seen = {
            a: np.array([self.steps, self.episode, k], np.float32)
            for k, a in enumerate(self.possible_agents)
            if a in agents
        }
        if self.mask != "obs":
            return seen
        return {a: {"seen": x, "action_mask": self._legal(a)} for a, x in seen.items()}

    def _legal(self, agent: str) -> Any:
        return (np.arange(4) != self.steps % 4).astype(np.int8) * (agent in self.agents)

    def _infos(self, agents: Sequence[str]) -> dict[str, Any]:
        return {a: {"action_mask": self._legal(a)} if self.mask == "info" else {} for a in agents}

    def render(self) -> Any:
        return np.full((16, 16, 3), 10 * self.steps, np.uint8)

    @property
    def render_mode(self) -> str:
        return "rgb_array"


def nameless() -> Crowd:
    """Without a list of all agents."""
    crowd = Crowd()
    del crowd.possible_agents
    return crowd


def uneven() -> Crowd:
    """Two agents with different actions."""
    return Crowd(lives=((0, 5), (0, 5)), odd=True)


_THREE, _BOX = spaces.Discrete(3), spaces.Box(-2, 2, (2,), np.float32)
_TWO = spaces.MultiDiscrete([3, 2])
DUOS: dict[str, tuple[Any, Any, Any]] = {  # observation, action, mask
    "nested observation": (spaces.Dict({"x": spaces.Tuple((_THREE, _BOX)), "y": _BOX}), _THREE, None),
    "Tuple": (spaces.Tuple((_BOX, _THREE)), spaces.Tuple((_THREE, spaces.Dict({"k": _BOX}))), None),
    "Dict": (_BOX, spaces.Dict({"k": spaces.Discrete(3, start=2)}), None),
    "Box": (_BOX, spaces.Box(-2, 2, (2,), np.float64), None),
    "list as mask": (_BOX, _THREE, [1, 0, 1]),
    "flat mask": (_BOX, _TWO, np.array([1, 0, 1, 1, 1], np.int8)),
    "mask of each component": (_BOX, _TWO, ([1, 0, 1], [1, 1])),
}


class Duo(ParallelEnv[str, Any, Any]):
    """Two agents for five steps, with the spaces and the mask of `DUOS`. An action that is not in its space raises, and
    so does choice 1 where there is a mask.
    """

    metadata: dict[str, Any] = {"name": "duo"}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        self.possible_agents, self.render_mode = ["a", "b"], None
        self.obs, self.action, self.mask = DUOS[kind]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.obs

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.agents, self.steps = list(self.possible_agents), 0
        return self._see()

    def _see(self) -> tuple[Any, Any]:
        info = {} if self.mask is None else {"action_mask": self.mask}
        return {a: self.obs.sample() for a in self.agents}, dict.fromkeys(self.agents, info)

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        flat = {a: spaces.flatten(self.action, x) for a, x in actions.items() if self.action.contains(x)}
        assert list(flat) == self.agents, actions
        assert self.mask is None or not any(x[1] for x in flat.values()), actions
        self.steps += 1
        over = dict.fromkeys(self.agents, self.steps == 5)
        obs, info = self._see()
        if self.steps == 5:
            self.agents = []
        return obs, {a: float(x.sum()) for a, x in flat.items()}, over, dict.fromkeys(over, False), info

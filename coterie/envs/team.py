"""Several agents in one env: PettingZoo's parallel API, all agents with one policy. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium

from coterie.errors import ConfigError
from coterie.extras import needs
from coterie.plugins import label

ZOO = "pettingzoo/"  # before an env of PettingZoo, as in pettingzoo/butterfly/pistonball_v6
_PADS = {"observation": "pad_observations_v0", "action": "pad_action_space_v0"}  # of SuperSuit


def zoo_ids(prefix: str) -> list[str]:
    """PettingZoo's parallel envs, or with another prefix than theirs its games by turns."""
    with needs("an env of several agents", "pettingzoo"):
        from pettingzoo import aec_registry, parallel_registry
    known = parallel_registry if prefix == ZOO else aec_registry
    return [prefix + re.sub(r"-v(\d+)$", r"_v\1", name) for name in known]


class Team(gymnasium.Env[Any, Any]):
    """A `ParallelEnv` with the spaces of one agent. `reset` and `step` take and return its dicts by agent. `members`:
    all agents; `playing`: those that are there. `limit` > 0 truncates the episodes of all.
    """

    def __init__(self, env_id: str, env: Any, limit: int) -> None:
        self.env, self.limit, self.render_mode = env, limit, getattr(env, "render_mode", None)
        self.members, self.steps = list[str](env.possible_agents), 0
        self.over = set[str]()  # agents whose episode has ended, and which `agents` may still list
        for what in _PADS:
            space, first = getattr(env, f"{what}_space"), self.members[0]
            for agent in self.members:
                if space(agent) != space(first):
                    raise ConfigError(
                        f"env.id {label(env_id)!r}: its agents share a policy, but {first} and {agent} differ in their "
                        f"{what} spaces, {space(first)} and {space(agent)}; SuperSuit's {_PADS[what]} pads them"
                    )
            setattr(self, f"{what}_space", space(first))

    @property
    def playing(self) -> list[str]:
        """The agents that take the next step; none where the episode is over."""
        over = self.limit and self.steps >= self.limit
        return [] if over else [agent for agent in self.env.agents if agent not in self.over]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        self.over.clear()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Mapping[str, Any]) -> Any:
        self.steps += 1
        return self.env.step(action)

    def noted(self, answer: list[Any]) -> list[Any]:
        """The parts of what `step` returned, after noting whose episode they end."""
        _, _, terminated, truncated, _ = answer
        ended = {agent for agent in self.members if terminated.get(agent) or truncated.get(agent)}
        self.over = (self.over | ended) & {*self.env.agents}  # one that has left may come back
        return answer

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        if found := force or hasattr(self.env.unwrapped, name):
            setattr(self.env.unwrapped, name, value)
        return found

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

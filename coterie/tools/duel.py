"""The env of self-play: one side of a game for two, against frozen copies of the policy.

The callback `SelfPlay` sets `pool`. Results go back in a file of this process, a line for each game: numbers in `info`
would arrive as means. Without a pool, as in evaluations, the opponent plays at random, and torch is not loaded.
"""

from __future__ import annotations

import copy
import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from coterie.envs.gym import mask_row, only
from coterie.envs.spaces import action_map, random_actions
from coterie.errors import ConfigError
from coterie.extras import needs
from coterie.plugins import named_env
from coterie.types import MASK

RANDOM = "random"  # the member of every pool that plays at random
REPLAYED = "COTERIE_REPLAYED"  # an environment variable: the pool's folder, of games that have been rated


@functools.lru_cache(maxsize=32)
def frozen(folder: Path, name: str) -> Any:
    """The `Policy` of the run that `folder` is in, with the weights of this member of the pool."""
    from safetensors.torch import load_file

    from coterie.build.policy import policy_of
    from coterie.runs.trust import open_run

    if not (weights := folder / f"{name}.safetensors").exists():
        replay = "; a replay can end before that game (--to) or begin with a later life (--from)"
        hint = replay if REPLAYED in os.environ else ""
        raise ConfigError(f"the opponent {name} has left the pool of {folder.parent}{hint}")
    config = open_run(folder.parent, trust=True)  # the run that plays
    return policy_of(folder.parent, config, load_file(weights), int(name), weights)


class Duel(gymnasium.Env[Any, Any]):
    """Our side of `game`, drawn for each episode like the opponent: with probability `newest` the newest of the pool,
    otherwise any. `game`: PettingZoo's, such as classic/go_v5, or package.module:callable that makes one of its API.
    """

    def __init__(self, game: str, newest: float = 0.5, **kwargs: Any) -> None:
        with needs("self-play", "pettingzoo"):
            import pettingzoo
        made: Any = named_env("env.id", game)(**kwargs) if ":" in game else pettingzoo.make("aec", game, **kwargs)
        self.game = made if hasattr(made, "agent_iter") else pettingzoo.utils.parallel_to_aec(made)
        spaces = [(made.observation_space(side), made.action_space(side)) for side in made.possible_agents]
        if len(spaces) != 2 or spaces[0] != spaces[1]:
            raise ConfigError(f"env.id: self-play needs a game for two sides with the same spaces; {game} has {spaces}")
        self.observation_space, self.action_space = spaces[0]
        self.actions = action_map(game, self.action_space)
        self.newest, self.render_mode = newest, kwargs.get("render_mode")
        self.pool: dict[str, Any] = {}  # "folder" and "members", the newest last

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset(seed=int(self.np_random.integers(2**31)))
        self.me, self.other = self.np_random.permutation(self.game.possible_agents).tolist()
        members = self.pool.get("members", [RANDOM])
        self.opponent = members[-1 if self.np_random.random() < self.newest else self.np_random.integers(len(members))]
        self.policy: Any = None  # the opponent's
        if self.opponent != RANDOM:
            import torch

            # In a replay not the recorded folder: the run may have moved, and a record is not trusted.
            self.policy = copy.copy(frozen(Path(os.environ.get(REPLAYED) or self.pool["folder"]), self.opponent))
            self.policy.reset()  # its memory and its random numbers are of this game
            self.policy.player = copy.copy(self.policy.player)
            self.policy.player.rng = torch.Generator().manual_seed(int(self.np_random.integers(2**31)))
        self.theirs = 0.0  # the opponent's reward since its last action
        self.total = self._opponents_turns()
        return self.game.observe(self.me), dict(self.game.infos[self.me])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        if not self._over:
            reward = self._step(action) + self._opponents_turns()
        self.total += reward
        if self._over and self.pool and REPLAYED not in os.environ:
            results = Path(self.pool["folder"], "results", str(os.getpid()))
            with suppress(OSError), results.open("a") as lines:  # a game that is not rated is no reason to end
                lines.write(f"{self.opponent} {(np.sign(self.total) + 1) / 2}\n")
        over = self.game.terminations[self.me], self.game.truncations[self.me]
        return self.game.observe(self.me), reward, *over, dict(self.game.infos[self.me])

    @property
    def _over(self) -> bool:
        return bool(self.game.terminations[self.me] or self.game.truncations[self.me])

    def _opponents_turns(self) -> float:
        """Play them; returns our reward. The opponent samples its actions, as the learner does."""
        reward = 0.0
        while not self._over and self.game.agent_selection == self.other:
            left = self.game.terminations[self.other] or self.game.truncations[self.other]
            reward += self._step(None if left else self._opponents_action())
        return reward

    def _step(self, action: Any) -> float:
        """Our reward."""
        self.game.step(action)
        self.theirs += self.game.rewards.get(self.other, 0.0)  # it may have left
        return float(self.game.rewards[self.me])

    def _opponents_action(self) -> Any:
        obs, legal = self.game.observe(self.other), None
        given = obs if isinstance(obs, dict) and MASK in obs else self.game.infos[self.other]
        if self.actions.spec.sizes and MASK in given:
            legal = given[MASK]
        if self.policy is not None:
            last, self.theirs = self.theirs, 0.0
            return self.policy.act(obs, action_mask=legal, reward=last, sampled=True)
        seen = None
        if legal is not None:
            seen = {MASK: mask_row(legal, self.action_space, sum(self.actions.spec.sizes))[None]}
        drawn = random_actions(self.actions.spec, self.np_random, 1, seen)
        return only(self.action_space, self.actions.nested(self.actions.to_env(drawn)))

    def render(self) -> Any:
        return self.game.render()

    def close(self) -> None:
        self.game.close()

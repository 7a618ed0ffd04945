"""Self-play in a game of our own: Nim, where the best move is known. python examples/self_play.py [STEPS]

Or by name, in the folder examples: coterie train ppo --env selfplay/self_play:Nim --steps 60000. Needs the extra
`pettingzoo`.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv


class Nim(AECEnv):
    """Take 1 to 3 of the sticks in turn; taking the last one wins. The best move makes them a multiple of 4."""

    sticks = 21

    def __init__(self):
        self.possible_agents = ["first", "second"]
        seen = {"observation": spaces.Box(0, 1, (self.sticks + 1,), np.float32), "action_mask": spaces.MultiBinary(3)}
        self.spaces = spaces.Dict(seen), spaces.Discrete(3)

    def observation_space(self, agent):
        return self.spaces[0]

    def action_space(self, agent):
        return self.spaces[1]

    def reset(self, seed=None, options=None):
        self.agents, self.agent_selection, self.left = list(self.possible_agents), "first", self.sticks
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def observe(self, agent):
        return look(self.left)

    def step(self, action):
        self.left -= action + 1
        mover = self.agent_selection
        self.agent_selection = "second" if mover == "first" else "first"
        if self.left == 0:
            self.rewards = {mover: 1.0, self.agent_selection: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)


def look(left):
    return {"observation": np.eye(Nim.sticks + 1, dtype=np.float32)[left], "action_mask": np.arange(3) < left}


if __name__ == "__main__":
    import coterie

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000
    summary = coterie.train(env="selfplay/self_play:Nim", preset="ppo", steps=steps, **{"log.checkpoint_every": 5})
    pool = json.loads(Path(summary["folder"], "selfplay", "pool.json").read_text())
    policy = coterie.load(summary["folder"])
    where = [left for left in range(1, Nim.sticks + 1) if left % 4]  # elsewhere the opponent can win whatever we do
    right = sum(policy({k: x[None] for k, x in look(left).items()})[0] + 1 == left % 4 for left in where)
    score = coterie.evaluate_run(summary["folder"], episodes=200)["mean_return"]
    print(f"Elo {pool['elo']:.0f}; best moves {right} of {len(where)}; mean return against a random player {score:.2f}")

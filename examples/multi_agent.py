"""Several agents with one policy: robots that meet in pairs. python examples/multi_agent.py [STEPS]

Or by name, in the folder examples: coterie train ppo --env multi_agent:Pairs --steps 200000. Needs the extra
`pettingzoo`.
"""

import sys

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Pairs(ParallelEnv):
    """Robots on a ring each see how far away the others are. Two that end a step in one cell leave with a reward of
    1; a step costs 0.05. Neighbors that walk towards each other pass: of two with one policy, one has to wait.
    """

    cells, limit = 15, 20

    def __init__(self, robots=4):
        self.possible_agents = [f"robot_{k}" for k in range(robots)]
        self.observation_spaces = {a: spaces.Box(0, 1, (self.cells,), np.float32) for a in self.possible_agents}
        self.action_spaces = {a: spaces.Discrete(3) for a in self.possible_agents}  # left, wait, right

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents), 0
        cells = self.rng.choice(self.cells, len(self.agents), replace=False)
        self.at = dict(zip(self.agents, cells, strict=True))
        return {a: self.look(a) for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions):
        self.steps += 1
        for agent, action in actions.items():
            self.at[agent] = (self.at[agent] + action - 1) % self.cells
        met = {a: any(self.at[a] == self.at[b] for b in actions if b != a) for a in actions}
        late = {a: self.steps == self.limit and not met[a] for a in actions}
        rewards = {a: 1.0 * met[a] - 0.05 for a in actions}
        seen = {a: self.look(a) for a in actions}
        self.agents = [a for a in actions if not (met[a] or late[a])]  # the others go on
        return seen, rewards, met, late, {a: {} for a in actions}

    def look(self, agent):
        ring = np.zeros(self.cells, np.float32)
        for other in self.agents:
            if other != agent:
                ring[(self.at[other] - self.at[agent]) % self.cells] = 1
        return ring


if __name__ == "__main__":
    import coterie

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    summary = coterie.train(env=Pairs, preset="ppo", steps=steps)
    score = coterie.evaluate_run(summary["folder"], episodes=200, sampled=True, env=Pairs)
    print(f"mean return of a robot {score['mean_return']:.2f} +- {score['stderr']:.2f}")

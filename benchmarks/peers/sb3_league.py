"""Stable-Baselines3 with its own defaults, for benchmarks/league.py.

    python sb3_league.py {ppo,a2c,dqn,sac} --env ENV --steps N [--seed K] [--episodes 100]

One env, as its examples have it. The last line of output is JSON: seconds, the curve (env steps, seconds, mean return
of the last 100 training episodes) and the score of greedy episodes. SAC has one torch thread: two wait for each
other in every operation (1,100 optimizer steps on a busy machine: 450 s with two, 27 s with one).
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

POINTS = 80
KINDS = {"ppo": PPO, "a2c": A2C, "dqn": DQN, "sac": SAC}


class Curve(BaseCallback):
    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.next, self.points = every, every, list[list[float]]()
        self.begin = time.monotonic()

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.next and self.model.ep_info_buffer:
            self.next += self.every
            mean = float(np.mean([one["r"] for one in self.model.ep_info_buffer]))
            self.points.append([self.num_timesteps, round(time.monotonic() - self.begin, 1), round(mean, 2)])
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=[*KINDS])
    parser.add_argument("--env", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=100)
    o = parser.parse_args()
    if o.algorithm == "sac":
        torch.set_num_threads(1)
    unseen = {"render_mode": None}  # the library's default, rgb_array, simulates what only a picture would show
    env = make_vec_env(o.env, n_envs=1, seed=o.seed, env_kwargs=unseen)
    model = KINDS[o.algorithm]("MlpPolicy", env, seed=o.seed, device="cpu")
    curve = Curve(max(1, o.steps // POINTS))
    model.learn(o.steps, callback=curve)
    seconds = time.monotonic() - curve.begin
    test = make_vec_env(o.env, n_envs=1, seed=o.seed + 1_000_003, env_kwargs=unseen)
    returns, _ = evaluate_policy(model, test, o.episodes, return_episode_rewards=True)
    stderr = float(np.std(returns, ddof=1) / len(returns) ** 0.5)
    score = {"mean_return": float(np.mean(returns)), "stderr": stderr, "episodes": len(returns)}
    machine = {"cores": len(os.sched_getaffinity(0)), "gpus": 0}
    print(json.dumps({"seconds": round(seconds), "machine": machine, "score": score, "curve": curve.points}))


if __name__ == "__main__":
    main()

"""Stable-Baselines3 on gymnasium or on EnvPool.

    python sb3.py {lunar,breakout} {ppo,a2c,dqn} {gymnasium,envpool} [--seconds 60] [--envs 32] [--threads 2]

PPO takes 128 steps of each env, 4 epochs and minibatches of 256; A2C takes 5 steps; DQN trains on a batch of 32 for
every four env steps (1 or 2 envs, or multiples of 4). The nets are the library's own:
64-64 for vectors and the Nature CNN for images, in fp32. gymnasium's LunarLander runs in the training process, the
fastest of its two ways here, and its Atari in one process for each env.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch
from meter import Meter
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecMonitor

TASKS = {"lunar": "LunarLander-v3", "breakout": "Breakout-v5"}


class PoolVecEnv(VecEnv):
    """EnvPool as a VecEnv: an env whose episode ended is reset within the same step, as the library expects."""

    def __init__(self, task: str, num_envs: int, threads: int, **options: Any) -> None:
        import envpool  # not where gymnasium is measured

        self.pool = envpool.make_gymnasium(task, num_envs=num_envs, num_threads=threads, seed=0, **options)
        super().__init__(num_envs, self.pool.observation_space, self.pool.action_space)
        self.actions = np.zeros(num_envs, np.int32)

    def reset(self) -> Any:
        return self.pool.reset()[0]

    def step_async(self, actions: Any) -> None:
        self.actions = np.asarray(actions, np.int32)

    def step_wait(self) -> Any:
        obs, reward, terminated, truncated, _ = self.pool.step(self.actions)
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(done)
        if len(ended):
            for i in ended:
                infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": bool(truncated[i])}
            obs[ended] = self.pool.reset(ended.astype(np.int32))[0]
        return obs, reward, done, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"EnvPool's envs have no {attr_name!r}")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(f"EnvPool's envs have no {method_name!r}")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def breakout(**options: Any) -> Any:
    import ale_py

    gym.register_envs(ale_py)  # in each worker process, too
    return gym.make("BreakoutNoFrameskip-v4", **options)


def make(task: str, simulator: str, envs: int, threads: int) -> VecEnv:
    if simulator == "envpool":
        options = {"reward_clip": True, "episodic_life": True} if task == "breakout" else {}
        return VecMonitor(PoolVecEnv(TASKS[task], envs, threads, **options))
    if task == "lunar":
        # The library's default, rgb_array, makes LunarLander simulate the particles that a picture would show.
        unseen = {"render_mode": None}
        return make_vec_env(TASKS[task], n_envs=envs, seed=0, vec_env_cls=DummyVecEnv, env_kwargs=unseen)
    return VecFrameStack(make_atari_env(breakout, n_envs=envs, seed=0, vec_env_cls=SubprocVecEnv), 4)


class Clock(BaseCallback):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def _on_rollout_start(self) -> None:
        self.meter.tick(self.num_timesteps)

    def _on_step(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("algorithm", choices=["ppo", "a2c", "dqn"])
    parser.add_argument("simulator", choices=["gymnasium", "envpool"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    o = parser.parse_args()
    torch.set_num_threads(1 if o.task == "lunar" else o.threads)  # one is the faster for nets of 64 units
    env = make(o.task, o.simulator, o.envs, o.threads)
    policy = "CnnPolicy" if o.task == "breakout" else "MlpPolicy"
    if o.algorithm == "ppo":
        model = PPO(policy, env, n_steps=128, n_epochs=4, batch_size=256, ent_coef=0.01, device="cpu", seed=0)
    elif o.algorithm == "dqn":
        steps = {"train_freq": max(1, 4 // o.envs), "gradient_steps": max(1, o.envs // 4)}
        model = DQN(policy, env, buffer_size=20_000, learning_starts=1_000, **steps, device="cpu", seed=0)
    else:
        model = A2C(policy, env, n_steps=5, ent_coef=0.01, device="cpu", seed=0)
    about = {"peer": f"Stable-Baselines3 {stable_baselines3.__version__}", "simulator": o.simulator}
    model.learn(10**9, callback=Clock(Meter(o.seconds, 10, about)))


if __name__ == "__main__":
    main()

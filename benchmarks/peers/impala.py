"""RLlib's IMPALA on Breakout, Nature CNN, fp32. Its simulator is gymnasium's, since RLlib does not take EnvPool.

    python impala.py breakout [--seconds 60] [--runners 2] [--envs 8]

The rate is the smaller of sampled and trained env steps, as samples are dropped when the learner's queue is full.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import gymnasium as gym
import numpy as np
import ray
from meter import Meter
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env


def breakout(_: Any) -> Any:
    import ale_py

    gym.register_envs(ale_py)
    env: Any = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=4, terminal_on_life_loss=True)
    env = gym.wrappers.FrameStackObservation(gym.wrappers.ClipReward(env, -1, 1), 4)
    space = gym.spaces.Box(0.0, 1.0, (84, 84, 4), np.float32)  # its CNN takes channels last, as floats
    return gym.wrappers.TransformObservation(env, lambda x: np.moveaxis(x, 0, -1).astype(np.float32) / 255, space)


def count(result: Any, *path: str) -> int:
    for key in path:
        result = result.get(key, {})
    return int(result or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["breakout"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    o = parser.parse_args()
    # Ray's CPUs only limit how many processes it starts.
    ray.init("local", num_cpus=16, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=2 * 10**9)
    register_env("breakout", breakout)
    net = DefaultModelConfig(
        conv_filters=[[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"]],
        conv_activation="relu",
        head_fcnet_hiddens=[512],
        head_fcnet_activation="relu",
        vf_share_layers=True,
    )
    config = (
        IMPALAConfig()
        .environment("breakout")
        .env_runners(num_env_runners=o.runners, num_envs_per_env_runner=o.envs, rollout_fragment_length=50)
        .learners(num_learners=0, num_aggregator_actors_per_learner=0)
        .training(lr=5e-4, train_batch_size_per_learner=500, broadcast_interval=1)
        .reporting(min_time_s_per_iteration=2)
        .rl_module(model_config=net)
    )
    algorithm = config.build_algo()
    meter = Meter(o.seconds, 30, {"peer": f"RLlib {ray.__version__} IMPALA", "simulator": "gymnasium"})
    while True:
        result = algorithm.train()
        sampled = count(result, "env_runners", "num_env_steps_sampled_lifetime")
        trained = count(result, "learners", "__all_modules__", "num_env_steps_trained_lifetime")
        meter.tick(min(sampled, trained))


if __name__ == "__main__":
    main()

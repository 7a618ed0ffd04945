"""Sample Factory's asynchronous APPO on EnvPool.

    python appo.py {lunar,breakout} [--seconds 60] [--epochs 1] [--envs 16] [--rollout 32] [--batch 1024]

Two rollout workers, each with one batched env of `--envs` instances; the learner is a third process. Nets in fp32:
64-64 tanh for vectors, the Nature CNN for images. No recurrence, no normalization, no V-trace.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import envpool
import gymnasium as gym
import numpy as np
from meter import Meter
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

TASKS = {"lunar": "LunarLander-v3", "breakout": "Breakout-v5"}


class Pool(gym.Env[Any, Any]):
    """One EnvPool as a batched env. It resets an ended env at that env's next step."""

    is_multiagent = True
    render_mode = None

    def __init__(self, task: str, num_envs: int, seed: int) -> None:
        options = {"reward_clip": True, "episodic_life": True} if task == "breakout" else {}
        self.pool = envpool.make_gymnasium(TASKS[task], num_envs=num_envs, num_threads=2, seed=seed, **options)
        space, self.num_agents = self.pool.observation_space, num_envs
        self.observation_space = gym.spaces.Box(space.low.min(), space.high.max(), space.shape, space.dtype)
        self.action_space = gym.spaces.Discrete(int(self.pool.action_space.n))

    def reset(self, **_: Any) -> Any:
        return self.pool.reset()[0], {}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.pool.step(np.asarray(action, np.int32).reshape(-1))
        return obs, reward.astype(np.float32), terminated, truncated, {}

    def close(self) -> None:
        pass  # EnvPool cannot be closed under the gymnasium that Sample Factory needs


class Clock(AlgoObserver):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        self.meter.tick(runner.env_steps.get(0, 0))


def make(task: str, envs: int, _: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Pool:
    return Pool(task, envs, int(env_config.env_id) if env_config else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seconds", type=float, default=60)
    for name, default in (("epochs", 1), ("envs", 16), ("rollout", 32), ("batch", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()

    register_env("pool", functools.partial(make, o.task, o.envs))
    settings = {
        "env": "pool", "algo": "APPO", "train_dir": tempfile.mkdtemp(prefix="sample-factory-"), "experiment": "rate",
        "device": "cpu", "async_rl": True, "serial_mode": False, "num_workers": 2, "num_envs_per_worker": 1,
        "worker_num_splits": 1, "batched_sampling": True, "rollout": o.rollout, "recurrence": 1, "use_rnn": False,
        "batch_size": o.batch, "num_batches_per_epoch": 1, "num_epochs": o.epochs, "with_vtrace": False,
        "normalize_input": False, "normalize_returns": False, "actor_critic_share_weights": True,
        "train_for_env_steps": 10**9, "summaries_use_frameskip": False, "save_every_sec": 10**5,
        "decorrelate_envs_on_one_worker": False, "decorrelate_experience_max_seconds": 0,
        "set_workers_cpu_affinity": False,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    if o.task == "breakout":
        arguments += ["--encoder_conv_architecture=convnet_atari", "--encoder_conv_mlp_layers", "512"]
        arguments += ["--obs_scale=255.0", "--env_frameskip=4", "--nonlinearity=relu"]
    else:
        arguments += ["--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh"]
    _, runner = make_runner(parse_full_cfg(parse_sf_args(arguments)[0], arguments))
    about = {"peer": "Sample Factory 2.1.1", "simulator": "envpool"}
    runner.register_observer(Clock(Meter(o.seconds, 15, about)))
    runner.init()
    runner.run()


if __name__ == "__main__":
    main()

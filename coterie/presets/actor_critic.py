"""A2C, A3C, PPO, APPO and GALA."""

from __future__ import annotations

from typing import Any

from coterie.config import PPO, Algo, Config, Gossip, Hogwild, Model, Optim, Reward, Schedule, Store
from coterie.plugins import NameOrObject
from coterie.presets.common import LINEAR, derive, image_rewards, is_classic, make, vector_rewards
from coterie.runs.objects import name_of


def a2c(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """Synchronous A2C, a simple baseline with short rollouts.

    Images: Accelerated Methods and its code (16 simulators, n = 5, RMSProp at 7e-4, eps inside the root), 10M env steps
    as in that code's example (the paper has 25M). With more simulators the rate grows by the root of their number.
    Ours: 84x84 frames, up to 200 random steps first (2000). Vectors and continuous control: our own settings, with
    normalized rewards and advantages; the continuous form of LunarLander has the discount and lambda of vectors.
    """
    env = name_of("env.id", env)
    return make(
        "a2c",
        env,
        overrides,
        {"algorithm": "a2c"},
        image={
            "steps": 10_000_000,
            "env.decorrelate": 200,
            "reward": image_rewards(env),
            "model.torso": "a3c",
            "algo": Algo(unroll_length=5, value_coef=0.25),
            "optim": Optim("rmsprop_tf", lr=7e-4, alpha=0.9, eps=1e-6, sqrt_scaling_from=16),
        },
        vector={
            "reward.normalize": True,
            "algo": Algo(16, gamma=0.995, gae_lambda=0.98, entropy_coef=0.005, normalize_advantage=True),
            "optim": Optim("rmsprop", lr=2e-3, schedule=LINEAR),
        },
        continuous={"algo": Algo(16, *_horizon(env, 0.995), entropy_coef=0.0, normalize_advantage=True)},
    )


def ppo(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """PPO, the one to try first: every kind of env and of action.

    Images: batches of 2048, clip 0.2, lambda 0.95 and entropy 0.01 as in Accelerated Methods. Ours, for few samples:
    5M env steps (25M), 16 envs (8), up to 200 random steps first (2000), 3 epochs over minibatches of 256, Adam at 5e-4
    with a linear schedule, normalized advantages, value coefficient 0.5, gradients clipped to 0.5; `ppo-paper` has the
    paper's values. Vectors and continuous control: our own settings, with normalized rewards but for CartPole, Acrobot
    and LunarLander, which are known to learn without (some seeds of MountainCar do not). The continuous form of
    LunarLander has the discount and lambda of vectors.
    """
    env = name_of("env.id", env)
    return make(
        "ppo",
        env,
        overrides,
        {"algorithm": "ppo", "env.num_envs": 16},
        image={
            "steps": 5_000_000,
            "env.decorrelate": 200,
            "reward": image_rewards(env),
            "model.torso": "a3c",
            "algo": Algo(128, gae_lambda=0.95, normalize_advantage=True),
            "ppo": PPO(epochs=3, minibatch_size=256, clip=0.2, batch_size=2048),
            "optim": Optim("adam", lr=5e-4, eps=1e-5, schedule=LINEAR),
        },
        vector={
            "reward.normalize": not is_classic(env) or env.startswith("MountainCar-"),
            "algo": Algo(128, gamma=0.999, gae_lambda=0.98, entropy_coef=0.01, normalize_advantage=True),
            "ppo": PPO(epochs=4, minibatch_size=128),
            "optim": Optim("adam", lr=1e-3, eps=1e-5, schedule=LINEAR),
        },
        continuous={
            "reward.normalize": True,
            "algo": Algo(128, *_horizon(env, 0.999), entropy_coef=0.0, normalize_advantage=True),
            "ppo": PPO(epochs=10, minibatch_size=128),
            "optim": Optim("adam", lr=3e-4, eps=1e-5, schedule=LINEAR),
        },
    )


def ppo_paper(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """PPO with a paper's settings for Atari, to compare with it.

    As in Accelerated Methods and its code: 8 simulators of 256 steps, 4 epochs, minibatches of 512, Adam at 1e-3, value
    coefficient 1, no clipping of gradients; the linear schedule and normalized advantages are options of that code, off
    by default. Ours: both are on, as in PPO's first code, advantages normalized in each minibatch (both codes: in each
    rollout); 84x84 frames, up to 200 random steps first (2000).
    Vectors and continuous control: as `ppo`.
    """
    image = {
        "steps": 25_000_000,
        "env.num_envs": 8,
        "algo": Algo(256, gae_lambda=0.95, value_coef=1.0, normalize_advantage=True),
        "ppo": PPO(epochs=4, minibatch_size=512, clip=0.2, clip_schedule=LINEAR, batch_size=2048),
        "optim": Optim("adam_eps_hat", lr=1e-3, eps=1e-5, max_grad_norm=0.0, schedule=LINEAR),
    }
    return derive(ppo, "ppo-paper", env, overrides, {}, image)


def gala_a2c(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """GALA-A2C: A2C learners that gossip, for several cores.

    Images: the arguments of GALA's public code: a directed ring, mixed after every update, 16 simulators each, n = 5,
    RMSProp 7e-4 times the root of all simulators over 16, no start decorrelation. Ours: 10M env steps (25M and 40M).
    Vectors and continuous control: each learner as `a2c`.
    """
    image = {
        "env.decorrelate": 0,
        "model.torso": "gala",
        "algo": Algo(unroll_length=5),
        "optim": Optim("rmsprop", lr=7e-4, alpha=0.99, eps=1e-5, sqrt_scaling_from=16),
    }
    common = {"exchange": "gossip", "learners": "auto", "gossip": Gossip(mix_every=1)}
    return derive(a2c, "gala-a2c", env, overrides, common, image)


def gala_ppo(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """PPO learners that gossip, for several cores.

    They mix once for each rollout: a combination that no paper has. Each learner has half of `ppo`'s envs, and its
    minibatches are half as large, so that each of two makes as many updates as `ppo` for the run's env steps. Images:
    6M env steps.
    """
    common = {"exchange": "gossip", "learners": "auto", "env.num_envs": 8}
    image = {"steps": 6_000_000, "ppo.batch_size": 1024, "ppo.minibatch_size": 128}
    return derive(ppo, "gala-ppo", env, overrides, common, image, {"ppo.minibatch_size": 64})


def bc(env: NameOrObject = "Hopper-v5", **overrides: Any) -> Config:
    """Behavior cloning of a Minari data set (`bc.dataset`).

    The network is that of `ppo`, which can go on from it with `init_from`. Ours: 100,000 env steps, each with 16 steps
    of the data.
    """
    common = {"algorithm": "bc", "steps": 100_000, "algo.entropy_coef": 0.0, "optim.max_grad_norm": 0.0}
    return derive(ppo, "bc", env, overrides, common)


def a3c(env: NameOrObject = "LunarLander-v3", **overrides: Any) -> Config:
    """A3C with GAE and an LSTM: lock-free workers, for many cores.

    Christensen and Hansen: workers of one simulator each, Adam with each worker's own moments, FC256-FC256-LSTM256
    shared by policy and value, or a small convolutional net before the LSTM. Classic vector envs: rewards times 0.01 as
    in the authors' code. Ours: 24 workers (64), lambda 0.98, an entropy bonus, gradients clipped to 0.5, a decaying
    learning rate; for vectors also longer unrolls and a faster rate; MountainCar's actions repeated 6 times (4) and its
    observations normalized. Values learn lambda-returns (Algorithm 1: n-step returns). `a3c-paper` has the paper's
    defaults.
    """
    env = name_of("env.id", env)
    net = Model("mlp", (256, 256), core="lstm", core_size=256, forget_bias=0.0, share="yes")
    vector = {
        "steps": 1_200_000,
        "reward": vector_rewards(env),
        "model": net,
        "algo": Algo(100, gamma=0.995, gae_lambda=0.98, value_coef=0.25, entropy_coef=0.001),
        "optim": Optim("adam", lr=7e-4, eps=1e-8, max_grad_norm=0.5, schedule=LINEAR),
    }
    if env.startswith("MountainCar-"):
        until = Schedule("steps", at=(12_000,), by="episodes", factors=(0.0,))
        vector |= {
            "steps": 400_000,
            "env.action_repeat": 6,
            "algo": Algo(50, gae_lambda=0.98, value_coef=0.25, entropy_coef=0.01, entropy_schedule=until),
            "model.normalize_obs": True,  # its velocity is 20 times smaller than its position
            "optim.lr": 1e-3,
        }
    return make(
        "a3c",
        env,
        overrides,
        {"exchange": "hogwild", "learners": 24, "env.num_envs": 1, "hogwild": Hogwild("own")},
        image={
            "steps": 10_000_000,
            "reward": image_rewards(env),
            "model": net,
            "model.torso": "a3c-gae",
            "algo": Algo(20, gae_lambda=0.98, value_coef=0.25, entropy_coef=0.01),
            "optim": Optim("adam", lr=1e-4, eps=1e-8, max_grad_norm=0.5, schedule=LINEAR),
        },
        vector=vector,
        continuous={
            "steps": 1_500_000,
            "reward": Reward(normalize=True),
            "model.normalize_obs": True,
            "model.init_log_std": -0.7,
            "algo": Algo(32, gae_lambda=0.95, value_coef=0.25, entropy_coef=0.0),
            "optim": Optim("adam", lr=5e-4, eps=1e-8, max_grad_norm=0.5, schedule=LINEAR),
        },
    )


def a3c_paper(env: NameOrObject = "LunarLander-v3", **overrides: Any) -> Config:
    """A3C with the defaults of its paper, to compare with it.

    Christensen and Hansen: 64 workers, updates every 20 steps, lambda 1, no entropy bonus, Adam at 1e-4 without a
    schedule or clipping, rewards times 1e-3, the n-step return as the value's target (Algorithm 1), time limits as
    ends. Unlike Algorithm 1, 20 steps go on across the end of an episode. From the authors' code: gamma 0.99, value
    coefficient 0.25, MountainCar's actions repeated 4 times. Ours: losses are means over the 20 steps, which Adam
    divides out; 10M env steps (280 to 3000 episodes a worker).
    """
    env = name_of("env.id", env)
    settings = {
        "steps": 10_000_000,
        "learners": 64,
        "env.time_limit": "terminate",
        "env.action_repeat": 4 if env.startswith("MountainCar-") else 1,
        "reward": Reward(scale=1e-3),
        "model.normalize_obs": False,
        "model.activation": "relu",
        "algo": Algo(20, gamma=0.99, gae_lambda=1.0, value_target="n-step", value_coef=0.25, entropy_coef=0.0),
        "optim": Optim("adam", lr=1e-4, eps=1e-8, max_grad_norm=0.0),
    }
    return derive(a3c, "a3c-paper", env, overrides, settings)


def a3c_store(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """A2C learners on a central store, for several cores.

    A3C with large batches (Accelerated Methods): learners that meet a store of 3 chunks after every update. The
    learning rate does not grow with the learners.
    """
    return derive(a2c, "a3c-store", env, overrides, {"exchange": "store", "learners": "auto"})


def appo(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """APPO: PPO learners on a central store, for several cores.

    Accelerated Methods, Appendix B: learners of 8 simulators and horizon 256, two local Adam steps between updates of
    the store, weights polled every 64 steps, 4 epochs over minibatches of 512, a quarter of PPO's rate, no schedule.
    Images: value coefficient 1, Adam as Keras has it, 25M env steps. Ours: normalized advantages, and frames of 84x84
    with up to 200 random steps first. Vectors and continuous control: these batches and this rate, not tuned; in other
    respects as `ppo`.
    """
    common = {
        "exchange": "store",
        "learners": "auto",
        "env.num_envs": 8,
        "store": Store(chunks=3, local_steps=2),
        "algo.unroll_length": 256,
        "algo.poll": 64,
        "ppo.batch_size": 2048,
        "ppo.minibatch_size": 512,
        "ppo.epochs": 4,
        "optim.lr": 2.5e-4,
        "optim.schedule": Schedule(),
        "optim.max_grad_norm": 0.5,
    }
    image = {"steps": 25_000_000, "algo.value_coef": 1.0, "optim.rule": "adam_eps_hat"}
    return derive(ppo, "appo", env, overrides, common, image)


def _horizon(env: str, gamma: float) -> tuple[float, float]:
    """Discount and lambda of continuous control. `gamma`: of LunarLander, which gives most of its reward at the end."""
    return (gamma, 0.98) if env.startswith("LunarLander") else (0.99, 0.95)

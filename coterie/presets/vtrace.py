"""Presets of V-trace: IMPALA, and SEED RL with it."""

from __future__ import annotations

from typing import Any

from coterie.config import Algo, Central, Config, Decoupled, Optim, Reward, VTrace
from coterie.plugins import NameOrObject
from coterie.presets.common import LINEAR, Changes, derive, envs, flat, image_rewards, make, of_env, vector_rewards
from coterie.runs.objects import name_of

_PAPER: Changes = {
    "steps": 50_000_000,
    "decoupled": Decoupled(batch_size=32),
    "algo": Algo(20, value_coef=0.25, entropy_coef=0.01),  # half of 0.5 times the squared error
    "vtrace": VTrace(loss="sum"),
    "optim": Optim("rmsprop_tf", lr=6e-4, eps=0.01, max_grad_norm=40.0, schedule=LINEAR),
}


def impala(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """IMPALA: actors that never wait, for many cores and slow envs.

    Decoupled actors with as many simulators as keep the cores busy, and V-trace. Images: our settings, to learn from
    fewer env steps: Adam, a step for every 4 rollouts of 20 steps, mean losses, lambda 0.95, normalized advantages
    (Pong: 16.4 after 5.8M env steps, one run that was stopped there). `impala-paper` has the paper's. `dmlab/...`: as
    `impala-paper`. Vectors and continuous control: our settings; the continuous form of LunarLander has the discount of
    vectors, unrolls of 128 with n-step returns, in batches of 4, and normalized advantages.
    """
    env = name_of("env.id", env)
    image: Changes = {
        "steps": 10_000_000,
        "decoupled": Decoupled(batch_size=16),
        "reward": image_rewards(env, "clamp"),
        "model.torso": "gala",
        "algo": Algo(20, gae_lambda=0.95, value_coef=0.25, entropy_coef=0.01, normalize_advantage=True),
        "vtrace": VTrace(minibatch=4),
        "optim": Optim("adam", lr=3e-4, eps=1e-5, schedule=LINEAR),
    }
    if env.startswith("dmlab/"):
        image |= _PAPER | {
            "steps": 10_000_000,
            "model.torso": "a3c",
            "model.core": "lstm",
            "model.core_size": 256,
            "model.last_action_reward": True,
            "algo": Algo(100, value_coef=0.25, entropy_coef=2.5e-4),
            "optim": Optim("rmsprop_tf", lr=4.8e-4, eps=0.1, max_grad_norm=0.0, schedule=LINEAR),
        }
    lander: Changes = {
        "algo": Algo(128, gamma=0.995, entropy_coef=0.0, normalize_advantage=True),
        "decoupled": Decoupled(batch_size=4),
        "optim": Optim("adam", lr=4e-4, schedule=LINEAR),
    }
    return make(
        "impala",
        env,
        overrides,
        {"algorithm": "vtrace", "acting": "decoupled", "env.num_envs": 0},
        image=image,
        vector={
            "reward": vector_rewards(env),
            "algo": Algo(20, gamma=0.995, gae_lambda=0.98, entropy_coef=0.003),
            "decoupled": Decoupled(batch_size=8),
            "optim": Optim("rmsprop", lr=3e-3, schedule=LINEAR),
        },
        continuous={
            "reward": Reward(normalize=True),
            "model.init_log_std": -0.7,
            "algo": Algo(32, gae_lambda=0.95, entropy_coef=0.0),
            "optim": Optim("adam", lr=7e-4, schedule=LINEAR),
            **(lander if env.startswith("LunarLander") else {}),
        },
    )


def impala_paper(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """IMPALA with its paper's settings, to compare with it.

    Table G.1: losses summed over batches of 32 rollouts of 20 steps, RMSProp with eps 0.01 inside the root, gradients
    clipped to 40, feed-forward on four frames, 50M env steps. `dmlab/...`: the shallow net with its LSTM of 256, last
    action and reward, unrolls of 100, and the rates of the authors' code. Other than in the paper: for Atari GALA's net
    in the place of the shallow one, and FIRE at the start of a game; 10M env steps of DMLab; as many simulators as keep
    the cores busy; no population-based training, no single run of all DMLab-30 tasks. Vectors and continuous control:
    as `impala`.
    """
    image = {} if name_of("env.id", env).startswith("dmlab/") else _PAPER
    return derive(impala, "impala-paper", env, overrides, {}, image)


def impala_deep(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """IMPALA with a deep network for images, for a GPU.

    As `impala-paper`, with the ResNet of 15 convolutions (Figure 3, right).
    """
    return derive(impala_paper, "impala-deep", env, overrides, {}, {"model.torso": "impala"})


def seed_vtrace(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """SEED RL with V-trace: central inference, for a GPU.

    Images: gcp/train_dmlab_explore_goal_locations_small.sh: env hosts without a policy, unrolls of 100 in batches of
    32, mean losses, Adam without momentum, rewards clipped to [-1, 1], the ResNet. Ours: 64 envs (400 actors), 10M env
    steps. Left out: the KL penalty, and but for `dmlab/...` the LSTM and the last action and reward: feed-forward on
    four frames. Vectors and continuous control: our settings for IMPALA.
    """
    image = {
        "env.num_envs": envs(env, 64),
        "central": Central(batch_size=32),
        "model.torso": "impala",
        "algo": Algo(100, gae_lambda=0.95, value_coef=0.25, entropy_coef=9.7056e-4),  # half of 0.5 times the square
        "vtrace": VTrace(loss="mean"),
        "optim": Optim("adam_eps_hat", lr=2.2588e-4, beta1=0.0, eps=3.125e-9, max_grad_norm=0.0, schedule=LINEAR),
    }
    batch = impala(env, **of_env(flat(overrides))).decoupled.batch_size
    vector = {"env.num_envs": envs(env, 16), "central": Central(batch_size=batch)}
    common = {"acting": "central", "decoupled": Decoupled()}
    return derive(impala, "seed-vtrace", env, overrides, common, image, vector)


def seed_football(env: NameOrObject = "gfootball/11_vs_11_hard_stochastic-v1", **overrides: Any) -> Config:
    """SEED RL with V-trace, for Google Research Football.

    Images: gcp/train_football_scoring.sh, and train_football_checkpoints.sh where `env.kwargs` asks for the checkpoint
    reward: unrolls of 32 in batches of 32, rewards as they are, Keras' Adam at a fixed rate, a ResNet of four stages.
    One frame on EnvPool; the paper's four by examples/envs/football.py.
    """
    checkpoints = "checkpoints" in flat(overrides).get("env.kwargs", "")
    lr, entropy, gae_lambda = (1.2542e-4, 7.3309e-4, 1.0) if checkpoints else (5.5339e-5, 3.1948e-5, 0.9)
    image = {
        "steps": 500_000_000,
        "reward": Reward(),
        "model.torso": "football",
        "algo": Algo(32, gamma=0.997, gae_lambda=gae_lambda, value_coef=0.25, entropy_coef=entropy),
        "optim": Optim("adam_eps_hat", lr=lr, eps=1e-7, max_grad_norm=0.0),
    }
    return derive(seed_vtrace, "seed-football", env, overrides, {}, image)

"""Presets of value learning: DQN and its descendants (Accelerated Methods and its code), Ape-X, R2D2 (SEED RL).

Vectors: our own settings.
"""

from __future__ import annotations

from typing import Any

from coterie.config import R2D2, Algo, Config, Optim, Q, Replay, Reward
from coterie.plugins import NameOrObject
from coterie.presets.common import LINEAR, derive, envs, make
from coterie.runs.objects import name_of


def dqn(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """DQN with a replay, for discrete actions and slow envs.

    Images, as in Accelerated Methods and its code: 32 simulators, batches of 32, each env step trained on 8 times,
    RMSProp, target network every 10,000 env steps, epsilon from 1 to 0.1 over a million, 10M env steps (the paper 50M).
    Vectors: our own, double and three-step, 8 envs; rewards of CartPole, Acrobot and MountainCar times 0.1, of
    LunarLander 0.01, so that most errors are below 1, where the Huber loss is quadratic. On MountainCar each action is
    repeated 4 times; otherwise few random episodes reach the flag.
    """
    env = name_of("env.id", env)
    return make(
        "dqn",
        env,
        overrides,
        {"algorithm": "dqn"},
        image={
            "steps": 10_000_000,
            "env.num_envs": 32,
            "reward.clip": "sign",
            "model.torso": "nature",
            "algo": Algo(unroll_length=4),
            "q": Q(double=False, epsilon_end=0.1, epsilon_steps=1_000_000, learn_start=50_000, eval_epsilon=0.05),
            "optim": Optim("rmsprop_tf", lr=2.5e-4, alpha=0.95, eps=1e-6, max_grad_norm=0.0),
        },
        vector={
            "steps": 500_000,
            "env.num_envs": 8,
            "env.action_repeat": 4 if env.startswith("MountainCar-") else 1,
            "model.hidden": (128, 128),
            "model.activation": "relu",
            "algo": Algo(unroll_length=8, gamma=0.99),
            "q": Q(n_step=3, target_every=2_000, batch_size=128, learn_start=2_000, intensity=16.0),
            "q.epsilon_end": 0.02,
            "q.epsilon_steps": 50_000,
            "replay.capacity": 200_000,
            "reward.scale": 0.1 if env.startswith("CartPole") else _range(env)[2],
            "optim": Optim("adam", lr=5e-4, eps=1e-5, max_grad_norm=10.0, schedule=LINEAR),
        },
        continuous={},
    )


def dqn_512(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """DQN with batches of 512, for a GPU.

    Images: Accelerated Methods, Table 1: RMSProp at 7.5e-4.
    """
    return derive(dqn, "dqn-512", env, overrides, {"q.batch_size": 512}, {"optim.lr": 7.5e-4})


def dqn_async(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """Four DQN learners on a central store, for several cores.

    Batches of 512: Accelerated Methods, Table 2.
    """
    return derive(dqn_512, "dqn-async", env, overrides, {"exchange": "store", "learners": 4})


def c51(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """C51, categorical DQN: for returns of a known range.

    Images: Accelerated Methods and its code: 51 returns from -10 to 10, Adam at 2.5e-4 with eps 0.01 / 32, epsilon to
    0.01. Vectors: ours; returns from -4 to 4 for LunarLander (rewards times 0.01), 0 to 100 for CartPole, -10 to 0 for
    Acrobot and MountainCar (times 0.1), -10 to 10 for others: set `q.v_min` and `q.v_max`.
    """
    env = name_of("env.id", env)
    image = {
        "q.epsilon_end": 0.01,
        "q.eval_epsilon": 0.001,
        "optim": Optim("adam_eps_hat", lr=2.5e-4, eps=0.01 / 32, max_grad_norm=0.0),
    }
    low, high, scale = _range(env)
    vector = {"q.v_min": low, "q.v_max": high, "reward.scale": scale}
    return derive(dqn, "c51", env, overrides, {"q.atoms": 51, "q.double": False}, image, vector)


def c51_2048(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """C51 with batches of 2048, for a GPU.

    Images: Accelerated Methods, Table 1: 64 simulators, Adam at 4.2e-4 with eps 0.01 / 2048.
    """
    image = {"env.num_envs": 64, "optim.lr": 4.2e-4, "optim.eps": 0.01 / 2048}
    return derive(c51, "c51-2048", env, overrides, {"q.batch_size": 2048}, image)


def rainbow(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """Rainbow without noisy layers, for few env steps.

    Epsilon-Rainbow of the code of Accelerated Methods: double, dueling, prioritized (0.5, 0.4 to 1), three-step,
    categorical. Images: Adam at 6.25e-5 with eps 0.005 / 32, target network every 8,000 env steps. Ours: the weight of
    the correction reaches 1 at the end of the run. Vectors: as `c51`.
    """
    image = {
        "model.torso": "nature-conv",
        "q.dueling": 512,
        "q.target_every": 8_000,
        "q.learn_start": 20_000,
        "q.epsilon_steps": 62_500,
        "optim": Optim("adam_eps_hat", lr=6.25e-5, eps=0.005 / 32, max_grad_norm=10.0),
    }
    common = {"q.double": True, "q.n_step": 3, "replay.alpha": 0.5, "replay.beta": 0.4}
    return derive(c51, "rainbow", env, overrides, common, image, {"q.dueling": 128})


def rainbow_512(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """Rainbow with batches of 512, for a GPU.

    Images: Accelerated Methods, Table 1: eps 0.005 / 512, and Adam's rate as for batches of 32 (A.3: "without scaling
    the learning rate").
    """
    image = {"optim.eps": 0.005 / 512}
    return derive(rainbow, "rainbow-512", env, overrides, {"q.batch_size": 512}, image)


def apex_dqn(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """Ape-X: DQN with actors and priorities, for several cores.

    Horgan et al. 2018: decoupled actors, an epsilon for each env, 0.4^(1 + 7 i / (N - 1)), first priorities (0.6, 0.4)
    from the actors' values (of the chosen actions, not of the best ones), double, dueling, three-step, batches of 512.
    As `dqn-512`, not as the paper: a replay of a million env steps (two), the target network every 10,000 env steps,
    156 updates (2,500). Ours: as many envs as keep the cores busy; the Huber loss (squared); RMSProp is not centered.
    """
    common = {
        "acting": "decoupled",
        "q.double": True,
        "q.n_step": 3,
        "q.epsilon_end": 0.4,
        "q.ladder": 7.0,
        "replay.alpha": 0.6,
        "replay.beta": 0.4,
        "replay.beta_end": 0.4,
        "replay.initial": "acting",
    }
    image = {
        "env.num_envs": envs(env, 32),
        "model.torso": "nature-conv",
        "algo": Algo(unroll_length=10),
        "q.dueling": 512,
        "optim": Optim("rmsprop", lr=0.00025 / 4, alpha=0.95, eps=1.5e-7, max_grad_norm=40.0),
    }
    return derive(dqn_512, "apex-dqn", env, overrides, common, image, {"env.num_envs": envs(env, 8), "q.dueling": 128})


def seed_r2d2(env: NameOrObject = "Pong-v5", **overrides: Any) -> Config:
    """R2D2: DQN with an LSTM, for envs that need memory.

    Images: SEED RL (gcp/train_atari.sh), with central inference: sequences of 80 after a burn-in of 40, 64 in a batch,
    each env step trained on 0.75 times, priorities (0.9, 0.6), n = 5, gamma 0.997, an epsilon for each env, 0.4^(1 to
    8), TensorFlow's Adam at 1e-4; the losses of a sequence's 80 steps are means here, which its eps and clip follow.
    First priorities by the values that acted. All 18 actions, lives and rewards as they are, and the paper's 40 billion
    frames: it copies its target network every 17 million env steps. A twentieth of the replay is gathered first. Ours:
    64 simulators (the paper's 610), a replay of a million env steps (7.4 GiB; 8 million in 85 GB), a bias in the
    advantages' layer. Vectors: our own settings.
    """
    common = {
        "algorithm": "r2d2",
        "acting": "central",
        "reward": Reward(),
        "q": Q(n_step=5, huber=0.0, epsilon_end=0.4, ladder=7.0, eval_epsilon=0.001),
        "replay": Replay(capacity=1_000_000, alpha=0.9, beta=0.6, beta_end=0.6, initial="acting"),
        "model.core": "lstm",
        "model.last_action_reward": True,
    }
    image = {
        "steps": 10_000_000_000,
        "env.num_envs": envs(env, 64),
        "model.core_size": 512,
        "model.clip_last_reward": False,
        "algo": Algo(unroll_length=40, gamma=0.997),
        "q.dueling": 512,
        "q.batch_size": 64,
        "q.intensity": 0.75,
        "q.learn_start": 50_000,
        "q.target_every": 2_500 * 6_827,
        "r2d2": R2D2(length=80, burn_in=40, stride=80),
        "optim": Optim("adam_eps_hat", lr=1e-4, eps=1e-3 / 80, max_grad_norm=1.0),
    }
    vector = {
        "reward.scale": 1.0,  # R2D2 rescales values itself
        "env.num_envs": envs(env, 16),
        "model.hidden": (128,),
        "model.core_size": 128,
        "algo": Algo(unroll_length=10, gamma=0.99),
        "q.batch_size": 16,
        "q.intensity": 16.0,
        "q.learn_start": 4_000,
        "q.target_every": 1_000,
        "replay.capacity": 200_000,
        "r2d2": R2D2(length=20, burn_in=10, stride=10),
        "optim": Optim("adam", lr=1e-3, eps=1e-5, max_grad_norm=10.0, schedule=LINEAR),
    }
    overrides = {"atari.episodic_life": False, "atari.full_action_set": True, **overrides}
    return derive(dqn, "seed-r2d2", env, overrides, common, image, vector)


def sac(env: NameOrObject = "Hopper-v5", **overrides: Any) -> Config:
    """Soft actor-critic, for continuous actions and slow envs.

    Haarnoja et al. 2018, arXiv 1812.05905, appendix D: two hidden layers of 256, batches of 256, Adam at 3e-4, tau
    0.005, one optimizer step for each env step, a replay of a million, a learned temperature. Random actions for 10,000
    env steps, as Stable-Baselines3's zoo. Ours: 4 envs, 16 env steps between the optimizer steps.
    """
    continuous = {
        "env.num_envs": envs(env, 4),
        "model.hidden": (256, 256),
        "model.activation": "relu",
        "model.normalize_obs": False,
        "algo": Algo(unroll_length=4, gamma=0.99),
        "q": Q(batch_size=256, intensity=256.0, learn_start=10_000),
        "optim": Optim("adam", lr=3e-4, eps=1e-8, max_grad_norm=0.0),
    }
    return make("sac", env, overrides, {"algorithm": "sac"}, image={}, vector={}, continuous=continuous)


def _range(env: str) -> tuple[float, float, float]:
    """Smallest and largest discounted return of a family of envs, roughly, with rewards scaled by the third number."""
    if env.startswith("LunarLander"):
        return -4.0, 4.0, 0.01
    if env.startswith("CartPole"):
        return 0.0, 100.0, 1.0
    if env.startswith(("MountainCar-", "Acrobot")):
        return -10.0, 0.0, 0.1
    return -10.0, 10.0, 1.0

"""Options under the names that older versions or other libraries give them, for error messages."""

from __future__ import annotations

from typing import Any

from coterie.plugins import PARTS

# Options of older versions: the value that a config file may still have (None: any), and the error for any other value.
OLD: dict[str, tuple[Any, str]] = {
    **{f"own.{part}": ("", f"is now plugins.{part}") for part in PARTS},
    **{f"{section}.algorithm": ("", "is now algorithm") for section in ("own", "plugins")},
    "env.reset": ("in_place", "was removed; envs are always reset in place"),
    "env.reserve": (None, "was removed with env.reset"),
    "env.delay_kind": ("constant", "was removed; env.delay is constant"),
    "central.inference_gpus": (0, "was removed; each learner chooses actions on its own GPU"),
    "central.lag_alarm": (0, "was removed; metrics.jsonl has policy_lag"),
    "decoupled.lag_alarm": (0, "was removed; metrics.jsonl has policy_lag"),
    "cuda_graphs": (True, "is now graphs"),
    "gossip.seats": (None, "was removed; a run gossips with at most 256 learners of other runs"),
    "sac.entropy_target": (0.0, "is now sac.target_entropy"),
    "store.fixed_turns": (False, "was removed; exchange allreduce, or gossip with tau 0, is reproducible"),
}
# What Stable-Baselines3 and CleanRL call otherwise, where no spelling is near.
PEERS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("optim.lr",),
    "total_timesteps": ("steps",),
    "n_steps": ("algo.unroll_length",),
    "num_steps": ("algo.unroll_length",),
    "batch_size": ("ppo.minibatch_size",),
    "num_minibatches": ("ppo.minibatch_size",),
    "clip_range": ("ppo.clip",),
    "clip_coef": ("ppo.clip",),
    "anneal_lr": ("optim.schedule.kind",),
    "net_arch": ("model.hidden",),
    "buffer_size": ("replay.capacity",),
    "learning_starts": ("q.learn_start",),
    "train_freq": ("q.intensity",),
    "train_frequency": ("q.intensity",),
    "target_update_interval": ("q.target_every",),
    "target_network_frequency": ("q.target_every",),
    "exploration_fraction": ("q.epsilon_steps",),
    "cuda": ("device",),
    "track": ("log.wandb",),
    "torch_deterministic": ("deterministic",),
    "log_dir": ("out",),
    "tensorboard_log": ("out",),
}

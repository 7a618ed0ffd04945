"""What other libraries call our options, for error messages."""

from __future__ import annotations

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

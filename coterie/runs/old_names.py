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
# What Stable-Baselines3, CleanRL, RLlib and Sample Factory call an option, where no spelling is near.
_PEERS = {
    "steps": "total_timesteps train_for_env_steps num_env_steps",
    "out": "log_dir tensorboard_log experiment train_dir",
    "actors": "num_workers num_env_runners num_rollout_workers",
    "device": "cuda num_gpus num_gpus_per_learner",
    "deterministic": "torch_deterministic",
    "env.num_envs": "num_envs_per_env_runner num_envs_per_worker",
    "env.kwargs": "env_config",
    "env.groups": "worker_num_splits",
    "env.decorrelate": "decorrelate_experience_max_seconds",
    "algo.unroll_length": "n_steps num_steps rollout rollout_fragment_length",
    "algo.entropy_coef": "ent_coef exploration_loss_coeff",
    "algo.value_coef": "vf_coef vf_loss_coeff",
    "ppo.minibatch_size": "batch_size num_minibatches",
    "ppo.batch_size": "train_batch_size train_batch_size_per_learner",
    "ppo.epochs": "update_epochs num_epochs num_sgd_iter",
    "ppo.clip": "clip_range clip_coef clip_param ppo_clip_ratio",
    "decoupled.publish_every": "broadcast_interval",
    "decoupled.queue": "learner_queue_size num_batches_to_accumulate",
    "optim.lr": "learning_rate",
    "optim.schedule.kind": "anneal_lr lr_schedule",
    "optim.max_grad_norm": "grad_clip",
    "replay.capacity": "buffer_size",
    "q.learn_start": "learning_starts num_steps_sampled_before_learning_starts",
    "q.intensity": "train_freq train_frequency training_intensity",
    "q.target_every": "target_update_interval target_network_frequency target_network_update_freq",
    "q.epsilon_steps": "exploration_fraction",
    "model.hidden": "net_arch hidden_size fcnet_hiddens encoder_mlp_layers",
    "model.activation": "fcnet_activation nonlinearity activation_fn",
    "model.core": "use_lstm use_rnn rnn_type",
    "model.core_size": "lstm_cell_size rnn_size",
    "model.normalize_obs": "normalize_input norm_obs",
    "reward.normalize": "normalize_returns norm_reward",
    "eval.every": "eval_freq evaluation_interval",
    "eval.episodes": "n_eval_episodes evaluation_duration",
    "log.wandb": "track with_wandb wandb_project",
    "log.checkpoint_every": "save_freq save_every_sec checkpoint_freq",
}
PEERS = {name: field for field, names in _PEERS.items() for name in names.split()}

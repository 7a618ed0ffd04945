"""Several tasks in one run: `--env A,B,C`, one policy without a task id (IMPALA, arXiv 1802.01561, 5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from coterie.config import Config, Env, ResolvedConfig
from coterie.envs.atari57 import human_normalized

AnyConfig = TypeVar("AnyConfig", bound=Config)


def tasks(env_id: str) -> list[str]:
    """The tasks that an `env.id` names: one, or several with commas between them."""
    return [name.strip() for name in env_id.split(",")]


def task_config(config: AnyConfig, task: str) -> AnyConfig:
    """The config of one of a run's tasks. Atari games then all have the full set of 18 actions."""
    if len(tasks(config.env.id)) == 1:
        return config
    return replace(config, env=replace(config.env, id=task), atari=replace(config.atari, full_action_set=True))


def evaluation_env(config: Config) -> Env:
    """The env of a run as it is played outside of training: from its first step on, and to the limit of evaluations."""
    longest = config.eval.max_episode_steps or config.env.max_episode_steps
    return replace(config.env, decorrelate=0, delay=0.0, max_episode_steps=longest)


def envs_per_child(config: ResolvedConfig) -> int:
    return config.env.num_envs * config.learners // max(1, config.actors)


def child_env(config: ResolvedConfig, number: int, rank: int) -> tuple[ResolvedConfig, int]:
    """The config of child process `number` of learner `rank`, with its share of the envs, and its first env's id."""
    width = envs_per_child(config)
    several = tasks(config.env.id)
    mine = task_config(config, several[(rank * (config.actors // config.learners) + number) % len(several)])
    delayed = config.env.delay_learner in (-1, rank)
    env = replace(mine.env, num_envs=width, delay=config.env.delay * delayed, delay_learner=-1)
    return replace(mine, env=env), rank * config.env.num_envs + number * width


def task_of(config: ResolvedConfig, env_id: int) -> str:
    """The task of an env by its id."""
    rank, place = divmod(env_id, config.env.num_envs)
    return child_env(config, place // envs_per_child(config), rank)[0].env.id


def overall(means: Mapping[str, float]) -> float:
    """One number for the mean returns of all tasks: the mean human-normalized score, each capped at 1, where all have a
    reference; else the mean of the returns.
    """
    scores = {task: human_normalized(task, mean) for task, mean in means.items()}
    if are_normalized(scores):
        return float(np.mean([np.minimum(1.0, s) for s in scores.values() if s is not None]))  # a NaN stays one
    return float(np.mean(list(means.values())))


def are_normalized(tasks: Iterable[str]) -> bool:
    """Whether all tasks have reference scores."""
    return all(human_normalized(task, 0.0) is not None for task in tasks)

"""Evaluation of a policy: episodes on separate envs, with a mean, a standard error and, for Atari, human-normalized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.base import AnyAlgorithm
from coterie.build.resources import plain_torch
from coterie.config import Config
from coterie.envs.atari57 import human_normalized
from coterie.envs.make import make_envs, make_spec
from coterie.envs.news import Means
from coterie.envs.spaces import on_host
from coterie.envs.tasks import evaluation_env, overall, task_config, tasks
from coterie.models.build import Network
from coterie.plugins import label
from coterie.types import Array, Inputs, Obs, Spec, entries, from_entries

_MOST_ENVS = 16


@dataclass
class Scores:
    """Returns of whole episodes (raw reward), in the order of the envs and of their episodes."""

    env_id: str
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unfinished: int = 0  # episodes that the step budget or `stop` cut off; not in `returns`
    stopped: bool = False
    secondary: Scores | None = None  # of a secondary learner on as many episodes
    info: Means = field(default_factory=Means)  # numbers in the env's info at the ends of episodes
    tasks: list[Scores] = field(default_factory=list)  # one for each task of several; the above are of all episodes

    @property
    def mean(self) -> float:
        if self.tasks:
            return overall({s.env_id: s.mean for s in self.tasks})
        return float(np.mean(self.returns)) if self.returns else math.nan

    @property
    def stderr(self) -> float:
        n = 0 if self.tasks else len(self.returns)
        return float(np.std(self.returns, ddof=1) / math.sqrt(n)) if n > 1 else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            "env": self.env_id,
            "episodes": len(self.returns),
            "mean_return": float(np.mean([s.mean for s in self.tasks])) if self.tasks else self.mean,
            "stderr": self.stderr,
            "min": min(self.returns, default=math.nan),
            "max": max(self.returns, default=math.nan),
            "mean_length": float(np.mean(self.lengths)) if self.lengths else math.nan,
            "human_normalized": human_normalized(self.env_id, self.mean) if self.returns else None,
            "unfinished": self.unfinished,
            "info": self.info.means(),
            "returns": self.returns,
            **({"score": self.mean, "tasks": [s.to_json() for s in self.tasks]} if self.tasks else {}),
        }


@dataclass(frozen=True)
class Trial:
    """How a policy is scored: whole episodes of each task, at most `max_steps` env steps of it (default:
    `eval.max_steps`). All agents of an env play as many. `stop`, called with a task's finished episodes and env steps,
    ends the whole evaluation by returning True.
    """

    episodes: int
    sampled: bool = False
    seed: int = 1
    max_steps: int | None = None
    stop: Callable[[int, int], bool] = lambda done, steps: False


def evaluate(algorithm: AnyAlgorithm, model: Network, config: Config, trial: Trial, union: bool = False) -> Scores:
    """Play a trial's episodes, and score them. `union`: the policy has actions of other tasks, too.

    Every env plays a fixed number of episodes, so that short episodes are not counted more often than long ones.
    """
    scores = Scores(label(config.env.id))
    if len(several := tasks(config.env.id)) > 1:
        for at, task in enumerate(several):
            one = evaluate(algorithm, model, task_config(config, task), trial, union=True)
            scores.tasks.append(one)
            scores.returns += one.returns
            scores.lengths += one.lengths
            scores.unfinished += one.unfinished
            scores.info.add(one.info)
            if one.stopped:  # the envs of other tasks are not made any more
                scores.unfinished += trial.episodes * (len(several) - at - 1)
                break
        return scores
    n, agents = min(trial.episodes, _MOST_ENVS), make_spec(config.env, config.atari).agents
    n += -n % agents
    env = replace(evaluation_env(config), num_envs=n, info="off" if config.env.info == "off" else "episodes")
    budget = config.eval.max_steps if trial.max_steps is None else trial.max_steps
    quota = np.bincount(np.arange(trial.episodes) % n, minlength=n)[::agents].repeat(agents)
    threads = config.env.threads or 2
    with make_envs(env, config.atari, seed=trial.seed, threads=threads, groups=1, training=False, union=union) as envs:
        player = Player(algorithm, model, envs.spec, n, trial.seed)
        ts, steps = envs.recv(0), 0
        while quota.any():
            scores.stopped = trial.stop(len(scores.returns), steps)
            if scores.stopped or steps >= budget:
                scores.unfinished = int(quota.sum())
                break
            envs.send(0, player.act(ts.obs, ts.is_first, ts.reward, trial.sampled))
            ts = envs.recv(0)
            steps += max(1, int(((quota > 0) & ~ts.is_first).sum()))  # it ends though an agent never appears
            for i in np.flatnonzero(~np.isnan(ts.episode_return) & (quota > 0)):
                quota[i] -= 1
                scores.returns.append(float(ts.episode_return[i]))
                scores.lengths.append(int(ts.episode_length[i]))
            envs.reports.ignore(quota == 0)  # they step on
        scores.info = envs.reports.take().info
    return scores


class Player:
    """A policy in front of a batch of envs: keeps the core state and the last action."""

    def __init__(self, algorithm: AnyAlgorithm, model: Network, spec: Spec, batch: int, seed: int) -> None:
        self.algorithm, self.model, self.spec = algorithm, model, spec
        device = next(model.parameters()).device
        self.action = torch.zeros((batch, *spec.action.shape), dtype=getattr(torch, spec.action.dtype), device=device)
        self.rng = torch.Generator(device).manual_seed(seed)
        self.state = model.initial_state(batch)

    @plain_torch(inference=True)
    def act(self, obs: Obs, is_first: Array, reward: Array, sampled: bool) -> Array:
        """The actions `[B, ...]` for what the envs show. `is_first` `[B]`: those that begin an episode."""

        def tensor(x: Array, dtype: str) -> Tensor:
            return torch.tensor(on_host(x), dtype=getattr(torch, dtype), device=self.action.device)

        seen = from_entries({k: tensor(x, self.spec.obs[k].dtype) for k, x in entries(obs).items()})
        inputs = Inputs(seen, tensor(is_first, "bool"), self.action, tensor(reward, "float32"))
        explore = inputs.prev_reward.new_full((len(is_first),), self.algorithm.sampled) if sampled else None
        out, self.state = self.algorithm.act(self.model, inputs, self.state, explore, self.rng)
        self.action = out.action
        return out.action.cpu().numpy()

"""Evaluation of a policy: episodes on separate envs, with a mean, a standard error and, for Atari, human-normalised."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.acting.recorder import Envs, Recorder, local_fields
from coterie.algorithms.base import Algorithm
from coterie.build.factory import make_algorithm, make_model
from coterie.build.resources import resolve_config
from coterie.config import Config
from coterie.envs.atari57 import human_normalized
from coterie.envs.make import env_edges, make_envs, make_spec
from coterie.envs.spaces import flatten
from coterie.envs.tasks import are_normalized, overall, task_config, tasks
from coterie.models.build import Network
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config
from coterie.types import Array, ConfigError, CoterieError, Inputs, Obs, Spec, TimeStep, entries, map_obs, reason_of

_MOST_ENVS = 16
_LONGEST_EPISODE = 200_000  # env steps on average, past which `coterie eval` counts episodes as unfinished


@dataclass
class Scores:
    """Returns of whole episodes (raw reward), in the order of the envs and of their episodes."""

    env_id: str
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unfinished: int = 0  # episodes that the step budget cut off; not in `returns`
    secondary: Scores | None = None  # of a secondary learner on as many episodes
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
        normalized = human_normalized(self.env_id, self.mean) if self.returns else None
        return {
            "env": self.env_id,
            "episodes": len(self.returns),
            "mean_return": float(np.mean([s.mean for s in self.tasks])) if self.tasks else self.mean,
            "stderr": self.stderr,
            "min": min(self.returns, default=math.nan),
            "max": max(self.returns, default=math.nan),
            "mean_length": float(np.mean(self.lengths)) if self.lengths else math.nan,
            "human_normalized": normalized,
            "unfinished": self.unfinished,
            "returns": self.returns,
            **({"score": self.mean, "tasks": [s.to_json() for s in self.tasks]} if self.tasks else {}),
        }


def evaluate(
    algorithm: Algorithm,
    model: Network,
    config: Config,
    *,
    episodes: int,
    sampled: bool,
    seed: int,
    max_steps: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    union: bool = False,
) -> Scores:
    """Play `episodes` whole episodes of each task, and score them. `union`: the policy has actions of other tasks, too.

    Every env plays a fixed number of episodes, so that short episodes are not counted more often than
    long ones. Stops at `max_steps` env steps in all (default: `eval.max_steps`), or when `stop` says so.
    """
    if len(several := tasks(config.env.id)) > 1:
        whole = Scores(config.env.id)
        for task in several:
            one = evaluate(
                algorithm, model, task_config(config, task), episodes=episodes, sampled=sampled, seed=seed,
                max_steps=max_steps, stop=stop, union=True,
            )  # fmt: skip
            whole.tasks.append(one)
            whole.returns += one.returns
            whole.lengths += one.lengths
            whole.unfinished += one.unfinished
        return whole
    n = min(episodes, _MOST_ENVS)
    env = replace(
        config.env,
        num_envs=n,
        decorrelate=0,
        delay=0.0,
        max_episode_steps=config.eval.max_episode_steps or config.env.max_episode_steps,
    )
    budget = config.eval.max_steps if max_steps is None else max_steps
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    scores = Scores(config.env.id)
    with make_envs(
        env, config.atari, seed=seed, threads=config.env.threads or 2, groups=1, training=False, union=union
    ) as envs:
        player = Player(algorithm, model, envs, sampled, seed)
        ts, steps = envs.recv(0), 0
        while quota.any():
            if steps >= budget or stop():
                scores.unfinished = int(quota.sum())
                break
            envs.send(0, player.act(ts))
            ts = envs.recv(0)
            steps += int(((quota > 0) & ~ts.is_first).sum())
            for i in np.flatnonzero(~np.isnan(ts.episode_return) & (quota > 0)):
                quota[i] -= 1
                scores.returns.append(float(ts.episode_return[i]))
                scores.lengths.append(int(ts.episode_length[i]))
    return scores


class Player:
    """A policy in front of one group of envs: keeps the core state and the last action."""

    def __init__(self, algorithm: Algorithm, model: Network, envs: Envs, sampled: bool, seed: int) -> None:
        self.algorithm, self.model, self.envs = algorithm, model, envs
        device = next(model.parameters()).device
        self.recorder = Recorder(local_fields(envs.spec, 1, envs.num_envs, device), [slice(0, envs.num_envs)], device)
        self.action = self.recorder.fields["action"]
        self.rng = torch.Generator(device).manual_seed(seed)
        self.explore = torch.full((envs.num_envs,), algorithm.sampled, device=device) if sampled else None
        self.state = model.initial_state(envs.num_envs)

    @torch.inference_mode()
    def act(self, ts: TimeStep) -> Array:
        seen = self.recorder.see(0, 1, ts)
        inputs = Inputs(seen.obs, seen.is_first, self.action[1], seen.prev_reward)
        out, self.state = self.algorithm.act(self.model, inputs, self.state, self.explore, self.rng)
        self.action[1] = out.action
        return out.action.cpu().numpy()


class Policy:
    """A trained policy for use outside of training: `policy(obs)` -> actions that the env takes.

    `obs` is a batch `[B, ...]` (or a nested dict of such), as the env gives it; actions are clipped and stretched to
    its bounds. With an LSTM the state is kept between calls for a fixed B; `reset(done)` clears it for the envs that
    begin again, and `reward` `[B]` is wanted where the net was trained with `model.last_action_reward`.
    """

    def __init__(self, folder: Path, config: Config, spec: Spec, step: int, model: Network) -> None:
        self.folder, self.config, self.spec, self.step, self.model = folder, config, spec, step, model
        self.algorithm = make_algorithm(resolve_config(config), spec)
        _, self.fields, self.actions = env_edges(config.env, config.atari)
        self._state: Tensor | None = None
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._rng = torch.Generator().manual_seed(config.seed)

    def reset(self, done: Array | None = None) -> None:
        """Begin new episodes: in every env, or where `done` `[B]`."""
        if done is None or self._first is None:
            self._first = None
        else:
            self._first = self._first | torch.as_tensor(done)

    @torch.inference_mode()
    def __call__(self, obs: Obs, *, reward: Array | None = None, sampled: bool = False) -> Array:
        obs = flatten(obs, self.fields)
        tensors = map_obs(torch.as_tensor, obs)
        batch = len(next(iter(entries(tensors).values())))
        if self._first is None or len(self._first) != batch:
            self._first = torch.ones(batch, dtype=torch.bool)
            self._state = self.model.initial_state(batch)
            self._last = torch.zeros((batch, *self.spec.action.shape), dtype=getattr(torch, self.spec.action.dtype))
        assert self._last is not None
        last_reward = torch.zeros(batch) if reward is None else torch.as_tensor(reward, dtype=torch.float32)
        inputs = Inputs(tensors, self._first, self._last, last_reward)
        explore = torch.full((batch,), self.algorithm.sampled) if sampled else None
        out, self._state = self.algorithm.act(self.model, inputs, self._state, explore, self._rng)
        self._last, self._first = out.action, torch.zeros(batch, dtype=torch.bool)
        return self.actions.to_env(out.action.numpy())


def open_run(folder: Path) -> Config:
    """The config of a run's folder, or one clear line."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"RUN: {folder} is not a run folder (it has no config.json)")
    return load_config(folder / "config.json")


def check_spec(folder: Path, config: Config) -> Spec:
    """The env's spec; refuses a run whose env gives or takes something else than it did."""
    spec, path = make_spec(config.env, config.atari), folder / "spec.json"
    saved, now = json.loads(path.read_text()), json.loads(json.dumps(spec.to_json()))
    if saved != now:
        raise ConfigError(f"env.id: the spaces differ from the run's; saved {json.dumps(saved)}; now {json.dumps(now)}")
    return spec


def load(folder: str | Path, learner: str = "0") -> Policy:
    """The policy of a run's best checkpoint, or of its last where none was marked best.

    `learner`: its index (learner 0 is the one that is evaluated during training), "mean" for the mean of all learners'
    weights, or "secondary" for the secondary learner.
    """
    folder = Path(folder)
    config, root = open_run(folder), folder / "checkpoints"
    path = checkpoint.best(root) or checkpoint.latest(root)
    if path is None:
        raise ConfigError(f"RUN: {folder} has no complete checkpoint yet")
    tensors, state = checkpoint.load(path)
    spec = check_spec(folder, config)
    model = make_model(config, spec)
    try:
        model.load_state_dict(_weights(tensors, learner))
    except RuntimeError as error:
        raise CoterieError(f"{path} does not fit the run's model: {reason_of(error)[:200]}") from None
    return Policy(folder, config, spec, int(state["env_steps"]), model.eval().requires_grad_(False))


def _weights(tensors: checkpoint.Tensors, learner: str) -> dict[str, Tensor]:
    """The weights of one learner of a checkpoint, or the mean of all learners'."""
    second = tensors.get("learner_0/secondary")
    if learner == "secondary" and second is not None:
        return second
    models = {int(k.split("/")[0].removeprefix("learner_")): x for k, x in tensors.items() if k.endswith("/model")}
    if learner == "mean":
        return {k: sum(m[k].double() for m in models.values()).div(len(models)).to(x.dtype)  # type: ignore[union-attr]
                for k, x in next(iter(models.values())).items()}  # fmt: skip
    if learner == "best":
        raise ConfigError("learner: best is now 0, the learner that is evaluated during training")
    if not learner.isdecimal() or int(learner) not in models:
        known = [*map(str, sorted(models)), "mean", *(["secondary"] if second is not None else [])]
        raise ConfigError(f"learner: {learner!r} is not one of {', '.join(known)}")
    return models[int(learner)]


def evaluate_run(
    folder: str | Path, *, episodes: int = 100, sampled: bool = False, seed: int = 1, learner: str = "0"
) -> dict[str, Any]:
    """Score a run's policy: mean over whole episodes +- standard error, human-normalised where a reference exists."""
    policy = load(folder, learner)
    scores = evaluate(
        policy.algorithm,
        policy.model,
        policy.config,
        episodes=episodes,
        sampled=sampled,
        seed=seed,
        max_steps=episodes * _LONGEST_EPISODE,
    )
    return {"run": str(folder), "checkpoint_env_steps": policy.step, "sampled": sampled, **scores.to_json()}


def show(result: dict[str, Any]) -> str:
    """What `evaluate_run` found, for people."""
    several = result.get("tasks", [])
    lines = [
        f"{task['env']}: {task['mean_return']:.2f} +- {task['stderr']:.2f} ({task['episodes']} episodes)"
        for task in several
    ]
    score = f"{result['mean_return']:.2f} +- {result['stderr']:.2f}"
    if several:
        known = are_normalized(task["env"] for task in several)
        what = "mean human-normalised score, each capped at 1" if known else "mean of the returns"
        score = f"{what}: {result['score']:.3g}"
    line = f"{result['env']}: {score} ({result['episodes']} episodes, {'sampled' if result['sampled'] else 'greedy'}"
    if result["human_normalized"] is not None:
        line += f", human-normalised {100 * result['human_normalized']:.0f}%"
    return "\n".join([*lines, f"{line}, checkpoint at {result['checkpoint_env_steps']:,} env steps)"])

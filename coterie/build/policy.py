"""A run's trained policy, for use outside of training, and its score."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.build.evaluate import Player, Trial, evaluate
from coterie.build.factory import make_algorithm, make_model
from coterie.build.resources import plain_torch, resolve_config
from coterie.build.validity import check_spec
from coterie.config import Config
from coterie.envs.answers import check_held
from coterie.envs.gym import mask_row, only
from coterie.envs.make import env_adapters
from coterie.envs.spaces import flatten, on_host
from coterie.errors import ConfigError, CoterieError, reason_of
from coterie.models.build import Network
from coterie.plugins import EVAL_SETTINGS, GIVEN
from coterie.presets.common import flat
from coterie.runs import checkpoint
from coterie.runs.files import read
from coterie.runs.manifest import MANIFEST
from coterie.runs.trust import open_run
from coterie.types import MASK, Obs, Spec, entries, from_entries

WEIGHTS = ("/model", "/secondary")  # the ends of their names in a checkpoint
_LONGEST_EPISODE = 200_000  # env steps on average, past which `coterie eval` counts episodes as unfinished


class Policy:
    """A trained policy for use outside of training: `policy(obs)` -> actions that the env takes.

    `obs` is a batch `[B, ...]` (or a nested dict of such), as the env gives it; actions are clipped and stretched to
    its bounds. With an LSTM the state is kept between calls for a fixed B; `reset(done)` clears it for the envs that
    begin again. A net trained with `model.last_action_reward` also needs `reward` `[B]`, and where the env has its
    action mask in info or a method, `action_mask` `[B, choices]`. Actions of a Dict or Tuple space have
    its structure, with arrays as leaves. `act` is the same for a single env.
    """

    def __init__(self, folder: Path, config: Config, spec: Spec, step: int, model: Network) -> None:
        self.folder, self.config, self.spec, self.step, self.model = folder, config, spec, step, model
        self.algorithm = make_algorithm(resolve_config(config), spec)
        _, fields, self.actions, self._outside = env_adapters(config.env, config.atari)  # a mask that is not in obs
        self.fields = [f for f in fields if not (self._outside and f.name == MASK)]
        self._first = np.ones(0, bool)  # envs that begin an episode
        self.player = self._new_player(0)

    def _new_player(self, batch: int) -> Player:
        return Player(self.algorithm, self.model, self.spec, batch, self.config.seed)

    def reset(self, done: ArrayLike | None = None, *, seed: int | None = None) -> None:
        """Begin new episodes: in every env, or where `done` `[B]`. Calls with another B begin new ones as well. `seed`:
        of sampled actions from now on; after `load` it is the run's.
        """
        if seed is not None:
            self.player.rng.manual_seed(_whole("seed", seed, 0))
        if done is not None and len(self._first) and np.shape(done) != self._first.shape:
            raise ConfigError(f"done: one value for each of {len(self._first)} envs is needed, not {np.shape(done)}")
        self._first = np.ones(0, bool) if done is None or not len(self._first) else self._first | (on_host(done) != 0)

    def __call__(
        self, obs: Obs, *, reward: ArrayLike | None = None, action_mask: ArrayLike | None = None, sampled: bool = False
    ) -> Any:
        """Actions for a batch. `sampled`: from the distribution, not the likeliest ones. Raises `ConfigError` where
        something is not a batch of what the env gives.
        """
        try:
            obs = from_entries({name: on_host(x) for name, x in entries(flatten(obs, self.fields)).items()})
        except KeyError as error:
            raise ConfigError(f"obs: {error} is missing") from error
        except (IndexError, TypeError, ValueError) as error:
            keys = dict.fromkeys(f.path[0] for f in self.fields if f.path and isinstance(f.path[0], str))
            if keys and not isinstance(obs, dict):
                given = "an array" if hasattr(obs, "shape") else type(obs).__name__
                raise ConfigError(f"obs: a dict with keys {', '.join(keys)} is needed, not {given}") from error
            hint = "for one env use policy.act"
            raise ConfigError(f"obs: not a batch of what the env gives: {reason_of(error)}; {hint}") from error
        if "" in self.spec.obs and isinstance(obs, dict):
            raise ConfigError("obs: an array is needed, not a dict")
        if action_mask is not None and not self.spec.masked:
            raise ConfigError("action_mask: the env of this policy has none")
        if self._outside:
            if action_mask is None:
                raise ConfigError("action_mask: this policy needs one, [B, choices]: the env's info or action_masks()")
            obs |= {MASK: on_host(action_mask).astype(bool)}
        for key, x in entries(obs).items():
            place = f"obs[{key!r}]" if key else "obs"
            if np.shape(x)[1:] != (row := self.spec.obs[key].shape):
                hint = "; for one env use policy.act" if np.shape(x) == row else ""
                needed = f"[{', '.join(map(str, ('B', *row)))}]"
                raise ConfigError(f"{place}: {needed} is needed, not {list(np.shape(x))}{hint}")
            if x.dtype.kind not in "biuf":
                raise ConfigError(f"{place}: numbers are needed, not {x.dtype}")
            if "int" in (dtype := self.spec.obs[key].dtype):
                check_held(place, x, dtype, ConfigError)
            elif not np.isfinite(x).all():
                raise ConfigError(f"{place}: it holds NaN or infinite numbers")
        if self.spec.masked and not self.spec.legal_rows(obs[MASK]).all():
            raise ConfigError("action_mask: nothing is legal in one of its rows")
        batch, *more = {len(x): key for key, x in entries(obs).items()}
        if more:
            what = "obs and action_mask have" if self._outside else "obs: its entries have"
            raise ConfigError(f"{what} {' and '.join(map(str, (batch, *more)))} rows; each needs the same")
        if len(self._first) != batch:
            self._first, rng = np.ones(batch, bool), self.player.rng
            self.player = self._new_player(batch)
            self.player.rng = rng  # two batches in a row are sampled differently
        if reward is None and self.model.recurrent and self.config.model.last_action_reward and not self._first.all():
            raise ConfigError("reward: this policy needs that of the last step, [B], where episodes go on")
        if (rewards := np.zeros(batch) if reward is None else on_host(reward)).shape != (batch,):
            raise ConfigError(f"reward: [{batch}] is needed, not {list(rewards.shape)}")
        if rewards.dtype.kind not in "biuf" or not np.isfinite(rewards).all():
            raise ConfigError("reward: it holds something else than finite numbers")
        action = self.player.act(obs, self._first, rewards, sampled)
        self._first = np.zeros(batch, bool)
        return self.actions.nested(self.actions.to_env(action))

    def act(
        self, obs: Any, *, reward: float | None = None, action_mask: ArrayLike | None = None, sampled: bool = False
    ) -> Any:
        """The action for the observation of a single env, both as its spaces have them, without a batch axis."""
        rewards, mask = None if reward is None else on_host(reward)[None], action_mask
        if action_mask is not None and self.spec.masked:
            mask = mask_row(action_mask, self.actions.space, sum(self.actions.spec.sizes))[None]
        return only(self.actions.space, self(batched(obs), reward=rewards, action_mask=mask, sampled=sampled))


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name}: {value!r} must be a whole number, at least {least}")
    return int(value)


def batched(obs: Any) -> Any:
    """A nested observation as a batch of one."""
    if isinstance(obs, dict):
        return {key: batched(x) for key, x in obs.items()}
    return tuple(map(batched, obs)) if isinstance(obs, tuple) else on_host(obs)[None]


@plain_torch()
def load(folder: str | Path, learner: str | int = "0", *, trust: bool = False, **new: Any) -> Policy:
    """The policy of a run's best checkpoint, or of its last where none was marked best, on the CPU. `folder` may also
    be a checkpoint of a run: `runs/x/checkpoints/step_000000100000`.

    `learner`: its index (learner 0 is the one that is evaluated during training), "mean" for the mean of all learners'
    weights, or "secondary" for the secondary learner. `new`: what takes the place of the run's own, above all of an
    object of a process that has ended: `env=MyEnv`, `**{"model.torso": Torso}`; and another env with the same spaces:
    `env="CartPole-v0"`, `**{"env.kwargs": {"level": 3}, "env.max_episode_steps": 200}`. `trust`: import what the run
    names even if its folder was not made by this user (docs/explanation/security.md).
    """
    folder = Path(folder).expanduser()
    if chosen := own_checkpoint(folder):
        folder = chosen.parent.parent
        if chosen.parent.name != "checkpoints":
            raise ConfigError(f"RUN: {chosen} is a checkpoint outside of its run's folder")
    config = open_run(folder, flat(new), trust, (*GIVEN, *EVAL_SETTINGS))
    path = chosen or checkpoint_of(folder, "RUN")
    tensors, state = checkpoint.load(path, ends=WEIGHTS)
    return policy_of(folder, config, weights_of(tensors, str(learner)), int(state["env_steps"]), path)


def own_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a folder is, if it is one."""
    here = folder.absolute()
    there = here if here.parent.name == "checkpoints" else here.resolve()
    return there if read(folder, (folder / MANIFEST).is_file) else None


def checkpoint_of(folder: Path, field: str) -> Path:
    """A run's best checkpoint, or its last where none was marked best. Raises a `ConfigError` that begins with `field`
    if it is not there.
    """
    root = folder / "checkpoints"
    best, last = checkpoint.best(root)[0], checkpoint.latest(root)
    if last is None:
        raise ConfigError(f"{field}: {folder} has no complete checkpoint yet")
    if not best and read(root, (mark := root / "best.json").exists) and not (best := checkpoint.best(root)[0]):  # again
        raise ConfigError(
            f"{field}: {mark} names no complete checkpoint of this run; give one yourself, such as {last}"
        )
    return (best or last).absolute()


def policy_of(folder: Path, config: Config, weights: dict[str, Tensor], step: int, path: Path) -> Policy:
    """The policy of the run in `folder` with these weights, which `path` has."""
    model = make_model(config, spec := check_spec(folder, config))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CoterieError(f"{path} does not fit the run's model: {reason_of(error)[:200]}") from None
    return Policy(folder, config, spec, step, model.eval().requires_grad_(False))


def weights_of(tensors: checkpoint.Tensors, learner: str) -> dict[str, Tensor]:
    """The weights of one learner of a checkpoint, or the mean of all learners'."""
    second = tensors.get("learner_0/secondary")
    if learner == "secondary" and second is not None:
        return second
    models = {int(k.split("/")[0].removeprefix("learner_")): x for k, x in tensors.items() if k.endswith("/model")}
    if learner == "mean":
        return {k: sum(m[k].double() for m in models.values()).div(len(models)).to(x.dtype)  # type: ignore[union-attr]
                for k, x in next(iter(models.values())).items()}  # fmt: skip
    if not learner.isdecimal() or int(learner) not in models:
        known = [*map(str, sorted(models)), "mean", *(["secondary"] if second is not None else [])]
        hint = "; `best` is now 0" if learner == "best" else ""
        raise ConfigError(f"learner: {learner!r} is not one of {', '.join(known)}{hint}")
    return models[int(learner)]


def evaluate_run(
    folder: str | Path, *, episodes: int = 100, sampled: bool = False, seed: int = 1, learner: str | int = "0",
    stop: Callable[[int, int], bool] = lambda done, steps: False, trust: bool = False, **new: Any,
) -> dict[str, Any]:  # fmt: skip
    """Score a run's policy: mean over whole episodes +- standard error, human-normalized where a reference exists.
    `stop`: called before each env step with the finished episodes and env steps of the present task; True ends all.
    `trust`, `new`: see `load`.
    """
    episodes, seed = _whole("episodes", episodes, 1), _whole("seed", seed, 0)
    policy = load(folder, learner, trust=trust, **new)
    trial = Trial(episodes, sampled, seed, episodes * _LONGEST_EPISODE, stop)
    scores = evaluate(policy.algorithm, policy.model, policy.config, trial)
    return {"run": str(folder), "checkpoint_env_steps": policy.step, "sampled": sampled, **scores.to_json()}

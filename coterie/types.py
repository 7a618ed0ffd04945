"""The data that travels: TimeStep (env to policy), Rollout (acting to learner), Spec (what an env takes and gives).

One time convention, decided where a rollout is written: seeing `obs[t]` the policy takes `action[t]`; the env returns
`reward[t]`, `terminated[t]`, `truncated[t]` and `obs[t + 1]`. No loss slices one field against another to align it.
This file must import without torch: the env worker processes load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

#: One array, or a flat dict of arrays, all with the same leading axes.
Obs = Any
Array = NDArray[Any]
Post = Callable[[str, Any], None]  # sends a message (its kind and content) to the parent process
Needs = dict[str, tuple[object, str]]  # names of options -> whether the run uses one of them, and what they require
T = TypeVar("T")


def map_obs(call: Callable[[Any], Any], obs: Obs) -> Obs:
    """`call` of an observation, or of each entry of a dict of them."""
    return {k: call(x) for k, x in obs.items()} if isinstance(obs, dict) else call(obs)


def entries(obs: Obs) -> dict[str, Any]:
    """The arrays of an observation by name; a plain one has the name ""."""
    return obs if isinstance(obs, dict) else {"": obs}


def from_entries(obs: dict[str, Any]) -> Obs:
    """The inverse of `entries`."""
    return obs.get("", obs)


MASK = "action_mask"  # the entry of an observation that says which choices are legal


@dataclass(frozen=True)
class ObsSpec:
    """Shape (without batch axes) and dtype of one observation array."""

    shape: tuple[int, ...]
    dtype: str
    low: float = -np.inf
    high: float = np.inf
    text: bool = False  # words as integers, 0 behind the last (envs/text.py)
    codes: tuple[int, ...] = ()  # of the last axis's bytes, which are names and not amounts: how many each may be

    @property
    def is_numeric(self) -> bool:
        """Numbers with a mean and a deviation worth knowing: neither bytes nor words nor a mask."""
        return self.dtype not in ("uint8", "bool") and not self.text

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3 and self.dtype == "uint8" and not self.codes


@dataclass(frozen=True)
class ActionSpec:
    """What an action is.

    categorical: `sizes == (n,)`, actions int64 `[B]`. multi: `sizes == (n_0, .., n_{A-1})`, actions int64 `[B, A]`.
    continuous: actions float32 `[B, A]`, `low` and `high` hold A bounds each (may be infinite). mixed: choices, then
    continuous components, all float32.
    """

    kind: Literal["categorical", "multi", "continuous", "mixed"]
    sizes: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action without batch axes."""
        if self.kind == "categorical":
            return ()
        return (len(self.sizes) + len(self.low),)

    @property
    def dtype(self) -> str:
        return "float32" if self.low else "int64"


@dataclass(frozen=True)
class Spec:
    """What one environment gives and takes. `obs` maps a name to its array; a plain array has the name ""."""

    env_id: str
    obs: dict[str, ObsSpec]
    action: ActionSpec
    action_repeat: int = 1  # emulator frames per env step
    max_episode_steps: int = 0  # the env's own steps, of which `env.action_repeat` are one env step; 0: no limit known
    agents: int = 1  # of one environment, each of them an env of its own for `env.num_envs`, the policy and the metrics

    @property
    def masked(self) -> bool:
        """Whether observations say which choices are legal."""
        return bool(self.action.sizes) and MASK in self.obs

    @property
    def obs_bytes(self) -> int:
        """Bytes of one observation."""
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in self.obs.values())

    def legal_rows(self, mask: Array) -> Array:
        """Which rows of an action mask `[n, choices]` allow a choice of each component: `[n]` bool."""
        return np.asarray(np.logical_or.reduceat(mask, np.cumsum([0, *self.action.sizes[:-1]]), axis=1).all(1))

    def to_json(self) -> dict[str, Any]:
        return {
            "env_id": self.env_id,
            "obs": {
                k: [list(s.shape), s.dtype, *(["text"] if s.text else []), *(["codes", *s.codes] if s.codes else [])]
                for k, s in self.obs.items()
            },
            "action": [self.action.kind, list(self.action.sizes), list(self.action.low), list(self.action.high)],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Spec:
        """What `to_json` wrote; it does not have the action repeat, limits and agents."""
        obs = {}
        for name, (shape, dtype, *more) in data["obs"].items():
            codes = more[more.index("codes") + 1 :] if "codes" in more else ()
            obs[name] = ObsSpec(tuple(shape), dtype, text="text" in more, codes=tuple(codes))
        kind, *bounds = data["action"]
        return cls(data["env_id"], obs, ActionSpec(kind, *map(tuple, bounds)))


class TimeStep(NamedTuple):
    """What acting sees of B envs: `obs[t]` and the consequence of `action[t - 1]`. NumPy arrays, `[B]` unless noted.

    `is_first`: obs begins an episode (after a done, or in an env that was replaced); then `reward` is 0, both flags
    are False, and the step that led here is the fake one that has no meaning. `episode_return` and `episode_length`
    are NaN except where a whole episode ended with this step: raw reward summed over the episode (not over one life),
    and its env steps. `env_id`: global ids.
    """

    obs: Obs
    reward: Array
    terminated: Array
    truncated: Array
    is_first: Array
    episode_return: Array
    episode_length: Array
    env_id: Array


class Inputs(NamedTuple):
    """What a model takes, as tensors with the same leading axes (`[B]`, `[T, B]` or rows `[N]`)."""

    obs: Obs
    is_first: Tensor
    prev_action: Tensor
    prev_reward: Tensor

    def map(self, call: Callable[[Tensor], Tensor]) -> Inputs:
        """`call` of each tensor."""
        return Inputs(map_obs(call, self.obs), *(call(x) for x in self[1:]))


class AgentOutput(NamedTuple):
    """What a policy says for B observations: `action` as sampled `[B, ...]`, its `log_prob` `[B]` and `value` `[B]`."""

    action: Tensor
    log_prob: Tensor
    value: Tensor


@dataclass
class Rollout:
    """T steps of B envs, time first. Valid until the next rollout is asked for: copy the rows that are kept.

    Row T of `obs` is the bootstrap observation and row 0 of the next rollout; `behavior_value` has that row, too.
    """

    obs: Obs  # [T+1, B, *obs], as the env gave it (uint8 stays uint8), or a dict of such
    is_first: Tensor  # [T+1, B] bool
    prev_action: Tensor  # [T+1, B, ...]; the model zeroes it where is_first
    prev_reward: Tensor  # [T+1, B] float32, raw
    action: Tensor  # [T, B] or [T, B, A], as sampled
    reward: Tensor  # [T, B] float32, raw consequence of action[t]
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    behavior_log_prob: Tensor  # [T, B] float32, of the very logits that were sampled
    behavior_value: Tensor  # [T+1, B] float32
    policy_version: Tensor  # [T, B] int64, learner step whose weights chose the action
    env_id: Tensor  # [B] int64
    core_state: Tensor | None = None  # [B, ...] before obs[0]; None without a core
    episodes: list[tuple[float, int, int]] = field(default_factory=list)  # that ended in it: return, length, env id
    origins: list[tuple[int, int, int]] = field(default_factory=list)  # of actors: (actor, its life, number in it)

    @property
    def inputs(self) -> Inputs:
        """The model's input at each row, the bootstrap observation's included."""
        return Inputs(self.obs, self.is_first, self.prev_action, self.prev_reward)

    @property
    def mask(self) -> Tensor:
        """`[T, B]` bool, False on the fake step of an autoreset and on the step of an env that was replaced."""
        return ~self.is_first[1:]


def map_tensors(call: Callable[[Tensor], Tensor], record: T, **changes: Any) -> T:
    """A copy of the dataclass `record`: `call` of each of its tensors (also in dicts and `Inputs`), and `changes`."""
    for field_ in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field_.name)
        if field_.name in changes:
            continue
        if isinstance(value, Inputs):
            changes[field_.name] = value.map(call)
        elif isinstance(value, dict) or hasattr(value, "dtype"):
            changes[field_.name] = map_obs(call, value)
    return replace(record, **changes)  # type: ignore[type-var]

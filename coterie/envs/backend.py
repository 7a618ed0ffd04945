"""The contract between `Envs` and what runs the instances: EnvPool, worker processes, a vector env, or a user's own.

A backend holds instances, numbered from 0. It takes one request at a time: `step` or `reset` of some instances returns
at once, and the `recv` that follows waits for the answer. It restarts a finished instance by itself when that is next
stepped (next-step autoreset: the action is ignored, reward 0, flags False). Groups and rollouts are unknown to it.

`spec.agents` instances in a row are the agents of one env, requested and replaced together. An agent that has left has
rows without meaning (`first`) until the env restarts, and so has one that has not appeared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from coterie.envs.spaces import ActionMap, ObsField, action_map, obs_fields, with_mask
from coterie.errors import ConfigError, CoterieError
from coterie.types import Array, Obs, Spec, entries

START_S = 60.0  # for an env to start, on top of env.timeout
CLOSE_S = 6.0  # for envs to close; then they are given up, and worker processes killed


class Declared(NamedTuple):
    """What an env takes and gives, and the conversions between its own arrays and ours."""

    spec: Spec
    fields: list[ObsField]
    actions: ActionMap
    mask: str = ""  # where the action mask is if the observation does not have it: "info" or "method"


class StepResults(NamedTuple):
    """The answer to a request, one row for each instance asked, in that order. The receiver owns the arrays."""

    obs: Obs
    reward: Array  # float32, as the env gave it
    terminated: Array  # bool
    truncated: Array  # bool
    game_over: Array  # bool: the whole episode ended, not only a life of it (or it was truncated)
    info: Mapping[str, Array] = {}  # float64, the numbers in the envs' info; NaN where an env gave none
    # Instances, requested or not, that must be replaced before they are used again, and why; their rows mean nothing.
    failed: Mapping[int, str] = {}
    first: Array = np.zeros((), bool)  # bool: obs follows from no action: of an agent that is absent, or of a restart

    def rows(self) -> list[Array]:
        """Observations, reward and flags."""
        return [*entries(self.obs).values(), *self[1:5]]


def declare(
    env_id: str, observation_space: Space[Any], action_space: Space[Any], frames: int = 1, max_episode_steps: int = 0,
    agents: int = 1, mask: str = "", text: Collection[str] = (),
) -> Declared:  # fmt: skip
    """What an env with these spaces takes and gives. `frames`: in a step; `text`: arrays of bytes that are text."""
    actions = action_map(env_id, action_space)
    fields = with_mask(env_id, obs_fields(env_id, observation_space, text), actions.spec, bool(mask))
    spec = Spec(env_id, {f.name: f.spec for f in fields}, actions.spec, frames, max_episode_steps, agents)
    return Declared(spec, fields, actions, mask)


class CannotReplace(CoterieError):
    """A backend cannot restart some of its instances without the others."""


class Backend(ABC):
    """What runs the instances. A user's own implements `reset`, `step` and `recv` (docs/guides/vector-envs.md)."""

    tensors = False  # `step` takes a torch tensor, on the observations' device; results may be what DLPack shares

    def __init__(self, declared: Declared, num_instances: int) -> None:
        self.declared = declared
        self.spec, self.fields, self.action_map, self.mask = declared
        self.num_instances = num_instances

    @abstractmethod
    def reset(self, ids: Array) -> None:
        """Start a reset of instances `ids` (int32): all of them at first, later those that were replaced."""

    @abstractmethod
    def step(self, ids: Array, actions: Any) -> None:
        """Start a step of instances `ids` (int32) with the env's own actions; of a user's own backend, all of them."""

    @abstractmethod
    def recv(self) -> StepResults:
        """Wait for the answer to the last request."""

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Make new instances in the place of these. Each must be reset before it is stepped."""
        raise CannotReplace("it cannot be restarted without the others")

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set these attributes of all instances, and of those that will replace them."""
        raise ConfigError("set_env: these envs have no attributes; use gymnasium's, with env.backend workers")

    def close(self) -> None:
        """End every thread and process; free all memory."""


MakeBackend = Callable[[Sequence[int]], Backend]  # one seed for each instance

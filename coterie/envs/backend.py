"""The contract between `Envs` and what runs the instances (EnvPool, or worker processes).

A backend holds instances, numbered from 0. It takes one request at a time: `step` or `reset` of some instances returns
at once, and the `recv` that follows waits for the answer. It restarts a finished instance by itself when that is next
stepped (next-step autoreset: the action is ignored, reward 0, flags False). Groups and rollouts are unknown to it.

`spec.agents` instances in a row are the agents of one env, requested and replaced together. An agent that has left has
rows without meaning (`first`) until the env restarts, and so has one that has not appeared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from coterie.envs.spaces import ActionMap, ObsField
from coterie.types import Array, Obs, Spec, entries


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
        """Every array."""
        return [*entries(self.obs).values(), *self[1:5]]


class Backend(Protocol):
    """What runs the instances."""

    spec: Spec
    action_map: ActionMap
    num_instances: int

    def step(self, ids: Array, actions: Array) -> None:
        """Start a step of instances `ids` (int32) with the env's own actions."""

    def reset(self, ids: Array) -> None:
        """Start a reset of instances `ids` (int32)."""

    def recv(self) -> StepResults:
        """Wait for the answer to the last request."""
        ...

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Make new instances in the place of these. Each must be reset before it is stepped."""

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set these attributes of all instances, and of those that will replace them."""

    def close(self) -> None:
        """End every thread and process; free all memory."""


MakeBackend = Callable[[Sequence[int]], Backend]  # one seed for each instance

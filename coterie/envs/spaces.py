"""From gymnasium spaces to our `ObsSpec` and `ActionSpec`, and the conversions at the env's edge.

Observations: Box, Discrete and MultiDiscrete (one-hot float32), MultiBinary, Text (word hashes), MiniGrid's grids
(codes), and Dict of those (flat, nested keys joined by "."). Actions: Discrete, MultiDiscrete, MultiBinary, Box of
floats. Left out: Tuple, Graph, Sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from coterie.envs.text import TEXT_FORM, text_rows, text_spec
from coterie.types import ActionSpec, Array, ConfigError, Obs, ObsSpec, from_entries

Convert = Callable[[Array], Array]

# Kept as the env gives them, because torch has them too; anything else becomes float32.
_KEPT = {"uint8", "int8", "int16", "int32", "int64", "float32", "bool"}
_LARGEST_ONE_HOT = 65536
# MiniGrid's and BabyAI's grid, which declares itself an image: what is in a cell, its color, its state or direction.
_GRID = re.compile(r"(MiniGrid|BabyAI)-")
_GRID_CODES = (11, 6, 4)


@dataclass(frozen=True)
class ObsField:
    """One array of an observation: where it is in the env's (nested) observation, and how a batch of it converts."""

    name: str
    path: tuple[str, ...]
    spec: ObsSpec
    convert: Convert | None  # None: as it is
    form: str = "as it is"  # what `convert` makes of the env's own array, for people


def _one_hot(sizes: Array, start: Array) -> Convert:
    """Each of K integers as a one-hot vector, concatenated: `[n, K]` or `[n]` to `[n, sum(sizes)]` float32."""
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - start
    width = int(sizes.sum())

    def convert(x: Array) -> Array:
        out = np.zeros((len(x), width), np.float32)
        columns = x.reshape(len(x), -1).astype(np.int64) + offsets
        out[np.arange(len(x))[:, None], columns] = 1
        return out

    return convert


def _field(env_id: str, name: str, path: tuple[str, ...], space: spaces.Space[Any], text: bool = False) -> ObsField:
    if text or (space.dtype is not None and space.dtype.kind == "U"):  # gymnasium's Text, minigrid's MissionSpace
        return ObsField(name, path, text_spec(), text_rows, TEXT_FORM)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = space.n if isinstance(space, spaces.Discrete) else space.nvec
        sizes = np.asarray(counts, np.int64).reshape(-1)
        start = np.broadcast_to(np.asarray(space.start, np.int64).reshape(-1), sizes.shape)
        if sizes.sum() > _LARGEST_ONE_HOT:
            raise ConfigError(f"env.id {env_id!r}: observation {name!r} has {sizes.sum()} values, too many to one-hot")
        spec = ObsSpec((int(sizes.sum()),), "float32", 0.0, 1.0)
        form = f"one-hot vectors side by side, of as many values as {sizes.tolist()}, from {start.tolist()} on"
        return ObsField(name, path, spec, _one_hot(sizes, start), form)
    if isinstance(space, spaces.MultiBinary):
        return ObsField(name, path, ObsSpec(tuple(space.shape), "int8", 0.0, 1.0), _plain((), "int8"), "as int8")
    if isinstance(space, spaces.Box):
        shape = tuple(space.shape) or (1,)
        dtype = space.dtype.name if space.dtype is not None and space.dtype.name in _KEPT else "float32"
        low, high = (float(np.min(space.low)), float(np.max(space.high))) if dtype == "uint8" else (-np.inf, np.inf)
        same = space.dtype is not None and space.dtype.name == dtype and space.shape != ()
        codes = _GRID_CODES if _GRID.match(env_id) and name == "image" and shape[2:] == (len(_GRID_CODES),) else ()
        spec = ObsSpec(shape, dtype, low, high, codes=codes)
        if same:
            return ObsField(name, path, spec, None)
        return ObsField(name, path, spec, _plain(space.shape, dtype), f"as {dtype}")
    raise ConfigError(
        f"env.id {env_id!r}: observation {name or 'space'!r} is {type(space).__name__}; "
        "it may be Box, Discrete, MultiDiscrete, MultiBinary, Text or a Dict of those"
    )


def _plain(shape: tuple[int, ...], dtype: str) -> Convert:
    scalar = shape == ()
    return lambda x: (x.reshape(len(x), 1) if scalar and x.ndim == 1 else x).astype(dtype)


def obs_fields(env_id: str, space: spaces.Space[Any], text: Collection[str] = ()) -> list[ObsField]:
    """The arrays of an observation space; a space that is not a Dict has one, named "".

    `text` names the arrays of bytes that are text.
    """
    if not isinstance(space, spaces.Dict):
        return [_field(env_id, "", (), space)]
    fields: list[ObsField] = []

    def walk(node: spaces.Dict, path: tuple[str, ...]) -> None:
        for key, child in node.spaces.items():
            here = (*path, key)
            if isinstance(child, spaces.Dict):
                walk(child, here)
            else:
                name = ".".join(here)
                fields.append(_field(env_id, name, here, child, name in text))

    walk(space, ())
    if not fields:
        raise ConfigError(f"env.id {env_id!r}: the observation space is an empty Dict")
    return fields


@dataclass(frozen=True)
class ActionMap:
    """What a policy may choose, and how a batch of its choices becomes what the env takes: in the env's shape, clipped
    to +-`limit`, times `scale`, plus `offset`; None: that is left out.
    """

    spec: ActionSpec
    shape: tuple[int, ...]
    offset: Array | None = None
    scale: Array | None = None
    limit: Array | None = None

    def to_env(self, a: Array) -> Array:
        """`[n, *spec.shape]` to `[n, *shape]`."""
        a = a.reshape(len(a), *self.shape)
        if self.limit is not None:
            a = np.clip(a, -self.limit, self.limit)
        if self.scale is not None:
            a = self.scale * a
        return a if self.offset is None else self.offset + a


def action_map(env_id: str, space: spaces.Space[Any]) -> ActionMap:
    """For the env's action space: starts added, [-1, 1] stretched to finite bounds."""
    if isinstance(space, spaces.Discrete):
        start = np.array(int(space.start)) if space.start else None
        return ActionMap(ActionSpec("categorical", (int(space.n),)), (), start)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        shape = tuple(space.shape)
        sizes = np.full(shape, 2) if isinstance(space, spaces.MultiBinary) else np.asarray(space.nvec)
        first = None if isinstance(space, spaces.MultiBinary) else np.asarray(space.start)
        return ActionMap(ActionSpec("multi", tuple(int(n) for n in sizes.reshape(-1))), shape, first)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return _box_action(space)
    raise ConfigError(
        f"env.id {env_id!r}: the action space is {space}; it may be Discrete, MultiDiscrete, MultiBinary "
        "or a Box of floats"
    )


def _box_action(space: spaces.Box) -> ActionMap:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    spec = ActionSpec("continuous", low=tuple(low.reshape(-1).tolist()), high=tuple(high.reshape(-1).tolist()))
    bounded = np.isfinite(low) & np.isfinite(high)
    center = np.where(bounded, (np.where(bounded, high, 0) + np.where(bounded, low, 0)) / 2, 0).astype(np.float32)
    half = np.where(bounded, (np.where(bounded, high, 0) - np.where(bounded, low, 0)) / 2, 1).astype(np.float32)
    limit = np.where(bounded, 1, np.inf).astype(np.float32)  # what has no bounds is passed as it is
    unit = bool((center == 0).all() and (half == 1).all())
    return ActionMap(spec, tuple(space.shape), None if unit else center, None if unit else half, limit)


def flatten(obs: Any, fields: list[ObsField]) -> Obs:
    """A (nested) batched observation as our flat one, converted."""
    out = {}
    for f in fields:
        x = obs
        for key in f.path:
            x = x[key]
        out[f.name] = x if f.convert is None else f.convert(x)
    return from_entries(out)


def random_actions(spec: ActionSpec, rng: np.random.Generator, n: int) -> Array:
    """n uniform-random policy actions (continuous: in [-1, 1])."""
    if spec.kind == "continuous":
        return rng.uniform(-1, 1, (n, *spec.shape)).astype(np.float32)
    return rng.integers(0, spec.sizes if spec.kind == "multi" else spec.sizes[0], (n, *spec.shape))

"""From gymnasium spaces to our `ObsSpec` and `ActionSpec`, and the conversions at the env's edge.

Observations: Box, Discrete and MultiDiscrete (one-hot float32), MultiBinary, Text (word hashes), MiniGrid's grids
(codes), and Dict and Tuple of those (flat, nested keys joined by "."). Actions: Discrete, MultiDiscrete, MultiBinary,
Box, and Dict and Tuple of those. Left out: Graph, Sequence, OneOf.

The entry "action_mask" of an observation says which choices of a discrete action are legal, those of several components
side by side. In `info["action_mask"]`, or from the env's method `action_masks()`, it may be nested like the actions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from coterie.envs.text import TEXT_FORM, text_rows, text_spec
from coterie.errors import ConfigError
from coterie.types import MASK, ActionSpec, Array, Obs, ObsSpec, from_entries

Convert = Callable[[Array], Array]

# Kept as the env gives them, because torch has them too; anything else becomes float32.
_KEPT = {"uint8", "int8", "int16", "int32", "int64", "float32", "bool"}
_LARGEST_ONE_HOT = 65536
# MiniGrid's and BabyAI's grid, which declares itself an image: what is in a cell, its color, its state or direction.
_GRID = re.compile(r"(.*:)?(MiniGrid|BabyAI)-")
_GRID_CODES = (11, 6, 4)


@dataclass(frozen=True)
class ObsField:
    """One array of an observation: where it is in the env's (nested) observation, and how a batch of it converts."""

    name: str
    path: tuple[str | int, ...]
    spec: ObsSpec
    convert: Convert | None  # None: as it is
    given: tuple[int, ...] | None = None  # the shape of the env's own array; None: not known
    form: str = "as it is"  # what `convert` makes of the env's own array, for people


def on_host(x: Any) -> Array:
    """An array, or a tensor on any device, as a NumPy array."""
    return np.asarray(x.detach().cpu() if hasattr(x, "cpu") else x)


def _one_hot(sizes: Array, start: Array) -> Convert:
    """Each of K integers as a one-hot vector, concatenated: `[n, K]` or `[n]` to `[n, sum(sizes)]` float32. Raises a
    `ValueError` for others: their columns would be those of another number.
    """
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - start
    width, end = int(sizes.sum()), start + sizes

    def convert(x: Array) -> Array:
        given = on_host(x).reshape(len(x), -1)
        inside = (given >= start) & (given < end) & (given == np.floor(given))
        if not inside.all():
            row, k = np.argwhere(~inside)[0]
            raise ValueError(f"{given[row, k]} is no integer from {start[k]} to {end[k] - 1}")
        out = np.zeros((len(x), width), np.float32)
        out[np.arange(len(x))[:, None], given.astype(np.int64) + offsets] = 1
        return out

    return convert


def _field(
    env_id: str, name: str, path: tuple[str | int, ...], space: spaces.Space[Any], text: bool = False
) -> ObsField:
    if text or (space.dtype is not None and space.dtype.kind == "U"):  # gymnasium's Text, minigrid's MissionSpace
        return ObsField(name, path, text_spec(), text_rows, form=TEXT_FORM)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = space.n if isinstance(space, spaces.Discrete) else space.nvec
        sizes = np.asarray(counts, np.int64).reshape(-1)
        start = np.broadcast_to(np.asarray(space.start, np.int64).reshape(-1), sizes.shape)
        if sizes.sum() > _LARGEST_ONE_HOT:
            raise ConfigError(f"env.id {env_id!r}: observation {name!r} has {sizes.sum()} values, too many to one-hot")
        one_hot = ObsSpec((int(sizes.sum()),), "float32", 0.0, 1.0)
        form = f"one-hot vectors side by side, of as many values as {sizes.tolist()}, from {start.tolist()} on"
        return ObsField(name, path, one_hot, _one_hot(sizes, start), tuple(space.shape or ()), form)
    if isinstance(space, spaces.MultiBinary):
        bits = ObsSpec(shape := tuple(space.shape), "int8", 0.0, 1.0)
        return ObsField(name, path, bits, _plain("int8"), shape, "as int8")
    if isinstance(space, spaces.Box):
        shape = tuple(space.shape) or (1,)
        dtype = space.dtype.name if space.dtype is not None and space.dtype.name in _KEPT else "float32"
        if 0 in shape:
            raise ConfigError(f"env.id {env_id!r}: observation {name!r} is empty, of shape {list(shape)}")
        low, high = float(np.min(space.low)), float(np.max(space.high))
        same = space.dtype is not None and space.dtype.name == dtype and space.shape != ()
        codes = _GRID_CODES if _GRID.match(env_id) and name == "image" and shape[2:] == (len(_GRID_CODES),) else ()
        spec = ObsSpec(shape, dtype, low, high, codes=codes)
        convert, form = (None, ObsField.form) if same else (_plain(dtype), f"as {dtype}")
        return ObsField(name, path, spec, convert, tuple(space.shape), form)
    raise ConfigError(
        f"env.id {env_id!r}: {f'observation {name!r}' if name else 'the observation space'} is {type(space).__name__}; "
        "it may be Box, Discrete, MultiDiscrete, MultiBinary, Text or a Dict or Tuple of those"
    )


def _plain(dtype: str) -> Convert:
    return lambda x: on_host(x.reshape(-1, 1) if x.ndim == 1 else x).astype(dtype)


def obs_fields(env_id: str, space: spaces.Space[Any], text: Collection[str] = ()) -> list[ObsField]:
    """The arrays of an observation space; a space that is neither Dict nor Tuple has one, named "".

    `text` names the arrays of bytes that are text.
    """
    leaves = {path: (".".join(map(str, path)), child) for path, child in leaf_spaces(space)}
    if not leaves:
        raise ConfigError(f"env.id {env_id!r}: the observation space is an empty {type(space).__name__}")
    if len({"", *(names := [name for name, _ in leaves.values()])}) <= len(names) > 1:
        raise ConfigError(f"env.id {env_id!r}: the observations {names} need different names, none of them empty")
    return [_field(env_id, name, path, child, name in text) for path, (name, child) in leaves.items()]


def leaf_spaces(
    space: spaces.Space[Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], spaces.Space[Any]]]:
    """The spaces in nested Dicts and Tuples, each with its keys."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield path, space
        return
    for key, child in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
        yield from leaf_spaces(child, (*path, key))


def with_mask(env_id: str, fields: list[ObsField], action: ActionSpec, outside: bool) -> list[ObsField]:
    """`fields` with an action mask, if the observation has one or it comes from `outside`: info or a method."""
    if not action.sizes:
        return fields
    spec, found = ObsSpec((sum(action.sizes),), "bool"), list[ObsField]()
    for f in fields:
        if MASK in f.path:
            if f.path != (MASK,) or f.spec.shape != spec.shape or len(fields) == 1:
                raise ConfigError(
                    f"env.id {env_id!r}: observation {f.name!r} has shape {f.spec.shape}; an action mask is the entry "
                    f"{MASK!r} beside other observations, with a value for each of {spec.shape[0]} choices"
                )
            f = ObsField(MASK, f.path, spec, lambda x: on_host(x).astype(bool), f.given, "as bool")
        found.append(replace(f, name=f.name or "observation") if outside else f)
    if outside:
        form = 'bool: what the env has in info["action_mask"], or its method action_masks() returns'
        found.append(ObsField(MASK, (), spec, None, form=form))
    return found


@dataclass(frozen=True)
class ActionMap:
    """What a policy may choose, and how a batch of its choices becomes what the env takes: in the env's shape, times
    `scale`, plus `offset`, clipped to `low` and `high`; None: that is left out.

    A Dict or Tuple has `leaves`, each with its columns of the policy's action, and the env's values side by side.
    """

    spec: ActionSpec
    shape: tuple[int, ...]
    space: spaces.Space[Any]
    offset: Array | None = None
    scale: Array | None = None
    low: Array | None = None
    high: Array | None = None
    leaves: tuple[tuple[ActionMap, Array], ...] = ()

    def to_env(self, a: Any) -> Any:
        """`[n, *spec.shape]` to `[n, *shape]`: an array, or a tensor where the constants are tensors, too."""
        if self.leaves:
            parts = [leaf.to_env(a[:, columns].astype(leaf.spec.dtype)) for leaf, columns in self.leaves]
            return np.concatenate([x.reshape(len(a), -1).astype(self.spec.dtype) for x in parts], 1)
        a = a.reshape(len(a), *self.shape)
        a = a if self.scale is None else self.scale * a
        a = a if self.offset is None else self.offset + a
        return a if self.low is None else a.clip(self.low, self.high)

    def from_env(self, a: Any) -> Array:
        """The inverse: `[n, *spec.shape]` of actions that the env took, in its structure."""
        if not self.leaves:
            x = np.asarray(a) if self.offset is None else np.asarray(a) - self.offset
            x = x if self.scale is None else x / np.where(self.scale, self.scale, np.inf)  # 0 between equal bounds
            return np.asarray(x, self.spec.dtype).reshape(len(x), *self.spec.shape)
        given = [leaf_of(a, path) for path, _ in leaf_spaces(self.space)]
        out = np.zeros((len(given[0]), *self.spec.shape), self.spec.dtype)
        for x, (leaf, columns) in zip(given, self.leaves, strict=True):
            out[:, columns] = leaf.from_env(x).reshape(len(out), -1)
        return out

    def nested(self, a: Array) -> Any:
        """`to_env`'s rows `[n, *shape]` in the env's structure and types, as gymnasium batches them. Tensors stay."""
        if not self.leaves:
            return a.astype(self.space.dtype, copy=False) if isinstance(a, np.ndarray) else a
        stops = np.cumsum([math.prod(leaf.shape) for leaf, _ in self.leaves])
        parts = np.split(a, stops[:-1], axis=1)
        rows = iter(x.reshape(len(a), *leaf.shape) for x, (leaf, _) in zip(parts, self.leaves, strict=True))
        return _nest(self.space, rows)


def _nest(space: spaces.Space[Any], rows: Iterator[Array]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nest(child, rows) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(child, rows) for child in space.spaces)
    return next(rows).astype(space.dtype)


def action_map(env_id: str, space: spaces.Space[Any]) -> ActionMap:
    """For the env's action space: starts added, [-1, 1] stretched to finite bounds."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _structured(env_id, space)
    if isinstance(space, spaces.Discrete) and space.n <= _LARGEST_ONE_HOT:
        start = np.array(int(space.start)) if space.start else None
        return ActionMap(ActionSpec("categorical", (int(space.n),)), (), space, start)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        sizes = tuple(map(int, np.ravel(getattr(space, "nvec", np.full(space.shape, 2)))))
        first = None if isinstance(space, spaces.MultiBinary) else np.asarray(space.start)
        if sum(sizes) <= _LARGEST_ONE_HOT:
            return ActionMap(ActionSpec("multi", sizes), tuple(space.shape), space, first)
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.floating):
            return _box_action(space)
        ends = zip(space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist(), strict=True)
        choices = tuple(high - low + 1 for low, high in ends)  # of Python's integers: NumPy's would overflow
        if sum(choices) <= _LARGEST_ONE_HOT:
            return ActionMap(ActionSpec("multi", choices), tuple(space.shape), space, space.low.astype(np.int64))
    raise ConfigError(
        f"env.id {env_id!r}: the action space has {space}; it may be Discrete, MultiDiscrete, MultiBinary, Box, or a "
        f"Dict or Tuple of those; integers may have at most {_LARGEST_ONE_HOT:,} values"
    )


def _structured(env_id: str, space: spaces.Space[Any]) -> ActionMap:
    """The choices of all leaves come first, then their continuous components."""
    maps = [action_map(env_id, leaf) for _, leaf in leaf_spaces(space)]
    if not maps:
        raise ConfigError(f"env.id {env_id!r}: the action space is an empty {type(space).__name__}")
    sizes = tuple(n for m in maps for n in m.spec.sizes)
    low, high = (tuple(x for m in maps for x in getattr(m.spec, side)) for side in ("low", "high"))
    at, leaves = {True: 0, False: len(sizes)}, []  # the next column of choices, and of numbers
    for m in maps:
        width, choice = len(m.spec.sizes) or len(m.spec.low), bool(m.spec.sizes)
        leaves.append((m, np.arange(at[choice], at[choice] + width)))
        at[choice] += width
    width = sum(math.prod(m.shape) for m in maps)
    spec = ActionSpec("mixed" if sizes and low else "multi" if sizes else "continuous", sizes, low, high)
    return ActionMap(spec, (width,), space, leaves=tuple(leaves))


def _box_action(space: spaces.Box) -> ActionMap:
    """A component with two bounds is stretched from [-1, 1]; with one or none it is the number itself, clipped."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    low[low < -1e15], high[high > 1e15] = -np.inf, np.inf  # the largest float often stands for no bound
    spec = ActionSpec("continuous", low=tuple(low.reshape(-1).tolist()), high=tuple(high.reshape(-1).tolist()))
    with np.errstate(over="ignore", invalid="ignore"):
        half = ((high - low) / 2).astype(np.float32)
        center = np.where(np.isfinite(half), low / 2 + high / 2, 0).astype(np.float32)
        ends = _inside(low, 1), _inside(high, -1)
    half = np.where(np.isfinite(half), half, np.float32(1))
    unit = bool((center == 0).all() and (half == 1).all())
    return ActionMap(spec, tuple(space.shape), space, None if unit else center, None if unit else half, *ends)


def _inside(bound: Array, side: int) -> Array:
    """The float32 numbers nearest to bounds on the inner `side`: 1 is upwards, -1 downwards."""
    near = bound.astype(np.float32)
    return np.where((near - bound) * side < 0, np.nextafter(near, np.float32(side * np.inf)), near)


def flatten(obs: Any, fields: list[ObsField], take: Callable[[Any], Any] = lambda x: x) -> Obs:
    """A (nested) batched observation as our flat one, converted. `take`: what of each array."""
    out = {}
    for f in fields:
        x = take(leaf_of(obs, f.path))
        out[f.name] = x if f.convert is None else f.convert(x)
    return from_entries(out)


def leaf_of(nested: Any, path: tuple[str | int, ...]) -> Any:
    """What is at `path` in nested dicts and tuples."""
    for key in path:
        nested = nested[key]
    return nested


def random_actions(spec: ActionSpec, rng: np.random.Generator, n: int, obs: Obs = None) -> Array:
    """n uniform-random policy actions (continuous: in [-1, 1]), legal ones where `obs` has an action mask."""
    numbers = rng.uniform(-1, 1, (n, len(spec.low))).astype(np.float32)
    if not spec.sizes:
        return numbers
    if isinstance(obs, dict) and MASK in obs:
        luck = np.split(np.where(obs[MASK], rng.random((n, sum(spec.sizes))), -1), np.cumsum(spec.sizes)[:-1], axis=1)
        choices = np.stack([x.argmax(1) for x in luck], 1)
    else:
        choices = rng.integers(0, spec.sizes, (n, len(spec.sizes)))
    return choices[:, 0] if spec.kind == "categorical" else np.concatenate((choices, numbers), 1).astype(spec.dtype)

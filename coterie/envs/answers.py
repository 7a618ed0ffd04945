"""What an env's `reset` and `step` have returned, or a `CoterieError` that says what is wrong with it."""

from __future__ import annotations

import math
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from coterie.envs.spaces import ObsField, leaf_of
from coterie.errors import ConfigError, CoterieError, one_line
from coterie.types import Array

_RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")
_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(gymnasium.__file__).parent))


def refused(error: Exception, says: str) -> bool:
    """Whether a call by Coterie or gymnasium had arguments that do not fit, and no code of the user ran."""
    frames = [f for e in (error, error.__cause__) if e for f in traceback.extract_tb(e.__traceback__)]
    fits = isinstance(error, TypeError) and re.search(says, str(error))
    return bool(fits) and all(frame.filename.startswith(_OURS) for frame in frames)


def check_kwargs(kwargs: Mapping[str, Any], *taken: str) -> None:
    """Raise a `ConfigError` where `env.kwargs` has one of these names."""
    if found := sorted(kwargs.keys() & taken):
        raise ConfigError(f"env.kwargs: {found[0]!r} is set by Coterie itself; use the options of section env")


def reset_env(env: Any, seed: int | None) -> Any:
    """The observation and the info of the env's reset."""
    try:
        answer = env.reset(seed=seed)
    except TypeError as error:
        if refused(error, r"reset\(\) got an unexpected keyword"):
            hint = "gymnasium's reset takes seed and options, and returns (obs, info)"
            raise CoterieError(f"{one_line(error)}; {hint}") from error
        raise
    return parts_of("reset", answer, _RESET)


def parts_of(call: str, answer: Any, parts: Sequence[str]) -> Any:
    """What the env's `call` has returned, if it has these parts."""
    if not isinstance(answer, tuple) or len(answer) != len(parts):
        what = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
        raise CoterieError(f"{call} must return ({', '.join(parts)}), not {what}")
    return answer


def number(reward: Any) -> float:
    """A reward."""
    try:
        return float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except (TypeError, ValueError):
        raise CoterieError(f"step must return a number as its reward, not {reward!r}") from None


def check_held(name: str, x: Array, dtype: str | np.dtype[Any], error: type[CoterieError] = CoterieError) -> None:
    """Raise for numbers that an integer dtype cannot hold. NumPy would cut or wrap them silently."""
    kind = np.dtype(dtype)
    if x.dtype != kind and kind.kind in "iu" and x.dtype.kind in "iuf" and not np.array_equal(x, x.astype(kind)):
        raise error(f"{name} has numbers that its space's {kind} cannot hold: {x.min()} to {x.max()}")


def fitting(f: ObsField, obs: Any, target: Array) -> Any:
    """A field of an observation, for a row of `target`. NumPy would broadcast what does not fit, silently."""
    name = "the observation" + "".join(f"[{key!r}]" for key in f.path)
    try:
        x = np.asarray(leaf_of(obs, f.path))
        single = f.convert is not None and x.size == 1 and math.prod(f.given or ()) == 1  # a number and an array of one
        if f.given is not None and x.shape != f.given and not single:
            raise CoterieError(f"{name} has shape {x.shape}, but its space has {f.given}")
        row = x if f.convert is None else f.convert(x[None])[0]
    except (LookupError, TypeError, ValueError) as error:
        raise CoterieError(f"{name} is not in its space: {one_line(error)}") from error
    check_held(name, x, target.dtype)
    return row

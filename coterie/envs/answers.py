"""What an env's `reset` and `step` have returned, or a `CoterieError` that says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.envs.spaces import ObsField, leaf_of
from coterie.types import Array, CoterieError, one_line

RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")


def parts_of(call: str, answer: Any, parts: Sequence[str]) -> Any:
    """What the env's `call` has returned, if it has these parts."""
    if not isinstance(answer, tuple) or len(answer) != len(parts):
        what = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
        raise CoterieError(f"{call} must return ({', '.join(parts)}), not {what}")
    return answer


def number(reward: Any) -> float:
    """A reward."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise CoterieError(f"step must return a number as its reward, not {reward!r}") from None


def fitting(f: ObsField, obs: Any, target: Array) -> Any:
    """A field of an observation, for a row of `target`. Numpy would broadcast or wrap what does not fit, unsaid."""
    name = "the observation" + "".join(f"[{key!r}]" for key in f.path)
    try:
        x = np.asarray(leaf_of(obs, f.path))
        single = f.convert is not None and x.size == 1 and math.prod(f.given or ()) == 1  # a number and an array of one
        if f.given is not None and x.shape != f.given and not single:
            raise CoterieError(f"{name} has shape {x.shape}, and its space {f.given}")
        row = x if f.convert is None else f.convert(x[None])[0]
    except (LookupError, TypeError, ValueError) as error:
        raise CoterieError(f"{name} is not in its space: {one_line(error)}") from error
    kind = target.dtype
    if x.dtype != kind and kind.kind in "iu" and x.dtype.kind in "iuf" and not np.array_equal(x, x.astype(kind)):
        raise CoterieError(f"{name} has numbers that its space's {kind} cannot hold: {x.min()} to {x.max()}")
    return row

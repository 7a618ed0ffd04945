"""Check sums of a rollout and of a network's weights: which env, or which tensor, is the first to differ."""

from __future__ import annotations

import base64
import zlib
from functools import lru_cache

import numpy as np
from torch import Tensor

from coterie.envs.spaces import on_host
from coterie.parallel.params import FlatParams
from coterie.types import Array, Rollout, entries

_PRIME = 0x9E3779B1


def weight_sums(params: FlatParams, moments: Tensor) -> list[int]:
    """CRC-32 of each tensor of the weights, in the order of `params.slices`, then that of the normalizers' sums."""
    data = params.data.detach().cpu()
    return [zlib.crc32(x.numpy().data) for x in (*(data[at] for at in params.slices.values()), moments)]


def rollout_sums(rollout: Rollout) -> tuple[int, str]:
    """CRC-32 of the policy's first row (actions and their log-probabilities), and 16 bits for each env of what the env
    gave (rewards, ends of episodes, last observation), in base64. Observations on a GPU are left out: they are large.

    Where the weights were equal, a difference of the first comes from the arithmetic; of the second alone, from an env.
    """
    first = zlib.crc32(b"".join(on_host(x)[0].tobytes() for x in (rollout.action, rollout.behavior_log_prob)))
    rows, envs = rollout.reward.shape
    total = _odd(rows) @ (_words(on_host(rollout.reward)).reshape(rows, envs) + _ends(rollout))
    for x in entries(rollout.obs).values():
        if x.device.type == "cpu":
            words = _words(on_host(x)[-1]).reshape(envs, -1)
            total = total + words @ _odd(words.shape[1])
    return first, base64.b64encode((total >> np.uint32(16)).astype(np.uint16).tobytes()).decode()


def differing_envs(a: str, b: str, env_id: Tensor) -> list[int]:
    """The ids of the envs whose sums differ."""
    x, y = (np.frombuffer(base64.b64decode(text), np.uint16) for text in (a, b))
    return sorted({int(i) for i in env_id.cpu().numpy()[x != y]}) if x.shape == y.shape else []


def _ends(rollout: Rollout) -> Array:
    """`[T, B]`: 0 in the middle of an episode, and other numbers at terminations and truncations."""
    terminated, truncated = (on_host(x).view(np.uint8) for x in (rollout.terminated, rollout.truncated))
    return terminated + np.uint32(2) * truncated


def _words(x: Array) -> Array:
    """The bytes of `x` as numbers of 4, or of 1 where the rows of each env have other lengths."""
    found = np.ascontiguousarray(x)
    whole = found.nbytes // max(1, len(found)) % 4 == 0
    return found.reshape(len(found), -1).view(np.uint32 if whole else np.uint8)


@lru_cache
def _odd(count: int) -> Array:
    """Odd numbers without a pattern, one for each place of a sum."""
    return (np.arange(1, count + 1, dtype=np.uint32) * np.uint32(_PRIME)) | np.uint32(1)

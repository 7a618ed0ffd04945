"""Frames of typed tensors: protobuf messages with raw bytes inside.

The handshake declares what a frame holds, so that a frame is checked by its length before it is read. The message
classes are made from the compiled `coterie.proto` at import: generated modules would tie the package to one release of
protobuf. This file must import without torch, which clients do not need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from coterie.types import MASK, Array, Spec

PROTOCOL = 2
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")

_pool = descriptor_pool.DescriptorPool()
_files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("coterie.desc").read_bytes())
_pool.AddSerializedFile(_files.file[0].SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"coterie.v1.{name}"))


Frame, TensorMessage = _message("Frame"), _message("Tensor")


class Refused(Exception):
    """A peer broke the protocol or a limit. The message is one line, for the peer and for the log. `status`: gRPC's
    name of what the peer receives; after UNAVAILABLE another attempt may succeed.
    """

    def __init__(self, reason: str, status: str = "INVALID_ARGUMENT") -> None:
        super().__init__(reason)
        self.status = status


class TensorSpec(NamedTuple):
    """One tensor of a frame. `rows`: an earlier bool tensor, which has as many True as axis 0 is long; "": none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: str = ""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    def count(self, arrays: Mapping[str, Array]) -> int:
        """Rows of this tensor in a frame of these arrays. A scalar is one row."""
        return int(np.count_nonzero(arrays[self.rows])) if self.rows else self.shape[0] if self.shape else 1


class FrameLayout:
    """The tensors of a frame, one after the other."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.tensors = tuple(tensors)
        shapes = {t.name: t.shape for t in self.tensors}
        self.most = sum(_rows(t, shapes) * t.row_bytes for t in self.tensors)  # bytes

    def pack(self, arrays: Mapping[str, Array]) -> bytes:
        """One frame of these arrays; a tensor with `rows` has those rows only. Raises `Refused` for other shapes."""
        parts: list[memoryview] = []
        for t in self.tensors:
            x, rows = np.ascontiguousarray(arrays[t.name], t.dtype), t.count(arrays)
            if x.shape != (rows, *t.shape[1:]):  # a scalar is one row
                raise Refused(f"{t.name} has shape {x.shape}, not {(rows, *t.shape[1:])}")
            parts.append(x.reshape(-1).view(np.uint8).data)
        return b"".join(parts)

    def unpack(self, data: bytes) -> dict[str, Array]:
        """The arrays in a frame: views of `data`, except bools. Raises `Refused` for a wrong length."""
        arrays: dict[str, Array] = {}
        at = 0
        for t in self.tensors:
            rows = t.count(arrays)
            end = at + rows * t.row_bytes
            if end > len(data):
                raise Refused(f"a frame of {len(data)} bytes ends within {t.name!r}, which ends at byte {end}")
            raw = np.frombuffer(data, np.uint8, end - at, at)
            # A bool of another byte than 0 or 1 would not be equal to itself.
            x = raw != 0 if t.dtype == "bool" else raw.view(t.dtype)
            arrays[t.name] = x.reshape((rows, *t.shape[1:]) if t.shape else ())
            at = end
        if at != len(data):
            raise Refused(f"a frame of {len(data)} bytes has {len(data) - at} more than declared")
        return arrays

    def message(self) -> list[Any]:
        return [TensorMessage(name=t.name, dtype=t.dtype, shape=t.shape, rows=t.rows) for t in self.tensors]


def _rows(tensor: TensorSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The largest number of rows of a tensor."""
    return math.prod(shapes[tensor.rows]) if tensor.rows else tensor.shape[0] if tensor.shape else 1


def layout_from(message: Sequence[Any], most: int) -> FrameLayout:
    """The layout that a peer declares, with frames of at most `most` bytes."""
    tensors, seen = list[TensorSpec](), dict[str, TensorSpec]()
    if len(message) > 256:
        raise Refused(f"{len(message)} tensors in a frame; at most 256")
    for m in message:
        t = TensorSpec(m.name, m.dtype, tuple(m.shape), m.rows)
        if t.dtype not in DTYPES:
            raise Refused(f"{t.name!r}: dtype {t.dtype!r} is not one of {', '.join(DTYPES)}")
        if t.name in seen or len(t.shape) > 8:
            raise Refused(f"{t.name!r} is declared twice, or has more than 8 axes")
        if 0 in t.shape[bool(t.rows) :]:  # the other axes could then have any length, which numpy refuses
            raise Refused(f"{t.name!r}: an axis of {t.shape} is empty")
        if t.rows and (t.rows not in seen or seen[t.rows].dtype != "bool" or seen[t.rows].rows or not t.shape):
            raise Refused(
                f"{t.name!r}: its rows are those of {t.rows!r}, which is not a bool tensor of fixed size before it"
            )
        seen[t.name] = t
        tensors.append(t)
    layout = FrameLayout(tensors)
    if layout.most > most:
        raise Refused(f"frames of up to {layout.most} bytes, more than {most}")
    return layout


_MOST = 1e15  # its square, summed over a batch, is still a float32
_SLACK = 100  # ranges of its space by which an observation may be outside: envs do not keep them closely


def check_values(spec: Spec, arrays: Mapping[str, Array]) -> None:
    """Raise `Refused` for values that would harm the learner: non-finite numbers, tokens out of range."""
    for name, x in arrays.items():
        per_episode = name.startswith("episode_")  # NaN where no episode has ended
        if x.dtype.kind == "f" and not (~np.isinf(x) if per_episode else np.isfinite(x)).all():
            raise Refused(f"{name} is not finite")
        if x.dtype.kind == "f" and (np.abs(x) > _MOST).any():
            raise Refused(f"{name} is beyond {_MOST:g}: the loss would not be finite")
    if (np.isnan(arrays["episode_return"]) != np.isnan(arrays["episode_length"])).any():
        raise Refused("an episode has a return without a length, or a length without a return")
    if (arrays["episode_length"] < 0).any():
        raise Refused("a negative episode length")
    for key, s in spec.obs.items():
        x = arrays[f"obs/{key}"]
        if s.text and not ((x >= 0) & (x <= s.high)).all():
            raise Refused(f"{key!r} has a token out of its range")
        room = _SLACK * (s.high - s.low)
        if x.dtype.kind == "f" and room < _MOST and ((x < s.low - room) | (x > s.high + room)).any():
            raise Refused(f"observation {key!r} is far outside of its space, {s.low:g} to {s.high:g}")
        if s.codes and (x >= np.array(s.codes)).any():
            raise Refused(f"{key!r} has a code out of its range")
    if spec.masked and not spec.legal_rows(arrays[f"obs/{MASK}"].reshape(-1, sum(spec.action.sizes))).all():
        raise Refused(f"{MASK} allows no action")


INFO_BYTES = 1 << 14  # most of a frame's `info`
_INFO_NAME = 100  # characters of a name in it


def pack_info(info: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
    """As many sums of `info` as a frame may carry, with names that it may have."""
    names, left = [name for name in info if 0 < len(name) <= _INFO_NAME and name.isprintable()], INFO_BYTES
    fits = [name for name in names if (left := left - len(name.encode()) - 32) > 0]
    return {name: {"total": info[name][0], "count": info[name][1]} for name in fits}


def unpack_info(message: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """The sums in a client's frame. Raises `Refused` for a name or a number that would harm the metrics."""
    for name, mean in message.items():
        if not (name.isprintable() and 0 < len(name) <= _INFO_NAME):
            raise Refused(f"info: {name[:_INFO_NAME]!r} is not a name of 1 to {_INFO_NAME} printable characters")
        if not (abs(mean.total) <= _MOST * mean.count and 0 < mean.count <= _MOST):
            raise Refused(f"info: {name} is not the sum of finite numbers")
    return {name: (mean.total, mean.count) for name, mean in message.items()}


WHOLE = "whole"  # tensor: the envs whose whole stack of frames is sent
_NEWEST, _STACK = "newest/", "stack/"


def timestep_layout(spec: Spec, envs: int, newest: bool = False, shared: bool = False) -> FrameLayout:
    """A TimeStep on the wire. `newest`: only the last frame of a stack, except where an episode begins. `shared`:
    without the observations, which are in shared memory.
    """
    obs: list[TensorSpec] = []
    for key, s in () if shared else spec.obs.items():
        if newest and s.is_image and s.shape[0] > 1:
            obs += [
                TensorSpec(f"{_NEWEST}{key}", s.dtype, (envs, *s.shape[1:])),
                TensorSpec(f"{_STACK}{key}", s.dtype, (0, *s.shape), WHOLE),
            ]
        else:
            obs.append(TensorSpec(f"obs/{key}", s.dtype, (envs, *s.shape)))
    small = [
        TensorSpec("reward", "float32", (envs,)),
        *(TensorSpec(name, "bool", (envs,)) for name in ("terminated", "truncated", "is_first")),
        TensorSpec("episode_return", "float64", (envs,)),
        TensorSpec("episode_length", "float64", (envs,)),
    ]
    stacks = any(t.rows for t in obs)
    return FrameLayout([*([TensorSpec(WHOLE, "bool", (envs,))] if stacks else []), *small, *obs])


def action_layout(spec: Spec, envs: int) -> FrameLayout:
    return FrameLayout([TensorSpec("action", spec.action.dtype, (envs, *spec.action.shape))])


class Newest:
    """Replaces stacks of frames by their newest frame before they are sent, and restores them on arrival."""

    def __init__(self, layout: FrameLayout) -> None:
        self.keys = [t.name.removeprefix(_NEWEST) for t in layout.tensors if t.name.startswith(_NEWEST)]
        self.last: dict[str, Array] = {}

    def split(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Whole stacks are sent wherever a stack is not the previous one moved by a frame, whatever the env does."""
        if not self.keys:
            return arrays
        whole = arrays["is_first"].copy()
        for key in self.keys:
            x = arrays[f"obs/{key}"]
            if key in self.last:
                whole |= (x[:, :-1] != self.last[key][:, 1:]).reshape(len(x), -1).any(1)
            else:
                whole[:] = True
            self.last[key] = x.copy()
        sent = {k: x for k, x in arrays.items() if k.removeprefix("obs/") not in self.keys or not k.startswith("obs/")}
        for key in self.keys:
            x = arrays[f"obs/{key}"]
            sent |= {f"{_NEWEST}{key}": x[:, -1], f"{_STACK}{key}": x[whole]}
        return {**sent, WHOLE: whole}

    def join(self, arrays: dict[str, Array]) -> dict[str, Array]:
        if not self.keys:
            return arrays
        whole = arrays.pop(WHOLE)
        for key in self.keys:
            newest, stack = arrays.pop(f"{_NEWEST}{key}"), arrays.pop(f"{_STACK}{key}")
            if key not in self.last:
                if not whole.all():
                    raise Refused(f"a stream's first frame must have whole stacks of {key!r}")
                self.last[key] = stack.copy()
            else:
                last = self.last[key]
                last[:, :-1] = last[:, 1:]
                last[:, -1] = newest
                last[whole] = stack
            arrays[f"obs/{key}"] = self.last[key]
        return arrays

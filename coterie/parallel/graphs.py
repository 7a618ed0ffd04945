"""CUDA graphs: a function of tensors is recorded once, and then launched as one, without Python between its kernels.

A learner step of a small net is about a hundred kernels, and launching them from Python takes longer than running them.
Only functions marked `recordable` are recorded: what they read besides their arguments stays in one place of memory.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor

from coterie.types import CoterieError, first_line

T = TypeVar("T")
P = ParamSpec("P")
# (function, its random numbers) -> a call that runs it again on the same memory
Record = Callable[[Callable[[], Any], Sequence[Generator]], Callable[[], Any]]

_WARM = 2  # plain calls before a recording: libraries set themselves up in their first calls
MOST_RECORDINGS = 8  # of one function by default, each with memory of its own
_MOST_KINDS = 1000  # of arguments, before nothing is recorded any more
_MOST_CHANGES = 4  # of what a function reads besides its arguments; each needs other recordings
_recording = threading.Lock()  # one thread records at a time


def recordable(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function or method. What overrides a method is not marked."""
    function.recordable = True  # type: ignore[attr-defined]
    return function


def record(function: Callable[[], T], rngs: Sequence[Generator]) -> Callable[[], T]:
    """Record `function` as a CUDA graph, without running it. The call that it returns launches the graph; its results
    are the same memory each time.
    """
    graph = torch.cuda.CUDAGraph()
    for rng in rngs:
        graph.register_generator_state(rng)
    # Not `torch.cuda.graph`: it empties torch's cache of memory, and all else would have to allocate again.
    current = torch.cuda.current_stream()
    # A graph's kernels keep the priority with which they were recorded.
    stream: torch.cuda.Stream = torch.cuda.Stream(priority=current.priority)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads go on with their own kernels
        try:
            results = function()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)

    def run() -> T:
        graph.replay()
        return results

    return run


class _Recording(Generic[T]):
    """One recording of a function, for arguments of one kind."""

    def __init__(
        self, function: Callable[..., T], args: tuple[Any, ...], tensors: list[Tensor], record: Record
    ) -> None:
        with torch.inference_mode(False):  # so that they can be written in any mode
            self.inputs = [x.clone() for x in tensors]
        left = iter(self.inputs)
        own = tuple(_refilled(x, left) for x in args)
        rngs = [x for x in args if isinstance(x, Generator)]
        with _device_of(tensors), _recording:
            self.run: Callable[[], T] = record(lambda: function(*own), rngs)

    def __call__(self, tensors: list[Tensor]) -> T:
        with _device_of(tensors):
            torch._foreach_copy_(self.inputs, tensors)
            found = self.run()
            results: list[Tensor] = []
            _taken(found, results)
            copies: T = _refilled(found, iter([x.clone() for x in results]))  # the next run overwrites the results
        return copies


def _device_of(tensors: list[Tensor]) -> AbstractContextManager[object]:
    """A thread has a GPU of its own as the current one: the first, unless it was set."""
    return torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else nullcontext()


class Graphed(Generic[T]):
    """`function`, recorded by `record` for each kind of arguments: shapes and types of tensors, and all else by value.
    Arguments may hold tensors in dataclasses, tuples, lists and dicts; arrays of numpy must not matter. Two threads may
    not call it with arguments of one kind at once. Without `record`, or if `function` (or `marked`, which it calls) is
    not `recordable`, each call is a plain one, and so are those of further kinds once there are `most` recordings.
    """

    def __init__(
        self, function: Callable[..., T], record: Record | None, marked: object = None, most: int = MOST_RECORDINGS
    ) -> None:
        self.most = most
        self.function, self.record = function, record if getattr(marked or function, "recordable", False) else None
        self.seen: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, _Recording[T]] = {}
        self.changing: tuple[float, ...] | None = None
        self.changes = 0

    def __call__(self, *args: Any, changing: tuple[float, ...] = ()) -> T:
        """`changing`: what `function` reads besides its arguments."""
        if self.record is not None and changing != self.changing:
            self.changing, self.changes = changing, self.changes + 1
            self._forget(self.record if self.changes <= _MOST_CHANGES else None)
        if self.record is None:
            return self.function(*args)
        tensors: list[Tensor] = []
        kind = _taken(args, tensors)
        if (found := self.recordings.get(kind)) is None:
            self.seen[kind] += 1
            if len(self.seen) > _MOST_KINDS:
                self._forget(None)
                return self.function(*args)
            if self.seen[kind] <= _WARM or len(self.recordings) == self.most:
                return self.function(*args)
            try:
                found = self.recordings[kind] = self._recorded(args, tensors, self.record)
            except torch.OutOfMemoryError:
                warnings.warn("no memory is left for CUDA graphs: going on without", stacklevel=2)
                self._forget(None)
                return self.function(*args)
            except RuntimeError as error:
                raise CoterieError(f"cuda_graphs: recording failed ({first_line(error)}); set it to False") from error
        return found(tensors)

    def _recorded(self, args: tuple[Any, ...], tensors: list[Tensor], record: Record) -> _Recording[T]:
        try:
            return _Recording(self.function, args, tensors, record)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # the plain calls' memory
        return _Recording(self.function, args, tensors, record)

    def _forget(self, record: Record | None) -> None:
        """Drop the recordings, and go on with `record`."""
        self.record = record
        with _recording:
            self.recordings.clear()
        self.seen.clear()


def _taken(x: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors that are in `x`; returns what else decides how a function runs."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return x.shape, x.dtype, x.device
    if isinstance(x, slice):
        return "slice", x.start, x.stop, x.step
    if isinstance(x, dict):
        return tuple((name, _taken(value, tensors)) for name, value in x.items())
    if isinstance(x, tuple | list):
        return tuple(_taken(value, tensors) for value in x)
    if is_dataclass(x):
        return type(x), *(_taken(getattr(x, f.name), tensors) for f in fields(x))
    return None if isinstance(x, np.ndarray) else x


def _refilled(x: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of `x` with other tensors, in the order of `_taken`."""
    if isinstance(x, Tensor):
        return next(tensors)
    if isinstance(x, dict):
        return {name: _refilled(value, tensors) for name, value in x.items()}
    if isinstance(x, tuple | list):
        items = [_refilled(value, tensors) for value in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: _refilled(getattr(x, f.name), tensors) for f in fields(x)})
    return x

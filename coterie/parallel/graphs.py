"""Functions of tensors that are recorded once, and then run as one, without Python between their operators: on a GPU as
CUDA graphs (`record`), on a CPU as TorchScript (`traces.py`).

A learner step of a small net is about a hundred operators, and calling them from Python takes longer than running them.
Only functions marked `recordable` are recorded: what they read besides their arguments stays in one place of memory.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor

from coterie.errors import CoterieError, first_line

T = TypeVar("T")
P = ParamSpec("P")
Flat = Callable[[list[Tensor]], list[Tensor]]
# (function, arguments, its random numbers) -> its results for them where it was called, and the recorded function;
# None: it cannot be recorded
Record = Callable[[Flat, list[Tensor], Sequence[Generator]], tuple[list[Tensor] | None, Flat | None]]

_WARM = 2  # plain calls before a recording: libraries set themselves up in their first calls
MOST_RECORDINGS = 8  # of one function by default; on a GPU each has memory of its own
_MOST_KINDS = 1000  # of arguments, before nothing is recorded any more
_recording = threading.Lock()  # one thread records at a time


def recordable(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function or method. What overrides a method is not marked, nor is what a class of another package
    inherits, for it may override what the method calls.
    """
    function.recordable = True  # type: ignore[attr-defined]
    return function


def _marked(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    ours = owner is None or type(owner).__module__.split(".")[0] == function.__module__.split(".")[0]
    return ours and getattr(function, "recordable", False)


def record(function: Flat, tensors: list[Tensor], rngs: Sequence[Generator]) -> tuple[None, Flat]:
    """Record `function` as a CUDA graph, without running it."""
    with torch.inference_mode(False):  # so that they can be written in any mode
        inputs = [x.clone() for x in tensors]
    graph = torch.cuda.CUDAGraph()
    for rng in rngs:
        graph.register_generator_state(rng)
    # Not `torch.cuda.graph`: it empties torch's cache of memory, and all else would have to allocate again.
    current = torch.cuda.current_stream()
    # A graph's kernels keep the priority with which they were recorded.
    stream: torch.cuda.Stream = torch.cuda.Stream(priority=current.priority)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream), _uncollected():
        graph.capture_begin(capture_error_mode="thread_local")  # other threads go on with their own kernels
        try:
            results = function(inputs)
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(inputs, tensors)
        graph.replay()
        return [x.clone() for x in results]  # the next run overwrites them

    return None, run


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: that may free a GPU's memory or graphs, which would invalidate a recording."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass
class _Recording(Generic[T]):
    """One recording of a function, for arguments of one kind. `found`: results, of which the tensors are replaced."""

    run: Flat
    found: T

    def __call__(self, tensors: list[Tensor]) -> T:
        with _device_of(tensors):
            results: T = _refilled(self.found, iter(self.run(tensors)))
        return results


def _device_of(tensors: list[Tensor]) -> AbstractContextManager[object]:
    """A thread has a GPU of its own as the current one: the first, unless it was set."""
    return torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else nullcontext()


class Graphed(Generic[T]):
    """`function`, recorded by `record` for each kind of arguments: shapes and types of tensors, and all else by value.
    Arguments may hold tensors in dataclasses, tuples, lists and dicts, which `function` may not write to; arrays of
    numpy must not matter. Two threads may not call it with arguments of one kind at once. Without `record`, or if
    `function` (or `marked`, which it calls) is not `recordable`, each call is a plain one, and so are those of further
    kinds once there are `most` recordings, and all once one could not be recorded.
    """

    def __init__(
        self, function: Callable[..., T], record: Record | None, marked: object = None, most: int = MOST_RECORDINGS
    ) -> None:
        self.most = most
        self.function, self.record = function, record if _marked(marked or function) else None
        self.call_counts: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, _Recording[T]] = {}

    def __call__(self, *args: Any) -> T:
        if (record := self.record) is None:
            return self.function(*args)
        tensors: list[Tensor] = []
        kind = _taken(args, tensors)
        if (found := self.recordings.get(kind)) is None:
            self.call_counts[kind] += 1
            if len(self.call_counts) > _MOST_KINDS:
                self._give_up()
                return self.function(*args)
            if self.call_counts[kind] <= _WARM or len(self.recordings) == self.most:
                return self.function(*args)
            results, found = self._recorded(record, args, tensors)
            if found is None:
                self._give_up()
            else:
                self.recordings[kind] = found
            if results is not None:
                return results[0]
        return found(tensors) if found else self.function(*args)

    def _recorded(
        self, record: Record, args: tuple[Any, ...], tensors: list[Tensor]
    ) -> tuple[list[T] | None, _Recording[T] | None]:
        """The results, if the function was called, and the recording, if it can be recorded."""
        kept: list[T] = []

        def flat(tensors: list[Tensor]) -> list[Tensor]:
            kept[:] = [self.function(*_refilled(args, iter(tensors)))]
            results: list[Tensor] = []
            _taken(kept[0], results)
            return results

        rngs, run = [x for x in args if isinstance(x, Generator)], None
        for last in (False, True):
            try:
                with _device_of(tensors), _recording:
                    results, run = record(flat, tensors, rngs)
                break
            except torch.OutOfMemoryError:
                if last:
                    warnings.warn("no memory is left for CUDA graphs: going on without", stacklevel=3)
                    return None, None
                torch.cuda.empty_cache()  # the plain calls' memory
            except RuntimeError as error:
                raise CoterieError(f"graphs: recording failed ({first_line(error)}); give --graphs False") from error
        made = None if run is None else _Recording(run, kept[0])
        return (None if results is None else list(kept)), made

    def _give_up(self) -> None:
        """Drop the recordings, and go on with plain calls."""
        self.record = None
        with _recording:
            self.recordings.clear()
        self.call_counts.clear()


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

"""Functions of tensors as TorchScript, for a CPU: their operators run in its interpreter, without Python between them.

A learner step of a small network is about 130 operators. Eager torch takes 7 us for each of them, what it keeps for the
backward pass included, and the interpreter 2 (docs/benchmarks/changes.md). The operators and their order stay the same,
and so do the results. What is recorded runs below autograd: a backward pass is just more operators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.parallel.graphs import Flat

# A private name: `no_grad` does the same, but counts what is written and keeps views, a tenth of a small step.
_below_autograd: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", torch.no_grad
)


@dataclass(frozen=True)
class _TensorKey:
    """Identifies a tensor by its memory, since a backward pass has other objects for the same memory. No two tensors of
    a tape have the same one while all of them exist.
    """

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _key(x: Tensor) -> _TensorKey:
    return _TensorKey(x.untyped_storage()._cdata, int(x.storage_offset()), x.shape, x.stride(), x.dtype)


def _keys(x: Any) -> Any:
    """`x` with keys for its tensors."""
    if isinstance(x, Tensor):
        return _key(x)
    return type(x)(map(_keys, x)) if isinstance(x, tuple | list) else x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for y in x:
            yield from _tensors(y)


class _Reads(TorchFunctionMode):
    """Notes what takes values out of tensors, or brings them in, without an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= func in _OUTSIDE
        return func(*args, **(kwargs or {}))


_OUTSIDE = {Tensor.tolist, Tensor.numpy, Tensor.__array__, torch.from_numpy, torch.as_tensor}
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that run, with their arguments and results."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, dict[str, Any], list[_TensorKey]]] = []
        self.reads = {_key(x): x for x in inputs}  # what exists before the calls, the inputs first
        self.made = dict[_TensorKey, Tensor]()
        self.fleeting = {key.storage for key in self.reads}  # memory that is another one at the next call
        self.moving = set(self.fleeting)  # memory whose values differ from call to call
        self.whole = True  # whether these calls are all that makes the results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, 0.8 s and 70 MiB, to leave this class out of what it compiles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = list(_tensors((args, tuple(named.values()))))
        lasting = self.mark_read(given)
        if func is torch.ops.aten.lift_fresh.default:  # a tensor of Python's numbers is a new one in each call
            func = torch.ops.aten.clone.default
        found = func(*args, **named)
        keys = [_key(x) for x in _tensors(found)]
        self.whole &= bool(keys) and not (_OF_VALUES & set(func.tags) and not _is_lookup(func, args))
        if func.is_view and (self.made.keys() >= set(keys) or lasting >= {key.storage for key in keys}):
            return found  # what is there already, or memory that stays
        self.made |= {key: x for key, x in zip(keys, _tensors(found), strict=True) if key not in self.reads}
        self.fleeting |= {key.storage for key in keys} - lasting
        if any(isinstance(x, Generator) for x in (*args, *named.values())) or any(
            _key(x).storage in self.moving | lasting for x in given
        ):
            self.moving |= {key.storage for key in keys}
        self.calls.append((func, _keys(args), {name: _keys(x) for name, x in named.items()}, keys))
        return found

    def mark_read(self, tensors: Iterable[Tensor]) -> set[int]:
        """They are read; returns the memory that is the same at the next call."""
        for x in tensors:
            if (key := _key(x)) not in self.made and key not in self.reads:
                self.whole &= key.storage not in self.fleeting
                self.reads[key] = x
        return {key.storage for key in self.reads} - self.fleeting

    def run_again(self, reads: Sequence[Tensor], results: list[_TensorKey]) -> tuple[Tensor, ...]:
        """The results of the same calls, with others of what they read."""
        now = dict(zip(self.reads, reads, strict=True))

        def of(x: Any) -> Any:
            if isinstance(x, _TensorKey):
                return now[x]
            return type(x)(map(of, x)) if isinstance(x, tuple | list) else x

        for func, args, named, keys in self.calls:
            found = func(*of(args), **{name: of(x) for name, x in named.items()})
            now.update(zip(keys, _tensors(found), strict=True))
        return tuple(now[key] for key in results)


def _is_lookup(func: Any, args: Any) -> bool:
    """Indexing by numbers, not by a mask, whose count would be the length of the result."""
    return func is torch.ops.aten.index.Tensor and all(x.dtype in (torch.int64, torch.int32) for x in _tensors(args[1]))


def trace(function: Flat, tensors: list[Tensor], rngs: Sequence[Generator]) -> tuple[list[Tensor], Flat | None]:
    """Call `function` and record it: its results, and itself as TorchScript, or None where it cannot be recorded."""
    with torch.inference_mode(False):
        inputs = [x.clone(memory_format=torch.contiguous_format) for x in tensors]  # with memory of their own
    tape, reads = _Tape(inputs), _Reads()
    with reads, tape:
        results = function(inputs)
    tape.mark_read(results)
    script = None if reads.any or not tape.whole else _script(tape, [_key(x) for x in results], rngs)
    if script is None:
        return results, None
    own = [x.detach() for x in tape.reads.values()][len(inputs) :]
    constant = [i for i, x in enumerate(results) if _key(x).storage not in tape.moving]
    tape.made.clear()  # TorchScript keeps the tape
    tape.reads.clear()

    def run(tensors: list[Tensor]) -> list[Tensor]:
        with _below_autograd():
            found = list(script(*(x.contiguous() for x in tensors), *own))
            for i in constant:  # TorchScript makes it once
                found[i] = found[i].clone()
        return found

    return results, run


def _script(
    tape: _Tape, results: list[_TensorKey], rngs: Sequence[Generator]
) -> Callable[..., tuple[Tensor, ...]] | None:
    """The calls of the tape as TorchScript. Nothing that they read is changed."""
    states = [rng.get_state() for rng in rngs]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is not developed any further
            copies = tuple(x.detach().clone() for x in tape.reads.values())
            made = torch.jit.trace(lambda *reads: tape.run_again(reads, results), copies, check_trace=False)  # type: ignore[no-untyped-call]
        return made if isinstance(made, torch.jit.ScriptFunction) else None
    except Exception:  # an argument that it does not know, or a torch without it
        return None
    finally:
        for rng, state in zip(rngs, states, strict=True):
            rng.set_state(state)

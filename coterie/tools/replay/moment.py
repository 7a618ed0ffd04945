"""One learner step of a replay, held for a look: the batch, the gradient and the weights just before the update."""

from __future__ import annotations

import pdb
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from safetensors.torch import save
from torch import Tensor

from coterie.algorithms.base import AnyAlgorithm, AnyBatch
from coterie.learner import Observer
from coterie.roles.learner_process import LearnerProcess


@dataclass(frozen=True)
class Moment:
    """`weights` and `gradient`: flat views of the learner's tensors by name, before the clip. `batch`: of the step."""

    step: int
    learner: LearnerProcess
    batch: AnyBatch

    @property
    def weights(self) -> dict[str, Tensor]:
        params = self.learner.params
        return {name: params.data[at] for name, at in params.slices.items()}

    @property
    def gradient(self) -> dict[str, Tensor]:
        params = self.learner.params
        return {name: params.grad[at] for name, at in params.slices.items()}

    def data(self) -> bytes:
        """All tensors as a file of safetensors: weights/NAME, gradient/NAME, batch/FIELD."""
        groups = {"weights": self.weights, "gradient": self.gradient, "batch": dict(_tensors("", self.batch))}
        found = {f"{group}/{name}": x for group, each in groups.items() for name, x in each.items()}
        return save({name: x.detach().cpu().clone().contiguous() for name, x in found.items()})


class StepBreakpoint(Observer):
    """Calls `call` once, at learner step `step`."""

    def __init__(self, learner: LearnerProcess, step: int, call: Callable[[Moment], None]) -> None:
        self.learner, self.at, self.call, self.done = learner, step, call, False

    def gradient(self, env_steps: int, algorithm: AnyAlgorithm, batch: AnyBatch) -> None:
        step = self.learner.progress.learner_steps + 1
        if step == self.at:
            self.done = True
            self.call(Moment(step, self.learner, batch))


def debug(moment: Moment) -> None:
    """Open the debugger."""
    batch, weights, gradient = moment.batch, moment.weights, moment.gradient  # noqa: F841  # names at its prompt
    print(f"learner step {moment.step}: moment, batch, weights, gradient; c goes on")
    pdb.Pdb(nosigint=True).set_trace()  # this is not the main thread


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested dataclasses, tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield name, value
        return
    inner: Mapping[Any, Any] = {}
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        inner = value._asdict()
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    elif isinstance(value, Mapping):
        inner = value
    for key, x in inner.items():
        yield from _tensors(f"{name}/{key}".strip("/"), x)

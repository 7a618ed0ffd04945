"""Compares a replay with its record, event by event."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from coterie.flight.life import Event, RecordedLife
from coterie.flight.sums import differing_envs
from coterie.learner import Observer
from coterie.runs.machine import arithmetic, versions
from coterie.types import Rollout, entries, map_tensors

_COMPARED = ("rollout", "weights", "final")


@dataclass(frozen=True)
class DivergentRollout:
    """A rollout in which envs returned something else than was recorded, after equal weights and first actions; or a
    life's first rollout, if already its first actions differ.
    """

    number: int  # of the learner's life
    rollout: Rollout
    first_actions: bool = False  # which differ


class Differs(Exception):
    """The replay is not what was recorded; the message says where and why."""

    def __init__(self, message: str, odd: DivergentRollout | None = None) -> None:
        super().__init__(message)
        self.odd = odd


class Comparison(Observer):
    """Takes a replay's events in place of a record, and raises `Differs` at the first other one."""

    def __init__(self, life: RecordedLife) -> None:
        self.header = life.header
        self.expected = {kind: deque(life.of(kind)) for kind in _COMPARED}
        self.equal = dict.fromkeys(_COMPARED, 0)
        self.last: Rollout | None = None
        self.steps = int(life.header["counts"].get("learner_steps", 0))  # the last ones with equal weights
        self._equal_steps = {self.steps}
        self._mixes = bool(life.of("mix"))  # others' weights in after a step, and before the next actions

    @property
    def digests(self) -> int:
        """How often the weights were compared."""
        return self.equal["weights"] + self.equal["final"]

    def begin(self, rollout: Rollout, env_steps: int) -> None:
        self.last = rollout

    def rest(self) -> None:
        """Compare no further."""
        for expected in self.expected.values():
            expected.clear()

    def note(self, kind: str, *event: Any) -> None:
        if kind not in _COMPARED or not self.expected[kind]:
            return
        there, here = self.expected[kind].popleft(), json.loads(json.dumps(event))
        if there != here:
            raise self._rollout(there, here) if kind == "rollout" else Differs(self._weights(there, here))
        self.equal[kind] += 1
        if kind != "rollout":
            self.steps = here[0]
            self._equal_steps.add(self.steps)

    def _rollout(self, there: Event, here: Event) -> Differs:
        number = self.equal["rollout"]
        step = f"rollout {number:,}, before learner step {here[0] + 1:,}"
        names = ("learner step", "env steps of the run", "rollouts of the batch", "versions of the weights")
        for name, a, b in zip(names, there, here, strict=False):
            if a != b:
                return Differs(f"{step}: {name} were {a} and are {b}")
        assert self.last is not None
        kept = map_tensors(lambda x: x.cpu().clone(), self.last)
        if there[4] != here[4]:
            text = self._actions(max(of_one[0] for of_one in there[3]))
            # The observations before the first actions of a later rollout are the last ones of the one before it.
            return Differs(f"{step}: {text}", None if number else DivergentRollout(number, kept, True))
        envs, rows = differing_envs(there[5], here[5], self.last.env_id), len(self.last.reward)
        which = f"all {len(envs)} envs" if 1 < len(envs) == len(self.last.env_id) else f"env {_listed(envs) or 'some'}"
        text = f"weights and first actions are equal, but what {which} returned within these {rows} rows is not"
        return Differs(f"{step}: {text}", DivergentRollout(number, kept))

    def _actions(self, step: int) -> str:
        """What other first actions mean, by weights of this learner step."""
        if step in self._equal_steps and not self._mixes:
            return f"from equal weights the policy's first actions differ; {machine(self.header)}"
        before = f"weights of learner step {step:,}, which were not compared (those of step {self.steps:,} are equal)"
        return (
            f"the policy's first actions differ, by {before}: the update or the arithmetic differs, and a run with "
            f"--log.digest-every 1 tells which; {machine(self.header)}"
        )

    def _weights(self, there: Event, here: Event) -> str:
        each = zip_longest(self.header["tensors"], there[1], here[1], fillvalue="a new tensor")
        tensors = [name for name, a, b in each if a != b]
        shown = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        steps = f"learner steps {self.steps + 1} to {here[0]}"
        if there[0] != here[0]:
            return f"the last learner step was {there[0]} and is {here[0]}"
        return f"{steps}: {shown} differ after equal rollouts; {machine(self.header)}"


def cause(first: DivergentRollout, second: DivergentRollout | None, header: dict[str, Any]) -> str:
    """Why envs returned something else than was recorded, by what a second replay had there (None: no such rollout).
    Empty where first actions differ and the envs are not the cause.
    """
    if second is None or second.number != first.number:
        return "a second replay does not differ there: the env is not deterministic"
    if first.first_actions:
        before = zip(entries(first.rollout.obs).values(), entries(second.rollout.obs).values(), strict=True)
        begins = [_unlike(x[0], y[0]).reshape(len(x[0]), -1).any(1) for x, y in before]
        ids = sorted({int(i) for odd in begins for i in first.rollout.env_id[odd]})
        return f"in a second replay env {_listed(ids)} begins otherwise: its reset is not deterministic" if ids else ""
    if (place := _first_row(first.rollout, second.rollout)) is not None:
        row, env = place
        where = f"from row {row + 1} of {len(first.rollout.reward)} on"
        return f"in a second replay env {env} returns something else {where}: it is not deterministic"
    same = "a second replay returns the same, so the env has probably changed (or the weights of later rows have)"
    return f"{same}; {machine(header)}"


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")


def _first_row(a: Rollout, b: Rollout) -> tuple[int, int] | None:
    """The first row and the id of the env that returned something else in it."""
    rows, envs = a.reward.shape
    differ = _unlike(a.reward, b.reward) | (a.terminated != b.terminated) | (a.truncated != b.truncated)
    for x, y in zip(entries(a.obs).values(), entries(b.obs).values(), strict=True):
        differ |= _unlike(x[1:], y[1:]).reshape(rows, envs, -1).any(-1)
    if not len(places := differ.nonzero()):
        return None
    row, column = places[0].tolist()
    return row, int(a.env_id[column])


def _unlike(x: Tensor, y: Tensor) -> Tensor:
    """Where two numbers differ; a NaN is like another one."""
    return (x != y) & ((x == x) | (y == y))


def machine(header: dict[str, Any]) -> str:
    return "; ".join(machine_differences(header)) or "torch, processor and instruction set are the recorded ones"


def machine_differences(header: dict[str, Any]) -> list[str]:
    """What is not as recorded here, and may change the arithmetic or the envs."""
    there, here = header | header.get("versions", {}), versions() | arithmetic(header["device"])
    return [f"{name}: {there[name]} recorded, {x} here" for name, x in here.items() if there.get(name, x) != x]

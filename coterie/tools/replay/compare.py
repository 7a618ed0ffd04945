"""Compares a replay with its record, event by event."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from coterie.flight.life import Event, Life
from coterie.flight.sums import differing_envs
from coterie.learner import Observer
from coterie.runs.machine import arithmetic
from coterie.types import Rollout

_COMPARED = ("rollout", "weights")


class Differs(Exception):
    """The replay is not what was recorded; the message says where and why."""


class Comparison(Observer):
    """Takes a replay's events in place of a record, and raises `Differs` at the first other one."""

    def __init__(self, life: Life) -> None:
        self.header = life.header
        self.expected = {kind: deque(life.of(kind)) for kind in _COMPARED}
        self.equal = dict.fromkeys(_COMPARED, 0)
        self.last: Rollout | None = None
        self.steps = 0  # learner steps up to which the weights were equal

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
            raise Differs((self._rollout if kind == "rollout" else self._weights)(there, here))
        self.equal[kind] += 1
        if kind == "weights":
            self.steps = here[0]

    def _rollout(self, there: Event, here: Event) -> str:
        step = f"rollout {self.equal['rollout']:,}, before learner step {here[0] + 1:,}"
        names = ("learner step", "env steps of the run", "rollouts of the batch", "versions of the weights")
        for name, a, b in zip(names, there, here, strict=False):
            if a != b:
                return f"{step}: {name} were {a} and are {b}"
        if there[4] != here[4]:
            return f"{step}: from equal weights the policy's first actions differ; {self._machine()}"
        assert self.last is not None
        envs = ", ".join(map(str, differing_envs(there[5], here[5], self.last.env_id))) or "some"
        rows = len(self.last.reward)
        return (
            f"{step}: weights and first actions are equal, but what env {envs} returned within these {rows} steps is "
            "not: the env is not deterministic"
        )

    def _weights(self, there: Event, here: Event) -> str:
        tensors = [name for name, a, b in zip(self.header["tensors"], there[1], here[1], strict=True) if a != b]
        shown = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        return f"learner steps {self.steps + 1} to {here[0]}: {shown} differ after equal rollouts; {self._machine()}"

    def _machine(self) -> str:
        return (
            "; ".join(machine_differences(self.header)) or "torch, processor and instruction set are the recorded ones"
        )


def machine_differences(header: dict[str, Any]) -> list[str]:
    """Why the arithmetic here may not be the recorded one."""
    here = arithmetic(header["device"])
    return [f"{name}: {header[name]} recorded, {x} here" for name, x in here.items() if header.get(name, x) != x]

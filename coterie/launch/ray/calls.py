"""What is asked of Ray: a place for a part, and calls to it that end in time, with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie.launch.ray import sync
from coterie.launch.ray.node import Node
from coterie.launch.ray.placement import Machine
from coterie.types import CoterieError, first_line

SILENT_S = 60.0  # that a machine may take to answer


class Part:
    """One command of the run, wherever Ray has put it. `folder`: a copy of its run folder, where it has one (a site).

    `asked` is the answer that is awaited, to: `news` (it works), `open` (it waits for a place), or `started` (it was
    lost: has it been started anew, or was it out of reach?).
    """

    def __init__(self, name: str, handle: Any, ports: int, folder: Path | None = None) -> None:
        self.name, self.handle, self.ports, self.folder = name, handle, ports, folder
        self.address = "", 0
        self.stamps: sync.Stamps = {}
        self.asked: Any = None
        self.what = "open"
        self.since, self.not_before = time.monotonic(), 0.0  # it was asked, it is asked again
        self.warned = False  # that there is no place for it
        self.reason = ""  # why it was lost
        self.code: int | None = None
        self.last = ""  # line that it printed


class Calls:
    """`check` may raise while a place is waited for."""

    def __init__(self, ray: Any, check: Callable[[Part], None]) -> None:
        self.ray, self.errors, self.check = ray, ray.exceptions, check

    def place(self, machine: Machine, cpus: int, gpus: int, restarts: int) -> Any:
        """A Ray actor on that machine; on another one when it comes back from the dead and that is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(machine.id, soft=True)
        made = self.ray.remote(Node).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=restarts, scheduling_strategy=strategy
        )
        return made.remote(__version__)

    def ask(self, part: Part, what: str, *args: Any, seconds: float = SILENT_S) -> Any:
        """Call a part and wait for its answer. Raises Ray's `RayActorError` where it is lost but may come back."""
        end, ref = time.monotonic() + seconds, getattr(part.handle, what).remote(*args)
        while not self.ray.wait([ref], timeout=1.0)[0]:
            if what == "open":
                self.check(part)
            if time.monotonic() > end:
                raise CoterieError(f"ray: no answer of {part.name} for {seconds:.0f} s; {self.free()}")
        try:
            return self.ray.get(ref)
        except self.errors.RayError as error:
            if (why := self.final(part, error)) is not None:
                raise why from None
            if isinstance(error, self.errors.RayActorError):
                raise
            raise CoterieError(f"{part.name}: {first_line(error)}") from None

    def final(self, part: Part, error: Exception) -> CoterieError | None:
        """The reason in one line, where there is no use in trying again."""
        if isinstance(error, self.errors.RayTaskError):  # what it was told to do went wrong
            return CoterieError(f"{part.name}: {first_line(getattr(error, 'cause', None) or error)}")
        if isinstance(error, self.errors.ActorDiedError):
            return CoterieError(f"{part.name} is lost, and Ray does not start it again: {_last_line(error)}")
        return None

    def free(self) -> str:
        free, there = self.ray.available_resources(), self.ray.cluster_resources()
        return "free are " + ", ".join(f"{free.get(k, 0):g} of {there.get(k, 0):g} {k}s" for k in ("CPU", "GPU"))


def _last_line(error: BaseException) -> str:
    """Of an actor that could not be made: what its own error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if getattr(error, "actor_init_failed", False) and lines else first_line(error)

"""The flight record of one life of a learner's process: what it begins with, what it trains on, and how it ends."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from coterie.algorithms.base import AnyAlgorithm
from coterie.build.factory import ProcessContext
from coterie.build.resources import Resources
from coterie.choices import is_own
from coterie.config import ResolvedConfig
from coterie.exchange.base import Exchange, ExchangeKind
from coterie.exchange.table import exchange_kind
from coterie.flight.life import Note, unrecorded
from coterie.flight.record import FlightRecorder, path_of
from coterie.flight.sums import rollout_sums, weight_sums
from coterie.learner import Observer, Progress
from coterie.models.heads import Moments
from coterie.parallel.params import FlatParams
from coterie.runs.checkpoint import CheckpointPart, Tensors, digest
from coterie.runs.machine import arithmetic, versions
from coterie.types import Rollout


class LifeRecorder:
    """`note` takes its events. In a replay that is the context's; without a record it does nothing."""

    def __init__(self, config: ResolvedConfig, context: ProcessContext, life_number: int) -> None:
        self.header: dict[str, Any] = {"learner": context.rank, "life": life_number, "init_from": config.init_from}
        self.header |= {"steps": config.steps, "digest_every": config.log.digest_every}  # of this life alone
        self.recorder: FlightRecorder | None = None
        if context.folder is not None and config.log.flight:
            self.recorder = FlightRecorder(path_of(context.folder, context.rank, life_number), self._whole)
        self.note: Note = context.note or (self.recorder.note if self.recorder is not None else unrecorded)

    def describe(self, tensors: Iterable[str], resources: Resources, actors: Resources) -> None:
        """What other processes must have in common with this one and its actors to repeat their arithmetic."""
        self.header |= {
            "began": time.time(),
            "tensors": [*tensors, "normalizers"],
            "device": resources.device.type,
            "precision": resources.precision,
            "actor_precision": actors.precision,
            "torch_threads": resources.torch_threads,
            "chunk": resources.chunk,
            "groups": resources.groups,
            **arithmetic(resources.device.type),
            "versions": versions(),
        }

    def resume(self, part: CheckpointPart, rngs: Iterable[torch.Generator]) -> None:
        """Note the part of a checkpoint that this life goes on from. The generators' states are noted as well: central
        acting draws numbers while a checkpoint is written, so a replay cannot have them from there.
        """
        self.header |= {
            "checkpoint": part.checkpoint,
            "part": part.rank,
            "part_steps": part.state["learners"][part.rank]["learner_steps"],
            "digest": digest_of_state(part.tensors),
            "rng": [base64.b64encode(rng.get_state().numpy().data).decode() for rng in rngs],
        }

    def _whole(self) -> dict[str, Any] | None:
        """The header; None before `start`, when an env may have been replaced and a stream opened."""
        return self.header if "counts" in self.header else None

    def start(self, counts: Mapping[str, int], env_steps: int) -> None:
        """`env_steps`: of the whole run."""
        self.header |= {"counts": dict(counts), "env_steps": env_steps}

    def flush(self) -> None:
        """Wait until the events so far stay even if this process is killed."""
        if self.recorder is not None:
            self.recorder.flush()

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def trouble(self) -> str:
        """A line for the user where the record has ended too early, once."""
        if self.recorder is None or not self.recorder.failed:
            return ""
        reason, self.recorder = self.recorder.failed, None
        return f"the flight record ends here, so that a replay does, too: {reason}"


class FlightNotes(Observer):
    """Notes each rollout, and the weights every `every` learner steps (docs/reference/flight.md).

    "rollout": learner step, the run's env steps, origins, the versions of each origin's weights, `rollout_sums`.
    "weights": learner step, `weight_sums`. "final": the same at the end, if not noted.
    """

    def __init__(
        self, params: FlatParams, moments: Moments, progress: Progress, poll: int, every: int, note: Note
    ) -> None:
        self.params, self.moments, self.progress, self.every, self.note = params, moments, progress, every, note
        self.poll = poll  # rows with the same weights

    def begin(self, rollout: Rollout, env_steps: int) -> None:
        version = rollout.policy_version.cpu().numpy()
        versions = version[:: self.poll, :: version.shape[1] // max(1, len(rollout.origins))].T.tolist()
        self.note("rollout", self.progress.learner_steps, env_steps, rollout.origins, versions, *rollout_sums(rollout))

    def step(self) -> None:
        if (steps := self.progress.learner_steps + 1) % self.every == 0:
            self.note("weights", steps, weight_sums(self.params, self.moments.read()))

    def end(self) -> None:
        if (steps := self.progress.learner_steps) % self.every:
            self.note("final", steps, weight_sums(self.params, self.moments.read()))


def digest_of_state(tensors: Tensors) -> str:
    """Digest of the state that a learner begins with, without its random numbers."""
    return digest({group: x for group, x in tensors.items() if group != "rng"})


def not_restored(config: ResolvedConfig, tensors: Tensors, algorithm: AnyAlgorithm, exchange: Exchange) -> list[str]:
    """Lines about what the user's own parts have not taken from the state that they were given."""
    parts: dict[str, Any] = {"algorithm": algorithm}
    if exchange_kind(config).restore is ExchangeKind.restore:  # else learners share it, and it may have changed since
        parts["exchange"] = exchange
    lines = []
    for part in (one for one in parts if is_own(one, config)):
        now = parts[part].state_dict()
        lost = [name for name, x in tensors[part].items() if name not in now or not _same(now[name].cpu(), x)]
        lines += [f"{part}: load_state_dict has not restored {name!r}: it is not as in the checkpoint" for name in lost]
    return lines


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y.to(x.dtype), 0, 0, equal_nan=True))

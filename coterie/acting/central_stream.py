"""Seats of central acting: what the learner keeps of each stream's envs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from coterie.acting.batching import may_go
from coterie.acting.recorder import Recorder
from coterie.types import AgentOutput, Array, Inputs, Spec, TimeStep
from coterie.wire.codec import Newest, action_layout, check_values, timestep_layout
from coterie.wire.server import Answer, ServiceStream


@dataclass(frozen=True)
class Shape:
    """How central acting goes: see config.Central."""

    spec: Spec
    envs: int  # of the hosts that the run starts
    unroll_length: int
    batch_size: int
    batches: int
    batch_min: int = 0
    batch_max: int = 0
    wait: float = 0.002
    lockstep: bool = False
    newest: bool = False
    max_envs: int = 4096
    timeout: float = 900.0


@dataclass(eq=False)
class Question:
    """What a stream's envs show, and how they get their actions."""

    seat: Seat
    seen: TimeStep
    answer: Answer
    since: float = field(default_factory=time.perf_counter)

    @property
    def width(self) -> int:
        return self.seat.width


class Seat(ServiceStream):
    """One stream's envs: their recurrent state and their unfinished rollout. Dies with the stream."""

    def __init__(
        self, shape: Shape, place: tuple[int, int], first_env: int, width: int, buffers: Sequence[Recorder],
        state: Tensor | None, post: Callable[[Question], None], left: Callable[[Seat], None],
    ) -> None:  # fmt: skip
        super().__init__({})  # the service fills the welcome
        self.shape, self.place, self.first_env_id, self.width = shape, place, first_env, width
        self.post, self.left = post, left
        self.alive = self.counted = True  # counted: its rows are in the books
        self.reads, self.writes = timestep_layout(shape.spec, width, shape.newest), action_layout(shape.spec, width)
        self.newest = Newest(self.reads)
        self.ids = np.arange(first_env, first_env + width, dtype=np.int64)
        self.buffers = deque(buffers)  # that nobody writes or has yet to read
        self.recorder: Recorder | None = None
        action, reward = self.buffers[0].last()
        self.last = torch.zeros_like(action), torch.zeros_like(reward)
        self.state = state
        self.row, self.valid = 0, 0  # of the unfinished rollout: the next row, valid rows
        self.seen = 0  # valid rows that nobody has added up yet
        self.new = True

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        """In the server's thread: check what came, and hand it to the inference thread."""
        arrays = self.newest.join(arrays)
        check_values(self.shape.spec, arrays)
        obs = {k.removeprefix("obs/"): x for k, x in arrays.items() if k.startswith("obs/")}
        seen = TimeStep(
            obs=obs[""] if list(obs) == [""] else obs,
            reward=arrays["reward"],
            terminated=arrays["terminated"],
            truncated=arrays["truncated"],
            is_first=arrays["is_first"] | self.new,
            episode_return=arrays["episode_return"],
            episode_length=arrays["episode_length"],
            env_id=self.ids,
        )
        self.new = False
        self.post(Question(self, seen, answer))

    def leave(self) -> None:
        self.left(self)

    # In the inference thread:

    def may_go(self, room: bool = True) -> bool:
        """Whether what comes next can be written; where that begins a rollout only if there is `room` for another."""
        row = -1 if self.recorder is None else self.row
        return may_go(row, self.shape.unroll_length, self.shape.lockstep, room and bool(self.buffers))

    def see(self, seen: TimeStep) -> Inputs:
        """Write the next row, of a new rollout where the last one is whole."""
        if self.recorder is None:
            self.recorder, self.row = self.buffers.popleft(), 0
            self.recorder.begin([self.state], self.last)
        else:
            valid = int(np.count_nonzero(~seen.is_first))
            self.valid, self.seen = self.valid + valid, self.seen + valid
        return self.recorder.see(0, self.row, seen)

    def act(self, out: AgentOutput, state: Tensor | None, version: int) -> None:
        assert self.recorder is not None
        self.recorder.act(0, self.row, out, version)
        self.state, self.row = state, self.row + 1

    def finish(self, value: Tensor) -> Recorder:
        """The rollout is whole; the next `see` begins another."""
        assert self.recorder is not None
        done = self.recorder
        done.bootstrap(0, value)
        self.recorder, self.last, self.valid = None, done.last(), 0
        return done

"""The streams of central acting: what the learner keeps for the envs of each one."""

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
class CentralConfig:
    """The settings of central acting; config.Central explains them."""

    spec: Spec
    envs: int  # of the run's own hosts
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
class InferenceRequest:
    """What a stream's envs show, and the call that sends their actions."""

    stream: EnvStream
    seen: TimeStep
    answer: Answer
    since: float = field(default_factory=time.perf_counter)

    @property
    def width(self) -> int:
        return self.stream.width


class EnvStream(ServiceStream):
    """One stream's envs: their recurrent state and their unfinished rollout."""

    def __init__(
        self, config: CentralConfig, place: tuple[int, int], first_env: int, recorders: Sequence[Recorder],
        state: Tensor | None, post: Callable[[InferenceRequest], None], on_leave: Callable[[EnvStream], None],
    ) -> None:  # fmt: skip
        super().__init__({})  # the service fills the welcome
        self.config, self.place, self.first_env_id = config, place, first_env
        self.width = width = int(recorders[0].is_first.shape[1])
        self.post, self.on_leave = post, on_leave
        self.alive = self.counted = True  # counted: its unfinished rollout is not dropped yet
        self.reads, self.writes = timestep_layout(config.spec, width, config.newest), action_layout(config.spec, width)
        self.newest = Newest(self.reads)
        self.ids = np.arange(first_env, first_env + width, dtype=np.int64)
        self.recorders = deque(recorders)  # free ones
        self.recorder: Recorder | None = None
        action, reward = self.recorders[0].last()
        self.last = torch.zeros_like(action), torch.zeros_like(reward)
        self.state = state
        self.row, self.valid = 0, 0  # of the unfinished rollout: the next row, valid rows
        self.seen = 0  # valid rows that are not in `Central.produced` yet
        self.new = True

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        """In the server's thread: check the arrays, and pass them to the inference thread."""
        arrays = self.newest.join(arrays)
        check_values(self.config.spec, arrays)
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
        self.post(InferenceRequest(self, seen, answer))

    def leave(self) -> None:
        self.on_leave(self)

    # In the inference thread:

    def may_go(self, room: bool = True) -> bool:
        """Whether the next row can be written. `room`: another rollout may begin."""
        row = -1 if self.recorder is None else self.row
        return may_go(row, self.config.unroll_length, self.config.lockstep, room and bool(self.recorders))

    def see(self, seen: TimeStep) -> Inputs:
        """Write the next row, of a new rollout if the last one is finished."""
        if self.recorder is None:
            self.recorder, self.row = self.recorders.popleft(), 0
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
        """Complete the rollout; the next `see` begins another."""
        assert self.recorder is not None
        done = self.recorder
        done.bootstrap(0, value)
        self.recorder, self.last, self.valid = None, done.last(), 0
        return done


def join(inputs: Sequence[Inputs]) -> Inputs:
    """The inputs of several streams as one batch."""
    if len(inputs) == 1:
        return inputs[0]
    first = inputs[0].obs
    obs = {k: torch.cat([x.obs[k] for x in inputs]) for k in first} if isinstance(first, dict) else None
    return Inputs(obs or torch.cat([x.obs for x in inputs]), *(torch.cat([x[i] for x in inputs]) for i in range(1, 4)))

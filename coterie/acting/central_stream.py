"""Streams of central acting: their admission, their state on the learner, and assembly of rollouts into batches."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.acting.base import LearnerSetup, core_shape
from coterie.acting.recorder import ON_HOST, Fields, Recorder, local_fields, valid_rows
from coterie.acting.window import Window, window_of
from coterie.envs.tasks import child_env, tasks
from coterie.errors import counted
from coterie.parallel.gpu import finish_kernels
from coterie.parallel.slots import columns_of
from coterie.remote.admission import FIRST_REMOTE_ID, ClientIds, check_hello, settings_of
from coterie.types import AgentOutput, Array, Inputs, TimeStep, from_entries
from coterie.wire.codec import Newest, Refused, action_layout, check_values, timestep_layout
from coterie.wire.service import Answer, ServiceStream


@dataclass(eq=False)
class InferenceRequest:
    """A stream's observations, and the callback that sends its actions."""

    stream: EnvStream
    time_step: TimeStep
    answer: Answer
    since: float = field(default_factory=time.perf_counter)

    @property
    def width(self) -> int:
        return self.stream.width


class EnvStream(ServiceStream):
    """One stream's envs: their recurrent state and their unfinished rollout."""

    def __init__(
        self, registry: EnvStreams, place: tuple[int, int], first_env: int, recorders: Sequence[Recorder],
        state: Tensor | None, shared: Mapping[str, Array],
    ) -> None:  # fmt: skip
        super().__init__({})  # the service fills the welcome
        self.registry, self.place, self.first_env_id = registry, place, first_env
        self.spec = spec = registry.setup.envs.spec
        self.width = width = int(recorders[0].is_first.shape[1])
        self.alive = self.counted = True  # counted: its unfinished rollout is not dropped yet
        self.shared = shared  # observations that are not in the frames
        self.reads = timestep_layout(spec, width, registry.config.newest_frame and not shared, bool(shared))
        self.writes = action_layout(spec, width)
        self.newest = Newest(self.reads)
        self.ids = np.arange(first_env, first_env + width, dtype=np.int64)
        self.recorders = deque(recorders)  # free ones
        self.recorder: Recorder | None = None
        action, reward = self.recorders[0].last()
        self.last = torch.zeros_like(action), torch.zeros_like(reward)
        self.state = state
        self.window, self.ticket = registry.window, -1  # of the unfinished rollout
        self.row, self.valid = 0, 0  # of the unfinished rollout: the next row, valid rows
        self.new, self.serial = True, 0  # serial: among its learner's streams
        self.ended = np.zeros(width, bool)  # envs whose episode ended in the last frame

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        """In the server's thread: check the arrays, and pass them to the inference thread."""
        arrays = {**self.newest.join(arrays), **self.shared}
        check_values(self.spec, arrays)
        obs = {k.removeprefix("obs/"): x for k, x in arrays.items() if k.startswith("obs/")}
        small = {name: arrays[name] for name in TimeStep._fields if name in arrays}
        first, ended = small["is_first"], small["terminated"] | small["truncated"]
        if (self.ended & ~first).any():
            raise Refused("the row after an episode's end has no is_first: it must be the next episode's first one")
        if not self.new and (first & (ended | (small["reward"] != 0))).any():
            raise Refused("a row with is_first has a reward or an end")
        self.ended = ended
        small["is_first"] = first | self.new
        time_step = TimeStep(obs=from_entries(obs), env_id=self.ids, **small)
        self.new = False
        self.registry.inbox.put(InferenceRequest(self, time_step, answer))

    def leave(self) -> None:
        self.registry.leave(self)

    # In the inference thread:

    def may_go(self, room: bool = True, before: int = 0) -> bool:
        """Whether its request can be answered now. `room`: for a new rollout. `before`: columns begun in this batch."""
        begun = self.recorder is not None
        room = room and bool(self.recorders) and (begun or self.window.may_begin(before + self.width))
        # The last row of a rollout is the first one of the next, but for lockstep.
        return room or (begun and (self.row != self.registry.unroll_length or self.registry.config.lockstep))

    def write_step(self, ts: TimeStep) -> Inputs:
        """Write the next row, of a new rollout if the last one is finished."""
        if self.recorder is None:
            self.recorder, self.row = self.recorders.popleft(), 0
            self.ticket = self.window.begin(self.width)
            self.recorder.begin([self.state], self.last)
        else:
            valid = int(np.count_nonzero(~ts.is_first))
            self.valid += valid
            self.registry.produced += valid * self.counted
        return self.recorder.write_step(0, self.row, ts)

    def write_output(self, out: AgentOutput, state: Tensor | None, version: int) -> None:
        assert self.recorder is not None
        self.recorder.write_output(0, self.row, out, version)
        self.state, self.row = state, self.row + 1

    def abandon(self) -> int:
        """Drop the unfinished rollout of a closed stream; returns its valid rows."""
        dropped = self.valid if self.counted else 0
        self.valid, self.counted = 0, False
        if self.recorder is not None:
            self.window.abandon(self.ticket)
        return dropped

    def finish(self, request: InferenceRequest, value: Tensor) -> Recorder:
        """Complete the rollout; the next `write_step` begins another, with the observations that this one ends with."""
        assert self.recorder is not None
        done = self.recorder
        self.window.finish(self.ticket)
        # The recorder's copy from here on: the host overwrites its own, perhaps before a GPU has read it again.
        request.time_step = request.time_step._replace(obs=done.inputs(0, self.row).obs)
        done.bootstrap(0, value)
        self.recorder, self.last, self.valid = None, done.last(), 0
        return done


class EnvStreams:
    """The open streams of a learner."""

    def __init__(self, setup: LearnerSetup) -> None:
        config, own = setup.config, setup.config.central
        self.setup, self.config, self.device, self.unroll_length = setup, own, setup.envs.device, setup.unroll_length
        self.batch_size = own.batch_size or config.env.num_envs
        self.own_envs = config.env.num_envs if config.actors else 0  # of the run's own hosts
        self.max_envs = min(own.max_envs, setup.max_envs)
        self.paced = own.lockstep or config.max_lag > 0  # a new rollout waits for weights that are new enough
        unbound = own.lockstep or setup.recorded_life is not None  # a record says when a rollout begins
        self.window = Window(0 if unbound else window_of(config.max_lag, self.batch_size, setup.updates))
        self.patience = setup.timeout / 3 if self.window.columns else 0.0  # with a window all wait for one that hangs
        self.streams: dict[tuple[int, int], EnvStream] = {}  # by client and group
        self.envs = self.opened = self.produced = 0  # envs of all streams; all streams so far; valid rows
        self.inbox = queue.SimpleQueue[InferenceRequest | EnvStream | None]()  # requests, closed streams, wake-ups
        self._streams_lock = threading.RLock()  # the servers for local and for remote hosts have a thread each

    def open_stream(
        self, number: int, group: int, first_env: int, width: int, life_number: int = -1,
        shared: Mapping[str, Array] = MappingProxyType({}),
    ) -> EnvStream:  # fmt: skip
        """Open a stream, with new rollouts and recurrent states. It replaces an older one of the same client."""
        with self._streams_lock:
            old = self.streams.get((number, group))
            others = self.envs - (old.width if old else 0)
            kept = 0  # for the run's own hosts, which may be restarting
            if number >= FIRST_REMOTE_ID:
                there = sum(stream.width for stream in self.streams.values() if stream.place[0] < FIRST_REMOTE_ID)
                kept = max(0, self.own_envs - there)
            if width < 1 or others + width > self.max_envs - kept:
                local = f", {kept} of them reserved for the run's local hosts" if kept else ""
                room = f"the limit is {self.max_envs}{local} (central.max_envs, replay.envs)"
                raise Refused(f"cannot add {counted(width, 'env')} to {others}: {room}")
            self.window.check(width, self.batch_size)
            if old is not None:
                self.leave(old)
            # Two: one is written while the other waits for the prefetch thread.
            recorders = [Recorder(self.make_fields(width), [slice(0, width)], self.device) for _ in range(2)]
            state = self.setup.agent.model.initial_state(width)
            stream = EnvStream(self, (number, group), first_env, recorders, state, shared)
            finish_kernels(self.device)  # other streams write there; a wait for all would break a recording of graphs
            stream.serial, self.opened = self.opened, self.opened + 1
            self.setup.note("open", stream.serial, number, group, life_number, first_env, width)
            self.streams = {**self.streams, stream.place: stream}  # a copy: another thread may iterate
            self.envs += width
            return stream

    def make_fields(self, width: int) -> Fields:
        """The arrays of a rollout of `width` envs."""
        spec, core = self.setup.envs.spec, core_shape(self.setup.agent.model)
        return local_fields(spec, self.unroll_length, width, self.device, core)

    def leave(self, stream: EnvStream) -> None:
        """Close a stream: its envs are not waited for any more."""
        with self._streams_lock:
            if stream.alive:
                stream.alive = False
                self.envs -= stream.width
                self.streams = {key: one for key, one in self.streams.items() if one is not stream}
                self.inbox.put(stream)


class EnvHostService:
    """The service of central acting. `local`: for the run's own env hosts, which know their numbers, with where each
    host's observations are, `[hosts, envs, ..]`.
    """

    def __init__(self, streams: EnvStreams, local: Mapping[str, Array] | None = None) -> None:
        setup = streams.setup
        self.streams, self.local, self.config, self.spec = streams, local, setup.config, setup.envs.spec
        self.ids = ClientIds(setup.config, setup.rank)
        settings = settings_of(setup.config, self.spec, setup.unroll_length)
        self.settings = json.dumps(settings, allow_nan=False)

    def __call__(self, hello: Any) -> ServiceStream:
        local, own = self.local, self.config.central
        number = self.ids.number(hello.run_id) if local is None else hello.number
        welcome = {"number": number, "learners": self.config.learners, "settings": self.settings}
        if hello.envs == 0:
            return ServiceStream(welcome)
        if hello.envs > own.max_envs:
            raise Refused(f"{hello.envs} envs are more than central.max_envs, {own.max_envs}")
        expected = timestep_layout(self.spec, hello.envs, own.newest_frame and local is None, local is not None)
        check_hello(hello, tasks(self.config.env.id), expected)
        if local is None:
            first, life_number, shared = self.ids.first_env(hello.run_id, hello.group, hello.envs), -1, {}
            number += FIRST_REMOTE_ID
        else:
            mine = slice(hello.group * hello.envs, (hello.group + 1) * hello.envs)
            if not all(0 <= number < len(x) and 0 <= mine.start < mine.stop <= len(x[0]) for x in local.values()):
                raise Refused(f"host {number} has no group {hello.group} of {hello.envs} envs")
            first, life_number = child_env(self.config, number, self.streams.setup.rank)[1] + mine.start, hello.run_id
            shared = {name: x[number, mine] for name, x in local.items()}
        stream = self.streams.open_stream(number, hello.group, first, hello.envs, life_number, shared)
        stream.welcome = {**welcome, "first_env_id": first}
        stream.patience = self.streams.patience if local is None else 0.0  # its launch kills a local one that hangs
        stream.about = f"{counted(hello.envs, 'env')} of a host" if local is None else ""
        return stream


class BatchAssembly:
    """Batches of `size` columns, put together in the order in which the rollouts ended.

    `batches`: their memory; `on_copied` is called when a recorder's rollout was copied and the recorder is free again.
    """

    def __init__(self, size: int, batches: list[Fields], device: torch.device, on_copied: Callable[[], None]) -> None:
        self.size, self.device, self.on_copied = size, device, on_copied
        self.finished = queue.SimpleQueue[tuple[EnvStream, Recorder] | None]()
        self.free, self.ready = queue.SimpleQueue[Fields | None](), queue.SimpleQueue[Fields]()
        self.partial: list[Mapping[str, Tensor]] = []  # at the end: columns of a batch that is not full, and others
        for fields in batches:
            self.free.put(fields)

    def run(self) -> None:
        """The thread's work, until `close`."""
        filling, at = None, 0
        while (item := self.finished.get()) is not None:
            stream, recorder = item
            done = 0
            while done < stream.width:
                if filling is None:
                    filling, at = self.free.get(), 0
                    if filling is None:
                        self.partial.append(columns_of(recorder.fields, done, stream.width - done))
                        return
                n = min(stream.width - done, self.size - at)
                target, source = columns_of(filling, at, n), columns_of(recorder.fields, done, n)
                for name, x in target.items():
                    x.copy_(source[name], non_blocking=name not in ON_HOST)
                done, at = done + n, at + n
                if at == self.size:
                    finish_kernels(self.device)
                    self.ready.put(filling)
                    filling = None
            finish_kernels(self.device)  # of a closed stream the recorder's memory may be free at once
            stream.recorders.append(recorder)
            self.on_copied()
        if filling is not None:
            self.partial.append(columns_of(filling, 0, at))

    def left(self) -> int:
        """Valid rows that the learner has not taken, once the thread has ended."""
        while not self.ready.empty():
            self.partial.append(self.ready.get())
        while not self.finished.empty():
            if (item := self.finished.get()) is not None:
                self.partial.append(item[1].fields)
        return sum(map(valid_rows, self.partial))

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        self.finished.put(None)
        self.free.put(None)

"""Env hosts of central acting: they run `env_loop` with actions from the wire."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from coterie.acting.base import EnvShare, Memory, MemorySetup, Stopped, WorkerSetup
from coterie.acting.child_processes import Reporter, WorkerReport, check, reported, sender
from coterie.acting.recorder import Envs, env_loop
from coterie.envs.tasks import envs_per_child
from coterie.parallel.hardware import available_cores, keep_freed_memory
from coterie.parallel.processes import scratch_folder
from coterie.parallel.shm import InSharedMemory, Layout
from coterie.parallel.stages import Stages
from coterie.types import Array, Post, TimeStep, entries
from coterie.wire import codec
from coterie.wire.client import Connection, Endpoint, ReconnectingStream, RunEnded, Stream
from coterie.wire.codec import Newest, timestep_layout

_SILENCE_S = 30.0  # without a frame from the learner


class GroupStream(ReconnectingStream):
    """One group's stream to the learner. `wanted` ends a wait for an answer by raising; `check` is called before each
    attempt to connect, and may raise. `shared`: where observations go that are not in the frames, see `HostMemory`.
    """

    def __init__(
        self, connection: Connection, layout: codec.FrameLayout, group: int, wanted: Callable[[], None],
        check: Callable[[], None], shared: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__(self._new_stream, connection, check)
        self._connection, self._layout, self._group, self._wanted = connection, layout, group, wanted
        self._shared = shared
        self._newest, self.rows = Newest(layout), 0  # rows: sent on the present stream

    def _new_stream(self) -> Stream:
        self._newest, self.rows = Newest(self._layout), 0
        hello = {"envs": self._layout.tensors[0].shape[0], "group": self._group}
        return self._connection.stream("Infer", self._layout, self._wanted, silence=_SILENCE_S, **hello)

    def actions(self, seen: dict[str, Array]) -> Array:
        """The learner's actions for these observations."""

        def question() -> dict[str, Array]:
            self.rows += 1
            for name, into in self._shared.items():
                into[...] = seen[name]
            return self._newest.split(seen)

        return self.ask(question)[0]["action"]


def host_envs(share: EnvShare) -> Envs:
    """Envs in groups: where there are two, one steps while the other waits for its actions."""
    torch.set_num_threads(1)
    keep_freed_memory()
    # A group that waits leaves its threads idle: each group has one for every core.
    return share.make(share.config.env.threads or len(available_cores()) * share.groups)


class HostMemory(InSharedMemory, Memory):
    """The unix socket at which a learner's env hosts connect, and each env's newest observation in shared memory.

    A host writes the observations of a group before its question, and again only after the answer. A frame would be
    copied six times on its way through the socket.
    """

    def __init__(self, setup: MemorySetup) -> None:
        hosts, width = setup.config.actors // setup.config.learners, envs_per_child(setup.config)
        layout: Layout = {f"obs/{k}": ((hosts, width, *s.shape), s.dtype) for k, s in setup.spec.obs.items()}
        super().__init__(layout, "coterie-obs")
        # A socket's path has 107 bytes at most.
        self.folder = scratch_folder(None if len(tempfile.gettempdir()) < 60 else "/tmp")
        self.address = f"unix:{self.folder / 'learner'}"

    def _bind(self, arrays: Mapping[str, Array]) -> None:
        self.obs, self.memory = dict(arrays), self._shared.memory

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "address": self.address}

    def close(self) -> None:
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)


class EnvHost:
    """The work of an env host that the run started."""

    def __init__(self, setup: WorkerSetup, memory: HostMemory) -> None:
        self.setup, share = setup, setup.envs
        hello = {"env_id": share.config.env.id, "number": setup.number, "run_id": setup.life_number}
        self.connection = Connection(Endpoint(memory.address, patience=setup.timeout), hello)

        def connect(group: int, width: int) -> GroupStream:
            layout, mine = timestep_layout(share.spec, width, shared=True), slice(group * width, (group + 1) * width)
            shared = {name: x[setup.number, mine] for name, x in memory.obs.items()}
            return GroupStream(self.connection, layout, group, lambda: None, partial(check, setup), shared)

        self.loop = EnvLoop(host_envs(share), connect, partial(check, setup))
        self.loop.waits = partial(setup.board.blocked, setup.row)  # an answer may take as long as an evaluation

    def run(self, post: Post) -> None:
        board, report = self.setup.board, sender(self.setup, self.loop.envs, post)
        with reported(lambda: report(self.loop.report.take())), suppress(Stopped):
            try:
                self.loop.run(report)
            except RunEnded:
                for stream in self.loop.streams:  # the learner's server waits for them
                    stream.close()
                with board.blocked(self.setup.row):  # for learners that have not reached the end
                    while not board.closed:
                        time.sleep(0.01)

    def close(self) -> None:
        self.loop.close()
        self.connection.close()


class EnvLoop:
    """Envs that are stepped with actions from the wire. `connect` makes the stream of a group of some width. `check` is
    called at each step and may raise to end the loop; so may `rest`, where all rollouts of `unroll` rows are complete.
    """

    def __init__(
        self, envs: Envs, connect: Callable[[int, int], GroupStream], check: Callable[[], None], unroll: int = 1,
        rest: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.envs, self.check, self.unroll, self.rest = envs, check, unroll, rest
        self.streams = [connect(g, cols.stop - cols.start) for g, cols in enumerate(envs.groups)]
        self.stages = Stages()
        self.report = Reporter("host", self.stages, self.envs.reports.take)
        self.env_steps = 0
        self.waits: Callable[[], AbstractContextManager[None]] = nullcontext  # around each wait for the learner

    def run(self, on_report: Callable[[WorkerReport], None]) -> None:
        """Step until something ends it: `RunEnded`, `Stopped`, an error."""

        def act(g: int, row: int, seen: TimeStep) -> Array:
            action = self._act(g, seen)
            if self.report.is_due():
                on_report(self.report.take())
            return action

        seen = {g: self.envs.recv(g) for g in range(len(self.envs.groups))}
        for stream in self.streams:  # all before the first question: lockstep answers none before all are connected
            with self.waits():
                stream.open()
                self.check()
        env_loop(self.envs, act, range(sys.maxsize), seen, self.stages)

    def _act(self, g: int, seen: TimeStep) -> Array:
        if all(stream.rows == 0 or (stream.rows - 1) % self.unroll == 0 for stream in self.streams):
            self.rest()
        with self.waits():
            try:
                action = self.streams[g].actions(as_arrays(seen))
            finally:
                self.check()  # a heartbeat, before the next one is due
        self.report.latencies.append(self.streams[g].latency)
        self.env_steps += len(seen.reward)
        return action

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.envs.close()


def as_arrays(seen: TimeStep) -> dict[str, Array]:
    """A TimeStep as the tensors of a frame. Env ids are not sent: the learner assigns them."""
    small = {k: x for k, x in seen._asdict().items() if k not in ("obs", "env_id")}
    return {**{f"obs/{k}": x for k, x in entries(seen.obs).items()}, **{k: np.asarray(x) for k, x in small.items()}}

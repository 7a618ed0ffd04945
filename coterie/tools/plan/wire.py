"""The cost of a message on the wire: client and server in one process, over a unix socket, without acting."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping

import numpy as np

from coterie.parallel.processes import scratch_folder
from coterie.types import Array, Spec
from coterie.wire.client import Stream, open_channel
from coterie.wire.codec import action_layout, timestep_layout
from coterie.wire.server import Answer, Server, ServiceStream


class Echo(ServiceStream):
    """A stream that answers at once."""

    def __init__(self, spec: Spec, envs: int, newest: bool = False) -> None:
        super().__init__({})
        self.reads, self.writes = timestep_layout(spec, envs, newest), action_layout(spec, envs)
        self.actions = {t.name: np.zeros(t.shape, t.dtype) for t in self.writes.tensors}

    def ask(self, arrays: Mapping[str, Array], answer: Answer) -> None:
        answer(self.actions, 0)


def wire_cost(spec: Spec, envs: int, seconds: float) -> float:
    """Core-seconds of a message of so many envs and its answer, client and server together."""
    folder = scratch_folder("/tmp")  # a socket's path has 107 bytes at most
    server = Server(f"unix:{folder / 'wire'}", {"Infer": lambda hello: Echo(spec, envs)})
    try:
        layout = timestep_layout(spec, envs)
        seen = {t.name: np.zeros(t.shape, t.dtype) for t in layout.tensors}
        channel = open_channel(server.address)
        stream = Stream(channel, "Infer", {"envs": envs}, layout)
        for _ in range(3):
            stream.send(seen)
            stream.receive()
        count, begin, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < seconds:
            stream.send(seen)
            stream.receive()
            count += 1
        spent = (time.process_time() - cpu) / count
        stream.close()
        channel.close()
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    return spent

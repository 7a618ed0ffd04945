"""The last step of central acting: finished rollouts of streams become batches for the learner, in a thread."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch

from coterie.acting.central_stream import EnvStream
from coterie.acting.recorder import ON_HOST, Fields, Recorder
from coterie.parallel.slots import columns_of


class BatchAssembly:
    """Batches of `size` columns, put together in the order in which the rollouts ended.

    `batches`: their memory; `on_copied` is called when a recorder's rollout was copied and the recorder is free again.
    """

    def __init__(self, size: int, batches: list[Fields], device: torch.device, on_copied: Callable[[], None]) -> None:
        self.size, self.device, self.on_copied = size, device, on_copied
        self.finished = queue.SimpleQueue[tuple[EnvStream, Recorder] | None]()
        self.free, self.ready = queue.SimpleQueue[Fields | None](), queue.SimpleQueue[Fields]()
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
                        return
                n = min(stream.width - done, self.size - at)
                target, source = columns_of(filling, at, n), columns_of(recorder.fields, done, n)
                for name, x in target.items():
                    x.copy_(source[name], non_blocking=name not in ON_HOST)
                done, at = done + n, at + n
                if at == self.size:
                    if self.device.type == "cuda":
                        torch.cuda.current_stream(self.device).synchronize()
                    self.ready.put(filling)
                    filling = None
            stream.recorders.append(recorder)
            self.on_copied()

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        self.finished.put(None)
        self.free.put(None)

"""Batches from shared memory to a learner's device, the next one while the last one trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.types import Array

Fields = dict[str, Tensor]


class Uploads:
    """Copies of `batches` on a GPU, made on a stream of their own out of `memory`, which is pinned for it.

    On the CPU a batch is what it was, and nothing is copied.
    """

    def __init__(self, batches: Sequence[Fields], memory: Array, device: torch.device) -> None:
        self.batches, self.memory, self.device = batches, memory, device
        self.pinned = False
        self.there: dict[int, tuple[Fields, torch.cuda.Event]] = {}
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            # Where it cannot be pinned, the copies are slower.
            self.pinned = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0

    def send(self, batch: int) -> None:
        """Start to copy a whole batch."""
        if self.device.type == "cuda" and batch not in self.there:
            with torch.cuda.stream(self.stream):
                copies = {k: x.to(self.device, non_blocking=True) for k, x in self.batches[batch].items()}
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            self.there[batch] = copies, done

    def get(self, batch: int) -> Fields:
        """A batch on the device: the current stream waits until it is there."""
        if self.device.type != "cuda":
            return self.batches[batch]
        self.send(batch)
        copies, done = self.there[batch]
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for x in copies.values():
            x.record_stream(current)
        return copies

    def free(self, batch: int) -> None:
        """The batch will be written again: its copy must be whole by now."""
        if batch in self.there:
            self.there.pop(batch)[1].synchronize()

    def close(self) -> None:
        if self.pinned:
            self.pinned = False
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)  # type: ignore[no-untyped-call]

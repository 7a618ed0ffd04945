"""Batches from shared memory to a learner's device, the next one while the last one trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.types import Array

Fields = dict[str, Tensor]


class Uploads:
    """Copies of `batches` on a GPU, made on a separate stream. `memory`, which holds the batches, is pinned for that.

    On the CPU nothing is copied.
    """

    def __init__(self, batches: Sequence[Fields], memory: Array, device: torch.device) -> None:
        self.batches, self.memory, self.device = batches, memory, device
        self.pinned = False
        self.copied: dict[int, tuple[Fields, torch.cuda.Event]] = {}
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            # If pinning fails, the copies are slower.
            self.pinned = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0

    def send(self, batch: int) -> None:
        """Start to copy a whole batch."""
        if self.device.type == "cuda" and batch not in self.copied:
            with torch.cuda.stream(self.stream):
                copies = {k: x.to(self.device, non_blocking=True) for k, x in self.batches[batch].items()}
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            self.copied[batch] = copies, done

    def get(self, batch: int) -> Fields:
        """A batch on the device. The current stream waits for its copy."""
        if self.device.type != "cuda":
            return self.batches[batch]
        self.send(batch)
        copies, done = self.copied[batch]
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for x in copies.values():
            x.record_stream(current)
        return copies

    def free(self, batch: int) -> None:
        """The batch is about to be written again: wait for its copy."""
        if batch in self.copied:
            self.copied.pop(batch)[1].synchronize()

    def close(self) -> None:
        if self.pinned:
            self.pinned = False
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)  # type: ignore[no-untyped-call]

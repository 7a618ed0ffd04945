"""Memory and streams of a GPU: batches from shared memory to the learner's device, the next while the last one trains.

On the CPU nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from coterie.types import Array

Fields = dict[str, Tensor]


def urgent_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A context in which a GPU's kernels go before those of the default stream, which does not wait for them."""
    if device.type == "cpu":
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def finish_kernels(device: torch.device) -> None:
    """Wait until a GPU has done all that this thread has asked for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Pinned:
    """Memory that a GPU reads without a copy on the host, until it is closed. If pinning fails, copies are slower."""

    def __init__(self, memory: Array, device: torch.device) -> None:
        self.memory, self.device, self.done = memory, device, False
        if device.type == "cuda":
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self.done = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
            if not self.done:  # the refusal is pending: the next kernel, which finds it, must be this one
                with suppress(RuntimeError):
                    torch.ones(1, device=device).add_(1)

    def close(self) -> None:
        if self.done:
            self.done = False
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)  # type: ignore[no-untyped-call]


class Uploads:
    """Copies of `batches` on a GPU, made on a separate stream. `memory`, which holds them, is pinned for that."""

    def __init__(self, batches: Sequence[Fields], memory: Array, device: torch.device) -> None:
        self.batches, self.device, self.pinned = batches, device, Pinned(memory, device)
        self.copied: dict[int, tuple[Fields, torch.cuda.Event]] = {}
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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
        self.pinned.close()

"""Slots: columns of batches in shared memory that producers fill and one consumer learns from, without a copy.

There are a few batches, each `[T, B]` arrays cut into slots of `width` columns. The consumer opens a batch by writing
a ticket beside each of its slots; a producer takes the oldest open slot and writes the same number when it is full.
The slot of a killed producer goes to its successor: nothing that it held has to be freed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from coterie.parallel.locks import Locks
from coterie.parallel.shm import InSharedMemory, Layout, fence
from coterie.types import Array

FREE = -1  # a slot that any producer may take
_PLAIN = ("env_id", "core")  # arrays without a time axis


def columns_of(fields: Mapping[str, Tensor], first: int, count: int) -> dict[str, Tensor]:
    """Some columns of a batch's arrays."""
    at = slice(first, first + count)
    return {k: x[at] if k in _PLAIN else x[:, at] for k, x in fields.items()}


class Slots(InSharedMemory):
    """`batches` times the arrays of `layout`, whose columns are axis 1 (axis 0 of those in `_PLAIN`).

    `producers`: whose deliveries are counted.
    """

    def __init__(self, layout: Layout, batches: int, batch_size: int, width: int, producers: int = 1) -> None:
        self.width = width
        arrays = {f"field/{k}": ((batches, *shape), dtype) for k, (shape, dtype) in layout.items()}
        slots = batches, batch_size // width
        control = dict.fromkeys(("ticket", "holder", "need", "full"), (slots, "int64"))
        more = {"origin": ((*slots, 3), "int64"), "promised": ((producers, 3), "int64")}
        super().__init__({**arrays, **control, **more}, "coterie-slots")

    def _bind(self, arrays: Mapping[str, Array]) -> None:
        self.ticket, self.need = arrays["ticket"], arrays["need"]  # written by the consumer
        self.batches, self.per_batch = len(self.ticket), len(self.ticket[0])
        self.holder, self.full = arrays["holder"], arrays["full"]  # written by the producers
        self.origin = arrays["origin"]  # of each slot's rollout: its producer, the producer's life, the number in it
        self.promised = arrays["promised"]  # of each producer: its next slot, the ticket, the rows delivered with it
        self.fields = [
            {k.removeprefix("field/"): torch.from_numpy(x[j]) for k, x in arrays.items() if k.startswith("field/")}
            for j in range(self.batches)
        ]
        self.memory = self._shared.memory
        self.locks = Locks(self._shared.fd, 0.0)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "width": self.width}

    def open(self, batch: int, need: int, holders: list[int] | None = None) -> None:
        """Consumer: have a batch filled with weights of version `need` or newer; `holders`: by these producers."""
        self.holder[batch] = FREE if holders is None else holders
        self.need[batch] = need
        fence()
        self.ticket[batch] = self.ticket.max() + 1 + np.arange(self.per_batch)

    def is_full(self, batch: int, slot: int | slice = slice(None)) -> bool:
        """Consumer: whether a slot of an open batch has been filled, or all of them."""
        whole = bool(np.all(self.full[batch, slot] == self.ticket[batch, slot]))
        fence()
        return whole

    def take(self, producer: int) -> tuple[int, int] | None:
        """Producer: (batch, slot) to fill next, or None. The one it holds already, else the oldest open one.

        A dead producer's slot may be filled by another one after a newer slot, which swaps two rollouts of that one.
        """
        empty = self.full != self.ticket
        fence()  # the holder of a slot that is empty now, not the one before
        if (at := self._oldest(empty & (self.holder == producer))) is not None:
            return at
        if not (empty & (self.holder == FREE)).any():
            return None
        if not self.locks.take(0, wait=False):  # a stopped holder delays no other producer
            return None
        try:
            at = self._oldest((self.full != self.ticket) & (self.holder == FREE))
            if at is not None:
                self.holder[at] = producer
        finally:
            self.locks.free(0)
        return at

    def _oldest(self, among: np.ndarray) -> tuple[int, int] | None:
        if not among.any():
            return None
        fence()
        flat = np.where(among, self.ticket, np.iinfo(np.int64).max).argmin()
        return divmod(int(flat), self.per_batch)

    def abandon(self, producer: int) -> None:
        """Supervisor: free a dead producer's slots."""
        empty = self.full != self.ticket
        fence()  # before the holder is read: it may change as soon as the slot is full
        self.holder[empty & (self.holder == producer)] = FREE

    def promise(self, producer: int, at: tuple[int, int], rows: int) -> None:
        """Producer: with this slot it will have delivered `rows` in all. It may be killed before it has counted them;
        `delivered` counts them only if it filled the slot.
        """
        promise = self.promised[producer]
        promise[1] = np.iinfo(np.int64).max  # the ticket of no slot: half a promise does not count
        fence()
        promise[0], promise[2] = at[0] * self.per_batch + at[1], rows
        fence()
        promise[1] = self.ticket[at]
        fence()

    def delivered(self, producer: int) -> int:
        """Supervisor: the rows of a producer's last promise if the slot was filled, else 0."""
        slot, ticket, rows = self.promised[producer].tolist()
        return rows if self.full.reshape(-1)[slot] >= ticket else 0

    def fill(self, at: tuple[int, int], origin: tuple[int, int, int] = (-1, 0, 0)) -> None:
        """Producer: the slot is full."""
        self.origin[at] = origin
        fence()
        self.full[at] = self.ticket[at]

    def origins(self, batch: int) -> list[tuple[int, int, int]]:
        """Consumer: where the rollouts of a full batch come from."""
        return [(producer, life, number) for producer, life, number in self.origin[batch].tolist()]

    def columns(self, batch: int, slot: int) -> dict[str, Tensor]:
        """A slot's arrays."""
        return columns_of(self.fields[batch], slot * self.width, self.width)

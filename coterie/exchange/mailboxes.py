"""Mailboxes of gossip between machines: the newest weights of each learner, of this run and of others.

A learner writes its mailbox after every mix and reads those of the learners elsewhere. A `Relay` at each end of the
run's connection (`remote/gossip_link.py`) carries messages between machines. A newer message overwrites an older one
that was not read, so no learner waits for a connection. A frame holds:

present  bool [MAX_REMOTE_LEARNERS]    the sender's learners, and at the hub those of other clients, by id
filled   bool [1]                      whether there is a message
learner  int64 [1]                     its id
weights  float32 [0, weights]          rows = filled
moments  float64 [0, moments]          rows = filled
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.parallel.seqlock import Seqlock
from coterie.parallel.shm import Layout, SharedArrays
from coterie.types import Array
from coterie.wire import codec
from coterie.wire.codec import FrameLayout, Refused

MAX_REMOTE_LEARNERS = 256  # learners of other runs at most; only the mailboxes that are used take memory
NAP_S = 5e-3  # between two questions for news when there was none
_MOST = {"weights": 1e15, "moments": 1e100}  # their squares are still a float32 and a float64


class Net(NamedTuple):
    """What the learners of all runs must share."""

    digest: str  # of the network's names and shapes
    weights: int
    moments: int


class Link(Protocol):
    """Carries messages between the learners of this run and those of other runs, for the supervisor."""

    # Begin, before the learners do. `join`: they are to take the others' weights; returns whether they are to.
    def start(self, memory: SharedArrays, join: bool, stop: Callable[[], bool]) -> bool: ...
    def cut(self) -> bool: ...  # break it, as a broken network does; returns whether there was one to break
    def lines(self) -> list[str]: ...  # for the log
    def gauges(self, env_steps: int) -> dict[str, float]: ...
    def close(self, over: bool) -> None: ...  # `over`: this run has ended for good


class Message(NamedTuple):
    version: int
    weights: Array
    moments: Array
    sender: int = -1  # a learner of this run

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.weights), torch.from_numpy(self.moments)


def mailbox_arrays(rows: int, weights: int, moments: int) -> Layout:
    return {
        "mailbox/weights": ((rows, weights), "float32"),
        "mailbox/moments": ((rows, moments), "float64"),
        "mailbox/writes": ((rows,), "int64"),
    }


class Mailboxes:
    """Mailboxes in shared memory, by row: this run's learners first, then those of other runs. Each has one writer."""

    def __init__(self, shared: SharedArrays, learners: int) -> None:
        self.learners, self.present = learners, shared.arrays["present"]
        self.weights, self.moments = shared.arrays["mailbox/weights"], shared.arrays["mailbox/moments"]
        self.lock = Seqlock(shared.arrays["mailbox/writes"])
        self.remote = range(learners, len(self.present))

    def peers(self) -> list[int]:
        """Rows of the remote learners that take part."""
        found: list[int] = (self.learners + np.flatnonzero(self.present[self.learners :])).tolist()
        return found

    def write(self, row: int, weights: Array, moments: Array) -> None:
        with self.lock.writing(row):
            self.weights[row] = weights
            self.moments[row, : len(moments)] = moments

    def read(self, row: int, after: int = 0) -> Message | None:
        """The newest message, unless it is being written or its version is not above `after`."""
        writes, weights, moments = self.lock.writes, self.weights[row], self.moments[row]
        if writes[row] <= after:
            return None
        return self.lock.read(row, lambda: Message(int(writes[row]), weights.copy(), moments.copy()))


def message_layout(weights: int, moments: int) -> FrameLayout:
    return FrameLayout(
        [
            codec.TensorSpec("present", "bool", (MAX_REMOTE_LEARNERS,)),
            codec.TensorSpec("filled", "bool", (1,)),
            codec.TensorSpec("learner", "int64", (1,)),
            codec.TensorSpec("weights", "float32", (0, weights), "filled"),
            codec.TensorSpec("moments", "float64", (0, moments), "filled"),
        ]
    )


class Relay:
    """One end of a connection. It sends the mailboxes `sends`, by row, and fills `receives`: row k of the other end
    is row `receives[k]` here.
    """

    def __init__(self, mailboxes: Mailboxes, sends: Iterable[int], receives: Iterable[int]) -> None:
        self.mailboxes, self.receives = mailboxes, list(receives)
        self.sent = dict.fromkeys(sends, 0)  # version of the last message of each row, the longest unsent first
        for row in self.receives:
            mailboxes.lock.invalidate(row)  # of the last learner that had this row

    def send(self) -> dict[str, Array]:
        """The next frame."""
        boxes, rows = self.mailboxes, list(self.sent)
        present = np.zeros(MAX_REMOTE_LEARNERS, bool)
        present[rows] = boxes.present[rows] == 1
        learner, weights, moments = -1, boxes.weights[:0], boxes.moments[:0]
        for row in rows:
            if present[row] and (message := boxes.read(row, self.sent[row])) is not None:
                del self.sent[row]
                self.sent[row] = message.version
                learner, weights, moments = row, message.weights[None], message.moments[None]
                break
        row_of_it = np.array([learner])
        return {
            "present": present, "filled": row_of_it >= 0, "learner": row_of_it, "weights": weights, "moments": moments,
        }  # fmt: skip

    def receive(self, frame: dict[str, Array]) -> bool:
        """Take a frame of the other end; returns whether it had a message. Raises `Refused`, with nothing changed."""
        boxes, count = self.mailboxes, len(self.receives)
        present, learner = frame["present"], int(frame["learner"][0])
        if present[count:].any() or (frame["filled"][0] and not 0 <= learner < count):
            raise Refused(f"the other run sent a learner beyond its {count} learners")
        for name, most in _MOST.items():
            if not (np.abs(frame[name]) < most).all():  # nor a NaN
                raise Refused(f"the other run sent {name} that are not finite")
        if frame["filled"][0]:
            boxes.write(self.receives[learner], frame["weights"][0], frame["moments"][0])
        boxes.present[self.receives] = present[:count]
        return bool(frame["filled"][0])

    def close(self) -> None:
        """The connection is gone, and so are the learners at its other end."""
        self.mailboxes.present[self.receives] = 0

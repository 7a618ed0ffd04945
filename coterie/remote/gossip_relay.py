"""What travels between two runs that gossip: which learners take part, and the newest weights of one at a time.

present  bool [REMOTE]                 the sender's learners, and at the hub those of other clients, by id
filled   bool [1]                      whether there is a message
learner  int64 [1]                     its id
weights  float32 [0, weights]          rows = filled
moments  float64 [0, moments]          rows = filled
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coterie.exchange.mailboxes import REMOTE, Mailboxes
from coterie.types import Array
from coterie.wire.codec import Layout, Refused, Tensor

NAP_S = 5e-3  # between two questions for news when there was none
_MOST = 1e15  # of a weight: its square is still a float32


def message_layout(weights: int, moments: int) -> Layout:
    return Layout(
        [
            Tensor("present", "bool", (REMOTE,)),
            Tensor("filled", "bool", (1,)),
            Tensor("learner", "int64", (1,)),
            Tensor("weights", "float32", (0, weights), "filled"),
            Tensor("moments", "float64", (0, moments), "filled"),
        ]
    )


class Relay:
    """One end of a connection. It sends the mailboxes `sends`, whose rows are their ids, and fills `receives`: id k of
    the other end is row `receives[k]` here.
    """

    def __init__(self, mailboxes: Mailboxes, sends: Iterable[int], receives: Iterable[int]) -> None:
        self.mailboxes, self.receives = mailboxes, list(receives)
        self.sent = dict.fromkeys(sends, 0)  # version of the last message of each row, the longest unsent first
        for row in self.receives:
            mailboxes.clear(row)  # of the last learner that had this row

    def send(self) -> dict[str, Array]:
        """The next frame."""
        boxes, rows = self.mailboxes, list(self.sent)
        present = np.zeros(REMOTE, bool)
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
            raise Refused(f"it sends more than its {count} learners")
        for name in ("weights", "moments"):
            if not (np.abs(frame[name]) < _MOST).all():  # nor a NaN
                raise Refused(f"its {name} are not finite")
        if frame["filled"][0]:
            boxes.write(self.receives[learner], frame["weights"][0], frame["moments"][0])
        boxes.present[self.receives] = present[:count]
        return bool(frame["filled"][0])

    def close(self) -> None:
        """The connection is gone, and so are the learners at its other end."""
        self.mailboxes.present[self.receives] = 0

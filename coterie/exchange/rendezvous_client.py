"""A machine's contact with the store where rings are called together (convener.py), in a thread of its own.

Calls of torch's store have no time-out where the other side hangs: whoever wants to go on must not make them itself.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coterie.exchange.rendezvous import BEAT_S, GONE, LOOK_S, SILENT_S, STORE_S, Ticket
from coterie.types import first_line

Address = tuple[str, int]


class Contact:
    """Tells the store at `address` signs of life, asks it for a place in a ring, and hears what is said there."""

    def __init__(self, address: Address, who: str) -> None:
        self.address, self.who = address, who
        self.own = self.uid = ""  # this machine's address, as the store's sees it, and this run at it
        self.store: TCPStore | None = None  # for the ring's connections to be made
        self.error = ""
        self.over = False  # the run of the machine that listens is
        self.ring, self.broken = 0, False  # the ring that it is in, and whether somebody says that it is broken
        self.answer: dict[str, Any] | None = None  # to the last ticket
        self._ticket: Ticket | None = None
        self._number = 0
        self._answered = time.monotonic()
        self._to_break = 0
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="coterie-contact", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> str:
        """Why nothing is to be expected of the store any more; empty while it answers."""
        if not self.error and time.monotonic() - self._answered > SILENT_S:
            return "the machine that listens gives no sign of life"
        return self.error

    def ask(self, ticket: Ticket) -> None:
        self.answer, self._number, self._ticket = None, 0, ticket
        self._wake.set()

    def enter(self, ring: int) -> None:
        self.ring, self.broken = ring, False

    def break_it(self) -> None:
        """Tell the others of the ring that it is broken."""
        self.broken, self._to_break = True, self.ring
        self._wake.set()

    def _work(self) -> None:
        try:
            with socket.create_connection(self.address, timeout=STORE_S) as way:
                self.own = way.getsockname()[0]
            self.uid = f"{self.own} {self.who}"
            store = TCPStore(*self.address, None, False, timeout=timedelta(seconds=STORE_S), wait_for_workers=False)
            beat, last = 0, -BEAT_S
            store.set(f"beat/{self.uid}", "0")
            self.store = again(store)
            while not self._closed.is_set():
                if time.monotonic() - last >= BEAT_S:
                    store.set(f"beat/{self.uid}", str(beat := beat + 1))
                    self.over = store.check(["over"])
                    if store.check([f"broken/{(ring := self.ring)}"]) and ring == self.ring:
                        self.broken = True
                    last = time.monotonic()
                if self.over:
                    break
                self._talk(store)
                self._answered = time.monotonic()
                self._wake.wait(LOOK_S if self._number and self.answer is None else BEAT_S / 2)
                self._wake.clear()
            store.set(f"beat/{self.uid}", GONE)
        except (RuntimeError, OSError) as error:
            self.error = first_line(error)

    def _talk(self, store: TCPStore) -> None:
        if self._to_break:
            store.set(f"broken/{self._to_break}", "1")
            self._to_break = 0
        if (ticket := self._ticket) is not None:
            self._ticket = None
            self._number = number = store.add("tickets", 1)
            store.set(f"ticket/{number}", json.dumps(asdict(ticket)))
        if self._number and self.answer is None and store.check([f"call/{self._number}"]):
            self.answer = json.loads(store.get(f"call/{self._number}"))

    def close(self) -> None:
        """Leave, and say so."""
        self._closed.set()
        self._wake.set()
        self._thread.join(2 * BEAT_S)


def again(store: TCPStore) -> TCPStore:
    """A connection of its own: two threads on one wait for each other."""
    return store.clone()  # type: ignore[attr-defined,no-any-return]

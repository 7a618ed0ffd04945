"""Where runs meet to gossip: one of them listens (`gossip.bind`), and passes on what each of the others says."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Any

import numpy as np

from coterie.config import ResolvedConfig
from coterie.exchange.base import Circle
from coterie.exchange.gossip import begin_at, next_number
from coterie.parallel.shm import SharedArrays
from coterie.remote.admission import SettingsRequest
from coterie.remote.gossip_mirror import Mirror, news_layout
from coterie.remote.servers import Servers
from coterie.types import Array, ConfigError
from coterie.wire.codec import Layout, Refused, layout_from
from coterie.wire.server import Answer, ServiceStream

TELLS, HEARS = 0, 1  # groups of a guest's two streams
NAP_S = 5e-3  # between two looks for news, each of which takes 50 us
LEAVE_S = 2.0


class Meeting:
    """Where the runs that connect to this one come: a desk, and a thread that tells them the news."""

    def __init__(self, config: ResolvedConfig, circle: Circle, memory: SharedArrays, learners: int, net: str) -> None:
        self.memory, self.circle, self.own, self.env_id = memory, circle, learners, config.env.id
        weights, moments = (memory.arrays[k].shape[1] for k in ("message", "moments"))
        self.layout = news_layout(circle.seats, weights, moments)
        if self.layout.most > (most := config.wire.max_message_mb) << 20:
            raise ConfigError(f"wire.max_message_mb: a message has {self.layout.most / 2**20:.0f} MB, not {most}")
        self.settings = {
            "env_id": config.env.id, "net": net, "weights": weights, "moments": moments, "seats": circle.seats,
        }  # fmt: skip
        self.guests: dict[int, _Guest] = {}  # by the run_id of their runs
        self.silence = config.log.stall / 2
        self.lines = deque[str](maxlen=100)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.servers = Servers(config.wire)
        self.servers.serve(config.gossip.bind, {"Gossip": self.sit}, "gossip.bind")
        self._thread = threading.Thread(target=self._work, name="coterie-gossip", daemon=True)
        self._thread.start()

    def sit(self, hello: Any) -> ServiceStream:
        said: dict[str, Any] = {"number": 0, "learners": 1}
        if hello.envs == 0:
            return SettingsRequest(said | {"settings": json.dumps(self.settings)})
        if hello.env_id != self.env_id:
            raise Refused(f"the run's envs are {self.env_id}, not {hello.env_id[:100]!r}")
        if hello.group not in (TELLS, HEARS):
            raise Refused(f"there is no group {hello.group}")
        expected = self.layout if hello.group == TELLS else Layout(())
        if layout_from(hello.sends, self.layout.most).tensors != expected.tensors:
            raise Refused("its messages are not of the run's network")
        with self._lock:
            guest = self.guests.get(hello.run_id)
            if hello.group == HEARS:
                if guest is None:
                    raise Refused("the stream of group 0 comes first")
                guest.hears.alive = False
                guest.hears = _Hears(self.layout, said)
                return guest.hears
            if guest is not None:  # it came back before its end was noticed
                self._leave(guest)
            guest = self._admit(hello)
            self.guests[hello.run_id] = guest
            said["first_env_id"] = guest.seats[0]
            said["settings"] = json.dumps({"first": guest.mirror.start, "said": guest.said})
            guest.tells = _Tells(self, guest, said)
            return guest.tells

    def _admit(self, hello: Any) -> _Guest:
        taken = {j for guest in self.guests.values() for j in guest.seats}
        free = [j not in taken for j in range(self.circle.seats)]
        rows = [hello.number, *range(self.own, self.circle.seats)]  # as it wishes, or the first that are free
        at = next((j for j in rows if j >= self.own and _all_free(free, j, hello.envs)), None)
        if at is None:
            raise Refused(f"there is no room for {hello.envs} more learners: gossip.seats {self.circle.seats}")
        seats = list(range(at, at + hello.envs))
        others = [j for j in range(self.circle.seats) if j not in seats]
        a, first = self.memory.arrays, next_number(self.memory.arrays, seats)
        a["begun"][seats] = 0  # what others said at these seats is not theirs
        begin_at(a, seats, first)
        said = int(np.count_nonzero((a["told"] > a["joined"])[others] & (a["here"] == 1)[others]))
        mirror = Mirror(self.memory, others, seats, first, silence=self.silence)
        return _Guest(hello.run_id, seats, mirror, said, _Hears(self.layout, {}))

    def leave(self, guest: _Guest) -> None:
        with self._lock:
            self._leave(guest)

    def _leave(self, guest: _Guest) -> None:
        if self.guests.get(guest.run_id) is guest:
            del self.guests[guest.run_id]
            guest.mirror.part()
            guest.hears.alive = False
            if guest.tells is not None:
                guest.tells.alive = False

    def _work(self) -> None:
        while not self._closed.wait(NAP_S):
            with self._lock:
                guests = list(self.guests.values())
            for guest in guests:
                try:
                    self._tell(guest)
                except Exception as error:  # not the others' fault
                    self.lines.append(f"gossip: no more news for seat {guest.seats[0]}: {error!r}")
                    self.leave(guest)

    def _tell(self, guest: _Guest) -> None:
        guest.mirror.look()
        if (answer := guest.hears.answer) is not None and (news := guest.mirror.news()) is not None:
            guest.hears.answer = None
            answer(news, 0)

    def tell(self) -> list[str]:
        """What the log should know of."""
        return self.servers.refused() + [self.lines.popleft() for _ in range(len(self.lines))]

    def gauges(self, env_steps: int) -> dict[str, float]:
        with self._lock:
            seats = [j for guest in self.guests.values() for j in guest.seats]
        return {
            "gossip/peers": int(self.memory.arrays["here"][seats].sum()),
            **self.servers.traffic(env_steps, "gossip"),
        }

    def close(self, over: bool) -> None:
        """`over`: the run has ended for good, and nobody needs to look for it."""
        self._closed.set()
        self.servers.close(over)
        self._thread.join(LEAVE_S)


def _all_free(free: list[bool], first: int, count: int) -> bool:
    return first + count <= len(free) and all(free[first : first + count])


class _Guest:
    """A run that has come to a meeting."""

    def __init__(self, run_id: int, seats: list[int], mirror: Mirror, said: int, hears: _Hears) -> None:
        self.run_id, self.seats, self.mirror, self.said, self.hears = run_id, seats, mirror, said, hears
        self.tells: _Tells | None = None


class _Tells(ServiceStream):
    """The stream on which a guest says what its learners say."""

    def __init__(self, meeting: Meeting, guest: _Guest, said: dict[str, Any]) -> None:
        super().__init__(said)
        self.meeting, self.guest, self.reads = meeting, guest, meeting.layout

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        if self.alive:
            self.guest.mirror.take(arrays)
            answer({}, 0)

    def leave(self) -> None:
        self.meeting.leave(self.guest)


class _Hears(ServiceStream):
    """The stream on which it hears of all others: an answer comes when there is news."""

    def __init__(self, writes: Layout, said: dict[str, Any]) -> None:
        super().__init__(said)
        self.writes = writes
        self.answer: Answer | None = None

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        self.answer = answer

    def leave(self) -> None:
        self.alive, self.answer = False, None

"""The way of a run to another one's meeting (peers.py): `gossip.connect`."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from coterie.config import Config, Wire
from coterie.exchange.base import Circle
from coterie.exchange.gossip import AHEAD, begin_at
from coterie.exchange.topology import matrices
from coterie.parallel.shm import SharedArrays
from coterie.remote.gossip_hub import HEARS, LEAVE_S, NAP_S, TELLS
from coterie.remote.gossip_mirror import Mirror, news_layout
from coterie.types import ConfigError, CoterieError
from coterie.wire.auth import read_token
from coterie.wire.client import ConnectionLost, Retry, RunEnded, Stream, back_off, open_channel
from coterie.wire.codec import Layout, Refused

_SEATS = 1024  # that a meeting may have: everybody keeps a place for everybody
_PATIENCE_S = 600.0  # that a new run looks for the others
_ALONE_S = 30.0  # that a resumed run does, before it goes on without them
_WEIGHTS_S = 30.0  # that a run that joins waits for the others' weights


class _Meeting(NamedTuple):
    """What a meeting says of itself."""

    env_id: str
    net: str
    weights: int
    moments: int
    seats: int

    @property
    def layout(self) -> Layout:
        return news_layout(self.seats, self.weights, self.moments)


def _read(text: str) -> _Meeting:
    try:
        said = json.loads(text)
        sizes = [int(said[name]) for name in ("weights", "moments", "seats")]
        if min(sizes) < 1 or not 1 < sizes[2] <= _SEATS:
            raise ValueError
        return _Meeting(str(said["env_id"]), str(said["net"]), *sizes)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise CoterieError("what listens there is no meeting of runs: is this the same version of coterie?") from None


class Link:
    """The connection of a run to a meeting, from the first welcome to the end of either. `resumed`: the run can do
    without. `say` hears of what goes on while it is looked for. Raises `CoterieError` where there is none.
    """

    def __init__(self, config: Config, learners: int, resumed: bool, say: Callable[[str], None]) -> None:
        self.address, self.env_id, self.learners = config.gossip.connect, config.env.id, learners
        self.silence = config.log.stall / 2
        self.wire: Wire = config.wire
        self.token = read_token(self.wire.token_file) if self.wire.token_file else ""
        self.run_id = random.SystemRandom().getrandbits(64)
        self.channel = open_channel(self.address, self.wire.cert, "gossip.connect", "wire.cert")
        self.lines = deque[str](maxlen=100)
        self.bytes_in = self.bytes_out = 0
        self.streams: list[Stream] = []
        self.seat = -1
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

        def come() -> None:
            try:
                self.meeting = self._visit()
                self._open()
            except BaseException:
                self._hang_up()
                raise

        try:
            patience = _ALONE_S if resumed else _PATIENCE_S
            Retry(self.address, patience, report=say)(come)
        except RunEnded as over:
            self.close()
            raise CoterieError(f"gossip.connect: the run at {self.address} is over: {over}") from None
        except BaseException:
            self.close()
            raise

    def _hello(self, group: int) -> dict[str, Any]:
        return {
            "client": "coterie", "run_id": self.run_id, "env_id": self.env_id, "envs": self.learners, "group": group,
            "number": self.seat,
        }  # fmt: skip

    def _stream(self, hello: dict[str, Any], sends: Layout) -> Stream:
        return Stream(self.channel, "Gossip", hello, sends, token=self.token, check=self._check)

    def _check(self) -> None:
        if self._closed.is_set():
            raise CoterieError("the run has ended")

    def _visit(self) -> _Meeting:
        stream = self._stream({**self._hello(0), "envs": 0}, Layout(()))
        stream.close()
        meeting = _read(stream.welcome.settings)
        if meeting.env_id != self.env_id:
            raise CoterieError(f"gossip.connect: the run's envs are {meeting.env_id}, not {self.env_id}")
        return meeting

    def _open(self) -> None:
        """Both streams. Raises `ConnectionLost` where the meeting is away."""
        layout = self.meeting.layout
        tell = self._stream(self._hello(TELLS), layout)
        self.streams = [tell]
        seat = tell.welcome.first_env_id
        if self.seat not in (-1, seat):
            raise ConnectionLost(f"seat {self.seat} is taken")
        try:
            now = json.loads(tell.welcome.settings)
            self.first, self.said = int(now["first"]), int(now["said"])
        except (ValueError, KeyError, TypeError):
            raise CoterieError("its welcome has no number to begin with") from None
        try:
            hear = self._stream(self._hello(HEARS), Layout(()))
        except CoterieError as error:  # it lets in who has told: the other stream is gone
            raise ConnectionLost(str(error)) from None
        self.streams.append(hear)
        if hear.reads.tensors != layout.tensors:
            raise CoterieError("its news are not what it said that they are: is this the same version of coterie?")
        self.seat = seat

    @property
    def circle(self) -> Circle:
        return Circle(self.seat, matrices("complete", self.meeting.seats))

    def check(self, net: str, weights: int, moments: int) -> None:
        """Raises `ConfigError` where these are not what the others average."""
        if (net, weights, moments) != (self.meeting.net, self.meeting.weights, self.meeting.moments):
            raise ConfigError("gossip.connect: the run's network or normalizers are others: give both the same model")

    def attach(self, memory: SharedArrays, join: bool, stop: Callable[[], bool] = lambda: False) -> bool:
        """Begin, with this run's learners not at work yet. `join`: they want the others' weights; returns whether
        there are any. Does not wait for them once `stop` says so.
        """
        self.memory, a = memory, memory.arrays
        self.own = list(range(self.seat, self.seat + self.learners))
        begin_at(a, self.own, self.first)
        if coming := join and self.said > 0:
            a["here"][self.own] = 0  # until they have the others' weights
        self.others = [j for j in range(len(a["told"])) if j not in self.own]
        self._thread = thread = threading.Thread(target=self._work, name="coterie-gossip", daemon=True)
        thread.start()
        end = time.monotonic() + _WEIGHTS_S

        def all_here() -> bool:
            return bool(np.count_nonzero(a["begun"][self.others]) >= self.said)

        while coming and not all_here() and not stop() and thread.is_alive() and time.monotonic() < end:
            time.sleep(NAP_S)
        return coming

    def _work(self) -> None:
        try:
            fresh = True
            while not self._closed.is_set():
                if not self._meet(self._mirror(fresh)) or not self._come_back():
                    return
                fresh = False
        except Exception as error:  # it must not end without a word
            self.lines.append(f"no more gossip with {self.address}: {error!r}")

    def _mirror(self, fresh: bool) -> Mirror:
        """Of this connection. The meeting's numbers may be anywhere: it was away for long, or has begun anew."""
        if fresh:
            return Mirror(self.memory, self.own, self.others, self.first, silence=self.silence)
        a = self.memory.arrays
        mine = int(max(a[k][self.own].max() for k in ("told", "mixed")))
        return Mirror(self.memory, self.own, self.others, mine + AHEAD, self.first - mine, self.silence)

    def _meet(self, mirror: Mirror) -> bool:
        """Gossip for as long as there is a connection; returns whether to look for another."""
        try:
            self._talk(mirror)
        except RunEnded as over:
            self.lines.append(f"the run at {self.address} is over ({over}): this one goes on without it")
            return False
        except ConnectionLost as error:
            self.lines.append(f"the run at {self.address} is away ({error}): this one goes on meanwhile")
        except (CoterieError, Refused) as error:
            self.lines.append(f"the run at {self.address} ended the gossip ({error}): this one goes on meanwhile")
        finally:
            mirror.part()
            self._hang_up()
        return True

    def _talk(self, mirror: Mirror) -> None:
        tell, hear = self.streams
        failed: list[BaseException] = []

        def listen() -> None:
            try:
                while not self._closed.is_set():
                    hear.send({})
                    mirror.take(hear.receive()[0])
            except BaseException as error:  # which is for the other thread to raise
                failed.append(error)
                tell.close()

        ear = threading.Thread(target=listen, name="coterie-gossip-ear", daemon=True)
        ear.start()
        try:
            while not self._closed.is_set() and not failed:
                self._say(tell, mirror)
            if not failed:
                self._say(tell, mirror)  # that they have left
        except ConnectionLost:
            if not failed:
                raise
        finally:
            hear.close()
            ear.join(LEAVE_S)
        if failed and not self._closed.is_set():
            raise failed[0]

    def _say(self, tell: Stream, mirror: Mirror) -> None:
        mirror.look()
        if (news := mirror.news()) is None:
            self._closed.wait(NAP_S)
            return
        tell.send(news)
        tell.receive()

    def _hang_up(self) -> None:
        for stream in self.streams:
            stream.close()
            self.bytes_in, self.bytes_out = self.bytes_in + stream.bytes_in, self.bytes_out + stream.bytes_out
        self.streams = []

    def _come_back(self) -> bool:
        """Returns False where that is no longer possible, or wanted."""
        said = ""
        for wait in back_off():
            if self._closed.wait(wait):
                return False
            try:
                meeting = self._visit()
                if meeting != self.meeting:
                    self.lines.append(f"the run at {self.address} has become another one: this one goes on without it")
                    return False
                self._open()
            except RunEnded as over:
                self.lines.append(f"the run at {self.address} is over ({over}): this one goes on without it")
                return False
            except CoterieError as error:
                self._hang_up()
                if not isinstance(error, ConnectionLost) and str(error) != said:
                    self.lines.append(f"not back at {self.address}: {error}")
                    said = str(error)
            else:
                self.lines.append(f"back at {self.address}")
                return True
        raise AssertionError

    def cut(self) -> bool:
        """End the streams without a word, as a broken network does; returns whether there were any."""
        open_ones = list(self.streams)
        for stream in open_ones:
            stream.close()
        return bool(open_ones)

    def tell(self) -> list[str]:
        """What the log should know of."""
        return [self.lines.popleft() for _ in range(len(self.lines))]

    def gauges(self, env_steps: int) -> dict[str, float]:
        open_ones = list(self.streams)
        came, went = (sum(getattr(s, k) for s in open_ones) for k in ("bytes_in", "bytes_out"))
        steps = max(1, env_steps)
        return {
            "gossip/peers": int(self.memory.arrays["here"][self.others].sum()),
            "gossip/bytes_in_per_step": (self.bytes_in + came) / steps,
            "gossip/bytes_out_per_step": (self.bytes_out + went) / steps,
        }

    def close(self, over: bool = True) -> None:
        """Whether this run has ended for good is all the same to the others."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        with suppress(Exception):
            self._hang_up()
        self.channel.close()

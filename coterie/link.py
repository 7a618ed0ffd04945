"""The way of a run to another one's meeting (peers.py): `gossip.connect`."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from coterie.config import Config, Wire
from coterie.exchange.gossip import Circle
from coterie.exchange.mirror import AHEAD, Mirror, news_layout
from coterie.parallel.shm import SharedArrays
from coterie.peers import HEARS, LEAVE_S, NAP_S, TELLS
from coterie.types import ConfigError, CoterieError
from coterie.wire.auth import read_token
from coterie.wire.client import Lost, Over, Stream, back_off, keep_trying, open_channel
from coterie.wire.codec import Layout, Refused

_WEIGHTS_S = 30.0  # that a run that joins waits for the others' weights
_ALONE_S = 30.0  # that a resumed run looks for the others before it goes on without them


class Link:
    """The connection of a run to a meeting, from the first welcome to the end of either. `check` raises where nobody
    waits for it any longer; `must`: the run cannot begin without.
    """

    def __init__(self, config: Config, learners: int, check: Callable[[], None], must: bool) -> None:
        self.address, self.env_id, self.learners, self.check = config.gossip.connect, config.env.id, learners, check
        self.wire: Wire = config.wire
        self.token = read_token(config.wire.token_file) if config.wire.token_file else ""
        self.run_id = random.SystemRandom().getrandbits(64)
        self.channel: grpc.Channel | None = None
        self.lines = deque[str](maxlen=100)
        self.bytes_in = self.bytes_out = 0
        self.streams: list[Stream] = []
        self.seat, self._here = -1, False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        patience = 10 + 2 * config.log.stall if must else _ALONE_S
        self.settings: dict[str, Any] = keep_trying(self._visit, self.address, patience, check, self.lines.append)
        self._open()

    def _hello(self, group: int) -> dict[str, Any]:
        return {
            "client": "coterie", "run_id": self.run_id, "env_id": self.env_id, "envs": self.learners, "group": group,
            "number": self.seat,
        }  # fmt: skip

    def _stream(self, hello: dict[str, Any], sends: Layout) -> Stream:
        if self.channel is None:
            self.channel = open_channel(self.address, self.wire.cert)
        return Stream(self.channel, "Gossip", hello, sends, token=self.token, check=self._check)

    def _check(self) -> None:
        if self._closed.is_set():
            raise CoterieError("the run has ended")

    def _visit(self) -> dict[str, Any]:
        stream = self._stream({**self._hello(0), "envs": 0}, Layout(()))
        stream.close()
        settings: dict[str, Any] = json.loads(stream.welcome.settings)
        if settings["env_id"] != self.env_id:
            raise CoterieError(f"gossip.connect: the run's envs are {settings['env_id']}, not {self.env_id}")
        return settings

    def _open(self) -> None:
        """Both streams. Raises `Lost` where the meeting is away."""
        told = self.settings
        layout = news_layout(len(told["sequence"][0]), told["weights"], told["moments"])
        tell = self._stream(self._hello(TELLS), layout)
        self.streams = [tell]
        seat = tell.welcome.first_env_id
        if self.seat not in (-1, seat):
            raise Lost(f"seat {self.seat} is taken")
        self.seat, now = seat, json.loads(tell.welcome.settings)
        self.first, self.said = int(now["first"]), int(now["said"])
        self.streams.append(self._stream(self._hello(HEARS), Layout(())))

    @property
    def circle(self) -> Circle:
        return Circle(self.seat, [np.asarray(m, float) for m in self.settings["sequence"]])

    def attach(self, memory: SharedArrays, net: str, join: bool) -> bool:
        """Begin, with this run's learners not at work yet. `join`: they want the others' weights; returns whether
        there are any.
        """
        if net != self.settings["net"]:
            raise ConfigError(
                "gossip.connect: the run's network is another one: give both runs the same model settings"
            )
        self.memory, a = memory, memory.arrays
        self.own = list(range(self.seat, self.seat + self.learners))
        for name in ("told", "mixed", "joined"):
            a[name][self.own] = self.first
        if coming := join and self.said > 0:
            a["here"][self.own] = 0  # until they have the others' weights
        self.others = [j for j in range(len(a["told"])) if j not in self.own]
        self._thread = threading.Thread(target=self._work, name="coterie-gossip", daemon=True)
        self._thread.start()
        end = time.monotonic() + _WEIGHTS_S
        while coming and np.count_nonzero(a["begun"][self.others]) < self.said and time.monotonic() < end:
            self.check()
            time.sleep(NAP_S)
        return coming

    def _work(self) -> None:
        fresh = True
        while not self._closed.is_set():
            mirror = self._mirror(fresh)
            fresh = False
            try:
                self._talk(mirror)
            except Over as over:
                self.lines.append(f"the run at {self.address} is over ({over}): this one goes on without it")
                return
            except Lost as error:
                self.lines.append(f"the run at {self.address} is away ({error}): this one goes on meanwhile")
            except (CoterieError, Refused) as error:
                self.lines.append(f"no more gossip with {self.address}: {error}")
                return
            finally:
                mirror.part()
                self._hang_up()
            if not self._come_back():
                return

    def _mirror(self, fresh: bool) -> Mirror:
        """Of this connection. The meeting's numbers may be anywhere: it was away for long, or has begun anew."""
        if fresh:
            return Mirror(self.memory, self.own, self.others, self.first)
        a = self.memory.arrays
        mine = int(max(a[k][self.own].max() for k in ("told", "mixed")))
        period = len(self.settings["sequence"])
        shift = -(-(self.first - mine) // period) * period
        return Mirror(self.memory, self.own, self.others, mine + AHEAD, shift)

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

        self._here = True
        ear = threading.Thread(target=listen, name="coterie-gossip-ear", daemon=True)
        ear.start()
        try:
            while not self._closed.is_set():
                self._say(tell, mirror)
                if failed:
                    raise failed[0]
            self._say(tell, mirror)  # that they have left
        except Lost:
            if failed and not isinstance(failed[0], Lost):
                raise failed[0] from None  # why the stream was closed
            raise
        finally:
            self._here = False
            hear.close()
            ear.join(LEAVE_S)

    def _say(self, tell: Stream, mirror: Mirror) -> None:
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
        for wait in back_off():
            if self._closed.wait(wait):
                return False
            try:
                fresh = self._visit()
                if fresh != self.settings:
                    self.lines.append(f"the run at {self.address} has become another one: this one goes on without it")
                    return False
                self._open()
            except Lost:
                self._hang_up()
            except Over:
                return False
            except CoterieError as error:
                self.lines.append(f"no more gossip with {self.address}: {error}")
                self._hang_up()
                return False
            else:
                self.lines.append(f"back at {self.address}")
                return True
        raise AssertionError

    def tell(self) -> list[str]:
        """What the log should know of."""
        return [self.lines.popleft() for _ in range(len(self.lines))]

    def gauges(self, env_steps: int) -> dict[str, float]:
        open_ones = list(self.streams)
        came, went = (sum(getattr(s, k) for s in open_ones) for k in ("bytes_in", "bytes_out"))
        a, steps = self.memory.arrays, max(1, env_steps)
        return {
            "gossip/peers": int(a["here"][self.others].sum()) if self._here else 0,
            "wire/bytes_in_per_step": (self.bytes_in + came) / steps,
            "wire/bytes_out_per_step": (self.bytes_out + went) / steps,
        }

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        with suppress(Exception):
            self._hang_up()
        if self.channel is not None:
            self.channel.close()

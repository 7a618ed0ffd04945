"""Gossip between the learners of runs: one listens (`gossip.bind`) and relays the messages of each of the others
(`gossip.connect`) to all.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from coterie.config import Config, ResolvedConfig
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.mailboxes import MAX_REMOTE_LEARNERS, NAP_S, Link, Mailboxes, Net, Relay, message_layout
from coterie.parallel.shm import SharedArrays
from coterie.remote.admission import Servers, check_hello
from coterie.types import Array
from coterie.wire.auth import read_token
from coterie.wire.client import Connection, ConnectionLost, Endpoint, RefusedClient, RunEnded, Stream
from coterie.wire.codec import Refused
from coterie.wire.service import Answer, ServiceStream

_PATIENCE_S = 600.0  # that a new run waits for the hub
_ALONE_S = 30.0  # that a resumed run waits, before it trains alone
_WEIGHTS_S = 60.0  # that a new run waits for the weights of others, whose learners may start just now
_LEAVE_S = 2.0


def link(config: ResolvedConfig, net: Net, resumed: bool, report: Callable[[str], None]) -> Link:
    """The link of a run that listens for others or connects to one."""
    if config.gossip.bind:
        return GossipHub(config, config.learners, net)
    return GossipClient(config, config.learners, net, resumed=resumed, report=report)


class GossipHub:
    """Admits clients, all in the server's thread, and keeps a mailbox for each of their learners."""

    mailboxes: Mailboxes

    def __init__(self, config: Config, learners: int, net: Net) -> None:
        self.address, self.env_id, self.learners, self.net = config.gossip.bind, config.env.id, learners, net
        self.seed = config.seed
        self.layout = message_layout(net.weights, net.moments)
        if self.layout.most > (most := config.wire.max_message_mb) << 20:
            raise ConfigError(f"wire.max_message_mb: a message has {self.layout.most / 2**20:.0f} MB, not {most}")
        self.clients: dict[int, GossipStream] = {}  # by run_id
        self.servers = Servers(config.wire)

    def start(self, memory: SharedArrays, join: bool = False, stop: Callable[[], bool] = lambda: False) -> bool:
        """Listen. The learners start with their own weights."""
        self.mailboxes = Mailboxes(memory, self.learners)
        self.servers.serve(self.address, {"Gossip": self.admit}, "gossip.bind")
        return False

    def cut(self) -> bool:
        """Only clients break their streams."""
        return False

    def admit(self, hello: Any) -> GossipStream:
        check_hello(hello, [self.env_id], self.layout)
        if (before := self.clients.get(hello.run_id)) is not None:  # it reconnects before its end was noticed
            self.leave(before)
        stream = GossipStream(self, self._relay(hello.envs), hello.run_id)
        self.clients[hello.run_id] = stream
        return stream

    def _relay(self, learners: int) -> Relay:
        """Mailboxes in consecutive free rows, below the highest id."""
        taken = {row for client in self.clients.values() for row in client.relay.receives}
        first = self.learners
        while first + learners <= MAX_REMOTE_LEARNERS:
            if not (busy := taken.intersection(range(first, first + learners))):
                rows = range(first, first + learners)
                return Relay(self.mailboxes, (row for row in range(MAX_REMOTE_LEARNERS) if row not in rows), rows)
            first = max(busy) + 1
        raise Refused(f"no room for {learners} more learners: all runs together have at most {MAX_REMOTE_LEARNERS}")

    def leave(self, stream: GossipStream) -> None:
        if self.clients.get(stream.run_id) is stream:
            del self.clients[stream.run_id]
            stream.alive = False
            stream.relay.close()

    def lines(self) -> list[str]:
        """Lines for the log."""
        return self.servers.news().failures

    def gauges(self, env_steps: int) -> dict[str, float]:
        return {"gossip/peers": len(self.mailboxes.peers()), **self.servers.traffic(env_steps, "gossip")}

    def close(self, over: bool) -> None:
        """`over`: the run has ended for good, and the others stop looking for it."""
        self.servers.close(over)


class GossipStream(ServiceStream):
    """One client's stream: each of its frames is answered with one of the hub's."""

    def __init__(self, hub: GossipHub, relay: Relay, run_id: int) -> None:
        settings = json.dumps({"net": hub.net.digest, "seed": hub.seed})
        super().__init__({"number": 0, "learners": 1, "settings": settings})
        self.hub, self.relay, self.run_id = hub, relay, run_id
        self.reads = self.writes = hub.layout

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        if self.alive:
            self.relay.receive(arrays)
            answer(self.relay.send(), 0)

    def leave(self) -> None:
        self.hub.leave(self)


class GossipClient:
    """The connection of a run of `learners` to the hub, opened again after each loss. A `resumed` run trains without
    it meanwhile; a new one raises `CoterieError` if the hub is away or refuses. `report`: of the first attempts.
    """

    def __init__(
        self, config: Config, learners: int, net: Net, *, resumed: bool = False,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.address, self.learners, self.net, self.seed = config.gossip.connect, learners, net, config.seed
        self.layout = message_layout(net.weights, net.moments)
        token = read_token(config.wire.token_file) if config.wire.token_file else ""
        patience = _ALONE_S if resumed else _PATIENCE_S
        endpoint = Endpoint(self.address, token, config.wire.cert, patience)
        self.connection = Connection(endpoint, {"env_id": config.env.id, "envs": learners}, report)
        self._lines, self.alike = deque[str](maxlen=100), False  # alike: it was said that the seeds are equal
        self.mailboxes: Mailboxes | None = None
        self.relay: Relay | None = None  # of the open stream
        self.stream: Stream | None = None
        self.bytes_in = self.bytes_out = 0  # of streams that have ended
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self.stream = self._first(resumed)
        except BaseException:
            self.close()
            raise

    def _first(self, resumed: bool) -> Stream | None:
        try:
            return self.connection.retry(self._open, self._check)
        except RunEnded as over:
            if not resumed:
                raise CoterieError(f"gossip.connect: the run at {self.address} is over: {over}") from None
        except CoterieError as error:
            if not resumed or (isinstance(error, ConfigError) and not isinstance(error, RefusedClient)):
                raise
            self._lines.append(f"{error}: this run continues alone until it is back")
        return None

    def _open(self) -> Stream:
        """A new stream. Raises `ConnectionLost` where the hub is away."""
        stream = self.connection.stream("Gossip", self.layout, self._check)
        try:
            settings = json.loads(stream.welcome.settings)
            if settings["net"] != self.net.digest or stream.reads.tensors != self.layout.tensors:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            stream.close()
            raise CoterieError("gossip.connect: the runs have different networks: use the same model") from None
        if settings.get("seed") == self.seed and not self.alike:
            self.alike = True
            same = f"--seed {self.seed}, and so the same episodes"  # runs that connect are not compared
            self._lines.append(f"gossip: the other run has {same}: give this run another seed")
        return stream

    def _check(self) -> None:
        if self._closed.is_set():
            raise CoterieError("the run has ended")

    def start(self, memory: SharedArrays, join: bool, stop: Callable[[], bool] = lambda: False) -> bool:
        """Begin to gossip, before this run's learners start. `join`: they are to start with the others' weights, for
        which this waits until the hub's learners have started, or `stop` is true; returns `join`.
        """
        self.mailboxes = boxes = Mailboxes(memory, self.learners)
        if self.stream is not None:
            self._lines.append(f"gossip with the run at {self.address}")
        self._thread = thread = threading.Thread(target=self._work, args=(boxes,), name="coterie-gossip", daemon=True)
        thread.start()
        end = time.monotonic() + _WEIGHTS_S
        while join and not any(map(boxes.lock.is_whole, boxes.peers())):
            if stop() or not thread.is_alive() or time.monotonic() > end:
                self._lines.append("gossip: no weights of others came, so the learners begin with their own")
                break
            time.sleep(NAP_S)
        return join

    def _work(self, mailboxes: Mailboxes) -> None:
        """Gossip until this run or the other one ends."""
        self.connection.report = lambda line: self._lines.append(f"gossip: {line}")
        self.connection.patience = math.inf  # the learners train on without the others
        try:
            while True:
                if not self.connection.retry(partial(self._swap, mailboxes), self._check):
                    self._closed.wait(NAP_S)
        except RunEnded as over:
            self._lines.append(f"the run at {self.address} is over ({over}): this run continues without it")
        except Exception as error:  # the thread must not end unnoticed
            if not self._closed.is_set():
                self._lines.append(f"no more gossip with {self.address}: {error!r}")
        finally:
            self._end_stream()

    def _swap(self, mailboxes: Mailboxes) -> bool:
        """Send a frame and take one, on a new stream after a loss; returns whether either had a message."""
        try:
            stream = self.stream = self.stream or self._open()
            relay = self.relay = self.relay or Relay(mailboxes, range(self.learners), mailboxes.remote)
            question = relay.send()
            stream.send(question)
            return relay.receive(stream.receive()[0]) or bool(question["filled"][0])
        except (CoterieError, Refused) as error:  # also a refusal: the hub may have been restarted
            self._end_stream()
            raise ConnectionLost(str(error)) from None

    def _end_stream(self) -> None:
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.close()
        if (stream := self.stream) is not None:
            self.stream = None
            stream.close()
            self.bytes_in, self.bytes_out = self.bytes_in + stream.bytes_in, self.bytes_out + stream.bytes_out

    def cut(self) -> bool:
        """Break the stream, as a broken network does; returns whether there was one."""
        if (stream := self.stream) is None:
            return False
        stream.close()
        return True

    def lines(self) -> list[str]:
        """Lines for the log."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def gauges(self, env_steps: int) -> dict[str, float]:
        stream, steps = self.stream, max(1, env_steps)
        bytes_in, bytes_out = (0, 0) if stream is None else (stream.bytes_in, stream.bytes_out)
        return {
            "gossip/peers": 0 if self.mailboxes is None else len(self.mailboxes.peers()),
            "gossip/bytes_in_per_step": (self.bytes_in + bytes_in) / steps,
            "gossip/bytes_out_per_step": (self.bytes_out + bytes_out) / steps,
        }

    def close(self, over: bool = True) -> None:
        """`over` is ignored: the hub does not need it."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
        self._end_stream()
        self.connection.close()

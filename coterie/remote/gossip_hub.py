"""The run that listens for others to gossip with (`gossip.bind`). It relays the messages of each to all."""

from __future__ import annotations

import json
import threading
from typing import Any

from coterie.config import ResolvedConfig
from coterie.exchange.mailboxes import REMOTE, Mailboxes, Relay, message_layout
from coterie.parallel.shm import SharedArrays
from coterie.remote.admission import check_hello
from coterie.remote.servers import Servers
from coterie.types import Array, ConfigError
from coterie.wire.codec import Refused
from coterie.wire.server import Answer, ServiceStream


class GossipHub:
    """Admits clients and keeps a mailbox for each of their learners. `net`: a digest of the network."""

    def __init__(self, config: ResolvedConfig, memory: SharedArrays, learners: int, net: str) -> None:
        self.mailboxes, self.env_id, self.net = Mailboxes(memory, learners), config.env.id, net
        self.layout = message_layout(self.mailboxes.weights.shape[1], self.mailboxes.moments.shape[1])
        if self.layout.most > (most := config.wire.max_message_mb) << 20:
            raise ConfigError(f"wire.max_message_mb: a message has {self.layout.most / 2**20:.0f} MB, not {most}")
        self.clients: dict[int, GossipStream] = {}  # by run_id
        self._lock = threading.Lock()
        self.servers = Servers(config.wire)
        self.servers.serve(config.gossip.bind, {"Gossip": self.admit}, "gossip.bind")

    def admit(self, hello: Any) -> GossipStream:
        check_hello(hello, [self.env_id], self.layout)
        with self._lock:
            if (before := self.clients.get(hello.run_id)) is not None:  # it reconnects before its end was noticed
                self._drop(before)
            own = range(self.mailboxes.learners)
            published = any(map(self.mailboxes.has_message, (*own, *self.mailboxes.peers())))
            stream = GossipStream(self, self._relay(hello.envs), hello.run_id, published)
            self.clients[hello.run_id] = stream
            return stream

    def _relay(self, learners: int) -> Relay:
        """Mailboxes in consecutive free rows, below the highest id."""
        taken = {row for client in self.clients.values() for row in client.relay.receives}
        first = self.mailboxes.learners
        while first + learners <= REMOTE:
            if not (busy := taken.intersection(range(first, first + learners))):
                rows = range(first, first + learners)
                return Relay(self.mailboxes, (row for row in range(REMOTE) if row not in rows), rows)
            first = max(busy) + 1
        raise Refused(f"no room for {learners} more learners: all runs together have at most {REMOTE}")

    def leave(self, stream: GossipStream) -> None:
        with self._lock:
            self._drop(stream)

    def _drop(self, stream: GossipStream) -> None:
        if self.clients.get(stream.run_id) is stream:
            del self.clients[stream.run_id]
            stream.alive = False
            stream.relay.close()

    def lines(self) -> list[str]:
        """Lines for the log."""
        return self.servers.refused()

    def gauges(self, env_steps: int) -> dict[str, float]:
        return {"gossip/peers": len(self.mailboxes.peers()), **self.servers.traffic(env_steps, "gossip")}

    def close(self, over: bool) -> None:
        """`over`: the run has ended for good, and the others need not look for it."""
        self.servers.close(over)


class GossipStream(ServiceStream):
    """One client's stream: each of its frames is answered with one of the hub's."""

    def __init__(self, hub: GossipHub, relay: Relay, run_id: int, published: bool) -> None:
        settings = {"net": hub.net, "published": published}
        super().__init__({"number": 0, "learners": 1, "settings": json.dumps(settings)})
        self.hub, self.relay, self.run_id = hub, relay, run_id
        self.reads = self.writes = hub.layout

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        if self.alive:
            self.relay.receive(arrays)
            answer(self.relay.send(), 0)

    def leave(self) -> None:
        self.hub.leave(self)

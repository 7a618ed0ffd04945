"""The servers of a learner, or of a run: who may connect to them, who was refused, what went over the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from coterie.config import Wire
from coterie.wire.auth import offset, read_token, server_credentials
from coterie.wire.server import Desk, Limits, Server


class Servers:
    """Those that a learner has opened. `wire`: the run's settings."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.open = wire, list[Server]()
        self._refused = deque[str](maxlen=100)  # who was not let in, and why, since that was last asked

    def listen(self, address: str, desks: Mapping[str, Desk]) -> None:
        """To the run's own children."""
        self._open(address, desks, Wire(), "")

    def invite(self, rank: int, desks: Mapping[str, Desk]) -> None:
        """To whoever has the token, at the address of learner `rank`."""
        self._open(offset(self.wire.bind, rank), desks, self.wire, "wire.bind")

    def invite_peers(self, address: str, desks: Mapping[str, Desk]) -> None:
        """To runs that gossip with this one."""
        self._open(address, desks, self.wire, "gossip.bind")

    def _open(self, address: str, desks: Mapping[str, Desk], own: Wire, field: str) -> None:
        server = Server(
            address,
            desks,
            token=read_token(own.token_file) if own.token_file else "",
            credentials=server_credentials(own.cert, own.key) if own.cert else None,
            limits=Limits(self.wire.max_message_mb << 20),
            on_refused=self._refused.append,
            field=field,
        )
        self.open.append(server)

    def refused(self) -> list[str]:
        """Who was not let in since this was last asked."""
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def close(self, over: bool) -> None:
        """`over`: the run has ended for good; otherwise clients are to come again."""
        for server in self.open:
            server.close(*(() if over else (None,)))

    def traffic(self, env_steps: int, what: str = "wire") -> dict[str, float]:
        """What went over the wire for each of so many env steps, in bytes."""
        if not self.open:
            return {}
        steps = max(1, env_steps)
        return {
            f"{what}/bytes_in_per_step": sum(s.bytes_in for s in self.open) / steps,
            f"{what}/bytes_out_per_step": sum(s.bytes_out for s in self.open) / steps,
            f"{what}/refused": sum(s.refused.total() for s in self.open),
        }

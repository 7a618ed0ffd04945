"""The servers that a learner or a run has opened."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from coterie.config import Wire
from coterie.wire.auth import read_token, server_credentials
from coterie.wire.server import Limits, Server, Service


class Servers:
    """Opens servers with the run's `wire` settings, and sums up their traffic and refused clients."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.open = wire, list[Server]()
        self._refused = deque[str](maxlen=100)

    def serve(self, address: str, services: Mapping[str, Service], field: str = "") -> None:
        """Serve at `address`. `field`: the setting that holds it, of a server for other machines; their clients need
        the run's token and certificate.
        """
        access = self.wire if field else Wire()
        server = Server(
            address,
            services,
            token=read_token(access.token_file) if access.token_file else "",
            credentials=server_credentials(access.cert, access.key) if access.cert else None,
            limits=Limits(self.wire.max_message_mb << 20),
            on_refused=self._refused.append,
            field=field or "env hosts",
        )
        self.open.append(server)

    def refused(self) -> list[str]:
        """Clients that were refused since the last call, with the reasons."""
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def close(self, over: bool) -> None:
        """`over`: the run has ended for good; otherwise clients may reconnect."""
        for server in self.open:
            server.close(*(() if over else (None,)))

    def traffic(self, env_steps: int, prefix: str = "wire") -> dict[str, float]:
        """Metrics: bytes per env step, and refused streams."""
        if not self.open:
            return {}
        steps = max(1, env_steps)
        return {
            f"{prefix}/bytes_in_per_step": sum(s.bytes_in for s in self.open) / steps,
            f"{prefix}/bytes_out_per_step": sum(s.bytes_out for s in self.open) / steps,
            f"{prefix}/refused": sum(s.refused.total() for s in self.open),
        }

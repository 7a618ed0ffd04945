"""Admission of clients: the servers that a learner or a run has opened, the clients' numbers and env ids, the check of
their handshake, and the settings they receive.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import lru_cache
from itertools import count
from typing import Any

from coterie.config import ResolvedConfig, Wire
from coterie.envs.news import EnvNews, Means
from coterie.parallel.clock import Budget
from coterie.types import Spec
from coterie.wire.auth import read_token
from coterie.wire.codec import FrameLayout, Refused, layout_from
from coterie.wire.server import Server, server_credentials
from coterie.wire.service import Limits, Service

FIRST_REMOTE_ID = 1 << 20  # numbers of remote hosts, and the env ids of remote clients, start here
_REMEMBERED = 10_000  # remote clients
_LINES = 100  # for the log between two reports, and of clients that join or leave within an hour
ENV_SETTINGS = ("action_repeat", "max_episode_steps", "time_limit")  # that a run sets for its remote clients' envs


class Servers:
    """Opens servers with the run's `wire` settings, and sums up their traffic and refused clients."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.open = wire, list[Server]()
        self._refused, self._clients = deque[str](maxlen=_LINES), deque[str](maxlen=_LINES)
        self._logged = Budget(_LINES)
        self._info, self._lock = Means(), threading.Lock()

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
            on_client=self._add_client,
            on_info=self._add_info,
            field=field or "env hosts",
        )
        self.open.append(server)

    def _add_info(self, more: Mapping[str, tuple[float, int]]) -> None:
        with self._lock:
            self._refused.extend(self._info.add(more))

    def _add_client(self, line: str, refused: bool) -> None:
        if refused:
            self._refused.append(line)
        elif self._logged.spend():
            more = "" if self._logged.left else "; no more clients that join or leave are logged in this hour"
            self._clients.append(line + more)

    def news(self) -> EnvNews:
        """Since the last call: clients that were refused, with the reasons, that joined and that left, and the numbers
        in info of remote envs.
        """
        with self._lock:
            lines = [queue.popleft() for queue in (self._refused, self._clients) for _ in range(len(queue))]
            return EnvNews(lines, self._info.take())

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


def check_hello(hello: Any, env_ids: Collection[str], expected: FrameLayout) -> None:
    """Raise `Refused` unless a client has one of these envs and declares these tensors."""
    if hello.env_id not in env_ids:
        raise Refused(f"the run's envs are {', '.join(env_ids)}, not {hello.env_id[:100]!r}")
    declared = layout_from(hello.sends, expected.most)
    if declared.tensors != expected.tensors:
        raise Refused(f"the run's frames hold {_shown(expected)}, the client's {_shown(declared)}")


def _shown(layout: FrameLayout) -> str:
    return ", ".join(f"{t.name}: {t.dtype}{list(t.shape)}" for t in layout.tensors[:12])[:250] or "no tensors"


class ClientIds:
    """Numbers and env ids of a learner's remote clients. A client that reconnects keeps them.

    An env's id also chooses its epsilon, by its place among the envs of all learners: the n-th remote env of a learner
    has the place of the learner's n-th local one.
    """

    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        envs, learners, base = config.env.num_envs, config.learners, FIRST_REMOTE_ID * (rank + 1)
        self._next_env = base + (rank * envs - base) % (envs * learners)
        numbers, remember = count(), lru_cache(_REMEMBERED)
        self.number: Callable[[int], int] = remember(lambda run_id: next(numbers))
        self.first_env: Callable[[int, int, int], int] = remember(self._new_envs)  # of a run_id, group and envs

    def _new_envs(self, run_id: int, group: int, envs: int) -> int:
        first = self._next_env
        self._next_env += envs
        return first


def _finite(x: Any) -> Any:
    """JSON has no infinity: null stands for no bound."""
    return [None if y in (math.inf, -math.inf) else y for y in x] if isinstance(x, list) else x


def settings_of(config: ResolvedConfig, spec: Spec, unroll_length: int) -> dict[str, Any]:
    """What a client needs to know before it makes its envs."""
    return {
        "env_id": config.env.id,
        "action": [_finite(x) for x in spec.to_json()["action"]],
        "unroll_length": unroll_length,
        "newest_frame": config.central.newest_frame,
        "atari": asdict(config.atari),
        "env": {k: getattr(config.env, k) for k in ENV_SETTINGS},
    }

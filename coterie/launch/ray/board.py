"""What the nodes of a run have in common: addresses, keys, restarts, and the order to stop."""

from __future__ import annotations

import time
from collections.abc import Collection
from tempfile import TemporaryDirectory
from typing import NamedTuple

from coterie.acting.table import acting_kind
from coterie.config import Config
from coterie.launch.ray.placement import Allocation, Part, Site, Worker
from coterie.launch.supervisor import RestartBudget
from coterie.wire.auth import make_keys

Address = tuple[str, int]  # and the first of a site's ports
_HINTS = ("evaluate: ", "resume: ", "watch: ")  # of a site, with a folder that is not the run's


class Terms(NamedTuple):
    """What a command is started with. When they change, it is stopped and started again."""

    peer: Address | None  # the site that it connects to, once that has a place: the first site, or the worker's own
    keys: dict[str, bytes]  # files for TLS and the token; empty where all parts are on one machine


class Orders(NamedTuple):
    """The answer to a node's report."""

    stop: bool
    terms: Terms


def budgets(config: Config) -> dict[type[Part], RestartBudget]:
    """The whole run's, for each kind of part."""
    workers = RestartBudget(f"{config.acting}.restarts", acting_kind(config).restarts(config))
    return {Site: RestartBudget("restarts", config.restarts), Worker: workers}


class Board:
    """An actor beside the process that started the run. All nodes report to it."""

    def __init__(self, allocation: Allocation, hosts: Collection[str]) -> None:
        self.sites = len(allocation.sites)
        self.hosts = set(hosts)
        self.keys = self._make_keys() if len(hosts) > 1 else {}
        self.addresses: dict[int, Address] = {}
        self.restarts = budgets(allocation.config)
        self.stopped: set[type[Part]] = set()
        self.lines: list[str] = []
        self.reported: dict[str, float] = {}  # when each part reported last

    def _make_keys(self) -> dict[str, bytes]:
        """A token and a pair of keys for this run, for all addresses that it has."""
        with TemporaryDirectory() as new:
            return {path.name: path.read_bytes() for path in make_keys(f"{new}/keys", sorted(self.hosts))}

    def begin(self, part: Part) -> None:
        """A part has a place. Ray runs a lost part again elsewhere."""
        if part.name in self.reported:
            self.restart(part, "its machine is gone or out of reach")
        self.reported[part.name] = time.monotonic()

    def restart(self, part: Part, reason: str) -> None:
        """Count a restart; raises `CoterieError` when the run may make no more."""
        self.restarts[type(part)].spend(reason)
        self.say(f"{part.name}: {reason}; it is restarted")

    def publish(self, site: int, address: Address) -> None:
        """The address of a site on its new place."""
        moved = site in self.addresses and site == 0 and self.sites > 1
        self.addresses[site] = address
        if self.keys and address[0] not in self.hosts:  # a machine that is new in the cluster
            self.hosts.add(address[0])
            self.keys, moved = self._make_keys(), True
        if moved:
            self.say(f"site {site} is at {address[0]} now: all go on from their checkpoints")

    def report(self, part: Part, lines: list[str]) -> Orders:
        """What a part's command printed since its last report."""
        self.reported[part.name] = time.monotonic()
        alone = isinstance(part, Site) and self.sites == 1
        for line in lines:
            if not line.startswith(_HINTS):
                self.say(line if alone else f"{part.name}: {line}")
        peer = self.addresses.get(0 if isinstance(part, Site) else part.site)
        return Orders(type(part) in self.stopped, Terms(peer, self.keys))

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stop(self, kind: type[Part]) -> None:
        """Order all parts of a kind to shut down."""
        self.stopped.add(kind)

    def collect(self) -> tuple[list[str], dict[str, float]]:
        """All lines since the last call, and for how many seconds each part has not reported."""
        lines, self.lines = self.lines, []
        now = time.monotonic()
        return lines, {name: now - last for name, last in self.reported.items()}

    def summary(self) -> dict[str, int]:
        return {"machines": len(self.hosts), "restarts": sum(one.used for one in self.restarts.values())}

"""A Ray cluster: its machines, actors on them, their answers, and the board to which the nodes of a run report."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from coterie.acting.table import acting_kind
from coterie.config import Ray
from coterie.errors import CoterieError, first_line, json_object, reason_of
from coterie.extras import needs
from coterie.launch.ray.allocation import Allocation, Machine, RunPart, Site, Worker
from coterie.launch.retries import RestartBudget
from coterie.parallel.clock import awake
from coterie.wire.auth import split
from coterie.wire.keys import make_keys

_CONNECT_S = 10.0
Address = tuple[str, int]  # and the first of a site's ports
_HINTS = re.compile(r"(evaluate|resume|watch): ")  # of a site, with a folder that is not the run's
_REPORT = re.compile(r"(finished|interrupted): |\w+: checkpoint written$")  # the run's own, where it has one site


class Cluster:
    """The cluster of `ray.address`, or this machine alone. Its machines begin with this one."""

    def __init__(self, options: Ray) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a process that can connect to Ray can run anything
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with needs("launch: ray", "ray"):
            import ray
        code = json_object("ray.runtime_env", options.runtime_env)
        where: dict[str, Any] = {"address": options.address or "local"}  # by default Ray joins any cluster it finds
        if not options.address:
            where["include_dashboard"] = False
        if ":" in options.address:  # Ray itself would try for minutes
            try:
                socket.create_connection(split(options.address), _CONNECT_S).close()
            except OSError as error:
                reason = reason_of(error)
                raise CoterieError(f"ray.address: cannot connect to {options.address}: {reason}") from None
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(runtime_env=code, log_to_driver=False, logging_level=logging.ERROR, namespace="coterie", **where)
        except Exception as error:  # Ray raises many kinds
            raise CoterieError(f"ray: {first_line(error)}") from error
        # ValueError: outside of the main thread, where Ray has not set its own, either; TypeError: it was not Python's.
        with suppress(ValueError, TypeError):
            signal.signal(signal.SIGTERM, handler)
        self.ray: Any = ray  # half of it has no types
        self.errors: Any = ray.exceptions
        here = ray.get_runtime_context().get_node_id()
        machines = [
            Machine(node["NodeID"], node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"] and (has := node["Resources"])
        ]
        self.machines = sorted(machines, key=lambda m: (m.id != here, m.address))

    def start(
        self, actor: type, args: tuple[Any, ...], machine: Machine, cpus: int, gpus: int = 0, restarts: int = 0
    ) -> Any:
        """An actor on that machine. Ray restarts it on another one, with its calls, if that machine is lost, `restarts`
        times at most; -1: always. Without restarts it is on no other machine.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = self.ray.remote(actor).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=restarts,
            max_task_retries=restarts,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.id, soft=restarts != 0),
        )
        return options.remote(*args)

    def result(self, name: str, call: Any) -> Any:
        """The answer of a call to the actor of that name."""
        try:
            return self.ray.get(call)
        except self.errors.RayTaskError as error:
            raise CoterieError(f"{name}: {first_line(error.cause or error)}") from None
        except self.errors.RayError as error:
            raise CoterieError(f"{name} is lost, and Ray does not restart it: {_last_line(error)}") from None

    def free(self) -> str:
        free, total = self.ray.available_resources(), self.ray.cluster_resources()
        return "free are " + ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k}s" for k in ("CPU", "GPU"))

    def close(self) -> None:
        self.ray.shutdown()


def _last_line(error: BaseException) -> str:
    """For an actor whose constructor failed, that error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if getattr(error, "actor_init_failed", False) and lines else first_line(error)


class Terms(NamedTuple):
    """What a command is started with. When they change, it is stopped and started again."""

    peer: Address | None  # the site that it connects to, once that has a place: the first site, or the worker's own
    keys: dict[str, bytes]  # files for TLS and the token; empty where all parts are on one machine


class Orders(NamedTuple):
    """The answer to a node's report."""

    stop: bool
    terms: Terms


class RayBoard:
    """An actor beside the process that started the run. All nodes report to it."""

    def __init__(self, allocation: Allocation, hosts: Collection[str]) -> None:
        self.sites = len(allocation.sites)
        self.hosts = set(hosts)
        self.keys = self._make_keys() if len(hosts) > 1 else {}
        self.addresses: dict[int, Address] = {}
        config = allocation.config
        workers = RestartBudget(f"{config.acting}.restarts", acting_kind(config).restarts(config))
        self.restarts = {Site: RestartBudget("restarts", config.restarts), Worker: workers}  # of the whole run
        self.stopped: set[type[RunPart]] = set()
        self.finished: set[int] = set()  # sites, whose workers shut down
        self.lines: list[str] = []
        self.reported: dict[str, float] = {}  # when each part reported last

    def _make_keys(self) -> dict[str, bytes]:
        """A token and a pair of keys for this run, for all addresses that it has."""
        with TemporaryDirectory() as new:
            return {path.name: path.read_bytes() for path in make_keys(f"{new}/keys", sorted(self.hosts))}

    def begin(self, part: RunPart) -> None:
        """A part has a place. Ray runs a lost part again elsewhere."""
        if part.name in self.reported:
            self.restart(part, "its machine is gone or out of reach")
        self.reported[part.name] = awake()

    def restart(self, part: RunPart, reason: str) -> None:
        """Count a restart; raises `CoterieError` when the run may make no more."""
        self.restarts[type(part)].restart(reason)
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

    def report(self, part: RunPart, lines: list[str]) -> Orders:
        """What a part's command printed since its last report."""
        self.reported[part.name] = awake()
        alone = isinstance(part, Site) and self.sites == 1
        for line in lines:
            if not (_HINTS.match(line) or (alone and _REPORT.match(line))):
                self.say(line if alone else f"{part.name}: {line}")
        peer = self.addresses.get(0 if isinstance(part, Site) else part.site)
        finished = isinstance(part, Worker) and part.site in self.finished
        return Orders(finished or type(part) in self.stopped, Terms(peer, self.keys))

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stop(self, kind: type[RunPart]) -> None:
        """Order all parts of a kind to shut down."""
        self.stopped.add(kind)

    def finish(self, site: int) -> None:
        """A site has ended: its workers would look for its learners in vain, and use up their restarts."""
        self.finished.add(site)

    def collect(self) -> tuple[list[str], dict[str, float]]:
        """All lines since the last call, and for how many seconds each part has not reported."""
        lines, self.lines = self.lines, []
        now = awake()
        return lines, {name: now - last for name, last in self.reported.items()}

    def summary(self) -> dict[str, int]:
        return {"machines": len(self.hosts), "restarts": sum(one.total for one in self.restarts.values())}

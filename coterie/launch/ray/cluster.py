"""A Ray cluster: its machines, actors on them, and their answers."""

from __future__ import annotations

import json
import logging
import os
import socket
from typing import Any

from coterie.config import Ray
from coterie.launch.ray.placement import Machine
from coterie.types import ConfigError, CoterieError, first_line, reason_of
from coterie.wire.auth import split

_CONNECT_S = 10.0


class Cluster:
    """The cluster of `ray.address`, or this machine alone. Its machines begin with this one."""

    def __init__(self, options: Ray) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a process that can connect to Ray can run anything
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise ConfigError("launch: ray needs `pip install 'coterie[ray]'`") from None
        try:
            code = dict(json.loads(options.runtime_env))
        except (ValueError, TypeError):
            raise ConfigError(f"ray.runtime_env: {options.runtime_env!r} is not a JSON object") from None
        where: dict[str, Any] = {"address": options.address or "local"}  # by default Ray joins any cluster it finds
        if not options.address:
            where["include_dashboard"] = False
        if ":" in options.address:  # Ray itself would try for minutes
            try:
                socket.create_connection(split(options.address), _CONNECT_S).close()
            except OSError as error:
                reason = reason_of(error)
                raise CoterieError(f"ray.address: cannot connect to {options.address}: {reason}") from None
        try:
            ray.init(runtime_env=code, log_to_driver=False, logging_level=logging.ERROR, namespace="coterie", **where)
        except Exception as error:  # Ray raises many kinds
            raise CoterieError(f"ray.address: {first_line(error)}") from error
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
        """An actor on that machine. Ray restarts it on another one, with its calls, if that machine is lost."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = self.ray.remote(actor).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=restarts,
            max_task_retries=restarts,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.id, soft=True),
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

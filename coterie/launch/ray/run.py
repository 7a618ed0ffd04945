"""A run on the machines of a Ray cluster: Ray finds places for its parts and starts lost ones again (fleet.py).

Observations, rollouts, weights and gossip go over `wire/`, just as if the parts' commands had been typed on the
machines (docs/nodes.md); Ray carries orders, and what changes in the run folder.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.config import Config
from coterie.launch.ray.cluster import Fleet, reached
from coterie.launch.ray.placement import Machine, lay_out
from coterie.runs.metrics import clean
from coterie.types import ConfigError, CoterieError, first_line
from coterie.wire.auth import split

_CONNECT_S = 10.0
_SUMMED = ("env_steps", "env_frames", "learner_steps", "samples_trained", "episodes", "masked_steps")


def run_on_ray(config: Config, folder: Path, resumed: bool, quiet: bool) -> dict[str, Any]:
    """Train on a cluster; returns the summary of all sites together, which is also in `summary.json`."""
    begin = time.monotonic()
    ray, machines = connect(config)
    try:
        sites = 1 + len(list(folder.glob("sites/*"))) if resumed else 0
        fleet = Fleet(ray, lay_out(config, machines, sites), folder, quiet, machines)
        told: dict[str, Any] = {"status": "failed", "reason": ""}
        try:
            told = dict(zip(("status", "reason"), fleet.work(resumed), strict=True))
        except KeyboardInterrupt:
            told["reason"] = "stopped at once by a second signal"
            raise
        except Exception as error:
            told["reason"] = first_line(error)
            raise
        finally:
            told |= {"folder": str(folder), "ray": {"machines": len(fleet.hosts), "restarts": sum(fleet.lost.values())}}
            own = [site.folder for site in fleet.sites if site.folder is not None]
            total = {"seconds": time.monotonic() - begin} | _together(own) | told
            try:
                with suppress(OSError):
                    (folder / "summary.json").write_text(json.dumps(clean(total), indent=1) + "\n")
                fleet.store(last=True)
            finally:
                fleet.close()
        return total
    finally:
        ray.shutdown()


def connect(config: Config) -> tuple[Any, list[Machine]]:
    """Ray, and the machines that it has, this one first: those of `ray.address`, or this one alone."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # whoever can talk to Ray can run anything
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray as found
    except ImportError:
        raise ConfigError("launch: ray needs `pip install 'coterie[ray]'`") from None
    ray: Any = found  # half of it has no types
    where: dict[str, Any] = {"address": config.ray.address or "local"}  # by itself Ray joins whatever it finds here
    if not config.ray.address:
        where["include_dashboard"] = False
    try:
        code = dict(json.loads(config.ray.runtime_env))
    except (ValueError, TypeError):
        raise ConfigError(f"ray.runtime_env: {config.ray.runtime_env!r} is no JSON object") from None
    if ":" in (address := config.ray.address):  # Ray itself tries for minutes
        try:
            socket.create_connection(split(address), _CONNECT_S).close()
        except OSError as error:
            raise CoterieError(f"ray.address: nobody listens at {address}: {error.strerror or error}") from None
    try:
        ray.init(runtime_env=code, log_to_driver=False, logging_level=logging.ERROR, namespace="coterie", **where)
    except Exception as error:  # Ray has many kinds
        raise CoterieError(f"ray.address: {first_line(error)}") from error
    own = ray.get_runtime_context().get_node_id()
    machines = [
        Machine(node["NodeID"], node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0)))
        for node in ray.nodes()
        if node["Alive"] and (has := node["Resources"])
    ]
    return ray, sorted(machines, key=lambda m: (m.id != own, m.address))


def _together(folders: list[Path]) -> dict[str, Any]:
    """The sites' summaries in one. Of a site that left none, with its machine, only its last checkpoint is known."""
    found, silent, steps = list[dict[str, Any]](), list[str](), 0
    for k, folder in enumerate(folders):
        try:
            found.append(json.loads((folder / "summary.json").read_text()))
        except (OSError, ValueError):
            silent.append(f"site {k}")
            steps += reached(folder)
    if not found:
        return {"env_steps": steps, "mean_return": None, "rows": {}}
    total: dict[str, Any] = dict(found[0])
    if len(folders) > 1:
        total |= {key: sum(one[key] for one in found) for key in _SUMMED}
        total["rows"] = {key: sum(one["rows"][key] for one in found) for key in total["rows"]}
        total["env_steps_per_s"] = sum(one["env_steps_per_s"] for one in found)
        means = [one["mean_return"] for one in found if one["mean_return"] is not None]
        total["mean_return"] = sum(means) / len(means) if means else None
        total["seconds"] = max(one["seconds"] for one in found)
        total["sites"] = found
    if silent:
        total["env_steps"] += steps
        total["without_summary"] = silent  # `rows` are of the others
    return total

"""A run on the machines of a Ray cluster, from its config to its summary.

Observations, rollouts, weights and gossip go over `wire/`, as if the parts' commands had been typed on the machines
(docs/nodes.md). Ray places the parts and carries reports and orders; files go through the storage.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.config import Config
from coterie.launch.ray.cluster import Cluster
from coterie.launch.ray.node import env_steps
from coterie.launch.ray.placement import allocate
from coterie.launch.ray.supervisor import Supervisor
from coterie.runs.metrics import clean
from coterie.types import CoterieError, first_line

_SUMMED = ("env_steps", "env_frames", "learner_steps", "samples_trained", "episodes", "masked_steps")


def run_on_ray(config: Config, folder: Path, resumed: bool, quiet: bool) -> dict[str, Any]:
    """Train on a cluster; returns the summary of all sites together, which is also in `summary.json`."""
    begin = time.monotonic()
    cluster = Cluster(config.ray)
    try:
        sites = 1 + len(list(folder.glob("sites/*"))) if resumed else 0
        run = Supervisor(cluster, allocate(config, cluster.machines, sites), folder, quiet)
        result: dict[str, Any] = {"status": "failed", "reason": ""}
        try:
            result = dict(zip(("status", "reason"), run.work(), strict=True))
        except KeyboardInterrupt:
            result["reason"] = "stopped at once by a second signal"
            raise
        except Exception as error:
            result["reason"] = first_line(error)
            raise
        finally:
            result |= {"folder": str(folder), "ray": run.close()}
            total = {"seconds": time.monotonic() - begin} | sum_up(run.folders) | result
            with suppress(OSError, CoterieError):
                (folder / "summary.json").write_text(json.dumps(clean(total), indent=1) + "\n")
                run.push("summary.json", "ray.txt")
        return total
    finally:
        cluster.close()


def sum_up(folders: list[Path]) -> dict[str, Any]:
    """The sites' summaries in one. Of a site without a summary, such as a lost one, its last checkpoint is counted."""
    found, missing, steps = list[dict[str, Any]](), list[str](), 0
    for k, folder in enumerate(folders):
        try:
            found.append(json.loads((folder / "summary.json").read_text()))
        except (OSError, ValueError):
            missing.append(f"site {k}")
            steps += env_steps(folder)
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
    if missing:
        total["env_steps"] += steps
        total["without_summary"] = missing  # `rows` are of the others
    return total

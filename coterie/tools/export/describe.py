"""`policy.json`: the description needed to use `policy.onnx` without Coterie."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from coterie import __version__
from coterie.build.policy import Policy
from coterie.envs.pool import has_env, is_atari
from coterie.envs.spaces import ActionMap
from coterie.envs.tasks import evaluation_env, task_config, tasks
from coterie.runs.machine import version
from coterie.runs.metrics import clean
from coterie.tools.export.check import TOLERANCE, Checked
from coterie.tools.export.graph import OPSET, Graph, Port, obs_name

FORMAT = 1


def describe(policy: Policy, graph: Graph, checked: Checked, learner: str) -> dict[str, Any]:
    """Plain JSON; a missing bound is null."""
    forms = {obs_name(f.name): {"path": list(f.path), "form": f.form} for f in policy.fields}
    return clean({  # type: ignore[no-any-return]
        "format": FORMAT,
        "coterie": __version__,
        "preset": policy.config.preset,
        "algorithm": policy.config.algorithm,
        "learner": learner,
        "env_steps": policy.step,
        "opset": OPSET,
        "inputs": [{**_port(port), **forms.get(port.name, {})} for port in graph.inputs],
        "outputs": [_port(port) for port in graph.outputs],
        "action": _action(policy.actions),
        "env": _env(policy),
        "check": {
            "largest_difference": checked.largest, "tolerance": TOLERANCE, "observations": checked.observations,
        },
    })  # fmt: skip


def _port(port: Port) -> dict[str, Any]:
    return {"name": port.name, "shape": ["batch", *port.shape], "dtype": port.dtype, "meaning": port.meaning}


def _action(actions: ActionMap) -> dict[str, Any]:
    """Its kind and the bounds of each component, as the env takes them; of a Dict or Tuple those of its leaves."""
    spec = actions.spec
    if actions.leaves:
        leaves = [_action(leaf) for leaf, _ in actions.leaves]
        return {"kind": spec.kind, "sizes": list(spec.sizes), "space": str(actions.space), "leaves": leaves}
    if spec.kind == "continuous":
        low, high = (np.reshape(x, actions.shape) for x in (spec.low, spec.high))
    else:
        ends = np.array([np.zeros(len(spec.sizes)), np.array(spec.sizes) - 1], np.int64)
        low, high = actions.to_env(ends)
    return {"kind": spec.kind, "sizes": list(spec.sizes), "low": low.tolist(), "high": high.tolist()}


def _env(policy: Policy) -> dict[str, Any]:
    """The env as in an evaluation, where an episode has all lives."""
    first = tasks(policy.config.env.id)[0]
    config, spec = task_config(policy.config, first), policy.spec
    pool = has_env(first) and config.env.backend in ("auto", "pool")
    maker = "envpool" if pool else "gymnasium"
    if found := version(maker):  # None for a custom build
        maker += f" {found}"
    atari = {k: v for k, v in asdict(config.atari).items() if k != "episodic_life"}
    return {
        "id": policy.config.env.id,
        "made_by": maker,
        "kwargs": json.loads(config.env.kwargs),
        "action_repeat": config.env.action_repeat,
        "frames_per_step": spec.action_repeat,
        "max_episode_steps": evaluation_env(config).max_episode_steps or spec.max_episode_steps or None,
        **({"atari": atari} if is_atari(first) else {}),
    }

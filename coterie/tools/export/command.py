"""The command `coterie export RUN`."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path
from shlex import quote

from coterie.build.policy import load
from coterie.extras import missing
from coterie.runs.files import save, unlinked
from coterie.tools.export.check import TOLERANCE, check
from coterie.tools.export.describe import describe
from coterie.tools.export.graph import Graph, to_onnx
from coterie.tools.export.web import page, playable

_NEEDS = ("onnx", "onnxruntime", "onnxscript")


def export(options: Namespace) -> int:
    """Write a run's policy, verified, and with `--web` a page."""
    if not all(map(importlib.util.find_spec, _NEEDS)):
        raise missing("export", "export")
    policy = load(options.run, options.learner, trust=options.trust)
    if options.web:
        playable(policy.config)
    static = page() if options.web else {}
    graph = Graph(policy.model, policy.actions)
    onnx = to_onnx(graph)
    checked = check(policy, graph, onnx)
    about = json.dumps(describe(policy, graph, checked, options.learner), indent=1) + "\n"
    folder = Path(options.out) if options.out else unlinked(policy.folder / "export")
    for name, data in {**static, "policy.json": about.encode(), "policy.onnx": onnx}.items():
        save(folder / name if options.out else unlinked(folder / name), data, "--out")
    inputs, outputs = (", ".join(port.name for port in ports) for ports in (graph.inputs, graph.outputs))
    print(f"{folder / 'policy.onnx'}: {inputs} -> {outputs}, {len(onnx):,} bytes")
    difference = f"differs from PyTorch by at most {checked.largest:.1e} ({TOLERANCE:.0e} is allowed)"
    print(f"onnxruntime {difference}, on {checked.observations} observations")
    if options.web:
        print(f"to watch it: python -m http.server --bind 127.0.0.1 --directory {quote(str(folder))}")
    return 0

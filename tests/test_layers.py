"""A file imports from lower levels only, and inside a directory only from files listed before it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "coterie"
# Level by level; inside a level, in order.
LEVELS: list[list[str]] = [
    ["types", "versions", "config", "own", "atari57", "tasks"],
    ["ops.returns", "ops.policy", "ops.vtrace", "ops.dist", "ops.optim", "ops.q"],
    [
        "parallel.affinity",
        "parallel.shm",
        "parallel.locks",
        "parallel.slots",
        "parallel.weights",
        "parallel.upload",
        "parallel.params",
        "parallel.threads",
        "parallel.board",
        "parallel.processes",
        "parallel.signals",
        "parallel.meters",
    ],
    ["runs.config_io", "runs.checkpoint", "runs.ship", "runs.metrics", "runs.machine", "runs.display"],
    [
        "envs.testing",
        "envs.text",
        "envs.spaces",
        "envs.backend",
        "envs.group",
        "envs.owner",
        "envs.pool",
        "envs.dmlab",
        "envs.football",
        "envs.gym",
        "envs.local",
    ],
    ["envs.worker_main", "envs.workers", "envs.repeat", "envs.make"],
    ["models.cores", "models.text", "models.mlp", "models.torsos", "models.heads", "models.build"],
    ["replay.memory", "replay.fifo", "replay.owners", "replay.priority", "replay.ring", "replay.sequence"],
    ["wire.auth", "wire.codec", "wire.server", "wire.client"],
    ["actor"],
    ["algorithms.a2c", "algorithms.ppo", "algorithms.vtrace", "algorithms.values", "algorithms.dqn", "algorithms.r2d2"],
    [
        "exchange.solo",
        "exchange.central",
        "exchange.convener",
        "exchange.contact",
        "exchange.ring",
        "exchange.allreduce",
        "exchange.hogwild",
        "exchange.store",
    ],
    ["exchange.topology", "exchange.gossip", "exchange.mirror"],
    ["norms", "learner", "exchange.diagnostics"],
    ["acting.inline", "acting.decoupled", "acting.seats", "acting.central"],
    ["matrix", "auto"],
    [
        "parts",
        "secondary",
        "door",
        "guests",
        "servers",
        "peers",
        "link",
        "roles",
        "producers",
        "hosts",
        "preload",
        "remote",
    ],
    [
        "evaluate",
        "watch",
        "presets_parts",
        "presets_value",
        "presets_vtrace",
        "presets",
        "serve",
        "account",
        "run",
        "launch.placement",
        "launch.chaos",
        "launch.children",
        "launch.local",
        "bench",
        "launch.layout",
        "launch.leash",
        "launch.node",
        "launch.calls",
        "launch.fleet",
        "launch.ray",
        "session",
    ],
    [
        "plan.services",
        "plan.layout",
        "plan.parts",
        "plan.machines",
        "plan.learners",
        "plan.acting",
        "plan.simulate",
        "plan.search",
        "plan.wire",
        "plan.turns",
        "plan.measure",
        "plan.command",
    ],
    [
        "report.runs",
        "report.stats",
        "report.charts",
        "report.sections",
        "report.page",
        "report.dashboard",
        "report.command",
    ],
    ["export.graph", "export.check", "export.describe", "export.web", "export.command"],
    ["sweep", "doctor", "lend", "listing", "completion"],
    [
        "reproduce.figure",
        "reproduce.draw",
        "reproduce.gala",
        "reproduce.a3c_gae",
        "reproduce.batches",
        "reproduce.accelerated",
        "reproduce.impala",
        "reproduce.seed",
        "reproduce.catalogue",
        "reproduce.runs",
        "reproduce.command",
    ],
    ["options"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, name in enumerate(name for level in LEVELS for name in level)}
MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in ROOT.rglob("*.py") if p.name != "__init__.py"
)


def imports(module: str) -> set[str]:
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.removeprefix("coterie.") for n in names if n.startswith("coterie.")}
    return found & set(MODULES)


def test_every_module_has_a_level() -> None:
    assert set(MODULES) == set(RANK)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    up = {other for other in imports(module) if RANK[other] >= RANK[module]}
    assert not up, f"{module} imports {up}"


@pytest.mark.parametrize("module", MODULES)
def test_no_inheritance_from_our_own_classes(module: str) -> None:
    ours = {
        node.name
        for other in MODULES
        for node in ast.walk(ast.parse((ROOT / (other.replace(".", "/") + ".py")).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    errors = {"CoterieError", "ConfigError"}  # an exception's parent is its contract
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    bases = {
        base.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    assert not bases & (ours - errors)


def test_env_workers_load_without_torch() -> None:
    code = "import coterie, coterie.envs.workers, coterie.types, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_path_of_a_transition_is_five_files() -> None:
    """acting -> actor -> types -> algorithms -> learner (-> exchange), each of one screen or few."""
    for module in ("acting.inline", "actor", "types", "algorithms.a2c", "learner", "exchange.solo"):
        assert len((ROOT / (module.replace(".", "/") + ".py")).read_text().splitlines()) <= 300

"""Small runs: their arguments, and what holds at their end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from coterie import presets
from coterie.config import Config
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics

ROLLOUT = 16 * 8  # rows of one rollout of one inline learner
CROWD = 4  # simulators of one learner that has actors
ENDLESS = {"steps": 10**9, "log.checkpoint_every": 0.3, "env.delay": 0.01}
# A CountingEnv that keeps a tally of the steps of all processes: one byte for each. With `tally_env` as a fixture.
TALLY = """
import os

from coterie.envs.testing import CountingEnv


class Tally(CountingEnv):
    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def step(self, action):
        os.write(self.file, b".")
        return super().step(action)

    def close(self):
        os.close(self.file)
"""


def save_checkpoint(root: Path, step: int, tensors: checkpoint.Tensors, state: dict[str, Any]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    draft = checkpoint.open_draft(root, f"step_{step:012d}")
    checkpoint.write(draft, tensors)
    return checkpoint.seal(root, draft, step, state)


def arguments(preset: str, out: Path, fields: dict[str, object]) -> list[str]:
    """The arguments of `coterie train` for a small run."""
    fields = {"env.id": "CartPole-v1", "steps": 3000, "log.tensorboard": False, "log.every": 0.1, **fields, "out": out}
    return ["train", preset, *(text for k, v in fields.items() for text in (f"--{k}", str(v)))]


def inline_options(out: Path, exchange: str, **changes: object) -> list[str]:
    """Two learners that step their own envs."""
    return arguments("a2c", out, {"learners": 2, "exchange": exchange, **changes})


def decoupled_options(out: Path, exchange: str = "solo", **changes: object) -> list[str]:
    """One learner, or two, with two actors each."""
    return _with_actors("impala", "decoupled", out, exchange, changes)


def central_options(out: Path, exchange: str = "solo", **changes: object) -> list[str]:
    """One learner, or two, with two env hosts each."""
    return _with_actors("seed-vtrace", "central", out, exchange, changes)


def _with_actors(preset: str, acting: str, out: Path, exchange: str, changes: dict[str, object]) -> list[str]:
    learners = 1 if exchange == "solo" else 2
    fields = {"exchange": exchange, "learners": learners, "actors": 2 * learners, "env.num-envs": CROWD}
    return arguments(preset, out, {**fields, f"{acting}.batch_size": 0, "algo.unroll-length": 5, **changes})


def tiny(out: Path, exchange: str, **changes: object) -> Config:
    """The config of `inline_options`, which writes every line of metrics."""
    fields = {"steps": 3000, "learners": 2, "log.tensorboard": False, "log.every": 0.0}
    return presets.a2c(env="CartPole-v1", **{**fields, "out": str(out), "exchange": exchange, **changes})


def small_ppo(out: Path, env: str = "CartPole-v1", **changes: object) -> Config:
    changes = {"steps": 3000, "out": str(out), "log.tensorboard": False, "log.every": 0.0, **changes}
    return presets.ppo(env=env, **changes)


def read_summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def last_checkpoint(out: Path) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    return checkpoint.load(checkpoint.latest(out / "checkpoints"))


def last_line(capsys) -> str:
    """The last line on stderr, which is one of the program's."""
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("coterie: ")
    return line


def keep(variable: str, rows: list[dict[str, Any]], *keys: str) -> None:
    """Add measured rows to the JSON file that this environment variable names, if it is set. They replace rows with the
    same `keys`; without any all rows.
    """
    if name := os.environ.get(variable):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else []
        new = [[row[key] for key in keys] for row in rows]
        rows = [*(row for row in before if [row[key] for key in keys] not in new), *rows]
        path.write_text(json.dumps(rows, indent=1) + "\n")


def check_rows(out: Path) -> dict[str, Any]:
    """The rows of any run: what was acted was learned, is in flight, was dropped or was rolled back."""
    summary = read_summary(out)
    rows = summary["rows"]
    missing = rows["produced"] - rows["learned"] - rows["in_flight"] - rows["dropped"] - rows["rolled_back"]
    assert missing == 0, f"{missing} rows are not accounted for"
    assert min(rows.values()) >= 0
    assert rows["learned"] == summary["env_steps"]
    if summary["status"] != "failed":
        assert last_checkpoint(out)[1]["in_flight"] == rows["in_flight"]
    return summary


def check_accounts(out: Path) -> dict[str, Any]:
    """The rows, the last checkpoint and the metrics of a run of inline learners that was not cut short."""
    summary = check_rows(out)
    assert summary["rows"]["in_flight"] == 0
    tensors, state = last_checkpoint(out)
    for total, name in (("env_steps", "learned"), ("learner_steps",) * 2, ("samples_trained",) * 2):
        assert sum(row[name] for row in state["learners"]) == summary[total]
    for rank in range(len(state["learners"])):
        assert {f"learner_{rank}/{part}" for part in ("model", "exchange", "rng")} <= set(tensors)
        assert all(torch.isfinite(x).all() for x in tensors[f"learner_{rank}/model"].values())
    lines = read_metrics(out)
    assert lines
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    for scores in (False, True):  # a score is of a checkpoint, which is complete only when others have gone on
        steps = [line["env_steps"] for line in lines if ("eval/return" in line) == scores]
        assert steps == sorted(steps)
    assert max(line["env_steps"] for line in lines) <= summary["env_steps"]
    return summary

"""Run folders with known numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie import presets
from coterie.config import Atari, Env
from coterie.envs.make import make_spec
from coterie.runs.config_io import replace, to_dict


def record(
    folder: Path, preset: str, seed: int = 0, env: str = "CartPole-v1", level: float = 100.0, **more: Any
) -> Path:
    """A run of 1,000 env steps in 10 lines whose mean return grows to `level`; `more`: options, of the config."""
    folder.mkdir(parents=True)
    config = replace(presets.make(preset, env), {"seed": seed, **{k.replace("__", "."): v for k, v in more.items()}})
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "spec.json").write_text(json.dumps(make_spec(Env(id=env), Atari()).to_json()))
    lines = [
        {
            "env_steps": 100 * i, "seconds": 2.0 * i, "mean_return": level * i / 10, "joules": 50.0 * i,
            "stage/train": 0.5, "stage/env": 0.3, "stage/actor/act": 0.1,
            "consensus/distance": 1.0 / i, "consensus/bound": 2.0 / i, "cosine/0-1": 0.25,
        }
        for i in range(1, 11)
    ]  # fmt: skip
    lines.append({"env_steps": 1000, "seconds": 20.5, "eval/return": level, "eval/stderr": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "status": "finished", "env_steps": 1000, "seconds": 20.5, "env_steps_per_s": 49.0,
        "policy_lag": {"0": 600, "1": 300, "5": 100},
    }  # fmt: skip
    machine = {
        "command": f"coterie train {preset}", "processor": "a <fast> one", "cores": 2, "gpus": 0, "system": "Linux",
        "versions": {"python": "3.11.7"},
    }  # fmt: skip
    (folder / "machine.json").write_text(json.dumps(machine))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder

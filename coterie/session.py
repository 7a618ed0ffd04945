"""`train` and `resume`: a run from its folder's first file to its summary."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.config import Config
from coterie.evaluate import check_spec, open_run
from coterie.roles import InlineLearner
from coterie.run import EXIT_INTERRUPTED, Run
from coterie.runs import checkpoint
from coterie.runs.config_io import save_config, validate
from coterie.types import ConfigError, CoterieError, Spec

__all__ = ["EXIT_INTERRUPTED", "resume", "train"]


def train(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """Train a new run and return its summary (also in `summary.json`). Raises `CoterieError` when it fails."""
    validate(config)
    folder = Path(config.out) if config.out else _new_folder(config)
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("log.wandb: needs `pip install 'coterie[wandb]'`")
    try:
        if (folder / "config.json").exists():
            raise ConfigError(
                f"out: {folder} already holds a run; go on with `coterie resume {folder}` or name another"
            )
        learner = InlineLearner(config)  # before the folder: a config that cannot work leaves nothing behind
    except OSError as error:
        raise CoterieError(f"out: cannot read {folder}: {error.strerror or error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(folder / "config.json", config)
        (folder / "spec.json").write_text(_spec_text(learner.spec))
        run = Run(config, folder, learner, quiet=quiet)
    except OSError as error:
        learner.close()
        raise CoterieError(f"out: cannot write to {folder}: {error.strerror or error}") from None
    except BaseException:
        learner.close()
        raise
    return run.go()


def resume(folder: str | Path, *, steps: int = 0, quiet: bool = False) -> dict[str, Any]:
    """Go on from a run's last complete checkpoint, with its own config (`steps` > 0: a new total of env steps)."""
    folder = Path(folder)
    config = open_run(folder)
    if steps:
        config = replace(config, steps=steps)
        validate(config)
    path = checkpoint.latest(folder / "checkpoints")
    if path is None:
        raise CoterieError(f"{folder} has no complete checkpoint to resume from; start it again with another --out")
    tensors, state = checkpoint.load(path)
    if state["env_steps"] >= config.steps:
        raise ConfigError(f"--steps: the run has its {state['env_steps']:,} env steps already; give a larger total")
    check_spec(folder, config)
    learner = InlineLearner(config, life=state["life"] + 1)
    try:
        learner.load(tensors)
        save_config(folder / "config.json", config)  # a later resume goes on towards the same total
        run = Run(config, folder, learner, state=state, quiet=quiet)
    except BaseException:
        learner.close()
        raise
    return run.go()


def _new_folder(config: Config) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{config.preset or config.algorithm}-{config.env.id}-s{config.seed}")
    base = Path("runs") / f"{name}-{time.strftime('%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path


def _spec_text(spec: Spec) -> str:
    return json.dumps(spec.to_json(), indent=1) + "\n"

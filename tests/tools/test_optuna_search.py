"""examples/optuna_search.py: a study that continues, and pruned trials that leave a checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

FILE = Path(__file__).parents[2] / "examples/optuna_search.py"
ARGS = ("--env", "CartPole-v1", "--log.tensorboard", "False", "--eval.episodes", "1", "--evaluations", "2")


def search(folder: Path, *args: str, **options):
    spec = importlib.util.spec_from_file_location("optuna_search", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study = module.main(["ppo", *ARGS, "--study", str(folder / "study.db"), *args], **options)
    return [trial.state.name for trial in study.trials], study


@pytest.mark.slow
def test_a_study_continues_and_keeps_failed_trials(tmp_path):
    states, study = search(tmp_path, "--steps", "3000", "--trials", "1")
    assert states == ["COMPLETE"]
    (trial,) = study.trials
    config = json.loads((tmp_path / "study-trial0/config.json").read_text())
    assert config["optim"]["lr"] == trial.params["optim.lr"]
    assert list(trial.intermediate_values.values())[-1] == trial.value
    assert len(trial.intermediate_values) >= 1
    assert search(tmp_path, "--trials", "2", "--optim.lr", "-1")[0] == ["COMPLETE", "FAIL"]
    assert search(tmp_path, "--trials", "2")[0] == ["COMPLETE", "FAIL"]  # nothing is left to do


class Always(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return True


def test_a_pruned_trial_ends_with_a_checkpoint(tmp_path):
    states, _ = search(tmp_path, "--steps", "200000", "--evaluations", "100", "--trials", "1", pruner=Always())
    assert states == ["PRUNED"]
    assert json.loads((tmp_path / "study-trial0/summary.json").read_text())["status"] == "interrupted"

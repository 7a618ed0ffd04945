"""examples/optuna_search.py: a study that continues, and pruned trials that leave a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

FILE = Path(__file__).parents[2] / "examples/optuna_search.py"
ARGS = ("--env", "CartPole-v1", "--log.tensorboard", "False", "--eval.episodes", "1", "--evaluations", "2")
TRIAL = "study-ppo-CartPole-v1-trial0"


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
    config = json.loads((tmp_path / TRIAL / "config.json").read_text())
    assert config["optim"]["lr"] == trial.params["optim.lr"]
    assert list(trial.intermediate_values.values())[-1] == trial.value
    assert len(trial.intermediate_values) >= 1
    assert search(tmp_path, "--trials", "2", "--optim.lr", "-1")[0] == ["COMPLETE", "FAIL"]
    assert search(tmp_path, "--trials", "2")[0] == ["COMPLETE", "FAIL"]  # nothing is left to do


class Always(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return True


class Stop(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        os.kill(os.getpid(), signal.SIGTERM)
        return False


@pytest.mark.parametrize("pruner", [Always(), Stop()])
def test_a_trial_that_is_pruned_or_stopped_ends_with_a_checkpoint(tmp_path, pruner):
    options = ("--steps", "200000", "--evaluations", "100", "--trials", "1")
    with pytest.raises(SystemExit, match="75") if isinstance(pruner, Stop) else nullcontext():
        assert search(tmp_path, *options, pruner=pruner)[0] == ["PRUNED"]
    assert json.loads((tmp_path / TRIAL / "summary.json").read_text())["status"] == "interrupted"


def test_a_folder_that_is_taken_is_a_failed_trial(tmp_path):
    (tmp_path / TRIAL).mkdir()
    assert search(tmp_path, "--trials", "1")[0] == ["FAIL"]

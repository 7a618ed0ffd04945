"""Search a preset's hyperparameters with Optuna (the extra optuna):

    python examples/optuna_search.py ppo --env CartPole-v1 --steps 50000 --trials 20 --study runs/search.db

Each trial is a short run in a process of its own, in a folder beside the study. Its evaluations are reported to Optuna,
which prunes trials that fall behind: SIGTERM, so that the run leaves a checkpoint. The study is a SQLite file: the same
command continues it, and several may work on it at once. Change `suggest` for other options.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import optuna

from coterie.parallel.signals import on_signals
from coterie.runs.metrics import file_name, read_metrics


def suggest(trial: optuna.Trial) -> dict[str, float]:
    """The options of a trial, by dotted name."""
    return {
        "optim.lr": trial.suggest_float("optim.lr", 1e-4, 1e-2, log=True),
        "algo.entropy_coef": trial.suggest_float("algo.entropy_coef", 1e-4, 3e-2, log=True),
        "algo.gamma": 1 - trial.suggest_float("1 - algo.gamma", 1e-3, 5e-2, log=True),
    }


def run_trial(trial: optuna.Trial, options: argparse.Namespace, rest: Sequence[str]) -> float:
    """Train with what Optuna suggests; returns the mean return of the last evaluation."""
    name = f"{options.study.stem}-{file_name(options.preset)}-{file_name(options.env)}-trial{trial.number}"
    folder = options.study.with_name(name)
    command = [sys.executable, "-m", "coterie", "train", options.preset, "--env", options.env, "--out", str(folder)]
    command += ["--steps", str(options.steps), "--eval.every", str(max(1, options.steps // options.evaluations))]
    command += [word for name, value in suggest(trial).items() for word in (f"--{name}", repr(value))]
    folder.mkdir(parents=True)
    reported = 0
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen([*command, *rest], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        while True:
            ended = process.poll() is not None
            scores = [line for line in read_metrics(folder) if line.get("eval/return") is not None]
            for line in scores[reported:]:
                trial.report(line["eval/return"], line["env_steps"])
                if trial.should_prune():
                    raise optuna.TrialPruned
            reported = len(scores)
            if ended:
                break
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait()
    if process.returncode or not scores:
        raise RuntimeError((folder / "output.txt").read_text().splitlines()[-1])
    return float(scores[-1]["eval/return"])


def main(args: Sequence[str] | None = None, pruner: optuna.pruners.BasePruner | None = None) -> optuna.Study:
    """`args`: other options than these are passed on to `coterie train`."""
    parser = argparse.ArgumentParser(description="Search hyperparameters with Optuna.", allow_abbrev=False)
    parser.add_argument("preset")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=50_000, help="env steps of a trial")
    parser.add_argument(
        "--evaluations", type=int, default=5, help="evaluations of a trial, at any of which it may be pruned"
    )
    parser.add_argument("--trials", type=int, default=20, help="trials of the study in all")
    parser.add_argument("--study", type=Path, default=Path("runs/search.db"), help="SQLite file")
    options, rest = parser.parse_known_args(args)
    options.study.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{options.study}",
        study_name=f"{options.preset} {options.env}",
        direction="maximize",
        pruner=pruner or optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )
    left = options.trials - sum(trial.state.is_finished() for trial in study.trials)
    if left > 0:  # a run that fails, such as one that diverges, is a failed trial
        with on_signals(lambda number: sys.exit(75), [signal.SIGTERM]):  # `run_trial` ends its run then
            study.optimize(
                lambda trial: run_trial(trial, options, rest), n_trials=left, catch=(FileExistsError, RuntimeError)
            )
    return study


if __name__ == "__main__":
    done = main()
    best = [trial for trial in done.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    print(f"best of {len(done.trials)}: {done.best_value:.1f} with {done.best_params}" if best else "no trial finished")

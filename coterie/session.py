"""`train` and `resume`: a run from its folder's first file to its summary."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from coterie.config import Config
from coterie.evaluate import evaluate
from coterie.parallel.affinity import rss_mb
from coterie.roles import EVAL_SEED, InlineLearner, seed_for
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config, save_config, validate
from coterie.runs.display import Display
from coterie.runs.metrics import Episodes, RunWriter, read_metrics
from coterie.types import ConfigError, CoterieError, Rollout, Spec

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: checkpointed on a signal, run `resume`


def train(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """Train a new run and return its summary (also in `summary.json`). Raises `CoterieError` when it fails."""
    validate(config)
    folder = Path(config.out) if config.out else _new_folder(config)
    if (folder / "config.json").exists():
        raise ConfigError(f"out: {folder} already holds a run; go on with `coterie resume {folder}` or name another")
    learner = InlineLearner(config)  # before the folder: a config that cannot work leaves nothing behind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(folder / "config.json", config)
        (folder / "spec.json").write_text(_spec_text(learner.spec))
    except OSError as error:
        learner.close()
        raise CoterieError(f"out: cannot write to {folder}: {error.strerror or error}") from None
    return Run(config, folder, learner, quiet=quiet).go()


def resume(folder: str | Path, *, steps: int = 0, quiet: bool = False) -> dict[str, Any]:
    """Go on from a run's last complete checkpoint, with its own config (`steps` > 0: a new total of env steps)."""
    from dataclasses import replace

    folder = Path(folder)
    config = open_run(folder)
    if steps:
        config = replace(config, steps=steps)
    path = checkpoint.latest(folder / "checkpoints")
    if path is None:
        raise CoterieError(f"{folder} has no complete checkpoint to resume from; start it again with another --out")
    tensors, state = checkpoint.load(path)
    learner = InlineLearner(config, life=state["life"] + 1)
    _check_spec(folder, learner)
    learner.load(tensors)
    return Run(config, folder, learner, state=state, quiet=quiet).go()


def open_run(folder: Path) -> Config:
    """The config of a run's folder, or one clear line."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"RUN: {folder} is not a run folder (it has no config.json)")
    return load_config(folder / "config.json")


class Run:
    """One process's life of a run: counters, metrics, evaluations, checkpoints, signals."""

    def __init__(
        self, config: Config, folder: Path, learner: InlineLearner, *, state: dict[str, Any] | None = None, quiet: bool
    ) -> None:
        self.config, self.folder, self.learner = config, folder, learner
        self.episodes = Episodes()
        self.life, self.seconds_before, self.next_eval, self.rolled_back = 0, 0.0, config.eval.every, 0
        progress = learner.progress
        if state is not None:
            for name in ("env_steps", "learner_steps", "samples_trained", "masked"):
                setattr(progress, name, state[name])
            self.life, self.seconds_before, self.next_eval = state["life"] + 1, state["seconds"], state["next_eval"]
            learner.exchange.skipped = state["skipped"]
            self.episodes.load_state_dict(state["episodes"])
            lost = max((line["env_steps"] for line in read_metrics(folder)), default=0) - progress.env_steps
            self.rolled_back = state["rolled_back"] + max(0, lost)
        at = progress.env_steps
        self.writer = RunWriter(
            folder, config.log.tensorboard, config.log.wandb, resume_env_steps=at if state is not None else None
        )
        self.display = Display(config.steps, title(config), start_steps=at, quiet=quiet)
        self.begin = self.last_line = self.last_checkpoint = time.monotonic()
        self.begin_steps = self.line_steps = at
        self.line_stages: dict[str, float] = {}
        self.signal: signal.Signals | None = None
        self.last_eval: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.begin

    def go(self) -> dict[str, Any]:
        """Run to the end, to a signal, or to an error, and write the summary whichever it is."""
        restore = self._catch_signals()
        status, reason, failure = "finished", "", None
        try:
            with self.display:
                for line in self.learner.describe():
                    self.display.note(line)
                self.learner.run(self.on_rollout)
                self._line()
                self._checkpoint()
            if self.signal is not None:
                status, reason = "interrupted", self.signal.name
        except (CoterieError, OSError, MemoryError, RuntimeError) as error:
            status, reason, failure = "failed", _one_line(error), error
        finally:
            self.learner.close()
            restore()
        summary = self._summary(status, reason)
        with suppress(CoterieError):  # what could not be written has its reason already
            self.writer.summary(summary)
        with suppress(CoterieError):
            self.writer.log(f"{status} {reason}".strip())
        with suppress(CoterieError):
            self.writer.close()
        if failure is not None:
            kept = checkpoint.latest(self.folder / "checkpoints")
            raise CoterieError(reason + (f"; last good checkpoint: {kept}" if kept else "")) from failure
        return summary

    def on_rollout(self, rollout: Rollout) -> bool:
        """After each rollout: book-keeping that is due by now. True ends the run."""
        self.episodes.extend(rollout.episodes)
        now, progress = time.monotonic(), self.learner.progress
        if now - self.last_line >= self.config.log.every:
            self._line()
        if self.config.eval.every and progress.env_steps >= self.next_eval:
            self._evaluate()
        if now - self.last_checkpoint >= self.config.log.checkpoint_every:
            self._checkpoint()
        self.display.update(self._status())
        return progress.env_steps >= self.config.steps or self.signal is not None

    def _status(self) -> dict[str, Any]:
        elapsed = max(time.monotonic() - self.begin, 1e-9)
        rate = (self.learner.progress.env_steps - self.begin_steps) / elapsed
        return {
            "env_steps": self.learner.progress.env_steps,
            "env_steps_per_s": rate,
            "frames_per_s": rate * self.learner.spec.action_repeat,
            "mean_return": self.episodes.mean_return,
            "episodes": self.episodes.count,
            "stages": {k: v / elapsed for k, v in self.learner.stages.seconds.items()},
            **self.last_eval,
        }

    def _line(self) -> None:
        """One line of metrics: rates and stages since the line before, losses as means over its batches."""
        learner, now = self.learner, time.monotonic()
        progress, elapsed = learner.progress, max(now - self.last_line, 1e-9)
        rate = (progress.env_steps - self.line_steps) / elapsed
        line: dict[str, Any] = {
            "env_steps": progress.env_steps,
            "seconds": round(self.seconds, 3),
            "learner_steps": progress.learner_steps,
            "env_steps_per_s": rate,
            "frames_per_s": rate * learner.spec.action_repeat,
            "mean_return": self.episodes.mean_return,
            "mean_length": self.episodes.mean_length,
            "episodes": self.episodes.count,
            "lr": learner.lr(progress.env_steps),
            "policy_lag_max": progress.policy_lag_max,
            "masked_steps": progress.masked,
            "envs_replaced": learner.envs.replaced,
            "skipped_batches": learner.exchange.skipped,
            "rss_mb": rss_mb(),
            **progress.read(),
        }
        for stage, seconds in learner.stages.seconds.items():
            line[f"stage/{stage}"] = (seconds - self.line_stages.get(stage, 0.0)) / elapsed
        self.line_stages, self.last_line, self.line_steps = dict(learner.stages.seconds), now, progress.env_steps
        self.writer.write(line)
        self.display.update({**self._status(), "losses": line})

    def _evaluate(self) -> None:
        every, progress = self.config.eval.every, self.learner.progress
        self.next_eval += -(-(progress.env_steps - self.next_eval + 1) // every) * every
        scores = evaluate(
            self.learner.algorithm,
            self.learner.actor,
            self.config,
            episodes=self.config.eval.episodes,
            sampled=self.config.eval.sampled,
            seed=seed_for(self.config.seed, EVAL_SEED, progress.env_steps),
        )
        self.last_eval = {"eval_return": scores.mean, "eval_stderr": scores.stderr}
        self.writer.write(
            {
                "env_steps": progress.env_steps,
                "seconds": round(self.seconds, 3),
                "eval/return": scores.mean,
                "eval/stderr": scores.stderr,
                "eval/episodes": len(scores.returns),
                "eval/unfinished": scores.unfinished,
            }
        )
        if scores.returns:
            path = self._checkpoint()
            root = self.folder / "checkpoints"
            best = checkpoint.best_score(root)
            if best is None or scores.mean >= best:
                checkpoint.mark_best(root, path, scores.mean)

    def _checkpoint(self) -> Path:
        progress = self.learner.progress
        state = {
            **{k: getattr(progress, k) for k in ("env_steps", "learner_steps", "samples_trained", "masked")},
            "seconds": self.seconds,
            "life": self.life,
            "next_eval": self.next_eval,
            "rolled_back": self.rolled_back,
            "skipped": self.learner.exchange.skipped,
            "episodes": self.episodes.state_dict(),
        }
        root = self.folder / "checkpoints"
        path = checkpoint.save(root, progress.env_steps, self.learner.tensors(), state)
        checkpoint.prune(root, self.config.log.keep)
        self.last_checkpoint = time.monotonic()
        return path

    def _summary(self, status: str, reason: str) -> dict[str, Any]:
        progress, seconds = self.learner.progress, self.seconds
        learned = progress.env_steps
        return {
            "status": status,
            "reason": reason,
            "folder": str(self.folder),
            "env_steps": learned,
            "env_frames": learned * self.learner.spec.action_repeat,
            "learner_steps": progress.learner_steps,
            "samples_trained": progress.samples_trained,
            "seconds": round(seconds, 3),
            "env_steps_per_s": learned / seconds,
            "episodes": self.episodes.count,
            "mean_return": self.episodes.mean_return,
            "rows": {
                "produced": learned + self.rolled_back,
                "learned": learned,
                "in_flight": 0,  # inline acting hands a rollout over before it begins the next
                "dropped": 0,
                "rolled_back": self.rolled_back,
            },
            "masked_steps": progress.masked,
            "envs_replaced": self.learner.envs.replaced,
            "skipped_batches": self.learner.exchange.skipped,
            "policy_lag_max": progress.policy_lag_max,
            "stages": {k: round(v, 3) for k, v in self.learner.stages.seconds.items()},
            "digest": checkpoint.digest({"model": dict(self.learner.model.state_dict())}),
            **self.last_eval,
        }

    def _catch_signals(self) -> Callable[[], None]:
        """SIGINT and SIGTERM ask for an end after this rollout; a second one ends it at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)
            self.display.note(f"{self.signal.name}: finishing this rollout, then a checkpoint (again: stop at once)")

        try:
            before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, as in some notebooks: signals stay whoever's they are
            return lambda: None

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore


def title(config: Config) -> str:
    parts = (config.preset or config.algorithm, config.env.id, config.acting, config.exchange)
    return " x ".join(parts)


def _new_folder(config: Config) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{config.preset or config.algorithm}-{config.env.id}-s{config.seed}")
    base = Path("runs") / f"{name}-{time.strftime('%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path


def _spec_text(spec: Spec) -> str:
    import json

    return json.dumps(spec.to_json(), indent=1) + "\n"


def _check_spec(folder: Path, learner: InlineLearner) -> None:
    """Refuse a run whose env gives or takes something else than it did."""
    saved, now = (folder / "spec.json").read_text(), _spec_text(learner.spec)
    if saved != now:
        learner.close()
        flat = [" ".join(text.split()) for text in (saved, now)]
        raise ConfigError(f"env.id: the spaces differ from the run's; saved {flat[0]}; now {flat[1]}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"

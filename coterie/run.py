"""One process's life of a run: counters, metrics, evaluations, checkpoints, signals, the watchdog, the summary."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
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
from coterie.runs.display import Display
from coterie.runs.metrics import Episodes, RunWriter, read_metrics
from coterie.types import CoterieError, Rollout

_COUNTERS = ("env_steps", "learner_steps", "samples_trained", "masked", "policy_lag_max")
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: checkpointed on a signal, run `resume`


class Run:
    """One process's life of a run: counters, metrics, evaluations, checkpoints, signals."""

    def __init__(
        self, config: Config, folder: Path, learner: InlineLearner, *, state: dict[str, Any] | None = None, quiet: bool
    ) -> None:
        self.config, self.folder, self.learner = config, folder, learner
        self.episodes = Episodes()
        self.life, self.seconds_before, self.next_eval, self.rolled_back = 0, 0.0, config.eval.every, 0
        self.replaced_before, self.last_eval = 0, dict[str, float]()
        progress = learner.progress
        if state is not None:
            for name in _COUNTERS:
                setattr(progress, name, state.get(name, 0))
            learner.stages.seconds.update(state.get("stages", {}))
            self.replaced_before, self.last_eval = state.get("envs_replaced", 0), state.get("last_eval", {})
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
        self.line_stages = dict(learner.stages.seconds)
        self.begin_stages = dict(learner.stages.seconds)
        self.signal: signal.Signals | None = None
        self.noted = False
        self.alive = time.monotonic()  # when something last came forward

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.begin

    def go(self) -> dict[str, Any]:
        """Run to the end, to a signal, or to an error, and write the summary whichever it is."""
        restore = self._catch_signals()
        status, reason = "finished", ""
        failure: BaseException | None = None
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="coterie-watchdog", daemon=True).start()
        try:
            with self.display:
                for line in self.learner.describe():
                    self.display.note(line)
                if self.life == 0:
                    self._checkpoint()  # from here on there is something to resume from
                self.learner.run(self.on_rollout)
                self._line()
                self._checkpoint()
            if self.signal is not None:
                status, reason = "interrupted", self.signal.name
        except KeyboardInterrupt as error:
            status, reason, failure = "failed", "stopped at once by a second signal, without a checkpoint", error
        except Exception as error:
            status, reason, failure = "failed", _one_line(error), error
            if not isinstance(error, CoterieError):
                with suppress(CoterieError):
                    self.writer.log(traceback.format_exc())
        finally:
            ended.set()
            self.learner.close()
            restore()
        summary = self._summary(status, reason)
        with suppress(CoterieError):  # what could not be written has its reason already
            self.writer.summary(summary)
        with suppress(CoterieError):
            self.writer.log(f"{status} {reason}".strip())
        with suppress(CoterieError):
            self.writer.close()
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        if failure is not None:
            kept = checkpoint.latest(self.folder / "checkpoints")
            raise CoterieError(reason + (f"; last good checkpoint: {kept}" if kept else "")) from failure
        return summary

    def on_rollout(self, rollout: Rollout) -> bool:
        """After each rollout: book-keeping that is due by now. True ends the run."""
        self.episodes.extend(rollout.episodes)
        self.alive = time.monotonic()
        if self.signal is not None and not self.noted:
            self.noted = True
            self.display.note(f"{self.signal.name}: a checkpoint, then the end (again: stop at once)")
        now, progress = time.monotonic(), self.learner.progress
        if now - self.last_line >= self.config.log.every:
            self._line()
        if self.config.eval.every and progress.env_steps >= self.next_eval and self.signal is None:
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
            "stages": {
                k: (v - self.begin_stages.get(k, 0.0)) / elapsed for k, v in self.learner.stages.seconds.items()
            },
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
            "envs_replaced": self.replaced_before + learner.envs.replaced,
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
        self.learner.refresh_actor()  # judge the weights that the checkpoint will hold
        scores = evaluate(
            self.learner.algorithm,
            self.learner.actor,
            self.config,
            episodes=self.config.eval.episodes,
            sampled=self.config.eval.sampled,
            seed=seed_for(self.config.seed, EVAL_SEED, progress.env_steps),
            stop=self._stop_evaluating,
        )
        if self.signal is not None:
            return
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
        if scores.returns and not scores.unfinished:  # the games that end early are not a fair sample
            path = self._checkpoint()
            root = self.folder / "checkpoints"
            best = checkpoint.best_score(root)
            if best is None or scores.mean >= best:
                checkpoint.mark_best(root, path, scores.mean)

    def _stop_evaluating(self) -> bool:
        self.alive = time.monotonic()
        return self.signal is not None

    def _watch(self, ended: threading.Event) -> None:
        """End the process with a reason when nothing comes forward: a hung simulator cannot be interrupted."""
        while not ended.wait(min(5.0, self.config.log.stall / 4)):
            idle = time.monotonic() - self.alive
            if idle > self.config.log.stall:
                reason = f"no rollout for {idle:.0f} s (log.stall): an environment or the learner hangs"
                with suppress(Exception):
                    self.writer.summary(self._summary("failed", reason))
                sys.stderr.write(f"coterie: {reason}\n")
                sys.stderr.flush()
                os._exit(1)

    def _checkpoint(self) -> Path:
        progress = self.learner.progress
        if name := self.learner.params.nonfinite(self.learner.params.data):
            raise CoterieError(f"the weights of {name} are not finite at learner step {progress.learner_steps}")
        state = {
            **{k: getattr(progress, k) for k in _COUNTERS},
            "stages": dict(self.learner.stages.seconds),
            "envs_replaced": self.replaced_before + self.learner.envs.replaced,
            "last_eval": self.last_eval,
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
        # Counted where rows are made; what was made before this process started was learned or rolled back.
        produced = self.begin_steps + self.learner.acting.produced
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
                "produced": produced + self.rolled_back,
                "learned": learned,
                "in_flight": produced - learned,  # a rollout that an error or a second signal kept from being learned
                "dropped": 0,
                "rolled_back": self.rolled_back,
            },
            "masked_steps": progress.masked,
            "envs_replaced": self.replaced_before + self.learner.envs.replaced,
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


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"

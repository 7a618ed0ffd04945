"""A learner at work within a run: after each rollout it counts, reports, and carries out orders.

Whoever runs it (the same process, or the parent of several) gives orders on the board and takes messages by `post`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from coterie.algorithms.base import Algorithm
from coterie.build.evaluate import Scores, evaluate
from coterie.build.factory import EVAL_SEED, seed_for
from coterie.models.build import Network
from coterie.parallel.affinity import rss_mb
from coterie.parallel.board import EVALUATE, LAST
from coterie.parallel.processes import Post
from coterie.roles.learner import Learner
from coterie.runs import checkpoint
from coterie.types import CoterieError, Rollout

_GAUGES_S = 0.25  # least seconds between two readings of what takes a while to find out


class Service:
    """Runs a learner. `every`: least seconds between two reports; `done`: the last order that is not for it."""

    def __init__(self, learner: Learner, folder: Path, post: Post, every: float = 0.0, done: int = 0) -> None:
        self.learner, self.post, self.every = learner, post, every
        self.root = folder / "checkpoints"
        self.board, self.rank = learner.links.board, learner.links.rank
        self.games: list[tuple[float, int, int]] = []  # return, length, env id
        self.reported = self.gauged = 0.0
        self.gauges: dict[str, float] = {}
        learner.exchange.report_to(lambda line: post("said", line))
        self.done = done  # the last order that was carried out
        self.over = False

    def run(self) -> None:
        """Train to the end of the run, then go on carrying out orders until the last."""
        self.learner.tell()
        self.post("note", self.learner.describe())
        # Given before anybody began: the checkpoint at step 0. Who comes back has no weights worth saving yet.
        if self.board.order[0] > self.done and not self.learner.links.rejoin:
            self.obey()
        self.learner.run(self.after_rollout)
        self.learner.tell()  # hosts had gone on during the last rollout's training
        self.report()
        self.post("idle", None)
        while not self.over:
            self.board.heartbeat[self.rank] = time.monotonic()
            if self.board.order[0] > self.done:
                self.obey()
            else:
                time.sleep(0.005)

    def after_rollout(self, rollout: Rollout) -> bool:
        """True ends the training: by budget, or because whoever runs the learners says so."""
        learner = self.learner
        self.games += [(*game, i) for game, i in zip(rollout.episodes, rollout.episode_env, strict=True)]
        learner.tell()
        if time.monotonic() - self.reported >= self.every:
            self.report()
        order, stop = learner.exchange.agree(self.board.order[0] > self.done, self.board.stopping)
        if order:
            self.obey()
        return stop or learner.exchange.steps.total >= learner.config.steps

    def report(self) -> None:
        progress, self.reported = self.learner.progress, time.monotonic()
        if self.reported - self.gauged > _GAUGES_S:
            self.gauged, self.gauges = self.reported, self.learner.gauges()
        content: dict[str, Any] = {
            "games": self.games,
            "metrics": progress.metrics,
            "batches": progress.batches,
            "stages": dict(self.learner.stages.seconds),
            "lr": self.learner.lr(self.learner.exchange.steps.total),
            "rss_mb": rss_mb(),
            "gauges": self.gauges,
            "failures": self.learner.failures(),
            "lags": dict(progress.lags),
            "lag_by_row": progress.lag_by_row,
            "rollouts": progress.rollouts,
        }
        self.games, progress.metrics, progress.batches = [], {}, 0
        progress.lags.clear()
        progress.rollouts = 0
        self.post("report", content)

    def obey(self) -> None:
        """Evaluate where that is asked for and this is the first learner; then write this learner's part."""
        number, what = self.board.order
        self.done = number
        if what & EVALUATE and self.rank == 0:
            self._evaluate(number)
        learner = self.learner
        if name := learner.params.nonfinite(learner.params.data):
            raise CoterieError(f"the weights of {name} are not finite at learner step {learner.progress.learner_steps}")
        groups, draft = learner.tensors(), checkpoint.draft_path(self.root, f"order_{number}")
        try:
            checkpoint.write(draft, {f"learner_{self.rank}/{name}": group for name, group in groups.items()})
        except CoterieError:
            if draft.is_dir():
                raise
            return  # the order was given up meanwhile: somebody who was to take part is gone
        digest = checkpoint.digest({"model": groups["model"]}) if what & LAST else ""
        self.gauged = 0.0  # also of a run that is shorter than the time between two readings
        self.report()  # so that what the checkpoint says of all rows is said of these, too
        self.post("saved", {"order": number, "counts": learner.counts(), "digest": digest})
        self.over = bool(what & LAST)

    def _evaluate(self, order: int) -> None:
        """Score the weights that the checkpoint will hold, unless a signal comes in between."""
        learner = self.learner
        learner.refresh_actor()
        scores = self._scores(learner.algorithm, learner.actor)
        if (second := learner.secondary) is not None:
            scores.secondary = self._scores(second.algorithm, second.model)
        if not self.board.stopping:
            self.post("scores", {"order": order, "scores": scores})

    def _scores(self, algorithm: Algorithm, model: Network) -> Scores:
        config = self.learner.config
        return evaluate(
            algorithm,
            model,
            config,
            episodes=config.eval.episodes,
            sampled=config.eval.sampled,
            seed=seed_for(config.seed, EVAL_SEED, self.learner.exchange.steps.total),
            stop=self._alive,
        )

    def _alive(self) -> bool:
        self.board.heartbeat[self.rank] = time.monotonic()
        return self.board.stopping

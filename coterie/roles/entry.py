"""The entry points of a run's child processes."""

from __future__ import annotations

from pathlib import Path

from coterie.acting.table import acting_kind
from coterie.build.factory import ProcessContext, worker_setup
from coterie.config import ResolvedConfig
from coterie.parallel.processes import Post
from coterie.roles.learner import Learner
from coterie.roles.learner_service import Service
from coterie.runs import checkpoint

_REPORT_S = 0.25  # between two reports of a learner


def learner_process(
    post: Post, config: ResolvedConfig, folder: Path, life: int, context: ProcessContext, counts: dict[str, int],
    total: int, saved: Path | None, done: int,
) -> None:  # fmt: skip
    """A child process: one learner, from the beginning or from its part of a checkpoint."""
    learner = Learner(config, life, context)
    try:
        if saved is not None:
            tensors, state = checkpoint.load(saved)
            if context.rank in state["present"]:
                learner.load(checkpoint.learner(tensors, context.rank))
            else:  # it was gone when the checkpoint was written: it takes another learner's weights
                learner.model.load_state_dict(checkpoint.learner(tensors, state["present"][0])["model"])
        learner.start(counts, total)
        Service(learner, folder, post, _REPORT_S, done).run()
    finally:
        learner.close()


def worker_process(
    post: Post, config: ResolvedConfig, life: int, context: ProcessContext, number: int, row: int
) -> None:
    """A child process of the run's acting: one actor, or one env host."""
    worker = acting_kind(config).worker(worker_setup(config, life, context, number, row), context.acting)
    try:
        worker.run(post)
    finally:
        worker.close()

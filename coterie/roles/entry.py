"""What the processes of a run do: a learner, an actor, or an env host each."""

from __future__ import annotations

from pathlib import Path

from coterie.acting.table import acting_kind
from coterie.build.factory import Links
from coterie.config import ResolvedConfig
from coterie.parallel.processes import Post
from coterie.roles.actor import Actor
from coterie.roles.env_host import EnvHost
from coterie.roles.learner import Learner
from coterie.roles.learner_service import Service
from coterie.runs import checkpoint

_REPORT_S = 0.25  # between two reports of a learner


def learner_process(
    post: Post, config: ResolvedConfig, folder: Path, life: int, links: Links, counts: dict[str, int], total: int,
    saved: Path | None,
    done: int,
) -> None:  # fmt: skip
    """A child: one learner, from the beginning or from its part of a checkpoint."""
    learner = Learner(config, life, links)
    try:
        if saved is not None:
            tensors, state = checkpoint.load(saved)
            if links.rank in state["present"]:
                learner.load(checkpoint.learner(tensors, links.rank))
            else:  # it was gone at the end: it goes on from what another had learned
                learner.model.load_state_dict(checkpoint.learner(tensors, state["present"][0])["model"])
        learner.start(counts, total)
        Service(learner, folder, post, _REPORT_S, done).run()
    finally:
        learner.close()


def actor_process(post: Post, config: ResolvedConfig, life: int, links: Links, number: int, row: int) -> None:
    """A child: one actor, or one env host."""
    actor = (EnvHost if acting_kind(config).hosted else Actor)(config, life, links, number, row)
    try:
        actor.run(post)
    finally:
        actor.close()

"""A learner in this process, with actors of its own where the config asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coterie.build.resources import resolve_config
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.launch.placement import Placement
from coterie.parallel.processes import Child
from coterie.roles.entry import worker_process
from coterie.roles.learner_process import LearnerProcess


@contextmanager
def crewed(config: Config) -> Iterator[LearnerProcess]:
    if config.acting == "inline":
        learner = LearnerProcess(resolve_config(config))
        try:
            yield learner
        finally:
            learner.close()
        return
    placement = Placement(resolve_config(config), make_spec(config.env, config.atari))
    actors = []
    try:
        for row in range(1, 1 + placement.actors):
            links, number, cores = placement.actor(row)
            actors.append(Child(f"test-actor-{row}", cores, worker_process, (placement.config, 0, links, number, row)))
        learner = LearnerProcess(placement.config, 0, placement.links(0))
        try:
            yield learner
        finally:
            placement.board.close()
            learner.close()
    finally:
        for actor in actors:
            actor.kill()
        placement.close()

"""The protocol of an acting, and what the program asks of a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from coterie.config import Central, Config, Decoupled, Refusal, ResolvedConfig
from coterie.envs.tasks import tasks
from coterie.types import Rollout


class Acting(Protocol):
    """Where actions are chosen: a source of rollouts that takes published weights."""

    def publish(self, version: int) -> None: ...  # the weights of learner step `version`
    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]: ...
    def rest(self) -> int: ...  # wait until nothing acts; returns the batches that wait. For measurements
    def counts(self) -> dict[str, int]: ...  # rows produced and dropped, envs replaced, since it began
    def failures(self) -> list[str]: ...  # why envs were replaced, since the last call
    def gauges(self) -> dict[str, float]: ...  # for the metrics
    def close(self) -> None: ...


@dataclass(frozen=True)
class ActingKind:
    """One choice of acting, as the rest of the program knows it. Each module of this folder has its `KIND`."""

    child: str = ""  # what its child processes are called; empty: the learner steps the envs itself
    own_policy: bool = False  # the children choose actions, one core each; else the learner does for them
    section: Callable[[Config], Decoupled | Central | None] = lambda config: None  # its settings
    refusals: tuple[Refusal, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether child processes step the envs."""
        return bool(self.child)

    @property
    def hosted(self) -> bool:
        """Whether env hosts step the envs, and the learner chooses the actions."""
        return self.apart and not self.own_policy

    def batch_size(self, config: Config) -> int:
        """Rollouts of one env each in a learner's batch."""
        section = self.section(config)
        return (section.batch_size if section is not None else 0) or config.env.num_envs

    def lockstep(self, config: Config) -> bool:
        """Whether every action is chosen with the newest weights."""
        section = self.section(config)
        return section is None or section.lockstep

    def restarts(self, config: Config) -> int:
        """Children that may be restarted before the run fails."""
        section = self.section(config)
        return 0 if section is None else section.restarts


def shares_evenly(config: ResolvedConfig, optional: bool = False) -> bool:
    """Whether learners, tasks and envs are shared out evenly over the children. `optional`: none at all will do where
    clients of other machines may join.
    """
    actors, learners = config.actors, config.learners
    return (
        (actors > 0 or (optional and bool(config.wire.bind)))
        and actors % learners == actors % len(tasks(config.env.id)) == 0
        and config.env.num_envs * learners % max(1, actors) == 0
    )


def envs_per_child(config: ResolvedConfig) -> int:
    return config.env.num_envs * config.learners // max(1, config.actors)


def apart_refusals(section: Callable[[Config], Decoupled | Central], optional: bool = False) -> tuple[Refusal, ...]:
    """Refusals of every acting with child processes."""
    return (
        Refusal(
            lambda c, s: not shares_evenly(c, optional),
            "actors",
            "must be a multiple of the learners and of the tasks, and divide env.num_envs x learners evenly; give "
            "other numbers, or leave both at auto",
        ),
        Refusal(
            lambda c, s: c.env.groups == 2 and envs_per_child(c) % 2 == 1,
            "env.groups",
            "2 groups need an even number of envs in each actor (env.num_envs x learners / actors)",
        ),
        Refusal(
            lambda c, s: section(c).lockstep and section(c).batch_size not in (0, c.env.num_envs),
            "ACTING.batch_size",
            "must be 0 in lockstep: a batch has one rollout of each env",
        ),
    )

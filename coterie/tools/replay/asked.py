"""What is asked of a replay, and the recorded lives that it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.acting.table import acting_kind
from coterie.choices import SECTIONS, uses
from coterie.config import ResolvedConfig
from coterie.errors import ConfigError, counted
from coterie.exchange.table import exchange_kind
from coterie.flight.life import RecordedLife
from coterie.flight.record import lives
from coterie.plugins import label
from coterie.tools.replay.engine import EDITABLE
from coterie.tools.replay.moment import Moment, debug

Together = Mapping[int, Sequence[RecordedLife]]
_FIXED = ("algo.unroll_length", "algo.poll", "ppo.batch_size")
SWITCHED = (  # what a learner reads at each use, and not as it is made
    "algo.gae_lambda", "algo.value_coef", "algo.entropy_coef", "algo.entropy_schedule", "algo.normalize_advantage",
    "ppo.clip", "ppo.clip_schedule", "ppo.clip_value", "vtrace.correction", "vtrace.rho_bar", "vtrace.c_bar",
    "vtrace.pg_rho_bar", "vtrace.loss", "q.double", "q.huber", "q.target_every", "r2d2.eta", "r2d2.rescale", "sac.tau",
    "sac.learn_alpha", "optim.lr", "optim.schedule", "optim.max_grad_norm", "reward.clip", "reward.scale",
)  # fmt: skip


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay: all that is recorded, unless `origin` names the checkpoint that the lives began with ("start":
    none), or a learner step: the last life that has it. `edits`: settings that are to be others, from that step or from
    the beginning of the first life on; then nothing is compared, and later lives are left out.
    """

    origin: str = ""
    until: int | None = None  # the last learner step
    edits: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None  # a learner step, which `call` is called with
    call: Callable[[Moment], None] = debug
    learner: int = 0  # whose step that is

    @property
    def since(self) -> int | None:
        """The learner step that `origin` names."""
        return int(self.origin) if self.origin.isdecimal() else None

    def check(self, config: ResolvedConfig, folder: Path) -> None:
        """Raise a `ConfigError` where this contradicts itself, or what the run can do."""
        exchange_kind(config).check_replay(config, folder)
        if config.plugins.acting and acting_kind(config).has_children:
            raise ConfigError(f"plugins.acting: {label(config.plugins.acting)} cannot be replayed, built-in acting can")
        if not 0 <= self.learner < config.learners:
            raise ConfigError(f"--learner: {self.learner} is not one of the run's learners, 0 to {config.learners - 1}")
        for option, step in (("--to", self.until), ("--break-at or --export-step", self.at)):
            if step is not None and step < 1:
                raise ConfigError(f"{option}: {step} must be at least 1, the first learner step")
        if self.until is not None and self.until < (self.at or 0):
            raise ConfigError(f"--to: {self.until:,} must be at least {self.at:,}, the learner step to look at")
        if self.until is not None and self.since is not None and self.until <= self.since:
            raise ConfigError(f"--to: {self.until:,} must be greater than {self.since:,}, the step of --from")
        for name in self.edits:
            section = name.partition(".")[0]
            if section not in EDITABLE or name in _FIXED:
                why = "cannot be edited" if section == "settings" else "would change the schedule"
                raise ConfigError(f"--edit: {name} {why}; settings of {', '.join(EDITABLE)} may change")
            if section in SECTIONS and not uses(section, config):
                raise ConfigError(f"--edit: {name} has no effect: a run of {config.algorithm} does not use {section}")
            if self.since is not None and not any(name == known or name.startswith(f"{known}.") for known in SWITCHED):
                raise ConfigError(f"--edit: {name} is read as a life begins, and not after --from {self.since}")
        independent = config.learners > 1 and not exchange_kind(config).in_lockstep
        if self.edits and self.since is not None and independent:
            needs = "one learner, or learners that make their steps together"
            raise ConfigError(f"--edit: with --from STEP it needs {needs}")

    def chosen(self, folder: Path, config: ResolvedConfig) -> list[Together]:
        """The lives to replay, those that ran together side by side. Raises `ConfigError` where there are none."""
        groups = together(folder, config)
        if not groups:
            raise ConfigError(f"RUN: {folder} has no flight record")
        if self.since is not None:
            groups = self._with_step(groups, self.since, folder / "checkpoints")
        else:
            names = dict.fromkeys(map(began_with, groups))
            groups = [each for each in groups if self.origin in ("", began_with(each))]
            if not groups:
                raise ConfigError(f"--from: no life began with {self.origin!r}, but with {', '.join(names)}")
            groups = groups[:1] if self.edits else groups
        if self.until is not None:
            first = min(map(_first_step, groups))
            groups = [each for each in groups if _first_step(each) < self.until]
            if not groups:
                raise ConfigError(f"--to: {self.until:,} must be greater than {first:,}, where the lives begin")
        self._refuse_other_step(groups)
        return groups

    def _refuse_other_step(self, groups: Sequence[Together]) -> None:
        """Before anything is replayed, where the records show that these lives have not the step to look at."""
        if self.at is None:
            return
        if self.at <= (first := min(map(_first_step, groups))):
            least = f"must be greater than {first:,}, where the lives begin"
            raise ConfigError(f"--break-at or --export-step: {self.at:,} {least}")
        ends = [last_step(life) for group in groups for life in group.get(self.learner, ())]
        if None not in ends and self.at > (last := max(filter(None, ends), default=0)):
            raise ConfigError(no_step(self.learner, last, self.at))

    def _with_step(self, groups: list[Together], step: int, checkpoints: Path) -> list[Together]:
        """From the newest checkpoint that is there and has the learner step before it: the last lives with that step,
        what comes before them if need be, and, without edits, what comes after them.
        """
        last, found = 0, -1
        for i, group in enumerate(groups):
            for life in group.get(self.learner, ()):
                if rollouts := life.of("rollout"):
                    last = max(last, rollouts[-1][0])
                    if life.header["counts"].get("learner_steps", 0) <= step <= rollouts[-1][0]:
                        found = i
        if found < 0:
            raise ConfigError(
                f"--from: learner {self.learner} has rollouts up to learner step {last:,}, none after {step:,}"
            )
        kept = (i for i in range(found, 0, -1) if (checkpoints / began_with(groups[i])).exists())
        return groups[next(kept, 0) : found + 1 if self.edits else None]


def together(folder: Path, config: ResolvedConfig) -> list[Together]:
    """The lives of a run's learners that exchanged with each other, in their order."""
    rejoins, groups = exchange_kind(config).restarts_one(config), dict[int, dict[int, list[RecordedLife]]]()
    for rank in range(config.learners):
        for life in lives(folder, rank):
            number = int(life.header["life"])
            groups.setdefault(number % 1000 if rejoins else number, {}).setdefault(rank, []).append(life)
    return sorted(groups.values(), key=lambda group: min(x[0].header["began"] for x in group.values()))


def began_with(group: Together) -> str:
    """The checkpoint's name, or start."""
    return str(next(iter(group.values()))[0].header.get("checkpoint", "start"))


def _first_step(group: Together) -> int:
    return min(int(each[0].header["counts"].get("learner_steps", 0)) for each in group.values())


def last_step(life: RecordedLife) -> int | None:
    """A learner step that the life has not passed; None: its record does not show one."""
    if final := life.of("final"):
        return int(final[-1][0])
    if life.header["digest_every"] == 1 and (weights := life.of("weights")):
        return int(weights[-1][0]) + (life.end != "")  # it may have failed in one more
    return None


def no_step(learner: int, last: int, asked: int) -> str:
    return f"learner {learner} has {counted(last, 'recorded learner step')}, and no step {asked:,}"

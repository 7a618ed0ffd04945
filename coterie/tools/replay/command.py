"""`coterie replay`."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from coterie.build.factory import make_model, normalizers
from coterie.build.resources import resolve_config
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.exchange.table import exchange_kind
from coterie.flight.life import Life, RecordEnds
from coterie.flight.record import lives
from coterie.learner import Observer
from coterie.roles.learner_process import LearnerProcess
from coterie.roles.life import digest_of_state
from coterie.runs import checkpoint
from coterie.runs.config_io import read_options, replace
from coterie.runs.trust import open_run
from coterie.runs.validate import validate
from coterie.tools.replay.compare import machine_differences
from coterie.tools.replay.engine import EDITABLE, Place, Replay, Result, Tensors
from coterie.tools.replay.moment import Hold, Moment, debug
from coterie.types import ConfigError, CoterieError, counted

Together = Mapping[int, Sequence[Life]]
_FIXED = ("algo.unroll_length", "algo.poll", "ppo.batch_size")
SWITCHED = (  # what a learner reads at each use, and not as it is made
    "algo.gae_lambda", "algo.value_coef", "algo.entropy_coef", "algo.entropy_schedule", "algo.normalize_advantage",
    "ppo.clip", "ppo.clip_schedule", "ppo.clip_value", "vtrace.correction", "vtrace.rho_bar", "vtrace.c_bar",
    "vtrace.pg_rho_bar", "vtrace.loss", "q.double", "q.huber", "q.target_every", "r2d2.eta", "r2d2.rescale", "sac.tau",
    "sac.learn_alpha", "optim.lr", "optim.schedule", "optim.max_grad_norm", "reward.clip", "reward.scale",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What to replay: all that is recorded, unless `origin` names the checkpoint that the lives began with ("start":
    none), or a learner step: the last life that has it. `edits`: settings that are to be others, from that step or from
    the beginning of each life on; then nothing is compared. Lives after the one with that step are left out.
    """

    origin: str = ""
    until: int | None = None  # the last learner step
    edits: Mapping[str, Any] = field(default_factory=dict)
    at: int = 0  # a learner step, which `call` is called with
    call: Callable[[Moment], None] = debug
    learner: int = 0  # whose step that is


def replay(options: Namespace) -> int:
    folder = Path(options.run)
    config = open_run(folder, trust=options.trust)
    begin, found = time.monotonic(), list[Result]()
    edits = read_options([f"--{edit}" for edit in options.edit])
    at, call = options.break_at or 0, debug
    if options.export_step is not None:
        path = Path(options.out or folder / f"learner_step_{options.export_step}.safetensors")
        at, call = options.export_step, partial(_export, path)
    for result in replay_run(
        folder, config, Asked(options.origin, options.to, edits, at, call, options.learner), print
    ):
        print(_shown(result), flush=True)
        found.append(result)
    print(f"in {time.monotonic() - begin:.0f} s")
    return int(any(result.difference for result in found))


def replay_run(folder: Path, asked: Config, what: Asked, say: Callable[[str], None]) -> Iterator[Result]:
    """Replay the lives of a run's learners, up to those of which one differs. Raises `ConfigError` where it cannot be
    done, and `CoterieError` where the first state of `origin` is gone. `say`: takes lines about the machine.
    """
    since = int(what.origin) if what.origin.isdecimal() else None
    for name in what.edits:
        if name.partition(".")[0] not in EDITABLE or name in _FIXED:
            raise ConfigError(f"--edit: {name} would change the schedule; settings of {', '.join(EDITABLE)} may change")
        if since is not None and not any(name == known or name.startswith(f"{known}.") for known in SWITCHED):
            raise ConfigError(f"--edit: {name} is read as a life begins, and not after --from {since}")
    config, edited = resolve_config(validate(asked)), resolve_config(validate(replace(asked, dict(what.edits))))
    exchange_kind(config).check_replay(config)
    if what.edits and since is not None and config.learners > 1 and not exchange_kind(config).in_lockstep:
        raise ConfigError("--edit: with --from STEP it needs one learner, or learners that make their steps together")
    groups = together(folder, config)
    if since is None:
        groups = [each for each in groups if what.origin in ("", _began(each))]
    elif groups:
        groups = _with_step(groups, since, what, folder / "checkpoints")
    if not groups:
        raise ConfigError(f"RUN: {folder} has no flight record" + (f" from {what.origin}" if what.origin else ""))
    headers = [life.header for group in groups for each in group.values() for life in each]
    if any(header["device"] != "cpu" for header in headers) and not config.deterministic:
        raise ConfigError("device: a GPU adds up in no fixed order: only a run with `--deterministic True` is replayed")
    for line in machine_differences(headers[0]):
        say(f"note: {line}")
    states, reached = States(folder / "checkpoints", config, groups, "" if since is not None else what.origin), 0

    def observers(learner: LearnerProcess) -> list[Observer]:
        return [Hold(learner, what.at, what.call)] if what.at and learner.context.rank == what.learner else []

    for each in groups:
        one = Replay(config, each, states.begin, what.until, None, since or 0, observers, states.wanted, states.known)
        if what.edits and (since is None or each is groups[-1]):
            one.edited = edited
        yield from one.run()
        if any(result.difference for result in one.results):
            return
        reached = max([reached, *(x.steps for x in one.results if x.life.header["learner"] == what.learner)])
    if what.at > reached:
        raise ConfigError(f"learner {what.learner} has {reached:,} recorded learner steps, and no step {what.at:,}")


def _export(path: Path, moment: Moment) -> None:
    moment.save(path)
    print(f"{path}: the batch, the gradient and the weights of learner step {moment.step}")


def together(folder: Path, config: ResolvedConfig) -> list[Together]:
    """The lives of a run's learners that exchanged with each other, in their order."""
    rejoins, groups = exchange_kind(config).restarts_one(config), dict[int, dict[int, list[Life]]]()
    for rank in range(config.learners):
        for life in lives(folder, rank):
            number = int(life.header["life"])
            groups.setdefault(number % 1000 if rejoins else number, {}).setdefault(rank, []).append(life)
    return sorted(groups.values(), key=lambda group: min(x[0].header["began"] for x in group.values()))


def _with_step(groups: list[Together], step: int, what: Asked, checkpoints: Path) -> list[Together]:
    """From the newest checkpoint that is there and has the learner step before it: the last lives with that step, what
    comes before them if need be, and, without edits, what comes after them.
    """
    last, found = 0, -1
    for i, group in enumerate(groups):
        for life in group.get(what.learner, ()):
            if rollouts := life.of("rollout"):
                last = max(last, rollouts[-1][0])
                if life.header["counts"].get("learner_steps", 0) <= step <= rollouts[-1][0]:
                    found = i
    if found < 0:
        raise ConfigError(
            f"--from: learner {what.learner} has rollouts up to learner step {last:,}, none after {step:,}"
        )
    kept = (i for i in range(found, 0, -1) if (checkpoints / _began(groups[i])).exists())
    return groups[next(kept, 0) : found + 1 if what.edits else None]


def _began(group: Together) -> str:
    return str(next(iter(group.values()))[0].header.get("checkpoint", "start"))


@dataclass
class States:
    """What lives begin with: checkpoints, or, where those were pruned, what replays of earlier lives came to."""

    root: Path
    config: ResolvedConfig
    groups: Sequence[Together]
    origin: str  # as asked
    wanted: set[Place] = field(default_factory=set)
    known: dict[Place, list[Tensors]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        everything = [life for group in self.groups for each in group.values() for life in each]
        later = [life.header for life in everything if "checkpoint" in life.header]
        if all((self.root / header["checkpoint"]).exists() for header in later):
            return
        self.wanted = {(header["part"], header["part_steps"]) for header in later}
        for life in everything:  # a rescue has taken what is not in the weights from one of these
            self.wanted |= {(life.header["learner"], steps) for (steps,) in life.of("saved")[-2:]}

    def begin(self, life: Life) -> Tensors | None:
        header = life.header
        if "checkpoint" not in header:
            return None
        path, part = self.root / header["checkpoint"], header["part"]
        for found in self._candidates(path, part, header["part_steps"]):
            if digest_of_state(found) == header["digest"]:
                return found if part == header["learner"] else {**found, "rng": {}}
        if self.origin:
            raise CoterieError(
                f"{path.name}, which life {header['life']} began with, was pruned (log.keep); replay from start"
            )
        raise RecordEnds(f"no further: {path.name} was pruned (log.keep), and no replay came to it")

    def _candidates(self, path: Path, part: int, steps: int) -> Iterator[Tensors]:
        if path.exists():
            yield checkpoint.learner(checkpoint.load(path)[0], part)
        newest = self.known.get((part, steps), [])
        yield from newest
        older = [x for (learner, _), found in list(self.known.items()) if learner == part for x in found]
        yield from (self._rescued(*pair) for pair in product(newest, older))

    def _rescued(self, newest: Tensors, older: Tensors) -> Tensors:
        """What a run saves of a lone learner that was killed: new weights and normalizers, and the rest as it was."""
        model = make_model(self.config, make_spec(self.config.env, self.config.atari))
        model.load_state_dict(newest["model"])
        moments = normalizers(self.config, model)
        moments.write(moments.read())
        return {**older, "model": dict(model.state_dict())}


def _shown(result: Result) -> str:
    header = result.life.header
    name = f"learner {header['learner']}, life {header['life']}"
    if result.difference:
        return f"{name} differs: {result.difference}"
    equal = f"{counted(result.rollouts, 'rollout')} and {counted(result.digests, 'digest')} of weights are equal"
    if not result.compared:
        equal = "not compared: it has other settings"
    if result.switched is not None:
        equal += f" up to learner step {result.switched:,}, and from there on it has other settings"
    if result.returns:
        equal += f", mean return {sum(result.returns) / len(result.returns):.1f}"
    ends = f"; it ends as recorded: {result.error}" if result.error else ""
    ends += f"; {result.stopped}" if result.stopped else ""
    return f"{name}, up to learner step {result.steps:,}: {equal}{ends}"

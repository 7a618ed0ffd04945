"""`coterie replay`."""

from __future__ import annotations

import time
from argparse import Namespace
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

from coterie.build.factory import make_model, normalizers
from coterie.build.resources import resolve_config
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.errors import ConfigError, CoterieError, counted
from coterie.flight.life import RecordedLife, RecordEnds
from coterie.learner import Observer
from coterie.roles.learner_process import LearnerProcess
from coterie.roles.life import digest_of_state
from coterie.runs import checkpoint
from coterie.runs.checkpoint import Tensors
from coterie.runs.config_io import read_options, replace
from coterie.runs.files import save, unlinked
from coterie.runs.trust import open_run
from coterie.runs.validate import validate
from coterie.tools.replay.asked import ReplayRequest, Together, no_step
from coterie.tools.replay.compare import machine_differences
from coterie.tools.replay.engine import LearnerStep, Replay, ReplayResult, explain
from coterie.tools.replay.moment import Moment, StepBreakpoint, debug


def replay(options: Namespace) -> int:
    folder = Path(options.run)
    config = open_run(folder, trust=options.trust)
    begin, found = time.monotonic(), list[ReplayResult]()
    edits = read_options([f"--{edit}" for edit in options.edit])
    at, call = options.break_at, debug
    if options.out and options.export_step is None:
        raise ConfigError("--out: is for --export-step")
    if options.export_step is not None:
        if at is not None:
            raise ConfigError("--export-step: --break-at cannot be given, too")
        own = folder / f"learner_step_{options.export_step}.safetensors"
        path = Path(options.out) if options.out else unlinked(own)
        if path.is_dir():
            raise ConfigError(f"--out: {path} is a folder")
        at, call = options.export_step, partial(_export, path)
    asked = ReplayRequest(options.origin, options.to, edits, at, call, options.learner)
    try:
        for result in replay_run(folder, config, asked, print):
            print(_shown(result), flush=True)
            found.append(result)
    except BdbQuit:
        print("\nended in the debugger")
        return 0
    last = max((result.steps for result in found), default=0)
    if options.to is not None and last < options.to and not any(result.difference for result in found):
        print(f"note: --to {options.to:,}: the record ends before it, at learner step {last:,}")
    if edits and all(result.compared and result.switched is None for result in found):
        print(f"note: --edit: it takes effect between rollouts, and no learner step up to {last:,} was made with it")
    print(f"in {time.monotonic() - begin:.0f} s")
    return int(any(result.difference for result in found))


def replay_run(folder: Path, asked: Config, what: ReplayRequest, say: Callable[[str], None]) -> Iterator[ReplayResult]:
    """Replay the lives of a run's learners, up to those of which one differs. Raises `ConfigError` where it cannot be
    done, and `CoterieError` where the first state of `origin` is gone. `say`: takes lines about the machine.
    """
    config, edited = resolve_config(validate(asked)), resolve_config(validate(replace(asked, dict(what.edits))))
    what.check(config, folder)
    groups, holds, since = what.chosen(folder, config), list[Observer](), what.since
    headers = [life.header for group in groups for each in group.values() for life in each]
    if any(header["device"] != "cpu" for header in headers) and not config.deterministic:
        raise ConfigError("device: a GPU adds up in no fixed order: only a run with `--deterministic True` is replayed")
    for line in machine_differences(headers[0]):
        say(f"note: {line}")
    states, reached = States(folder / "checkpoints", config, groups, "" if since is not None else what.origin), 0

    def observers(learner: LearnerProcess) -> list[Observer]:
        if what.at is None or learner.context.rank != what.learner:
            return []
        holds.append(StepBreakpoint(learner, what.at, what.call))
        return holds[-1:]

    for each in groups:
        one = Replay(config, each, states.begin, what.until, None, since or 0, observers, states.wanted, states.known)
        if what.edits and (since is None or each is groups[-1]):
            one.edited = edited
        results = one.run()
        if any(result.odd is not None for result in results):
            say("note: a second replay looks for the cause")
            again = list[ReplayResult]()
            with suppress(CoterieError):  # an env that is not deterministic may also fail
                again = Replay(config, each, states.begin, what.until, snapshots=states.known).run()
            for result in results:
                explain(result, again)
        yield from results
        if any(result.difference for result in results):
            return
        reached = max([reached, *(x.steps for x in results if x.life.header["learner"] == what.learner)])
    if what.at is not None and not any(cast(StepBreakpoint, hold).done for hold in holds):
        raise ConfigError(no_step(what.learner, reached, what.at))


def _export(path: Path, moment: Moment) -> None:
    save(path, moment.data(), "--out", durable=True)
    print(f"{path}: the batch, the gradient and the weights of learner step {moment.step}")


@dataclass
class States:
    """What lives begin with: checkpoints, or, where those were pruned, what replays of earlier lives came to."""

    root: Path
    config: ResolvedConfig
    groups: Sequence[Together]
    origin: str  # as asked
    wanted: set[LearnerStep] = field(default_factory=set)
    known: dict[LearnerStep, list[Tensors]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        everything = [life for group in self.groups for each in group.values() for life in each]
        later = [life.header for life in everything if "checkpoint" in life.header]
        if all((self.root / header["checkpoint"]).exists() for header in later):
            return
        self.wanted = {(header["part"], header["part_steps"]) for header in later}
        for life in everything:  # a rescue has taken what is not in the weights from one of these
            self.wanted |= {(life.header["learner"], steps) for (steps,) in life.of("saved")[-2:]}

    def begin(self, life: RecordedLife) -> Tensors | None:
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


def _shown(result: ReplayResult) -> str:
    header = result.life.header
    name = f"learner {header['learner']}, life {header['life']}"
    if result.difference:
        return f"{name} differs: {result.difference}"
    equal = f"{counted(result.rollouts, 'rollout')} and {counted(result.digests, 'digest')} of weights are equal"
    if not result.compared:
        equal = "not compared: it has other settings"
    elif result.unseen and result.switched is None:
        equal += f" (none of the last {counted(result.unseen, 'learner step')})"
    if result.switched is not None:
        equal += f" up to learner step {result.switched:,}, and from there on it has other settings"
    if result.returns:
        equal += f", mean return {sum(result.returns) / len(result.returns):.1f}"
    ends = f"; it ends as recorded: {result.error}" if result.error else ""
    ends += f"; {result.stopped}" if result.stopped else ""
    return f"{name}, up to learner step {result.steps:,}: {equal}{ends}"

"""Callbacks: the user's own code in the process of learner 0, called between rollouts (docs/guides/callbacks.md)."""

from __future__ import annotations

import inspect
import json
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsFloat

from coterie.build.evaluate import Scores
from coterie.build.policy import Policy
from coterie.errors import ConfigError, CoterieError, one_line
from coterie.plugins import label, named, raised
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from coterie.types import Post


class Callback:
    """The base of callbacks: its methods do nothing. One that raises ends the run as failed, after a checkpoint."""

    def __call__(self) -> Callback:
        """Return the instance, so that an instance can stand where a class is expected."""
        return self

    def on_start(self, run: Run) -> None:
        """Called before the first rollout, also when the run is resumed or learner 0 is restarted."""

    def on_rollout(self, run: Run) -> None:
        """Called after learner 0 has trained on a rollout."""

    def on_evaluation(self, run: Run, scores: Scores) -> None:
        """Called after an evaluation (`eval.every`): `scores.mean`, `stderr`, `returns`, `lengths`, `info.means()`."""

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        """Called once the newest checkpoint, `folder`, is complete."""

    def should_stop(self, run: Run) -> bool | str:
        """Called after `on_rollout`. True, or a text with the reason, ends the run as finished, after a checkpoint."""
        return False

    def on_end(self, run: Run) -> None:
        """Called last, after the final checkpoint, also where a signal has ended the run."""


Given = str | Callable[[], Callback]  # a name, a class, or an instance


def each(given: Given | Iterable[Given]) -> tuple[Given, ...]:
    """Callbacks that were given as one or as several."""
    if isinstance(given, str) or callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise ConfigError(f"callbacks: {given!r:.60} is not a name, a class, an instance or a list of those")
    return tuple(given)


def make_callback(given: Given) -> Callback:
    """A `ConfigError` where it cannot be made, or a `CoterieError` with the traceback of its own exception."""
    name = label(given) if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
    make = named("callbacks", given) if isinstance(given, str) else given
    if isinstance(make, type) and not issubclass(make, Callback):
        raise ConfigError(f"callbacks: {name} is not a subclass of coterie.Callback")
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:
        how = "give a function without arguments that makes it, or, from Python, an instance"
        raise ConfigError(f"callbacks: {name} must take no arguments ({error}); {how}") from None
    try:
        made = make()
    except (Exception, SystemExit) as error:
        if isinstance(error, ConfigError):
            raise
        raise CoterieError(f"callbacks: {name} cannot be made: {raised(error)}", traceback.format_exc()) from error
    if not isinstance(made, Callback):
        raise ConfigError(f"callbacks: {name} makes {type(made).__name__}, not a Callback")
    hooks = [x for x in vars(Callback) if x[0] != "_"]
    kinds = [kind for kind in type(made).__mro__ if issubclass(kind, Callback)]  # not what they are mixed with
    if wrong := [x for kind in kinds for x in vars(kind) if x[:3] == "on_" and not hasattr(Callback, x)]:
        known = ", ".join(hooks)
        raise ConfigError(f"callbacks: {type(made).__name__}.{wrong[0]} would never be called; there are {known}")
    for hook in hooks:
        _, *takes = inspect.signature(getattr(Callback, hook)).parameters
        try:
            inspect.signature(getattr(made, hook)).bind(*takes)
        except (TypeError, ValueError) as error:
            must = f"must take {' and '.join(takes)}"
            raise ConfigError(f"callbacks: {type(made).__name__}.{hook} {must} ({error})") from None
    return made


class Run:
    """A run as its callbacks see it. `config`: with the layout decided; `model`: the network of learner 0."""

    def __init__(self, learner: LearnerProcess, folder: Path, post: Post) -> None:
        self.folder, self.config, self.model = folder, learner.config, learner.model
        self.recorded: dict[str, float] = {}
        self._set = set[str]()  # attributes of envs
        self._spec, self._board, self._post = learner.spec, learner.context.board, post
        self._metrics, self._read = dict[str, Any](), 0  # bytes of metrics.jsonl

    @property
    def env_steps(self) -> int:
        """Env steps that all learners have trained on."""
        return self._board.sum("learned")

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest value of each metric of the whole run, as of the last line of metrics.jsonl: there is one every
        `log.every` seconds. A metric without a value yet is left out.
        """
        with (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._read += len(line)
                self._metrics |= {name: x for name, x in json.loads(line).items() if x is not None}
        return dict(self._metrics)

    def policy(self) -> Policy:
        """The present policy, as `coterie.load` returns one. Its weights change as the run goes on."""
        return Policy(self.folder, self.config, self._spec, self.env_steps, self.model)

    def log(self, line: str) -> None:
        """Write a line to the screen and to log.txt."""
        self._post("said", line)

    def record(self, name: str, value: SupportsFloat | None) -> None:
        """Make `value` the metric `custom/NAME` of each line of metrics until the next call, and of one after the last
        call of the run. None: there is none for now.
        """
        if value is None:
            self.recorded.pop(f"custom/{name}", None)
            return
        try:
            self.recorded[f"custom/{name}"] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"record({name!r}) takes a number, not {type(value).__name__}") from None

    def set_env(self, name: str, value: Any) -> None:
        """Set an attribute of all envs that the run trains on, now and later, before their next step. `value`: plain
        JSON. An evaluation's envs and those of remote clients keep theirs.
        """
        self._board.set_attribute(name, value)
        if self.config.wire.bind and name not in self._set:
            self._set.add(name)
            self.log(f"set_env {name}: the envs of remote clients keep theirs")


class Callbacks:
    """The callbacks of a run. One that has raised is not called again."""

    def __init__(self, run: Run, given: Sequence[Given], post: Post) -> None:
        self.run, self._given, self._post, self._board = run, given, post, run._board
        self._made: list[Callback] = []
        self._sealed = self._board.sealed

    def start(self) -> None:
        self._made = [make_callback(given) for given in self._given]
        self.call("on_start")

    def after_rollout(self) -> None:
        if self._made:
            self._after_checkpoint()
            self.call("on_rollout")
            self.call("should_stop")

    def end(self) -> None:
        """The last checkpoint is complete."""
        self._after_checkpoint()
        if self._made and self._sealed != self._board.sealed:
            self.run.log("on_checkpoint was not called for the last checkpoint: the disk does not answer")
        self.call("on_end")
        written = self.run.metrics if self.run.recorded else {}
        if new := {name: x for name, x in self.run.recorded.items() if math.isfinite(x) and written.get(name) != x}:
            self._post("recorded", new)

    def call(self, hook: str, *args: Any) -> None:
        """Call a method of each. An answer of `should_stop` may end the run."""
        for callback in list(self._made):
            name = f"{type(callback).__name__}.{hook}"
            try:
                answer = getattr(callback, hook)(self.run, *args)
                if isinstance(answer, bool) and hook != "should_stop":
                    raise ConfigError(f"it returned {answer}; what ends a run is should_stop")
                if hook == "should_stop" and answer:  # here: an array has no truth value
                    self._stop(answer if isinstance(answer, str) else name, None)
            except (Exception, SystemExit) as error:
                self._made = [one for one in self._made if one is not callback]
                trace = error.trace if isinstance(error, CoterieError) else traceback.format_exc()
                self._stop(f"{name}: {one_line(error)}", trace)

    def _stop(self, reason: str, trace: str | None) -> None:
        self._board.stop()  # at once: learners in lockstep would go on until the message has arrived
        self._post("stop", (reason, trace))

    def _after_checkpoint(self) -> None:
        if self._made and self._sealed != (sealed := self._board.sealed):
            with suppress(CoterieError):  # the disk does not answer: later
                path = checkpoint.latest(self.run.folder / "checkpoints")
                self._sealed = sealed
                self.call("on_checkpoint", path)

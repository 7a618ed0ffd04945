"""`train` and `resume`: a run from its folder's first file to its summary. A lone learner that steps its own envs runs
in the caller's process. Otherwise that process is the supervisor of others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Any

from coterie import presets
from coterie.acting.table import acting_kind
from coterie.build.factory import ProcessContext, make_model, network_digest, normalizers
from coterie.build.resources import plain_torch, resolve_config
from coterie.build.unused import unused
from coterie.build.validity import check_objects, check_spec
from coterie.build.warm_start import begin_from, fitting, source_of
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.errors import EXIT_INTERRUPTED, ConfigError, one_line
from coterie.exchange.mailboxes import Link, Net
from coterie.exchange.table import exchange_kind
from coterie.extras import missing
from coterie.flight.record import forget_from
from coterie.launch.checks import beyond_its_steps, check_run, crowded
from coterie.launch.coordinator import Coordinator
from coterie.launch.supervisor import Supervisor
from coterie.parallel.board import Board
from coterie.parallel.guard import StallGuard
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import start_server
from coterie.parallel.signals import HANDLED, STOP, on_signals
from coterie.plugins import NameOrObject, label, named
from coterie.presets.common import flat
from coterie.roles.callbacks import Given, each, make_callback
from coterie.roles.entry import LearnerService
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from coterie.runs.config_io import save_config
from coterie.runs.files import discard, refuse_run, sole_writer, write_whole, writing
from coterie.runs.machine import describe
from coterie.runs.metrics import file_name, read_metrics
from coterie.runs.objects import name_of
from coterie.runs.starting import Starting
from coterie.runs.trust import SIGNATURE, open_run, sign
from coterie.runs.validate import validate
from coterie.types import Spec

__all__ = ["resume", "train"]
_SAY_S = 5.0  # for the last line of a run that hangs


def train(
    config: Config | None = None,
    *,
    preset: NameOrObject = "ppo",
    callbacks: Given | Iterable[Given] = (),
    quiet: bool = False,
    starting: Starting | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a new run and return its summary (also in `summary.json`). Raises `CoterieError` when it fails. Ctrl-C
    saves a checkpoint and raises `KeyboardInterrupt`; after SIGTERM and SIGHUP it is `SystemExit`.

    Without a config the run is a preset's with these settings: `train(env=MyEnv, steps=100_000)`; without an env, too,
    it is on the preset's own, mostly Pong-v5. `callbacks`: a name, class or instance, or several, besides the config's;
    `starting`: for the command line, which began earlier and handles signals; an interrupted run then returns, too.
    """
    if config is None:
        config = presets.make(preset, **settings)
    elif not isinstance(config, Config):
        raise ConfigError(f"config: {config!r} is not a Config; coterie.presets.ppo(env=...) returns one")
    elif settings:
        raise ConfigError(f"{next(iter(settings))}: a config was given, too; give its preset this setting")
    config, given = validate(config), each(callbacks)
    folder = Path(config.out).expanduser() if config.out else _new_folder(config)
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise missing("log.wandb", "wandb")
    refuse_run(folder)
    by_command = starting is not None
    with closing(starting or Starting(quiet=quiet)) as starting, plain_torch(), ExitStack() as held:
        for name, needs in unused(flat(settings), config, make_spec(config.env, config.atari)) if settings else ():
            starting.notes.append(f"{name} has no effect in this run: it needs {needs}")
        summary = _go(config, folder, False, quiet, starting, given, held)
    return summary if by_command else _or_stop(summary)


def resume(
    folder: str | Path, *, steps: int = 0, callbacks: Given | Iterable[Given] = (), quiet: bool = False,
    starting: Starting | None = None, trust: bool = False, or_earlier: bool = False, **new: NameOrObject,
) -> dict[str, Any]:  # fmt: skip
    """Go on from a run's last complete checkpoint, with its own config (`steps` > 0: a new total of env steps).
    A URL (a run stored by `ray.storage`) is first downloaded to `runs/`. `callbacks`: as for `train`; `trust` and
    `new`: for `coterie.load`; `or_earlier`: where the last checkpoint is damaged, rename it and go on from the one
    before. Signals: as for `train`.
    """
    by_command = starting is not None
    if "://" in str(folder):
        url, folder = str(folder), Path("runs") / str(folder).rstrip("/").rpartition("/")[2]
        from coterie.launch.ray.mirror import fetch  # fsspec loads slowly

        fetch(url, folder)
    folder = Path(folder).expanduser()
    config = open_run(folder, new, trust)
    if steps:
        config = validate(replace(config, steps=steps))
    with closing(starting or Starting(quiet=quiet)) as starting, plain_torch(), ExitStack() as held:
        held.enter_context(sole_writer(folder))
        if or_earlier:
            if config.launch == "ray":
                raise ConfigError("--or-earlier: cannot be used with launch ray: remove the damaged checkpoint")
            starting.notes += checkpoint.set_damaged_aside(folder / "checkpoints", config.log.stall / 2)
        summary = _go(config, folder, True, quiet, starting, each(callbacks), held)
    return summary if by_command else _or_stop(summary)


def _or_stop(summary: dict[str, Any]) -> dict[str, Any]:
    """A signal that has stopped the run stops the script around it, too: it may be about to begin the next run."""
    if summary["status"] != "interrupted":
        return summary
    line = f"{summary['reason']}: checkpoint written; go on with coterie.resume({summary['folder']!r})"
    if summary["reason"] == "SIGINT":
        raise KeyboardInterrupt(line)
    with suppress(OSError):  # the terminal may be gone
        print(f"coterie: {line}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_INTERRUPTED)


def _go(
    asked: Config, folder: Path, resumed: bool, quiet: bool, starting: Starting, callbacks: Sequence[Given],
    held: ExitStack,  # until the run has ended
) -> dict[str, Any]:  # fmt: skip
    """Run from config to summary, in this process or in others. A run that cannot start writes no files."""
    check_objects(asked)
    made = [make_callback(one) for one in (*asked.callbacks, *callbacks)]
    if asked.launch == "ray":
        if callbacks:
            raise ConfigError("callbacks: launch ray takes the config's only, each package.module:callable")
        from coterie.launch.ray.run import run_on_ray  # which only this needs

        return run_on_ray(asked, folder, resumed, starting, held)
    data = f" and the data set {asked.bc.dataset}, perhaps from the network" if asked.bc.dataset else ""
    starting.doing(f"loading {label(asked.env.id)}{data}")
    saved, state, line = _saved(asked, folder) if resumed else (None, None, "")
    config = resolve_config(asked)
    kind = exchange_kind(config)
    here = kind.one_learner and not acting_kind(config).has_children
    if not here:
        start_server()
    # A later run that starts from this config.json may act in another mode: with inline acting, `actors` stays `auto`.
    actors = config.actors or asked.actors
    kept = replace(asked, learners=config.learners, actors=actors, env=config.env, plugins=config.plugins)
    spec = make_spec(config.env, config.atari)
    check_run(config, spec)
    starting.notes += filter(None, [line or beyond_its_steps(config), crowded(config)])
    if asked.init_from and not resumed:
        config = replace(config, init_from=str(source := fitting(source_of(Path(asked.init_from)), config, spec)))
        starting.notes.append(begin_from(source, make_model(config, spec), acting_kind(config).own_policy))
    (board := Board(config.learners)).release()  # for start-up only: child processes get another one
    if not here:  # learner 0's process finds them by name, and makes them again
        config = replace(config, callbacks=(*config.callbacks, *(name_of("callbacks", one) for one in callbacks)))
    life_number = 0 if state is None else state["life"] + 1
    starting.doing(f"{config.env.num_envs} envs" if here else "memory that the processes share")
    with ExitStack() as opened:  # closed where the run cannot start
        begins = replace(config, init_from="") if resumed else config
        learner = LearnerProcess(begins, life_number, ProcessContext(board=board, folder=folder)) if here else None
        if learner is not None:
            opened.callback(learner.close)
        kind.mixing(config, config.learners)  # a topology that cannot be read is refused before anything is written
        if (link := _link(config, spec, saved is not None, starting)) is not None:
            opened.callback(link.close, True)
        if learner is not None:
            if saved is not None:
                learner.resume(checkpoint.load_part(saved, 0, False, config.log.stall / 2))
            learner.start(*(({}, 0) if state is None else (state["learners"][0], state["env_steps"])))
        signals, unsigned = _prepare(folder, kept, spec, life_number, held, opened)
        run = Coordinator(config, folder, spec, board, state=state, quiet=quiet, starting=starting, signals=signals)
        opened.callback(run.writer.close)
        alone = f"exchange {config.exchange} has one learner, so it changes nothing: --learners N for more"
        for line in filter(None, (*starting.notes, unsigned, alone if kind.is_alone(config) else "")):
            run.log(line)
        del board  # its memory is freed with the last reference: the run's, until it has the children's board
        supervisor = Supervisor(run, config, saved, link) if learner is None else None
        opened.pop_all()
    if learner is not None:
        return _run_here(run, learner, [*made, *(one for one in config.callbacks if one not in asked.callbacks)])
    assert supervisor is not None
    return run.go(supervisor.work, supervisor.close)


def _saved(asked: Config, folder: Path) -> tuple[Path, dict[str, Any], str]:
    """The checkpoint that a run goes on from, its state, and a line for the user."""
    if (saved := checkpoint.latest(folder / "checkpoints")) is None:
        raise ConfigError(f"RUN: {folder} has no complete checkpoint to resume from; start it again with another --out")
    state = checkpoint.load_state(saved, asked.log.stall / 2, whole=True)
    if state["env_steps"] >= asked.steps:
        raise ConfigError(f"--steps: the run already has {state['env_steps']:,} env steps; give a larger total")
    check_spec(folder, asked)
    made, when = state["env_steps"], time.strftime("%d %b %H:%M:%S", time.localtime(saved.stat().st_mtime))
    later = max((line["env_steps"] for line in read_metrics(folder)), default=0) - made
    lost = f"; {later:,} later ones are lost" if later > 0 else ""
    return saved, state, f"continuing from the checkpoint of {when}: {made:,} env steps{lost}"


def _prepare(
    folder: Path, config: Config, spec: Spec, life_number: int, held: ExitStack, opened: ExitStack
) -> tuple[list[signal.Signals], str]:
    """The first files of a run's folder; those of a new one go again where it cannot start. Returns `sign`'s line, and
    the list of the signals from now on, which the run handles itself: with a config and no checkpoint it could not be
    resumed.
    """
    signals = list[signal.Signals]()
    held.enter_context(on_signals(signals.append, HANDLED if config.log.checkpoint_on_warning else STOP))
    if new := not life_number:
        held.enter_context(sole_writer(folder, new))
        names = "config.json", SIGNATURE, "spec.json", "machine.json", "log.txt", "metrics.jsonl"
        opened.callback(discard, folder, *names)
    with writing(folder, "out: "):
        unsigned = sign(folder, config)
        save_config(folder / "config.json", config)  # a later resume goes on towards the same total
        if new:
            written = spec.to_json() | {"high": {k: x.high for k, x in spec.obs.items() if x.dtype == "uint8"}}
            write_whole(folder / "spec.json", json.dumps(written, indent=1) + "\n")
            write_whole(folder / "machine.json", json.dumps(describe(), indent=1) + "\n")
        forget_from(folder, life_number)
        (folder / "summary.json").unlink(missing_ok=True)  # of the run before it was resumed
    return signals, unsigned


def _run_here(run: Coordinator, learner: LearnerProcess, callbacks: Sequence[Given]) -> dict[str, Any]:
    """Train in this process, so that a debugger and a notebook work."""
    says = " (log.stall): native code holds Python's lock (GIL). It is killed; resume it with: coterie resume "
    ended, guard = threading.Event(), StallGuard(run.config.log.stall, says + quote(str(run.folder)))

    def watch() -> None:
        """End the process when nothing moves: a simulator that hangs cannot be interrupted. The guard ends it where
        this thread cannot run, either.
        """
        while not ended.wait(min(1.0, run.config.log.stall / 4)):
            guard.alive()
            if not run.over and (stalled := run.stalled()):  # when it is over, callbacks end
                reason = f"no rollout for {stalled[1]:.0f} s (log.stall): an environment or the learner hangs"
                with suppress(Exception):
                    run.writer.summary(run.summary("failed", reason))
                threading.Timer(_SAY_S, os._exit, (1,)).start()  # where it is not read
                sys.stderr.write(f"coterie: {reason}\n")
                sys.stderr.flush()
                os._exit(1)

    def close() -> None:
        try:
            learner.close()
        except (Exception, SystemExit) as error:  # of the user's own parts: it must not hide how the run ended
            run.log(f"a part of the run cannot be closed: {one_line(error)}")
        finally:
            unwatched()

    def unwatched() -> None:  # what is left to do is not training
        ended.set()
        guard.close()

    thread = threading.Thread(target=watch, name="coterie-watchdog", daemon=True)
    try:
        run.poll()
        thread.start()
        service = LearnerService(learner, run.folder, partial(run.receive, 0), callbacks=callbacks)
        return run.go(service.run, close)
    finally:
        unwatched()


def _link(config: ResolvedConfig, spec: Spec, resumed: bool, starting: Starting) -> Link | None:
    """The link to other runs, if there are any."""
    kind = exchange_kind(config)
    if not (kind.link and kind.address(config)):
        return None
    starting.doing(f"connecting to the run at {kind.address(config)}")
    model = make_model(config, spec)
    net = Net(network_digest(model), len(FlatParams(model).data), max(1, normalizers(config, model).size))
    made: Link = named("link", kind.link)(config, net, resumed, starting.say)
    return made


def _new_folder(config: Config) -> Path:
    name = file_name(f"{config.preset or config.algorithm}-{label(config.env.id)}-s{config.seed}")
    base = Path("runs") / f"{name}-{time.strftime('%m%d-%H%M%S')}"
    others = (base.with_name(f"{base.name}-{n}") for n in count(2))
    return next(path for path in chain([base], others) if not path.exists())

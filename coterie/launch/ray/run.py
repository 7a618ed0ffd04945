"""A run on a Ray cluster, seen from the process that started it.

Each part of the run is a node (node.py), which Ray places, and runs again elsewhere when its machine is lost. Ray
carries reports and orders. Observations, rollouts, weights and gossip go over `wire/`, as if the parts' commands had
been typed on the machines (docs/guides/machines.md); files go through the storage.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie.build.warm_start import source_of
from coterie.choices import with_modules
from coterie.config import Config
from coterie.errors import ConfigError, CoterieError, first_line
from coterie.launch.ray.allocation import Allocation, RunPart, Site, Worker, allocate, targets
from coterie.launch.ray.cluster import Cluster, RayBoard
from coterie.launch.ray.lease import LeaseLost
from coterie.launch.ray.mirror import ENDED_S, STORED_S, site_url
from coterie.launch.ray.node import Node, Outcome
from coterie.launch.ray.storage import Storage
from coterie.parallel.clock import awake
from coterie.parallel.signals import is_second, on_signals
from coterie.runs import checkpoint
from coterie.runs.config_io import get, save_config
from coterie.runs.config_io import replace as changed
from coterie.runs.files import sole_writer, write_whole, writing
from coterie.runs.metrics import clean
from coterie.runs.starting import Starting
from coterie.runs.trust import SIGNATURE, sign

_POLL_S = 0.5
_WARN_S = 20.0  # without a report of a part, before that is said
_LOST_S = 600.0  # without a report of learners, before the run fails
_STOP_S = STORED_S + ENDED_S + 60.0  # for sites to write a checkpoint and store it when another one has failed
_LEAVE_S = 20.0  # for workers to shut down at the end

_SUMMED = (  # over the sites: totals, and numbers by name
    "env_steps", "env_frames", "learner_steps", "samples_trained", "episodes", "masked_steps", "env_steps_per_s",
    "envs_replaced", "skipped_batches", "restarts", "actor_restarts",
)  # fmt: skip
_SUMMED_BY_NAME = ("rows", "policy_lag", "chaos")


def run_on_ray(config: Config, folder: Path, resumed: bool, starting: Starting, held: ExitStack) -> dict[str, Any]:
    """Train on a cluster; returns the summary of all sites together, which is also in `summary.json`. `held`: is closed
    when the run has ended.
    """
    begin, config = time.monotonic(), with_modules(config)
    starting.doing("connecting to Ray")
    cluster = Cluster(config.ray)
    try:
        stored = partial(Storage, config.ray.storage, folder, resumed, starting.doing, held)
        if resumed:
            storage = stored()  # which gets the sites' last checkpoints
            allocation = allocate(config, cluster.machines, _sites_of(folder, config))
        else:
            config = _from_anywhere(config)
            allocation = allocate(config, cluster.machines)
            held.enter_context(sole_writer(folder, new=True))
            storage = stored()
        run = RayRun(cluster, allocation, folder, storage, starting)
        result: dict[str, Any] = {"status": "failed", "reason": ""}
        failure: Exception | None = None
        with on_signals(run.on_signal):  # until all is written
            starting.says = False
            starting.doing("")
            run.start(starting.notes)
            try:
                result = dict(zip(("status", "reason"), run.work(), strict=True))
            except KeyboardInterrupt:
                result["reason"] = "stopped at once by a second signal"
                raise
            except Exception as error:
                result["reason"], failure = first_line(error), error
            finally:
                result |= {"folder": str(folder), "ray": run.close()}
                total = {"seconds": time.monotonic() - begin} | sum_up(run.folders) | result
                with suppress(OSError, CoterieError):
                    write_whole(folder / "summary.json", json.dumps(clean(total), indent=1) + "\n")
                    storage.push("summary.json", "ray.txt")
        if isinstance(failure, CoterieError):
            raise type(failure)(f"{failure}{checkpoint.last_good(folder / 'checkpoints')}", failure.trace) from failure
        if failure is not None:
            raise failure
        return total
    finally:
        cluster.close()


def _sites_of(folder: Path, config: Config) -> list[int]:
    """The learners of each site of a run, as in its last checkpoint. Those without one share the rest."""
    found = list[int]()
    for k in range(1 + len(list(folder.glob("sites/*")))):
        path = checkpoint.latest(Path(site_url(str(folder), k), "checkpoints"))
        found.append(len(checkpoint.load_state(path)["learners"]) if path else 0)
    rest, missing = int(config.learners) - sum(found), found.count(0)
    for k, learners in enumerate(found):
        if not learners:
            found[k] = max(1, rest // missing)
            rest, missing = rest - found[k], missing - 1
    return found


def _from_anywhere(config: Config) -> Config:
    """With the paths of a new run's files, whatever folder its sites start in. All begin with the same weights."""
    names = "bc.dataset", "replay.disk", "ray.storage"
    given = {name: path for name in names if (path := get(config, name)) and "://" not in path}
    paths = {name: str(Path(path).expanduser().absolute()) for name, path in given.items()}
    if not Path(config.bc.dataset).expanduser().is_dir():  # its name at Minari
        paths.pop("bc.dataset", None)
    if config.init_from:
        paths["init_from"] = str(source_of(Path(config.init_from)))
    return changed(config, paths)


def sum_up(folders: list[Path]) -> dict[str, Any]:
    """The sites' summaries in one, as far as they can be summed up; `sites` has the rest. Of a site without a summary,
    such as a lost one, its last checkpoint is counted.
    """
    found, missing, steps = list[dict[str, Any]](), list[str](), 0
    for k, folder in enumerate(folders):
        try:
            found.append(json.loads((folder / "summary.json").read_text()))
        except (OSError, ValueError):
            missing.append(f"site {k}")
            with suppress(CoterieError):  # no checkpoint of it can be read
                steps += checkpoint.env_steps(folder / "checkpoints")
    if not found:
        return {"env_steps": steps, "mean_return": None, "rows": {}}
    total: dict[str, Any] = dict(found[0])
    if len(folders) > 1:
        total = {key: sum(one.get(key, 0) for one in found) for key in _SUMMED if any(key in one for one in found)}
        for key in _SUMMED_BY_NAME:
            if names := dict.fromkeys(name for one in found for name in one.get(key, ())):
                total[key] = {name: sum(one.get(key, {}).get(name, 0) for one in found) for name in names}
        means = [one["mean_return"] for one in found if one["mean_return"] is not None]
        total["mean_return"] = sum(means) / len(means) if means else None
        total |= {key: max(one[key] for one in found) for key in ("seconds", "policy_lag_max") if key in found[0]}
        total["sites"] = found
    if missing:
        total["env_steps"] += steps
        total["without_summary"] = missing  # `rows` are of the others
    return total


class RayRun:
    """Starts all parts of a run and waits for their outcomes."""

    def __init__(
        self, cluster: Cluster, allocation: Allocation, folder: Path, storage: Storage, starting: Starting
    ) -> None:
        self.cluster, self.allocation, self.folder = cluster, allocation, folder
        self.storage, self.starting = storage, starting
        self.signal: signal.Signals | None = None  # the first one, at the time `signaled`
        self.signaled = 0.0
        self.closing = self.hurried = False  # hurried: the storage is waited for no longer
        self.folders = [Path(site_url(str(folder), k)) for k in range(len(allocation.sites))]

    def start(self, notes: list[str]) -> None:
        """Write the run's first files, and start all parts."""
        cluster, allocation, folder, storage = self.cluster, self.allocation, self.folder, self.storage
        config = allocation.config
        reached = [checkpoint.env_steps(own / "checkpoints") for own in self.folders]
        goals = targets(allocation, reached)  # before anything is written
        with writing(folder, "out: "):
            for own in self.folders:
                own.mkdir(parents=True, exist_ok=True)
                (own / "summary.json").unlink(missing_ok=True)
            unsigned = sign(folder, config)
            save_config(folder / "config.json", config)
            self.log = (folder / "ray.txt").open("a")
        for line in filter(None, (unsigned, *notes)):
            self.say(line)
        storage.push("config.json", *([SIGNATURE] if (folder / SIGNATURE).exists() else []))
        here, hosts = cluster.machines[0], {m.address for m in cluster.machines}
        self.board = cluster.start(RayBoard, (allocation, hosts), here, cpus=0)
        self.pending: dict[Any, RunPart] = {}  # parts by the calls that end with them
        self.codes: dict[str, int] = {}
        self.silent: dict[str, float] = {}  # for how many seconds each part has not reported
        self.begin, self.stopping = awake(), False
        host = "" if len(hosts) > 1 else "127.0.0.1"
        parts: list[RunPart] = [*allocation.sites, *allocation.workers]
        for part in parts:
            made_of = (__version__, allocation, storage.url)
            node = cluster.start(Node, made_of, part.machine, part.cpus, part.gpus, restarts=-1)  # the board counts
            target = goals[part.site] if isinstance(part, Site) else 0
            self.pending[node.run.remote(self.board, part, host, target)] = part
            self.silent[part.name] = 0.0

    def say(self, line: str) -> None:
        """Log a line and print it. A full disk or a closed terminal does not end the run."""
        with suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {line}", file=self.log, flush=True)
        self.starting.say(line)

    def work(self) -> tuple[str, str]:
        """Follow the run to its end; returns its status and the reason."""
        try:
            while self._working(Site):
                if self.signal is not None and not self.stopping:
                    self.stopping = True
                    does = "saving a checkpoint at every site, then stopping (send again to stop at once)"
                    self.say(f"{self.signal.name}: {does}")
                    self.board.stop.remote(Site)
                self._poll()
        except LeaseLost:  # a site that stopped would write to the storage
            raise
        except Exception:
            if self._working(Site):
                self.say("a part has failed: the sites save a checkpoint and stop")
            self._stop(Site, _STOP_S)  # the others' checkpoints are kept
            raise
        self._stop(Worker, _LEAVE_S)
        if self.signal is not None and any(self.codes.get(f"site {k}") != 0 for k in range(len(self.folders))):
            return "interrupted", self.signal.name
        return "finished", ""

    def on_signal(self, number: signal.Signals) -> None:
        """The first one ends the run, a second one at once. At the run's end one ends the wait for the storage."""
        now = time.monotonic()
        ends = self.closing or self.hurried  # then nothing is raised: the summary is still to be written
        if self.signal is None:
            self.signal, self.signaled = number, now
        elif not is_second(number, now - self.signaled):
            return
        elif not ends:
            self.hurried = True
            raise KeyboardInterrupt
        self.hurried = ends

    def _working(self, kind: type[RunPart]) -> bool:
        """Whether a part of a kind has not ended. At the end those that do not report are not waited for."""
        parts = [part for part in self.pending.values() if isinstance(part, kind)]
        return any(not self.stopping or self.silent[part.name] < _WARN_S for part in parts)

    def _stop(self, kind: type[RunPart], seconds: float) -> None:
        """Shut down all parts of a kind."""
        self.board.stop.remote(kind)
        self.stopping, end = True, awake() + seconds
        while self._working(kind) and awake() < end:
            before = len(self.pending)
            try:
                self._poll()
            except CoterieError as error:  # the run ends anyway
                self.say(first_line(error))
                if len(self.pending) == before:  # the board is gone
                    return

    def _poll(self) -> None:
        """Take what has happened: lines, silence, outcomes."""
        ready, _ = self.cluster.ray.wait(list(self.pending), num_returns=len(self.pending), timeout=_POLL_S)
        lines, silent = self.cluster.result("the board", self.board.collect.remote())
        for line in lines:
            self.say(line)
        for line in self.storage.poll():
            self.say(line)
        for part in self.pending.values():
            self._check_silence(part, silent.get(part.name))
        for call in ready:
            part = self.pending.pop(call)
            outcome: Outcome = self.cluster.result(part.name, call)
            self.codes[part.name] = outcome.code
            said = f"{part.name}: {outcome.line.removeprefix('coterie: ')}"
            if outcome.code == 2:
                raise ConfigError(said)
            if outcome.code == 1:
                raise CoterieError(said)
            if isinstance(part, Site):
                self.board.finish.remote(part.site)

    def _check_silence(self, part: RunPart, silent: float | None) -> None:
        """`silent`: for how many seconds it has not reported; None: it never has."""
        seconds = awake() - self.begin if silent is None else silent
        before, self.silent[part.name] = self.silent.get(part.name, 0.0), seconds
        if isinstance(part, Site) and seconds > _LOST_S and not self.stopping:
            raise CoterieError(f"ray: no report of {part.name} for {_LOST_S:.0f} s; {self.cluster.free()}")
        if before < _WARN_S <= seconds:
            waits = "not scheduled yet, " if silent is None else ""
            self.say(f"{part.name}: {waits}no report for {_WARN_S:.0f} s; {self.cluster.free()}")

    def close(self) -> dict[str, int]:
        """End the storage's last updates, and count machines and restarts."""
        self.closing = True
        for line in self.storage.finish(lambda: self.hurried):
            self.say(line)
        found: dict[str, int] = {}
        with suppress(CoterieError):
            found = self.cluster.result("the board", self.board.summary.remote())
        with suppress(OSError):
            self.log.close()
        return found

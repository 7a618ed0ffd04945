"""A Ray actor that runs one part of a run on its machine: a `coterie` command, its output and its folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from coterie import __version__
from coterie.errors import EXIT_INTERRUPTED, ConfigError, CoterieError, first_line
from coterie.launch.ray import watchdog
from coterie.launch.ray.allocation import Allocation, RunPart, Site, Worker, site_config, worker_args
from coterie.launch.ray.cluster import Address, Orders, Terms
from coterie.launch.ray.mirror import ENDED_S, OF_THE_RUN, STORED_S, Mirror, site_url
from coterie.parallel.clock import awake
from coterie.parallel.processes import scratch_folder
from coterie.runs import checkpoint
from coterie.runs.config_io import to_dict
from coterie.runs.wandb_run import PAGE_ID, PAGE_NAME
from coterie.wire.auth import check_free, join
from coterie.wire.keys import CERT, token_file

_POLL_S = 0.5
_SILENT_S = 60.0  # for the board to answer: a node that is out of reach for longer gives up
_SLOW_S = 60.0  # of copying from the storage, before a line says so
_AGAIN_S = 5.0  # before a command that ended too early is started again
_TRIES = 100  # for consecutive free ports
_ERROR = "coterie: "  # before the line that a command fails with


class Outcome(NamedTuple):
    """How a part ended: the exit code of its command, and its error or else the last line that it printed."""

    code: int
    line: str


class Node:
    """Runs one part. `{here}` in a command's arguments and files is the node's own folder."""

    def __init__(self, version: str, allocation: Allocation, storage: str) -> None:
        if version != __version__:
            raise CoterieError(f"this machine has coterie {__version__}, the one that started the run {version}")
        self.allocation, self.storage = allocation, storage
        self.board: Any = None
        self.here = scratch_folder()
        self.run_folder = self.here / "run"
        self.process: subprocess.Popen[bytes] | None = None
        self.mirror: Mirror | None = None
        self.printed, self.last_line = 0, ""
        self.wandb: dict[str, str] = {}  # variables that name the page of a site, wherever it runs

    def ask(self, method: str, *args: Any) -> Any:
        """Call the board. Without an answer this process ends, its watchdog ends the command, and Ray runs the part
        again.
        """
        import ray

        try:
            return ray.get(getattr(self.board, method).remote(*args), timeout=_SILENT_S)
        except ray.exceptions.RayTaskError as error:
            raise CoterieError(first_line(error.cause or error)) from None
        except ray.exceptions.RayError:
            os._exit(1)

    def run(self, board: Any, part: RunPart, host: str, target: int) -> Outcome:
        """Run a part to its end. `host`: this machine's address, empty for the one that Ray has; `target`: env steps of
        a site. Ray calls this again on another machine when this one is lost.
        """
        self.board = board
        try:
            self.ask("begin", part)
            address = self._publish(host, part)
            while not (orders := self._wait_for_peer(part)).stop:
                if isinstance(part, Site):
                    if (orders := self._fetch(part)).stop:
                        break
                    if orders.terms.peer is None:  # site 0 moves
                        continue
                    if not are_free(address, _ports(part)):  # others have taken one of them since the last start
                        address = self._publish(host, part)
                        continue
                    if not self._start_site(part, address, orders.terms, target):
                        return Outcome(0, "")
                else:
                    self._start_worker(part, address, orders.terms)
                code, again = self._follow(part, orders.terms)
                if again:
                    continue
                if code == 2 or (isinstance(part, Site) and code in (0, 1)):
                    return Outcome(code, self.last_line)
                orders = self.ask("report", part, [])
                if orders.stop:  # whatever a worker whose site has ended says
                    return Outcome(EXIT_INTERRUPTED if isinstance(part, Worker) else code, self.last_line)
                if code:
                    said = f" ({self.last_line.removeprefix(_ERROR)})" if code == 1 else ""
                    self.ask("restart", part, f"its command ended with exit code {code}{said}")
                time.sleep(_AGAIN_S)  # a worker's learners may be about to end
            return Outcome(EXIT_INTERRUPTED, "")
        finally:
            self.end()
            shutil.rmtree(self.here, ignore_errors=True)

    def _publish(self, host: str, part: RunPart) -> Address:
        """Choose an address; that of a site, which listens for actors or env hosts and for gossip, is made known."""
        address = open_address(host, _ports(part))
        if isinstance(part, Site):
            self.ask("publish", part.site, address)
        return address

    def _wait_for_peer(self, part: RunPart) -> Orders:
        while True:
            orders: Orders = self.ask("report", part, [])
            if orders.stop or orders.terms.peer is not None:
                return orders
            time.sleep(_POLL_S)

    def _fetch(self, site: Site) -> Orders:
        """Get a site's files from the storage, however long that takes; returns the orders at its end."""
        self.end()
        shutil.rmtree(self.run_folder, ignore_errors=True)
        if not Mirror(self.here, self.storage).has("config.json"):
            raise CoterieError(
                f"ray.storage: {socket.gethostname()} does not see {self.storage}; put the run folder on a file system "
                "that all machines mount, or give a URL that fsspec accepts"
            )
        skip = ("sites", "summary.json", *OF_THE_RUN)
        self.mirror = Mirror(site_url(self.storage, site.site), self.run_folder, skip)
        begin, lines, now = awake(), list[str](), True
        while True:
            if failures := self.mirror.poll(now):
                raise CoterieError(failures[0])
            now = False
            orders: Orders = self.ask("report", site, lines)
            if orders.stop or self.mirror.updated:
                return orders
            late = awake() > begin + _SLOW_S
            lines = [f"{site.name}: its files still come from {self.storage}"] if late else []
            begin = math.inf if late else begin
            time.sleep(_POLL_S)

    def _start_site(self, site: Site, address: Address, terms: Terms, target: int) -> bool:
        """Start a site from its last checkpoint, which it has fetched; False if that has reached the target."""
        assert terms.peer is not None
        root = self.run_folder / "checkpoints"
        if checkpoint.env_steps(root) >= target:
            return False
        config = site_config(self.allocation, site, address, terms.peer, bool(terms.keys), target)
        files = {"config.json": json.dumps(to_dict(config)).encode(), **terms.keys}
        url = site_url(self.storage, site.site)
        page = Path(self.storage).name + (f"-site-{site.site}" if site.site else "")
        self.wandb = {PAGE_NAME: page, PAGE_ID: f"{page}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"}
        self.mirror = Mirror(self.run_folder, url, skip=() if site.site else OF_THE_RUN)
        self.mirror.remove("summary.json")  # of an earlier start
        # --trust: the process that started the run has checked its config.
        if checkpoint.latest(root) is None:
            shutil.rmtree(self.run_folder, ignore_errors=True)
            self.start(["train", "{here}/config.json", "--out", "{here}/run", "--trust"], files)
        else:
            self.mirror.take_as_equal()
            self.start(["resume", "{here}/run", "--trust"], files)
        learners = f"{site.learners} learners" if site.learners > 1 else "a learner"
        self.ask("say", f"{site.name}: {learners} at {address[0]}")
        return True

    def _start_worker(self, worker: Worker, address: Address, terms: Terms) -> None:
        assert terms.peer is not None
        self.end()
        args = worker_args(self.allocation, worker, terms.peer, bool(terms.keys))
        self.start(args, {name: x for name, x in terms.keys.items() if name in (CERT, token_file(worker.kind))})
        self.ask("say", f"{worker.name}: at {address[0]}, for site {worker.site}")

    def start(self, args: list[str], files: dict[str, bytes]) -> None:
        """Run `coterie ARGS`, with `files` in the node's folder."""
        here = str(self.here)
        for name, content in files.items():
            with open(os.open(self.here / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content.replace(b"{here}", here.encode()))
        if self.run_folder.exists():
            shutil.copy(self.here / "config.json", self.run_folder / "config.json")
        command = [sys.executable, watchdog.__file__, sys.executable, "-m", "coterie"]
        with (self.here / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *(arg.replace("{here}", here) for arg in args)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.wandb, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)},
            )  # in Ray's folder, with the code that Ray brought
        self.printed = 0

    def _follow(self, part: RunPart, terms: Terms) -> tuple[int, bool]:
        """Watch a command to its end, when the storage has all of its files; returns its exit code, and whether it was
        stopped to be started on other terms. The storage is updated only while the board answers, so that a machine
        that is out of reach does not write over the files of its successor.
        """
        assert self.process is not None
        assert self.process.stdin is not None
        stopping, ended, failures = False, 0.0, list[str]()
        while True:
            code = self.process.poll()
            if code is not None:
                ended = ended or awake()
            stored = self.mirror is None or self.mirror.updated >= ended
            orders: Orders = self.ask("report", part, [*self._output(), *failures])
            if code is not None and (stored or awake() > ended + STORED_S):
                if not stored:
                    raise CoterieError(self._keep())
                return code, orders.terms != terms and not orders.stop
            failures = self.mirror.poll(now=code is not None) if self.mirror is not None else []
            if not stopping and (orders.stop or orders.terms != terms):
                stopping = True
                with suppress(OSError):  # it has ended
                    os.write(self.process.stdin.fileno(), b".")  # the watchdog asks the command to shut down
            time.sleep(_POLL_S)

    def _keep(self) -> str:
        """Save the run folder from this node's end; says where it is, and how the command ended."""
        if self.mirror is not None:
            self.mirror.stop(1.0)  # it hangs, perhaps
            self.mirror = None
        self.end()
        kept = Path(tempfile.mkdtemp(prefix="coterie-kept-"))
        self.run_folder.rename(kept / "run")
        place = f"{kept}/run on {socket.gethostname()}"
        error = self.last_line.removeprefix(_ERROR) if self.last_line.startswith(_ERROR) else "no error"
        return f"ray.storage: {self.storage} does not have the last files, which are in {place}; the command: {error}"

    def _output(self) -> list[str]:
        """What the command printed since the last call, up to the last whole line while it runs. Its error is left out:
        the outcome has it, without the checkpoint, which is in a folder of this node.
        """
        assert self.process is not None
        ended = self.process.poll() is not None
        with (self.here / "output.txt").open("rb") as file:
            file.seek(self.printed)
            new = file.read()
        whole = len(new) if ended else new.rfind(b"\n") + 1
        self.printed += whole
        lines = new[:whole].decode(errors="replace").splitlines()
        errors = [line.partition(checkpoint.LAST_GOOD)[0] for line in lines if line.startswith(_ERROR)]
        self.last_line = (errors or [self.last_line, *filter(str.strip, lines)])[-1]
        return [line for line in lines if not line.startswith(_ERROR)]

    def end(self) -> None:
        """Shut the command down, or kill it after a while. The storage is updated no longer: it would lose the
        checkpoints of a run folder that is removed during an update.
        """
        if self.mirror is not None:
            self.mirror.stop(ENDED_S)
            self.mirror = None
        if self.process is None:
            return
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(watchdog.GRACE_S + 10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process = None


def _ports(part: RunPart) -> int:
    return 2 * part.learners + 1 if isinstance(part, Site) else 1


def are_free(address: Address, count: int) -> bool:
    """Whether nothing listens at `count` ports, of which the address has the first."""
    with suppress(ConfigError):
        for k in range(count):
            check_free(join(address[0], address[1] + k), "ray")
        return True
    return False


def open_address(host: str, count: int) -> Address:
    """An address, and the first of `count` consecutive ports that are free there."""
    if not host:
        from ray.util import get_node_ip_address

        host = str(get_node_ip_address())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_TRIES):
        with ExitStack() as held, suppress(OSError, OverflowError):
            first: int = held.enter_context(socket.create_server((host, 0), family=family)).getsockname()[1]
            for k in range(1, count):
                held.enter_context(socket.create_server((host, first + k), family=family))
            return host, first
    raise CoterieError(f"no {count} consecutive free ports at {host}")

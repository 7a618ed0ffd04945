"""`coterie dashboard RUN`: the report's page, made anew while the run goes on, with the health of its processes.

It listens on loopback only, answers GET / and nothing else, and draws only when somebody looks and something is new.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import psutil

from coterie.parallel.processes import location
from coterie.parallel.signals import on_signals
from coterie.tools.report.page import Page, Section, of_runs
from coterie.tools.report.runs import read_run
from coterie.tools.report.sections import Table
from coterie.types import ConfigError, CoterieError

REFRESH_S = 10
_LOG_LINES = 15
_SILENT_S = 60.0
_WATCHED = ("metrics.jsonl", "summary.json")


class Live:
    """The page of a run's folder as it is now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.seen: tuple[int, ...] = ()
        self.page = Page("")

    def html(self) -> str:
        """Charts are drawn where something is new, health is looked at each time. Raises `CoterieError`."""
        with self.lock:  # one drawing at a time: it takes a second of a core that the run wants
            now = tuple(_changed(self.folder / name) for name in _WATCHED)
            if now != self.seen:
                run = read_run(self.folder)
                page = of_runs([run], run.title, live=True)
                status = f"Status: {run.summary.get('status', 'goes on')}."
                self.page, self.seen = replace(page, intro=[status, *page.intro]), now
            page = self.page
        health = Section("Health", tables=[*_processes(self.folder), _log(self.folder)])
        return replace(page, parts=[page.parts[0], health, *page.parts[1:]]).html(refresh=REFRESH_S)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _processes(folder: Path) -> list[Table]:
    """Who is there, by what the run last wrote of them and by whether their pids are; none of a run that has ended."""
    try:
        told = json.loads((folder / "processes.json").read_text())
    except (OSError, ValueError):
        return []
    if (folder / "summary.json").exists():
        return []
    here = told.get("where", location()) == location()  # or else these pids are another machine's
    age = max(0.0, time.time() - told["unix"])
    rows = [
        [
            p["name"],
            str(p["pid"]),
            f"{p['silent_s'] + age:.0f} s ago" if not here or psutil.pid_exists(p["pid"]) else "gone",
            f"{p['env_steps']:,}",
            "-" if p["rss_mb"] is None else f"{p['rss_mb']:,.0f}",
        ]
        for p in told["processes"]
    ]
    head = ["process", "pid", "last sign of life", "env steps acted", "memory, MB"]
    text = f"The run told this {age:.0f} s ago; {told['restarts']} learners were started again."
    if age > _SILENT_S:
        text += " That is long: it hangs, was stopped, or was killed."
    return [Table("Processes", head, rows, text)]


def _log(folder: Path) -> Table:
    lines = list[str]()
    with suppress(OSError):
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return Table("Log", ["last lines"], [[line] for line in lines or ["nothing yet"]])


def make_server(folder: str, port: int) -> ThreadingHTTPServer:
    """A server of that run's page on loopback, not yet serving. Port 0: a free one. Raises `ConfigError`."""
    live = Live(Path(folder))
    read_run(live.folder)  # or there is nothing to show

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            name, _, own = self.headers.get("Host", "").rpartition(":")
            if name not in ("127.0.0.1", "localhost") or own != str(cast(ThreadingHTTPServer, self.server).server_port):
                return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)  # another site's name for this address
            if self.path != "/":
                return self.send_error(HTTPStatus.NOT_FOUND)
            try:
                body = live.html().encode()
            except CoterieError as error:
                return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header(
                "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; media-src data:"
            )
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on 127.0.0.1:{port}: {error.strerror or error}") from None


def serve(folder: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    stop = list[int]()
    with on_signals(stop.append), make_server(folder, port) as server:
        with suppress(OSError, AttributeError):
            os.nice(10)  # the run comes first
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it; the run does not notice)", flush=True)
        server.timeout = 0.5  # for how long a signal is waited with: the call goes on after it
        while not stop:
            server.handle_request()

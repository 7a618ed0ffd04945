"""`coterie dashboard RUN`: a live version of the report's page, with the health of the run's processes.

It listens on loopback only, answers GET / and nothing else, and draws only on request and if there is new data.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from coterie.errors import ConfigError, one_line, reason_of
from coterie.parallel.processes import location
from coterie.parallel.signals import on_signals
from coterie.runs.files import read_json, was_killed
from coterie.tools.report.page import Page, Section, of_runs
from coterie.tools.report.runs import read_run
from coterie.tools.report.tables import Table

REFRESH_S = 10
_LOG_LINES = 15
_SILENT_S = 60.0
_WATCHED = ("metrics.jsonl", "summary.json")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; media-src data:",
}


class Live:
    """The current page of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.drawn: tuple[int, ...] = ()
        self.page = Page("")

    def html(self) -> str:
        """Draws charts if there is new data, and checks the health each time. Raises `CoterieError`."""
        with self.lock:  # one drawing at a time: it takes a second of a core that the run needs
            now = (was_killed(self.folder), *(_written(self.folder / name) for name in _WATCHED))
            if now != self.drawn:
                run = read_run(self.folder)
                page = of_runs([run], run.title, live=True)
                status = f"Status: {run.status}."
                self.page, self.drawn = replace(page, intro=[status, *page.intro]), now
            page = self.page
        health = Section("Health", tables=[*_processes(self.folder), _log(self.folder)])
        return replace(page, parts=[page.parts[0], health, *page.parts[1:]]).html(refresh=REFRESH_S)


def _written(path: Path) -> int:
    """When a file was written, 0 where there is none: a resumed run removes its summary."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _processes(folder: Path) -> list[Table]:
    """The processes in the run's last report, and whether their pids exist; none of a run that has ended."""
    report = read_json(folder / "processes.json", dict)
    if not report or (folder / "summary.json").exists():
        return []
    here = report.get("where", location()) == location()  # the pids are not another machine's
    age = max(0.0, time.time() - report["unix"])
    rows = []
    for p in report["processes"]:
        with suppress(KeyError, TypeError, ValueError):  # a row of another program, without a field of these
            seen = f"{p['silent_s'] + age:.0f} s ago" if not here or psutil.pid_exists(p["pid"]) else "gone"
            memory = "-" if p["rss_mb"] is None else f"{p['rss_mb']:,.0f}"
            rows.append([p["name"], str(p["pid"]), seen, f"{p['env_steps']:,}", memory])
    head = ["process", "pid", "last heartbeat", "env steps acted", "memory, MB"]
    text = f"The run reported this {age:.0f} s ago; {report['restarts']} learners were restarted."
    if age > _SILENT_S:
        text += " That is long: the run hangs, was stopped, or was killed."
    return [Table("Processes", head, rows, text)]


def _log(folder: Path) -> Table:
    lines = list[str]()
    with suppress(OSError):
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return Table("Log", ["last lines"], [[line] for line in lines or ["nothing yet"]])


def make_server(folder: str, port: int) -> ThreadingHTTPServer:
    """A server of a run's page on loopback, not yet serving. Port 0: a free one. Raises `ConfigError`."""
    live = Live(Path(folder))
    read_run(live.folder)  # raises if there is no run

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):  # forwarded or not
                return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)  # a foreign name for it (DNS rebinding)
            if self.path != "/":
                return self.send_error(HTTPStatus.NOT_FOUND)
            try:
                body = live.html().encode()
            except Exception as error:
                return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=one_line(error))
            self.send_response(HTTPStatus.OK)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on 127.0.0.1:{port}: {reason_of(error)}") from None


def serve(folder: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    stop = list[int]()
    with on_signals(stop.append), make_server(folder, port) as server:
        with suppress(OSError, AttributeError):
            os.nice(10)  # the run comes first
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C stops the page, not the run)", flush=True)
        server.timeout = 0.5  # the longest wait for a signal, which does not interrupt the call
        while not stop:
            server.handle_request()

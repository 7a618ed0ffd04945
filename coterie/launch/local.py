"""A run on this machine: in the caller's own process, or in child processes.

A lone learner that steps its own envs runs in the caller's process, so that a debugger and a notebook work. Otherwise
that process is the supervisor of the others.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.config import ResolvedConfig
from coterie.launch.coordinator import Coordinator
from coterie.launch.supervisor import Supervisor
from coterie.remote.gossip_client import GossipClient
from coterie.roles.learner_process import LearnerProcess
from coterie.roles.learner_service import Service


def run_here(run: Coordinator, learner: LearnerProcess) -> dict[str, Any]:
    """Train in this process."""
    ended = threading.Event()

    def watch() -> None:
        """End the process when nothing moves: a simulator that hangs cannot be interrupted."""
        while not ended.wait(min(5.0, run.config.log.stall / 4)):
            if reason := run.stalled():
                with suppress(Exception):
                    run.writer.summary(run.summary("failed", reason))
                sys.stderr.write(f"coterie: {reason}\n")
                sys.stderr.flush()
                os._exit(1)

    def post(kind: str, content: Any) -> None:
        run.receive(0, kind, content)

    run.poll()
    threading.Thread(target=watch, name="coterie-watchdog", daemon=True).start()
    try:
        return run.go(Service(learner, run.folder, post).run, learner.close)
    finally:
        ended.set()


def run_children(
    run: Coordinator, config: ResolvedConfig, saved: Path | None, link: GossipClient | None = None
) -> dict[str, Any]:
    """Train in child processes, from the checkpoint `saved` if any. `link`: to a run elsewhere to gossip with."""
    try:
        supervisor = Supervisor(run, config, saved, link)
    except BaseException:
        if link is not None:
            link.close()
        raise
    return run.go(supervisor.work, supervisor.close)

"""The page of a run at Weights & Biases."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from signal import Signals
from threading import Thread
from typing import Any

import psutil

from coterie.config import Config
from coterie.errors import CoterieError, reason_of
from coterie.extras import needs
from coterie.parallel.clock import awake
from coterie.parallel.signals import on_signals
from coterie.runs.config_io import to_dict

_FINISH_S = 30.0  # for the last lines to arrive

PAGE_NAME, PAGE_ID = "COTERIE_WANDB_NAME", "COTERIE_WANDB_ID"  # in the environment of a site on Ray


class WandbRun:
    """Lines go to it in a thread: the run does not wait for W&B's process, nor for the network, and does not end with
    them. W&B's own variables, such as `WANDB_MODE=offline`, apply.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        with needs("log.wandb", "wandb"):
            import wandb
        folder = folder.resolve()  # it may be "."
        self._others = {process.pid for process in _services()}  # of runs that are not Coterie's
        # The id depends on the folder only, so that a resumed run continues its page. A site on Ray is given both.
        key = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        log = config.log
        try:
            self._wandb = wandb.init(
                project=log.wandb,
                group=log.wandb_group or None,
                tags=log.wandb_tags or None,
                config=to_dict(config),
                allow_val_change=True,  # a resumed run may have another total of env steps
                dir=str(folder),
                name=os.environ.get(PAGE_NAME, folder.name),
                id=os.environ.get(PAGE_ID, key),
                resume="allow",
            )
            # Its own step count cannot go back, as the line of an evaluation and a resumed run do.
            self._wandb.define_metric("*", step_metric="env_steps")
        except Exception as error:  # no key, no network: wandb raises a dozen classes
            raise CoterieError(f"log.wandb: {reason_of(error)}") from None
        self._teardown = wandb.teardown
        self._lines, self._reason, self._said = SimpleQueue[dict[str, Any] | None](), "", False
        self._thread = Thread(target=self._send, name="coterie-wandb", daemon=True)
        self._thread.start()

    def log(self, line: dict[str, Any]) -> None:
        if self._thread.is_alive():
            self._lines.put(line)

    def trouble(self) -> str:
        """A line for the user once it has failed; then an empty one."""
        if self._said or not self._reason:
            return ""
        self._said = True
        return f"log.wandb: {self._reason}; no more is sent"

    def finish(self) -> None:
        """Wait until all is sent: for a while, or until a signal. What is not sent stays in the run folder."""
        signals, end = list[Signals](), awake() + _FINISH_S
        with on_signals(signals.append):
            self._lines.put(None)
            while self._thread.is_alive() and not signals and awake() < end:
                self._thread.join(0.2)
        if self._thread.is_alive():
            self._reason = signals[0].name if signals else f"no answer for {_FINISH_S:g} s"
            self._kill_service()
            self._thread.join(5.0)

    def _send(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._wandb.log(line)
            self._wandb.finish()
        except Exception as error:
            self._reason = self._reason or reason_of(error)
            self._kill_service()
            # Or it captures the output still, and waits at the exit.
            for end in (self._wandb.finish, *[self._teardown] * (not self._others)):
                with suppress(Exception, SystemExit):
                    end()

    def _kill_service(self) -> None:
        """It would be waited for when Python exits."""
        for process in _services():
            if process.pid not in self._others:
                with suppress(psutil.Error):
                    process.kill()


def _services() -> Iterator[psutil.Process]:
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.name() == "wandb-core":
                yield process

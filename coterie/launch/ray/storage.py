"""The storage of a run as its command sees it: which run it holds, and copies up and down.

Without `ray.storage`, or where that is the run folder itself, there is nothing to copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from coterie.errors import ConfigError, CoterieError, reason_of
from coterie.launch.ray.lease import LeaseLost, lease
from coterie.launch.ray.mirror import OF_THE_RUN, STORED_S, Mirror
from coterie.parallel.clock import awake

_HURRIED_S = 3.0  # in place of STORED_S, where a signal hurries


class Storage:
    """`given`: what `ray.storage` says. `doing` receives what the start waits for. `held`: is closed when the run has
    ended. Of a run that is resumed, the run folder first gets what the storage has.

    Raises `CoterieError` if the storage does not hold the run that is resumed, holds one that is not, or is in use.
    """

    def __init__(self, given: str, folder: Path, resumed: bool, doing: Callable[[str], None], held: ExitStack) -> None:
        given = given.rstrip("/")
        self.url, self._folder = given if "://" in given else str(Path(given or folder).absolute()), folder
        self._down: Mirror | None = None
        if "://" not in given and Path(self.url).resolve() == folder.resolve():
            return
        self._check_run(resumed)
        self._check = held.enter_context(lease(self.url, doing))
        self._check_run(resumed)  # another command may have begun one meanwhile
        self._down = Mirror(self.url, folder, skip=OF_THE_RUN)
        if resumed:
            self._down.update()

    def _check_run(self, resumed: bool) -> None:
        holds = Mirror(self._folder, self.url).has("config.json")
        if holds and not resumed:
            raise ConfigError(f"ray.storage: {self.url} holds a run: resume that, or name another folder")
        if resumed and not holds:
            raise CoterieError(f"ray.storage: {self.url} does not hold this run")

    def push(self, *names: str) -> None:
        """Store files of the run folder."""
        if self._down is not None:
            try:
                for name in names:
                    Mirror(self._folder, self.url).copy(name)
            except Exception as error:  # every file system of fsspec's has its own
                raise CoterieError(f"ray.storage: cannot write to {self.url}: {reason_of(error)}") from None

    def poll(self) -> list[str]:
        """Keep the run folder like the storage, in the background. Returns lines to be logged. Raises `LeaseLost` once
        another command has taken the storage, to which nothing is copied from then on, nor from there.
        """
        if self._down is None:
            return []
        try:
            self._check()
        except LeaseLost:
            self._down.stop(0.0)
            self._down = None
            raise
        return self._down.poll()

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Wait until the run folder has all files, a few seconds where this is `hurried`. Yields lines to be logged."""
        begin = awake()
        while self._down is not None and self._down.updated < begin > awake() - (_HURRIED_S if hurried() else STORED_S):
            yield from self._down.poll(now=True)
            time.sleep(0.1)
        if self._down is not None:
            self._down.stop(1.0)
            if self._down.updated < begin:
                yield f"the run folder may lack the last files of {self.url}"

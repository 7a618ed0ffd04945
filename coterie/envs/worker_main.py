"""What an env worker process runs: `python -m coterie.envs.worker_main NAME SOCKET_FD MEMORY_FD`.

It steps its environments one after another, reading actions from and writing results to shared memory. One socket
carries requests and answers; it closes when the parent exits. Loads no torch.

Requests: the set-up (JSON, once), then `s` or `r` and instance numbers (int32): step or reset these; or `n` and JSON
[instances, seeds]: replace these by new ones at their next reset; or `a` and a JSON object: attributes to set in all
envs. These two are not answered. Answers: JSON, {"ready": true} once, then {"failed": {instance: line and traceback}},
which is empty unless `env.on_error` is replace: otherwise an exception of an env is a bug, and {"error": line,
"trace": traceback} is the last answer. "info" has the numbers that `env.info` asks for: {instance: {name: number}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from coterie.envs.gym import Instance, make_gym, make_instance, numbers
from coterie.errors import CoterieError
from coterie.parallel.shm import SharedArrays
from coterie.parallel.signals import end_with_parent, ignore_signals
from coterie.plugins import raised

_EXIT_S = 6.0  # for the envs to close once the parent is gone


class Worker:
    """The envs of this process."""

    def __init__(self, memory_fd: int) -> None:
        self.memory_fd = memory_fd
        self.instances: dict[int, Instance] = {}  # by env: one env has the rows of all its agents
        self.new: dict[int, int] = {}  # seeds of the instances that are made at their next reset
        self.failed = False

    def _set_up(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.every_step, self.last_step = setup["info"] == "steps", setup["info"] == "episodes"
        self.shared = SharedArrays(
            {k: (tuple(shape), dtype) for k, (shape, dtype) in setup["layout"].items()}, self.memory_fd
        )
        for i, seed in self._by_env(setup["ids"], setup["seeds"]).items():
            self._make(i, seed)

    def _by_env(self, ids: Sequence[int], seeds: Sequence[int]) -> dict[int, int]:
        return {i // self.setup["agents"]: seed for i, seed in zip(ids, seeds, strict=True)}

    def _rows(self, i: int) -> range:
        return range(i * self.setup["agents"], (i + 1) * self.setup["agents"])

    def _make(self, i: int, seed: int) -> None:
        """Make an instance; one that it replaces is closed first."""
        with contextlib.suppress(Exception):
            if (old := self.instances.pop(i, None)) is not None:
                old.env.close()
        env = make_gym(self.setup["env"], self.setup["kwargs"], self.setup["max_episode_steps"])
        env.action_space.seed(seed)
        made = make_instance(self.setup["env"], env, seed, self._rows(i), self.shared.arrays, self.setup["mask"])
        self.instances[i] = made
        if made.spec.to_json() != self.setup["spec"]:
            now = f"{env.observation_space} and {env.action_space} now: restart Python if its code has changed"
            raise CoterieError(f"its spaces differ from those read at the start, {now}")
        self._set_attributes(i)

    def _set_attributes(self, i: int) -> None:
        for name, value in self.setup["attributes"].items():
            if not self.instances[i].env.set_wrapper_attr(name, deepcopy(value), force=False):
                raise CoterieError(f"set_env: the env has no attribute {name!r}")

    def _go_on(self, i: int, reset: bool) -> None:
        if i in self.new:
            self._make(i, self.new.pop(i))
        instance = self.instances[i]
        instance.reset() if reset or instance.restart else instance.step()

    def answer(self, message: bytes) -> bytes:
        """Do what a request asks for; returns the answer, empty if there is none."""
        what = message[:1]
        try:
            if what == b"{":
                self._set_up(json.loads(message))
                return b'{"ready": true}'
            if what == b"n":
                self.new |= self._by_env(*json.loads(message[1:]))
                return b""
            if what == b"a":
                self.setup["attributes"] = json.loads(message[1:])
                for i in self.instances:
                    self._set_attributes(i)
                return b""
            failed, info = dict[int, str](), dict[int, dict[str, float]]()
            for i in dict.fromkeys((np.frombuffer(message[1:], np.int32) // self.setup["agents"]).tolist()):
                try:
                    self._go_on(i, what == b"r")
                    for row, given in self.instances[i].infos.items():
                        over = self.shared.arrays["terminated"][row] or self.shared.arrays["truncated"][row]
                        if self.every_step or (self.last_step and over):
                            info[row] = {name: x.item() for name, x in numbers(given, 1).items()}
                except (Exception, SystemExit) as error:
                    if self.setup["on_error"] == "fail":
                        raise
                    failed |= dict.fromkeys(self._rows(i), f"{raised(error)}\n{traceback.format_exc()}")
            return json.dumps({"failed": failed, "info": info}).encode()
        except (Exception, SystemExit) as error:
            self.failed = True
            trace = "" if isinstance(error, CoterieError) else traceback.format_exc()
            return json.dumps({"error": raised(error), "trace": trace}).encode()

    def close(self) -> None:
        for instance in self.instances.values():
            with contextlib.suppress(Exception):
                instance.env.close()


def _exit_with_parent(fd: int) -> None:
    """End this process soon after the other end of the socket is closed, whatever the main thread does."""
    poll = select.poll()
    poll.register(fd, 0)  # POLLHUP is always reported
    poll.poll()
    time.sleep(_EXIT_S)
    os._exit(1)


def main(socket_fd: int, memory_fd: int) -> None:
    ignore_signals()  # the parent handles them, and closes the socket
    end_with_parent(grace=True)
    conn = Connection(socket_fd)
    threading.Thread(target=_exit_with_parent, args=(socket_fd,), daemon=True).start()
    with contextlib.closing(Worker(memory_fd)) as worker, contextlib.suppress(EOFError, OSError):
        while not worker.failed:
            if answer := worker.answer(conn.recv_bytes()):
                conn.send_bytes(answer)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]))

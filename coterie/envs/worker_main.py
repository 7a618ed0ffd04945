"""What an env worker process runs: `python -m coterie.envs.worker_main NAME SOCKET_FD MEMORY_FD`.

It steps its environments one after another, reading actions from and writing results to shared memory. One socket
carries requests and answers; it closes when the parent exits. Loads no torch.

Requests: the set-up (JSON, once), then `s` or `r` and instance numbers (int32): step or reset these, answered; or `n`
and JSON [instances, seeds]: replace these by new ones, not answered. Answers: JSON, {"ready": true} once, then
{instance: reason} of those that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from coterie.envs.gym import Instance, make_gym, one_line
from coterie.envs.spaces import obs_fields
from coterie.parallel.shm import SharedArrays
from coterie.types import Array

_EXIT_S = 3.0  # for the envs to close once the parent is gone


class Worker:
    """The envs of this process."""

    def __init__(self, setup: dict[str, Any], memory_fd: int) -> None:
        self.setup = setup
        self.shared = SharedArrays(
            {k: (tuple(shape), dtype) for k, (shape, dtype) in setup["layout"].items()}, memory_fd
        )
        self.instances: dict[int, Instance] = {}
        self.broken: dict[int, str] = {}
        for i, seed in zip(setup["ids"], setup["seeds"], strict=True):
            self.instances[i] = self._make(i, seed)

    def _make(self, i: int, seed: int) -> Instance:
        env = make_gym(self.setup["env"], self.setup["kwargs"], self.setup["max_episode_steps"])
        env.action_space.seed(seed)
        return Instance(env, seed, i, self.shared.arrays, obs_fields(self.setup["env"], env.observation_space))

    def replace(self, ids: list[int], seeds: list[int]) -> None:
        for i, seed in zip(ids, seeds, strict=True):
            old = self.instances.pop(i, None)
            self.broken.pop(i, None)
            with contextlib.suppress(Exception):
                if old is not None:
                    old.env.close()
            try:
                self.instances[i] = self._make(i, seed)
            except Exception as error:
                self.broken[i] = one_line(error)

    def run(self, reset: bool, ids: Array) -> dict[int, str]:
        """Step or reset these instances; returns those that failed, and why."""
        failed = {}
        for i in ids.tolist():
            if i in self.broken:
                failed[i] = self.broken[i]
                continue
            try:
                instance = self.instances[i]
                if reset:
                    instance.reset()
                else:
                    instance.step()
            except Exception as error:
                failed[i] = self.broken[i] = one_line(error)
        return failed

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the socket
    conn = Connection(socket_fd)
    threading.Thread(target=_exit_with_parent, args=(socket_fd,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        try:
            worker = Worker(json.loads(conn.recv_bytes()), memory_fd)
        except (EOFError, OSError):
            raise
        except Exception as error:
            conn.send_bytes(json.dumps({"error": one_line(error)}).encode())
            return
        conn.send_bytes(b'{"ready": true}')
        with contextlib.closing(worker):
            while True:
                message = conn.recv_bytes()
                if message[:1] == b"n":
                    worker.replace(*json.loads(message[1:]))
                else:
                    failed = worker.run(message[:1] == b"r", np.frombuffer(message[1:], np.int32))
                    conn.send_bytes(json.dumps(failed).encode() if failed else b"{}")


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]))

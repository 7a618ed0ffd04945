"""The backend on worker processes: any gymnasium env, n processes x m environments each.

Accelerated Methods 2.1, figure 1: simulator processes step their environments in turn and share arrays with the process
that acts. A process is a fresh interpreter (never a fork), connected by one socket, which closes when the process dies.
A killed worker holds no lock that could block the others. A worker that dies or does not answer is started again, with
all its environments, when they are replaced. An exception of an env ends the run, or (`env.on_error`) that env is
replaced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from coterie import config
from coterie.envs.backend import CLOSE_S, START_S, Backend, Declared, StepResults
from coterie.envs.gym import describe, layout, open_gym, read_batch
from coterie.errors import ConfigError, CoterieError
from coterie.parallel.clock import awake
from coterie.parallel.shm import SharedArrays
from coterie.parallel.signals import blocked_signals, name_of, time_limit
from coterie.types import Array

_POLL_S = 1.0  # between checks of the clock while the workers are silent


@functools.lru_cache(maxsize=32)
def _declared(env_id: str, kwargs: str, max_episode_steps: int) -> Declared:
    with contextlib.chdir("."):  # an env may change to another folder
        env = open_gym(env_id, json.loads(kwargs), max_episode_steps)
        try:
            return describe(env_id, env, max_episode_steps)
        finally:
            with contextlib.suppress(Exception, SystemExit), time_limit(CLOSE_S, "close() did not end"):
                env.close()


def worker_declared(env: config.Env) -> Declared:
    """What a gymnasium env takes and gives, found by making it once in this process."""
    return _declared(env.id, env.kwargs, env.max_episode_steps)


class Process:
    """One worker process, started at once. `answers`: how many of its answers are outstanding."""

    def __init__(self, name: str, memory_fd: int, setup: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        command = [sys.executable, "-P", "-m", "coterie.envs.worker_main", name, str(theirs.fileno()), str(memory_fd)]
        with theirs, blocked_signals():  # the worker ignores them, once it has imported NumPy
            self.popen = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), memory_fd)
            )
        self.name = name
        self.conn = Connection(ours.detach())
        self.ids: list[int] = setup["ids"]
        self.ready = False
        self.answers = 0
        self.send(json.dumps(setup).encode())
        self.answers = 1  # the one to the set-up

    def send(self, message: bytes) -> None:
        """A dead worker is noticed when its answer is read, not here."""
        with contextlib.suppress(OSError):
            self.conn.send_bytes(message)

    def ask(self, message: bytes) -> None:
        self.send(message)
        self.answers += 1

    def end(self) -> str:
        """Kill it if it lives; returns how it ended."""
        self.conn.close()
        self.answers = 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(0.5)  # its socket may close a moment before the process ends
        self.popen.kill()
        try:
            code = self.popen.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "killed, but still there"
        return f"killed by {name_of(-code)}" if code < 0 else f"exit code {code}"


class WorkerBackend(Backend):
    """`len(seeds)` instances in at most `processes` worker processes, whole envs dealt out in turn."""

    def __init__(self, env: config.Env, seeds: Sequence[int], processes: int, name: str = "env-worker") -> None:
        super().__init__(worker_declared(env), n := len(seeds))
        agents = self.spec.agents
        if n % agents:
            raise ConfigError(f"env.num_envs: {n} in a group must be a multiple of the env's {agents} agents")
        self._env, self._name, self._count = env, name, min(processes, n // agents)
        self._layout = layout(self.declared, n)
        self._shared = SharedArrays(self._layout, name=name)
        self._workers: list[Process | None] = []  # None: dead
        self._asked = np.arange(n, dtype=np.int32)
        self._attributes: Mapping[str, object] = {}
        self._began = False  # an env that cannot be made is the user's error at the start, a failure later
        try:
            for w in range(self._count):
                ids = [i for i in range(n) if i // agents % self._count == w]
                self._workers.append(self._start(w, ids, [seeds[i] for i in ids]))
        except BaseException:
            self.close()
            raise

    def _start(self, w: int, ids: Sequence[int], seeds: Sequence[int]) -> Process:
        setup = {
            "env": self._env.id,
            "kwargs": json.loads(self._env.kwargs),
            "max_episode_steps": self._env.max_episode_steps,
            "on_error": self._env.on_error,
            "info": self._env.info,
            "layout": self._layout,
            "mask": self.mask,
            "agents": self.spec.agents,
            "spec": self.spec.to_json(),
            "ids": list(ids),
            "seeds": list(seeds),
            "attributes": self._attributes,
        }
        return Process(f"{self._name}-{w}", self._shared.fd, setup)

    def step(self, ids: Array, actions: Array) -> None:
        self._shared.arrays["action"][ids] = actions
        self._ask(b"s", ids)

    def reset(self, ids: Array) -> None:
        self._ask(b"r", ids)

    def _ask(self, what: bytes, ids: Array) -> None:
        self._asked = ids.astype(np.int32)
        owner = self._asked // self.spec.agents % self._count
        for w, worker in enumerate(self._workers):
            mine = self._asked[owner == w]
            if worker is not None and len(mine):
                worker.ask(what + mine.tobytes())

    def recv(self) -> StepResults:
        failed, info = self._wait()
        self._began = True
        return read_batch(self._shared.arrays, self.spec, self._asked, failed, info)

    def _wait(self) -> tuple[dict[int, str], dict[int, dict[str, float]]]:
        """Wait until every worker has answered, died or timed out; returns the instances that failed, and numbers in
        the info of others.
        """
        failed, info = dict[int, str](), dict[int, dict[str, float]]()
        begin = awake()
        while waiting := {x.conn: (w, x) for w, x in enumerate(self._workers) if x is not None and x.answers}:
            starting = any(not x.ready for _, x in waiting.values())
            left = begin + self._env.timeout + START_S * starting - awake()
            readable = wait(list(waiting), min(max(left, 0), _POLL_S))
            if not readable and left <= 0:
                limit = f"env.timeout {self._env.timeout:g} s" + f" and {START_S:g} s for the start" * starting
                for w, x in waiting.values():
                    failed |= self._bury(w, x, f"no answer in {limit}")
            for conn in readable:
                w, x = waiting[conn]  # type: ignore[index]
                try:
                    answer = json.loads(x.conn.recv_bytes())
                except (EOFError, OSError):
                    failed |= self._bury(w, x, "")
                    continue
                x.answers -= 1
                if "error" in answer and self._began and not x.ready and self._env.on_error == "replace":
                    failed |= self._bury(w, x, f"{answer['error']}\n{answer['trace']}")
                elif "error" in answer:
                    what = f"env.id {self.spec.env_id!r}"
                    again = answer["error"].startswith(what)
                    raise CoterieError(answer["error"] if again else f"{what}: {answer['error']}", answer["trace"])
                failed |= {int(i): reason for i, reason in answer.get("failed", {}).items()}
                info |= {int(i): given for i, given in answer.get("info", {}).items()}
                if "ready" in answer:
                    x.ready = True
                    begin = awake()
        return failed, info

    def _bury(self, w: int, worker: Process, reason: str) -> dict[int, str]:
        """Give up a worker: all its instances have failed."""
        self._workers[w] = None
        ended = worker.end()
        if not (self._began or worker.ready):
            raise CoterieError(
                f"env.id {self.spec.env_id!r}: {reason or f'its worker ended before it was ready ({ended})'}"
            )
        return dict.fromkeys(worker.ids, reason or f"its worker process died ({ended})")

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        owner = np.array(ids) // self.spec.agents % self._count
        for w, worker in enumerate(self._workers):
            mine = [(i, seed) for i, seed, at in zip(ids, seeds, owner, strict=True) if at == w]
            if not mine:
                continue
            new, of = [i for i, _ in mine], [seed for _, seed in mine]
            if worker is None:
                self._workers[w] = self._start(w, new, of)
            else:
                worker.send(b"n" + json.dumps([new, of]).encode())

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        self._attributes = attributes
        for worker in self._workers:
            if worker is not None:
                worker.send(b"a" + json.dumps(attributes).encode())

    def close(self) -> None:
        """Close the sockets, which ends the workers; kill those that are still there a moment later."""
        workers, self._workers = [x for x in self._workers if x is not None], []
        for worker in workers:
            worker.conn.close()
        deadline = time.monotonic() + CLOSE_S
        for worker in workers:
            try:
                worker.popen.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.popen.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may not let it go
                    worker.popen.wait(CLOSE_S)
        self._shared.close()

"""The backend on worker processes: any gymnasium env, n processes x m environments each.

Accelerated Methods 2.1, figure 1: simulator processes step their environments in turn and share arrays with the process
that acts. A process is a fresh interpreter (never a fork), joined by one socket; the socket's end is its death. Nothing
that a killed worker held can block the others. A worker that dies or does not answer is started again, with all its
environments, when they are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from coterie import config
from coterie.envs.backend import Batch
from coterie.envs.gym import frames_per_step, make_gym, one_line
from coterie.envs.spaces import ActionMap, ObsField, action_map, obs_fields
from coterie.parallel.shm import SharedArrays
from coterie.types import Array, ConfigError, CoterieError, Spec

_START_S = 60.0  # for a worker to start, on top of the time-out
_CLOSE_S = 3.0  # for all workers to close their envs; then they are killed


@functools.lru_cache(maxsize=32)
def _declared(env_id: str, kwargs: str, max_episode_steps: int) -> tuple[Spec, list[ObsField], ActionMap]:
    """What an env takes and gives, found by making it once in this process."""
    try:
        made = make_gym(env_id, json.loads(kwargs), max_episode_steps)
    except ConfigError:
        raise
    except TypeError as error:
        what = "env.kwargs" if "unexpected keyword" in str(error) else f"env.id {env_id!r}"
        raise ConfigError(f"{what}: {one_line(error)}") from error
    except Exception as error:
        raise ConfigError(f"env.id {env_id!r} cannot be made: {one_line(error)}") from error
    with contextlib.closing(made):
        limit = max_episode_steps or getattr(made.spec, "max_episode_steps", None) or 0
        fields, actions = obs_fields(env_id, made.observation_space), action_map(env_id, made.action_space)
        obs = {f.name: f.spec for f in fields}
        return Spec(env_id, obs, actions.spec, frames_per_step(made), limit), fields, actions


def workers_spec(env: config.Env) -> Spec:
    """What a gymnasium environment takes and gives."""
    return _declared(env.id, env.kwargs, env.max_episode_steps)[0]


def workers_edges(env: config.Env) -> tuple[list[ObsField], ActionMap]:
    _, fields, actions = _declared(env.id, env.kwargs, env.max_episode_steps)
    return fields, actions


class Process:
    """One worker process: started at once, `answers` still owed by it."""

    def __init__(self, name: str, memory_fd: int, setup: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        command = [sys.executable, "-P", "-m", "coterie.envs.worker_main", name, str(theirs.fileno()), str(memory_fd)]
        with theirs:
            self.popen = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), memory_fd)
            )
        self.name = name
        self.conn = Connection(ours.detach())
        self.ids: list[int] = setup["ids"]
        self.ready = False
        self.answers = 0
        self.send(json.dumps(setup).encode())
        self.answers = 1  # that it is ready

    def send(self, message: bytes) -> None:
        """A worker that is gone is noticed when its answer is waited for."""
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
            self.popen.wait(0.5)  # its socket may close a moment before it is gone
        self.popen.kill()
        code = self.popen.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class WorkerBackend:
    """`len(seeds)` instances in at most `processes` worker processes, dealt out in turn."""

    def __init__(self, env: config.Env, seeds: Sequence[int], processes: int, name: str = "env-worker") -> None:
        self.num_instances = n = len(seeds)
        self.spec, fields, self.action_map = _declared(env.id, env.kwargs, env.max_episode_steps)
        self._env, self._name, self._count = env, name, min(processes, n)
        self._layout: dict[str, tuple[tuple[int, ...], str]] = {
            f"obs/{f.name}": ((n, *f.spec.shape), f.spec.dtype) for f in fields
        }
        action = self.spec.action
        self._layout |= {
            "action": ((n, *_action_shape(self.action_map)), action.dtype),
            "reward": ((n,), "float32"),
            "terminated": ((n,), "bool"),
            "truncated": ((n,), "bool"),
        }
        self._shared = SharedArrays(self._layout, name=name)
        self._workers: list[Process | None] = []  # None: dead
        self._asked = np.arange(n, dtype=np.int32)
        self._began = False  # an env that cannot be made at the start is an error of the user's, later a failure
        try:
            for w in range(self._count):
                ids = list(range(w, n, self._count))
                self._workers.append(self._start(w, ids, [seeds[i] for i in ids]))
        except BaseException:
            self.close()
            raise

    def _start(self, w: int, ids: Sequence[int], seeds: Sequence[int]) -> Process:
        setup = {
            "env": self._env.id,
            "kwargs": json.loads(self._env.kwargs),
            "max_episode_steps": self._env.max_episode_steps,
            "layout": self._layout,
            "ids": list(ids),
            "seeds": list(seeds),
        }
        return Process(f"{self._name}-{w}", self._shared.fd, setup)

    def step(self, ids: Array, actions: Array) -> None:
        self._shared.arrays["action"][ids] = actions
        self._ask(b"s", ids)

    def reset(self, ids: Array) -> None:
        self._ask(b"r", ids)

    def _ask(self, what: bytes, ids: Array) -> None:
        self._asked = ids.astype(np.int32)
        owner = self._asked % self._count
        for w, worker in enumerate(self._workers):
            mine = self._asked[owner == w]
            if worker is not None and len(mine):
                worker.ask(what + mine.tobytes())

    def recv(self) -> Batch:
        failed = self._wait()
        self._began = True
        arrays, ids = self._shared.arrays, self._asked
        obs: Any = {k: arrays[f"obs/{k}"][ids] for k in self.spec.obs}
        terminated, truncated = arrays["terminated"][ids], arrays["truncated"][ids]
        return Batch(obs.get("", obs), arrays["reward"][ids], terminated, truncated, terminated | truncated, failed)

    def _wait(self) -> dict[int, str]:
        """Until every worker asked has answered, died or used up its time; returns the instances that failed."""
        failed: dict[int, str] = {}
        begin = time.monotonic()
        while waiting := {x.conn: (w, x) for w, x in enumerate(self._workers) if x is not None and x.answers}:
            starting = any(not x.ready for _, x in waiting.values())
            left = begin + self._env.timeout + _START_S * starting - time.monotonic()
            readable = wait(list(waiting), max(left, 0))
            if not readable and left <= 0:
                for w, x in waiting.values():
                    failed |= self._bury(w, x, f"no answer in env.timeout {self._env.timeout:g} s")
            for conn in readable:
                w, x = waiting[conn]  # type: ignore[index]
                try:
                    answer = json.loads(x.conn.recv_bytes())
                except (EOFError, OSError):
                    failed |= self._bury(w, x, "")
                    continue
                x.answers -= 1
                if "error" in answer:
                    failed |= self._bury(w, x, answer["error"])
                elif "ready" in answer:
                    x.ready = True
                    begin = time.monotonic()
                else:
                    failed |= {int(i): reason for i, reason in answer.items()}
        return failed

    def _bury(self, w: int, worker: Process, reason: str) -> dict[int, str]:
        """A worker is lost, and every instance of it."""
        self._workers[w] = None
        ended = worker.end()
        if not (self._began or worker.ready):
            raise CoterieError(
                f"env.id {self._env.id!r}: {reason or f'its worker ended before it was ready ({ended})'}"
            )
        return dict.fromkeys(worker.ids, reason or f"its worker process died ({ended})")

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        for w, worker in enumerate(self._workers):
            mine = [(i, seed) for i, seed in zip(ids, seeds, strict=True) if i % self._count == w]
            if not mine:
                continue
            new, of = [i for i, _ in mine], [seed for _, seed in mine]
            if worker is None:
                self._workers[w] = self._start(w, new, of)
            else:
                worker.send(b"n" + json.dumps([new, of]).encode())

    def close(self) -> None:
        """Tell every worker to go, wait a moment, then kill who is left."""
        workers, self._workers = [x for x in self._workers if x is not None], []
        for worker in workers:
            worker.conn.close()
        deadline = time.monotonic() + _CLOSE_S
        for worker in workers:
            try:
                worker.popen.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.popen.kill()
                worker.popen.wait()
        self._shared.close()


def _action_shape(actions: ActionMap) -> tuple[int, ...]:
    """Shape of one action as the env takes it."""
    zero = np.zeros((1, *actions.spec.shape), actions.spec.dtype)
    return actions.to_env(zero).shape[1:]

"""A Ray cluster of several machines on this one: each has a network namespace and an address of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.namespaces import bridged
from tests.support.net import free_port
from tests.support.process_table import family
from tests.support.waiting import wait_until

_START_S = 120.0
_SMALL = ("--num-cpus", "2", "--object-store-memory", "80000000", "--disable-usage-stats")


class Machine:
    """A node of the cluster; the first is its head, in this very namespace, so that runs can be started there."""

    def __init__(self, name: str, address: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.address = name, address
        prefix = ["ip", "netns", "exec", name] if name else []
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", address]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, *ray, *_SMALL, *command], stdout=file, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """All of it at once, as a machine that loses its power."""
        mine = family(self.process.pid)
        for pid in mine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Cluster:
    machines: list[Machine]
    address: str
    env: dict[str, str]


@contextmanager
def cluster(folder: Path, others: int = 2) -> Iterator[Cluster]:
    """A head in this namespace, and `others` in namespaces of their own, on one bridge."""
    if importlib.util.find_spec("ray") is None:  # imported in the runs alone: it has warnings and threads of its own
        pytest.skip("ray is not installed")
    port = free_port()
    token = secrets.token_hex(32)
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_grpc_server_num_threads": "1"}
    machines: list[Machine] = []
    with bridged(others, "r") as (here, made):
        try:
            head = ["--head", "--port", str(port), "--include-dashboard", "false"]
            machines.append(Machine("", here, head, env, folder / "head.txt"))
            _wait_until_up(machines[0], folder / "head.txt")
            for name, address, _ in made:
                join = ["--address", f"{here}:{port}"]
                machines.append(Machine(name, address, join, env, folder / f"{name}.txt"))
                _wait_until_up(
                    machines[-1], folder / f"{name}.txt"
                )  # they share a folder: two at once take the same names
            yield Cluster(machines, f"{here}:{port}", env)
        finally:
            for machine in reversed(machines):
                machine.kill()


def _wait_until_up(machine: Machine, log: Path) -> None:
    def is_up() -> bool:
        assert machine.process.poll() is None, log.read_text()
        return "Ray runtime started" in log.read_text()

    wait_until(is_up, _START_S)

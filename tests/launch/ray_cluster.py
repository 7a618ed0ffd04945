"""A Ray cluster of several machines on this one: each has a network namespace and an address of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.launch.test_remote_networks import ip
from tests.launch.visitors import free_ports

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
        mine = _family(self.process.pid)
        for pid in mine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _family(pid: int) -> list[int]:
    """A process and all that it has started, and these have."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents.setdefault(int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(
                    int(entry.name)
                )
    found, todo = [], [pid]
    while todo:
        found.append(one := todo.pop())
        todo += parents.get(one, [])
    return found


class Cluster:
    def __init__(self, machines: list[Machine], address: str, env: dict[str, str], bridge: str) -> None:
        self.machines, self.address, self.env, self.bridge = machines, address, env, bridge


@contextmanager
def cluster(folder: Path, others: int = 2) -> Iterator[Cluster]:
    """A head here and so many others in namespaces of their own, on one bridge."""
    if importlib.util.find_spec("ray") is None:  # imported in the runs alone: it has warnings and threads of its own
        pytest.skip("ray is not installed")
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    if os.geteuid():
        pytest.skip("network namespaces need root")
    tag = os.getpid() % 10_000
    bridge, net, made = f"ctb{tag}", f"10.{217 + tag % 30}.{tag % 250}", list[tuple[str, str]]()
    port = free_ports()
    token = secrets.token_hex(32)
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_grpc_server_num_threads": "1"}
    machines: list[Machine] = []
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{net}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for k in range(others):
                name, link = f"ctr{tag}n{k}", f"ctr{tag}v{k}"
                ip("netns", "add", name)
                made.append((name, link))
                ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", link, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{net}.{k + 2}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        head = ["--head", "--port", str(port), "--include-dashboard", "false"]
        machines.append(Machine("", f"{net}.1", head, env, folder / "head.txt"))
        _until_up(machines[0], folder / "head.txt")
        for k, (name, _) in enumerate(made):
            join = ["--address", f"{net}.1:{port}"]
            machines.append(Machine(name, f"{net}.{k + 2}", join, env, folder / f"{name}.txt"))
            _until_up(machines[-1], folder / f"{name}.txt")  # they share a folder: two at once take the same names
        yield Cluster(machines, f"{net}.1:{port}", env, bridge)
    finally:
        for machine in reversed(machines):
            machine.kill()
        for name, link in made:
            for what in (("link", "del", link), ("netns", "del", name)):
                with suppress(subprocess.CalledProcessError):
                    ip(*what)
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)


def _until_up(machine: Machine, log: Path) -> None:
    end = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        assert machine.process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)

"""Hosts in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from coterie import cli
from tests.launch.test_decoupled import check
from tests.launch.visitors import central, finish, free_ports, goes_on

slow = pytest.mark.slow


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def networks() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces: each one's name, the address that it has this machine at, and its link here."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    if os.geteuid():
        pytest.skip("network namespaces need root")
    tag, made = os.getpid() % 10_000, list[tuple[str, str, str]]()
    try:
        for k in range(2):
            name, link, net = f"ct{tag}n{k}", f"ct{tag}v{k}", f"10.{213 + k}.{tag % 250}"
            try:
                ip("netns", "add", name)
                made.append((name, f"{net}.1", link))
                ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            ip("addr", "add", f"{net}.1/24", "dev", link)
            ip("link", "set", link, "up")
            ip("-n", name, "addr", "add", f"{net}.2/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        for name, _, link in made:
            with suppress(subprocess.CalledProcessError):
                ip("link", "del", link)
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


@pytest.mark.parametrize("away", [1.0, pytest.param(50.0, marks=slow)])
def test_hosts_in_networks_of_their_own(tmp_path, meddler, clients, networks, away):
    """With TLS and a token. `away`: seconds without a link, less and more than anybody waits."""
    keys = tmp_path / "keys"
    assert cli.main(["keys", str(keys), *(x for _, address, _ in networks for x in ("--host", address))]) == 0
    port = free_ports()
    args = ["--token-file", str(keys / "token"), "--cert", str(keys / "cert.pem")]

    def meddle() -> None:
        mine = [
            clients("envs", port, *args, host=address, prefix=("ip", "netns", "exec", name))
            for name, address, _ in networks
        ]
        for client in mine:
            client.at_work()
        meddler.at_work()
        link = networks[0][2]
        ip("link", "set", link, "down")
        time.sleep(away)
        goes_on(meddler)
        ip("link", "set", link, "up")
        mine[1].end(signal.SIGTERM)  # now only the other can bring the run on
        goes_on(meddler)
        finish(meddler)
        code, said = mine[0].end()
        assert code == 0, said
        assert "the run has ended" in said
        assert mine[1].end()[0] == 0

    wire = {"wire.bind": f"0.0.0.0:{port}", "wire.token-file": keys / "token"}
    wire |= {"wire.cert": keys / "cert.pem", "wire.key": keys / "key.pem"}
    assert meddler.run(central(meddler.out, port, **wire), meddle) == 75
    check(meddler.out)
    meddler.check_nothing_left()

"""Machines on this one: network namespaces, each with an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.launch.slow_link import SlowLink


def _can() -> None:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    if os.geteuid():
        pytest.skip("network namespaces need root")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=30)


@contextmanager
def bridged(
    count: int, letter: str, slow: list[SlowLink] | None = None
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Namespaces on one bridge, where all reach each other: this machine's address there, and each one's name, address
    and link. `letter`: in their names, which must differ between tests that run at the same time. `slow`: receives the
    links, which can be slowed down then.
    """
    _can()
    if slow is not None and not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("there is no /dev/net/tun here")
    tag = os.getpid() % 10_000
    bridge, net, made = (
        f"ct{letter}{tag}",
        f"10.{217 + (tag + ord(letter)) % 30}.{tag % 250}",
        list[tuple[str, str, str]](),
    )
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{net}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for k in range(count):
                name, link = f"ct{letter}{tag}n{k}", f"ct{letter}{tag}v{k}"
                ip("netns", "add", name)
                made.append((name, f"{net}.{k + 2}", link))
                if slow is None:
                    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
                else:
                    slow.append(SlowLink(link, f"{link}x"))
                    ip("link", "set", f"{link}x", "netns", name, "name", "eth0")
                ip("link", "set", link, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{net}.{k + 2}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield f"{net}.1", made
    finally:
        for one in slow or ():
            one.close()
        for name, _, link in made:
            for what in (("link", "del", link), ("netns", "del", name)):
                with suppress(subprocess.CalledProcessError):
                    ip(*what)
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)

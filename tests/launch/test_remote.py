"""Hosts and actors that come by themselves: over loopback, through a proxy that disturbs them, from networks of their
own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie import cli
from coterie.acting.decoupled import Stopped
from coterie.config import Config, Env
from coterie.envs.make import make_spec
from coterie.remote import Door, lend_actor, lend_envs
from coterie.types import CoterieError
from coterie.wire.client import Stream, open_channel
from coterie.wire.codec import timestep_layout
from tests.launch import test_central, test_decoupled
from tests.launch.harness import ENDLESS, PATIENCE, Meddler, last_checkpoint, until
from tests.launch.test_decoupled import CROWD, check
from tests.launch.test_killed import TALLY
from tests.proxy import Proxy

slow = pytest.mark.slow
WIDTH = 2  # simulators of each host


def free_ports(count: int = 1) -> int:
    """The first of so many ports in a row."""
    for _ in range(100):
        with ExitStack() as held, suppress(OSError):
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for k in range(1, count):
                held.enter_context(socket.create_server(("127.0.0.1", first + k)))
            return first
    raise AssertionError("no ports")


def central(out: Path, port: int, exchange: str = "solo", **changes: object) -> list[str]:
    """A run without hosts of its own."""
    own = {"actors": 0, "wire.bind": f"127.0.0.1:{port}", **ENDLESS}
    return test_central.options(out, exchange, **{**own, **changes})


class Guest:
    """A host or an actor in a thread of this process."""

    def __init__(self, work: Callable[..., None], port: int, env: Env | None = None) -> None:
        env = replace(env or Env("CartPole-v1"), num_envs=WIDTH, delay=0.005, threads=1)
        config = replace(Config(), env=env, device="cpu")
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.left = threading.Event()
        door = Door(f"127.0.0.1:{port}", patience=60)

        def leave() -> None:
            if self.left.is_set():
                raise Stopped

        def run() -> None:
            try:
                work(config, door, self.lines.append, leave)
            except Stopped:
                pass
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def end(self) -> str:
        """It leaves, if it has not been told to go; what it said last."""
        self.left.set()
        self.thread.join(PATIENCE / 2)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.lines[-1]


@pytest.fixture
def guests() -> Iterator[Callable[..., Guest]]:
    made: list[Guest] = []

    def make(*args: object, **kwargs: object) -> Guest:
        made.append(Guest(*args, **kwargs))
        return made[-1]

    yield make
    for guest in made:
        guest.left.set()
    for guest in made:
        guest.thread.join(PATIENCE / 2)
        assert not guest.thread.is_alive()


class Client:
    """`coterie envs` or `coterie actor` as a user has it."""

    def __init__(self, folder: Path, args: list[str], prefix: tuple[str, ...] = ()) -> None:
        self.path = folder / f"client-{len(list(folder.glob('client-*')))}"
        with self.path.open("w") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "coterie.cli", *args], stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self.path.read_text()

    def at_work(self) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.said
            return f"{WIDTH} envs of CartPole-v1 for " in self.said

        until(there, "it is let in")

    def end(self, number: int = 0) -> tuple[int, str]:
        if number:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE), self.said


@pytest.fixture
def clients(tmp_path) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def start(what: str, port: int, *args: str, host: str = "127.0.0.1", env: str = "CartPole-v1", **kwargs) -> Client:
        own = ["--connect", f"{host}:{port}", "--env", env, "--env.num-envs", str(WIDTH), "--env.delay", "0.005"]
        made.append(Client(tmp_path, [what, *own, "--env.threads", "1", *args], **kwargs))
        return made[-1]

    yield start
    for client in made:
        if client.process.poll() is None:
            client.process.kill()
        client.process.wait(30)


def goes_on(meddler: Meddler, rows: int = 20 * CROWD) -> None:
    steps = meddler.steps()
    meddler.until(lambda: meddler.steps() > steps + rows, "the run goes on")


def finish(meddler: Meddler) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_hosts_come_and_go_while_a_run_trains(tmp_path, meddler, clients, capsys):
    """And who is not let in is told why."""
    assert cli.main(["keys", str(tmp_path / "keys")]) == 0
    assert cli.main(["keys", str(tmp_path / "others")]) == 0
    token, other = (["--token-file", str(tmp_path / name / "token")] for name in ("keys", "others"))
    port = free_ports()

    def meddle() -> None:
        first, second = (clients("envs", port, *token) for _ in range(2))  # before there is a run
        stranger = clients("envs", port, *other, "--seed", "3")
        odd = clients("envs", port, *token, env="Acrobot-v1")
        for client in (first, second):
            client.at_work()
        code, said = stranger.end()
        assert code == 1
        assert "no such token" in said
        code, said = odd.end()
        assert code == 1
        assert "the run's envs are CartPole-v1, not Acrobot-v1" in said
        meddler.at_work()
        code, said = first.end(signal.SIGTERM)
        assert code == 0, said
        assert "left: " in said
        goes_on(meddler)
        third = clients("envs", port, *token)
        third.at_work()
        second.process.kill()  # without a word
        goes_on(meddler)
        finish(meddler)
        code, said = third.end()
        assert code == 0, said
        assert "the run has ended: " in said

    args = [*central(meddler.out, port), "--wire.token-file", token[1]]
    assert meddler.run(args, meddle) == 75
    summary = check(meddler.out)
    assert summary["rows"]["learned"] > 0
    assert "refused ipv4:127.0.0.1: no such token" in (meddler.out / "log.txt").read_text()
    meddler.check_nothing_left()


def test_a_host_that_sends_nan_and_one_with_other_frames_are_put_out(meddler, guests):
    port = free_ports()
    spec = make_spec(Env("CartPole-v1"), Config().atari)
    layout = timestep_layout(spec, 1)
    good = {
        "obs/": np.zeros((1, 4), np.float32),
        **{k: np.zeros(1, bool) for k in ("terminated", "truncated", "is_first")},
        "reward": np.zeros(1, np.float32),
        **{k: np.full(1, np.nan) for k in ("episode_return", "episode_length")},
    }
    hello = {"client": "test", "run_id": 5, "env_id": "CartPole-v1", "envs": 1, "number": -1}

    def meddle() -> None:
        guest = guests(lend_envs, port)
        meddler.at_work()
        channel = open_channel(f"127.0.0.1:{port}")
        try:
            for name, bad in (("obs/", np.nan), ("reward", np.inf)):
                stream = Stream(channel, "Infer", hello, layout)
                for _ in range(3):
                    stream.send(good)
                    assert stream.receive()[0]["action"].shape == (1,)
                stream.send({**good, name: np.full_like(good[name], bad)})
                with pytest.raises(CoterieError, match=f"{name} is not finite"):
                    stream.receive()
                stream.close()
            with pytest.raises(CoterieError, match="frames"):
                Stream(channel, "Infer", hello, timestep_layout(make_spec(Env("Acrobot-v1"), Config().atari), 1))
        finally:
            channel.close()
        goes_on(meddler)
        finish(meddler)
        guest.thread.join(PATIENCE)
        assert "the run has ended" in guest.end()

    assert meddler.run(central(meddler.out, port), meddle) == 75
    summary = check(meddler.out)
    assert summary["rows"]["dropped"] >= 4  # two rows of each of its lives
    assert "obs/ is not finite" in (meddler.out / "log.txt").read_text()
    meddler.check_nothing_left()


def test_a_killed_learner_comes_back_and_its_hosts_find_it(meddler, guests):
    port = free_ports()

    def meddle() -> None:
        mine = [guests(lend_envs, port) for _ in range(2)]
        meddler.at_work()
        for _ in range(2):
            meddler.kill(0)
            at = meddler.saved()
            meddler.until(lambda at=at: meddler.saved() > at, "a later checkpoint")
        finish(meddler)
        for guest in mine:
            guest.thread.join(PATIENCE)
            assert "the run has ended" in guest.end()

    assert meddler.run(central(meddler.out, port), meddle) == 75
    check(meddler.out)
    assert meddler.started == [(0, pid) for _, pid in meddler.started]
    assert len(meddler.started) == 3
    meddler.check_nothing_left()


def test_through_a_proxy_that_delays_throttles_and_cuts(tmp_path, monkeypatch, meddler, guests):
    """5% of what goes over the wire comes late; streams are cut in the middle of a frame, with nobody to go to. The
    envs count their steps, of which none is learned from twice, or lost but where a stream was.
    """
    port, tally = free_ports(), tmp_path / "tally"
    (tmp_path / "tally_env.py").write_text(TALLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tally_env", raising=False)
    env = Env("tally_env:Tally", kwargs=json.dumps({"path": str(tally)}))
    own = {"env.id": env.id, "env.kwargs": env.kwargs}

    def meddle(proxy: Proxy) -> None:
        mine = [guests(lend_envs, at, env) for at in (proxy.port, proxy.port, port)]
        meddler.at_work()
        until(lambda: proxy.connections >= 4, "both have asked, and are connected")
        proxy.delayed, proxy.delay = 0.05, 0.1
        goes_on(meddler)
        assert proxy.late
        proxy.rate = 20_000
        goes_on(meddler)
        proxy.rate = 0
        for after in (1, 100, 333):
            before = proxy.connections
            assert proxy.cut(after)
            meddler.until(lambda before=before: proxy.connections >= before + 2, "both connect again")
            goes_on(meddler)
        proxy.deaf = True  # a while without a way there
        proxy.cut()
        goes_on(meddler)
        proxy.deaf = False
        before = proxy.bytes
        meddler.until(lambda: proxy.bytes > before + 20_000, "they are back")
        finish(meddler)
        for guest in mine:
            guest.thread.join(PATIENCE)
            assert "the run has ended" in guest.end()

    with Proxy(port) as proxy:
        assert meddler.run(central(meddler.out, port, **own), lambda: meddle(proxy)) == 75
    summary = check(meddler.out)
    produced, taken = summary["rows"]["produced"], tally.stat().st_size
    assert produced <= taken <= produced + (proxy.cuts + 3) * WIDTH
    assert summary["rows"]["dropped"] > 0
    assert [rank for rank, _ in meddler.started] == [0]
    assert "Traceback" not in (meddler.out / "log.txt").read_text()
    meddler.check_nothing_left()


@slow
def test_a_frozen_connection_is_given_up_and_made_again(meddler, guests):
    """As when a cable is pulled: nobody is told. Keepalive finds it out within its 20 s."""
    port = free_ports()

    def meddle(proxy: Proxy) -> None:
        mine = [guests(lend_envs, at) for at in (proxy.port, port)]
        meddler.at_work()
        until(lambda: proxy.connections >= 2, "it is connected")
        before = proxy.connections
        proxy.frozen.set()
        begin = time.monotonic()
        meddler.until(lambda: proxy.connections > before, "another try")
        assert time.monotonic() - begin < 45
        goes_on(meddler)
        proxy.frozen.clear()
        before = proxy.bytes
        meddler.until(lambda: proxy.bytes > before + 20_000, "it is back")
        finish(meddler)
        for guest in mine:
            guest.thread.join(PATIENCE)
            assert "the run has ended" in guest.end()

    with Proxy(port) as proxy:
        assert meddler.run(central(meddler.out, port), lambda: meddle(proxy)) == 75
    assert check(meddler.out)["rows"]["dropped"] > 0
    meddler.check_nothing_left()


def test_hosts_are_spread_over_the_learners(meddler, guests):
    port = free_ports(2)

    def meddle() -> None:
        mine = [guests(lend_envs, port) for _ in range(4)]
        until(lambda: all(guest.lines for guest in mine), "all are let in")
        where = sorted(guest.lines[0].rpartition(" ")[2] for guest in mine)
        assert where == [f"127.0.0.1:{port}"] * 2 + [f"127.0.0.1:{port + 1}"] * 2
        meddler.at_work()
        steps = learned()
        meddler.until(lambda: all(a > b for a, b in zip(learned(), steps, strict=True)), "both learn")
        finish(meddler)
        for guest in mine:
            guest.thread.join(PATIENCE)
            assert "the run has ended" in guest.end()

    def learned() -> list[int]:
        return [x["learned"] for x in last_checkpoint(meddler.out)[1]["learners"]]

    assert meddler.run(central(meddler.out, port, "gossip"), meddle) == 75
    check(meddler.out)
    meddler.check_nothing_left()


@pytest.mark.parametrize("work", [lend_envs, lend_actor])
def test_who_waits_for_a_learner_that_is_stopped_may_leave(meddler, guests, work):
    """And who stays goes on with it afterwards."""
    port = free_ports()

    def meddle() -> None:
        mine = [guests(work, port) for _ in range(2)]
        meddler.at_work()
        meddler.until(lambda: all(one.lines for one in mine), "they have begun")
        pid = meddler.pid(0)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(1)
            begin = time.monotonic()
            assert "left: " in mine[0].end()
            assert time.monotonic() - begin < 15
        finally:
            os.kill(pid, signal.SIGCONT)
        goes_on(meddler)
        finish(meddler)
        mine[1].thread.join(PATIENCE)
        assert "the run has ended" in mine[1].end()

    args = central if work is lend_envs else decoupled
    assert meddler.run(args(meddler.out, port), meddle) == 75
    check(meddler.out)
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", ["gossip", pytest.param("hogwild", marks=slow), pytest.param("store", marks=slow)])
def test_a_learner_that_nobody_came_to_does_not_keep_the_run_from_its_end(meddler, guests, exchange):
    port = free_ports(2)

    def meddle() -> None:
        guests(lend_envs, port).thread.join(PATIENCE)

    assert meddler.run(central(meddler.out, port, exchange, steps=500), meddle) == 0
    assert check(meddler.out)["status"] == "finished"
    learned = [x["learned"] for x in last_checkpoint(meddler.out)[1]["learners"]]
    assert learned[0] >= 500
    assert learned[1] == 0
    meddler.check_nothing_left()


def test_nobody_has_come_and_the_run_is_to_end(meddler):
    def meddle() -> None:
        meddler.until(lambda: meddler.saved() == 0, "the first checkpoint")
        finish(meddler)

    begin = time.monotonic()
    assert meddler.run(central(meddler.out, free_ports()), meddle) == 75
    assert time.monotonic() - begin < 60
    meddler.check_nothing_left()


# Actors of decoupled acting.


def decoupled(out: Path, port: int, **changes: object) -> list[str]:
    own = {"wire.bind": f"127.0.0.1:{port}", "actors": 1, **ENDLESS}
    return test_decoupled.options(out, **{**own, **changes})


def test_an_actor_comes_and_goes(meddler, clients):
    port = free_ports()

    def meddle() -> None:
        mine, odd = clients("actor", port), clients("actor", port, env="Acrobot-v1")
        until(lambda: "an actor with " in mine.said, "it is let in")
        code, said = odd.end()
        assert code == 1
        assert "the run's envs are CartPole-v1, not Acrobot-v1" in said
        meddler.at_work()
        goes_on(meddler)
        code, said = mine.end(signal.SIGTERM)
        assert code == 0, said
        assert "left: " in said
        goes_on(meddler)
        finish(meddler)

    assert meddler.run(decoupled(meddler.out, port), meddle) == 75
    check(meddler.out)
    meddler.check_nothing_left()


def test_an_actor_finds_a_learner_that_comes_back_through_a_proxy_that_cuts(meddler, guests):
    port = free_ports()

    def meddle(proxy: Proxy) -> None:
        mine = guests(lend_actor, proxy.port)
        meddler.at_work()
        until(lambda: proxy.bytes > 20_000, "it is at work")
        proxy.delayed, proxy.delay = 0.05, 0.1
        for _ in range(3):
            before = proxy.bytes
            assert proxy.cut(500)
            meddler.until(lambda before=before: proxy.bytes > before + 20_000, "it is back")
        meddler.kill(0)
        at, before = meddler.saved(), proxy.bytes
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        meddler.until(lambda: proxy.bytes > before + 20_000, "it is back")
        finish(meddler)
        mine.thread.join(PATIENCE)
        assert "the run has ended" in mine.end()

    with Proxy(port) as proxy:
        assert meddler.run(decoupled(meddler.out, port), lambda: meddle(proxy)) == 75
    check(meddler.out)
    assert "learner 0 was killed by SIGKILL" in (meddler.out / "log.txt").read_text()
    meddler.check_nothing_left()


# Networks of their own.


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

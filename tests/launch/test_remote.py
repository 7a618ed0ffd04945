"""Hosts that come by themselves: over loopback, and through a proxy that disturbs them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.config import Config, Env
from coterie.envs.make import make_spec
from coterie.roles import remote_worker
from coterie.roles.remote_worker import lend_actor, lend_envs
from coterie.types import CoterieError
from coterie.wire.client import Stream, open_channel
from coterie.wire.codec import timestep_layout
from tests.launch.harness import PATIENCE, last_checkpoint, until
from tests.launch.test_decoupled import check
from tests.launch.test_killed import TALLY
from tests.launch.visitors import WIDTH, central, decoupled, finish, free_ports, goes_on
from tests.support.proxy import Proxy

slow = pytest.mark.slow


def test_hosts_come_and_go_while_a_run_trains(tmp_path, meddler, clients, capsys):
    """And who is not let in is told why."""
    assert main(["keys", str(tmp_path / "keys")]) == 0
    assert main(["keys", str(tmp_path / "others")]) == 0
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


def test_a_host_that_is_told_to_leave_finishes_its_rollout(meddler, guests):
    port = free_ports()

    def meddle() -> None:
        mine = [guests(lend_envs, port) for _ in range(4)]
        meddler.at_work()
        meddler.until(lambda: all(one.there() for one in mine), "they have begun")
        for one in mine[:3]:
            goes_on(meddler)
            assert "left: " in one.end()
        at = meddler.saved()
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        assert last_checkpoint(meddler.out)[1]["dropped"] == 0
        finish(meddler, mine[3])

    assert meddler.run(central(meddler.out, port), meddle) == 75
    check(meddler.out)
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
        finish(meddler, guest)

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
        finish(meddler, *mine)

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
        finish(meddler, *mine)

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
        finish(meddler, *mine)

    with Proxy(port) as proxy:
        assert meddler.run(central(meddler.out, port), lambda: meddle(proxy)) == 75
    assert check(meddler.out)["rows"]["dropped"] > 0
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", ["gossip", "allreduce"])
def test_hosts_are_spread_over_the_learners(meddler, guests, exchange):
    port = free_ports(2)

    def meddle() -> None:
        mine = [guests(lend_envs, port) for _ in range(4)]
        until(lambda: all(guest.there() for guest in mine), "all are let in")
        where = sorted(guest.address for guest in mine)
        assert where == [f"127.0.0.1:{port}"] * 2 + [f"127.0.0.1:{port + 1}"] * 2
        meddler.at_work()
        steps = learned()
        meddler.until(lambda: all(a > b for a, b in zip(learned(), steps, strict=True)), "both learn")
        finish(meddler, *mine)

    def learned() -> list[int]:
        return [x["learned"] for x in last_checkpoint(meddler.out)[1]["learners"]]

    assert meddler.run(central(meddler.out, port, exchange), meddle) == 75
    summary = check(meddler.out)
    if exchange == "allreduce":
        assert len(summary["digests"]) == 2
        assert len(set(summary["digests"])) == 1
    meddler.check_nothing_left()


@pytest.mark.parametrize("work", [lend_envs, lend_actor])
def test_who_waits_for_a_learner_that_is_stopped_may_leave(meddler, guests, work, monkeypatch):
    """And who stays goes on with it afterwards, and says how long its envs wait for their actions."""
    monkeypatch.setattr(remote_worker, "_SAY_S", 0.5)
    monkeypatch.setattr(remote_worker, "_FINISH_S", 1.0)
    port = free_ports()

    def meddle() -> None:
        mine = [guests(work, port) for _ in range(2)]
        meddler.at_work()
        meddler.until(lambda: all(one.there() for one in mine), "they have begun")
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
        told = re.compile(r" env steps; actions came after [\d.]+ ms \(p50\), ")
        meddler.until(lambda: any(map(told.search, mine[1].lines)), "it says how long actions take")
        finish(meddler, mine[1])

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


@slow
@pytest.mark.parametrize("exchange", ["gossip", "allreduce"])
def test_a_learner_whose_hosts_have_left_does_not_keep_the_run_from_its_end(meddler, guests, exchange):
    """Under allreduce the other one waits for its gradient."""
    port = free_ports(2)

    def meddle() -> None:
        mine = [guests(lend_envs, port) for _ in range(2)]
        meddler.until(lambda: all(one.there() for one in mine), "both are let in")
        meddler.at_work()
        assert "left: " in mine[1].end()
        os.kill(os.getpid(), signal.SIGTERM)

    assert meddler.run(central(meddler.out, port, exchange), meddle) == 75
    check(meddler.out)
    meddler.check_nothing_left()


def test_nobody_has_come_and_the_run_is_to_end(meddler):
    def meddle() -> None:
        meddler.until(lambda: meddler.saved() == 0, "the first checkpoint")
        finish(meddler)

    begin = time.monotonic()
    assert meddler.run(central(meddler.out, free_ports()), meddle) == 75
    assert time.monotonic() - begin < 60
    meddler.check_nothing_left()

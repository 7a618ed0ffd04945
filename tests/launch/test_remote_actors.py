"""Actors that come by themselves: over loopback, and through a proxy that cuts."""

from __future__ import annotations

import signal

import pytest

from coterie import presets
from coterie.acting.decoupled import Stopped
from coterie.acting.recorder import Stages
from coterie.build.factory import make_model, normalizers
from coterie.envs.make import make_spec
from coterie.parallel.params import FlatParams
from coterie.roles import remote_worker
from coterie.roles.remote_worker import Door, Wire, lend_actor
from tests.launch.harness import until
from tests.launch.test_decoupled import check
from tests.launch.visitors import decoupled, finish, free_ports, goes_on
from tests.support.proxy import Proxy


@pytest.mark.parametrize("normalises", [True, False])  # False: there is nothing to send beside the weights
def test_an_actor_comes_and_goes(meddler, clients, normalises):
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

    args = decoupled(meddler.out, port, **{"model.normalize_obs": normalises})
    assert meddler.run(args, meddle) == 75
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
            until(lambda: proxy.cut(500), "there is something to cut")
            meddler.until(lambda before=before: proxy.bytes > before + 20_000, "it is back")
        meddler.kill(0)
        at, before = meddler.saved(), proxy.bytes
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        meddler.until(lambda: proxy.bytes > before + 20_000, "it is back")
        finish(meddler, mine)

    with Proxy(port) as proxy:
        assert meddler.run(decoupled(meddler.out, port), lambda: meddle(proxy)) == 75
    check(meddler.out)
    assert "learner 0 was killed by SIGKILL" in (meddler.out / "log.txt").read_text()
    meddler.check_nothing_left()


class Line:
    """A stream whose other end answers everything."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, arrays: object) -> None:
        self.sent += 1

    def receive(self) -> tuple[dict[str, object], int]:
        return {}, 3

    def close(self) -> None:
        pass


@pytest.fixture
def wire(monkeypatch):
    """An actor's, with `wire.orders` to leave in a list."""
    config = presets.make("impala", "CartPole-v1", **{"env.num_envs": 4})
    spec, orders = make_spec(config.env, config.atari), list[int]()
    model = make_model(config, spec)

    def leave() -> None:
        if orders:
            raise Stopped

    it = Wire(
        Door("unix:nowhere", patience=5.0), "unix:nowhere", 1, spec, config.env.id, 5, 4, (), FlatParams(model),
        normalizers(config, model), [slice(0, 4)], Stages(), lambda line: None, leave,
    )  # fmt: skip
    it.orders, it.version = orders, 3
    return it


def test_who_is_told_to_leave_delivers_its_rollout_first(wire, monkeypatch):
    push = wire.streams["PushRollouts"] = Line()
    wire.streams["PullParameters"] = Line()
    assert wire.pull() == 3
    wire.check()
    wire.orders.append(15)
    wire.check()
    wire.leave()
    assert (push.sent, wire.rollouts) == (1, 1)
    with pytest.raises(Stopped):
        wire.pull()
    monkeypatch.setattr(remote_worker, "_FINISH_S", -1.0)  # it takes too long
    with pytest.raises(Stopped):
        wire.check()

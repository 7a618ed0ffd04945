"""Remote actors of whole runs: over loopback, and through a proxy that cuts."""

from __future__ import annotations

import signal

from coterie.roles.remote_worker import lend_actor
from tests.support.net import free_port
from tests.support.proxy import Proxy
from tests.support.remote_workers import decoupled, finish, goes_on
from tests.support.runs import check_rows
from tests.support.waiting import wait_until


def test_actors_join_and_leave_while_a_run_trains(meddler, worker_processes):
    port = free_port()

    def meddle() -> None:
        mine = worker_processes("actor", port)
        wait_until(lambda: "an actor with " in mine.said, what="it is admitted")
        meddler.at_work()
        goes_on(meddler)
        code, said = mine.end(signal.SIGTERM)
        assert code == 0, said
        assert "left: " in said
        goes_on(meddler)
        finish(meddler)

    args = decoupled(meddler.out, port, **{"model.normalize_obs": True})
    assert meddler.run(args, meddle) == 75
    check_rows(meddler.out)
    meddler.check_nothing_left()


def test_an_actor_reconnects_after_cuts_and_a_restart_of_the_learner(meddler, worker_threads):
    port = free_port()

    def meddle(proxy: Proxy) -> None:
        mine = worker_threads(lend_actor, proxy.port)
        meddler.at_work()
        wait_until(lambda: proxy.bytes > 20_000, what="it is at work")
        proxy.delayed, proxy.delay = 0.05, 0.1
        for _ in range(3):
            before = proxy.bytes
            wait_until(lambda: proxy.cut(500), what="there is something to cut")
            meddler.until(lambda before=before: proxy.bytes > before + 20_000, "it is back")
        meddler.kill(0)
        at, before = meddler.saved(), proxy.bytes
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        meddler.until(lambda: proxy.bytes > before + 20_000, "it is back")
        finish(meddler, mine)

    with Proxy(port) as proxy:
        assert meddler.run(decoupled(meddler.out, port), lambda: meddle(proxy)) == 75
    check_rows(meddler.out)
    assert "learner 0 was killed by SIGKILL" in (meddler.out / "log.txt").read_text()
    meddler.check_nothing_left()

"""Remote env hosts and actors of whole runs: over loopback, and through a proxy that delays and cuts."""

from __future__ import annotations

import os
import re
import signal
import time

from coterie.config import Env
from coterie.roles.remote_worker import run_actor, run_env_host
from tests.support.commands import PATIENCE
from tests.support.net import free_port, free_ports
from tests.support.proxy import Proxy
from tests.support.remote_workers import WIDTH, central, decoupled, finish, goes_on
from tests.support.runs import check_rows, last_checkpoint
from tests.support.waiting import wait_until


def test_a_host_that_is_ended_finishes_its_rollout(meddler, worker_threads):
    port = free_port()

    def meddle() -> None:
        mine = [worker_threads(run_env_host, port, times=(10.0, 50.0 if k < 3 else 0.5)) for k in range(4)]
        meddler.at_work()
        meddler.until(lambda: all(one.is_connected() for one in mine), "they have begun")
        for one in mine[:3]:
            goes_on(meddler)
            assert "left: " in one.end()
        at = meddler.saved()
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        assert last_checkpoint(meddler.out)[1]["dropped"] == 0
        finish(meddler, mine[3])

    assert meddler.run(central(meddler.out, port), meddle) == 75
    check_rows(meddler.out)


def test_a_host_leaves_a_run_that_has_made_its_env_steps(meddler, worker_threads):
    port, mine = free_port(), []
    args = central(meddler.out, port, steps=400)
    assert meddler.run(args, lambda: mine.append(worker_threads(run_env_host, port))) == 0
    mine[0].thread.join(PATIENCE)
    assert "the run has ended" in mine[0].end()


def test_hosts_behind_a_proxy_that_delays_throttles_and_cuts_lose_no_other_steps(meddler, worker_threads, tally):
    """Chunks are late, streams are cut in the middle of a frame, and the learner is unreachable for a while. The envs
    count their steps: none is learned from twice, and only the steps of lost streams are lost.
    """
    port = free_port()
    env = Env(tally.options["env.id"], kwargs=tally.options["env.kwargs"])

    def meddle(proxy: Proxy) -> None:
        mine = [worker_threads(run_env_host, port, env, behind=at) for at in (proxy.port, proxy.port, port)]
        meddler.at_work()
        wait_until(lambda: proxy.connections >= 4, what="both have asked, and are connected")
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
        assert meddler.run(central(meddler.out, port, **tally.options), lambda: meddle(proxy)) == 75
    summary = check_rows(meddler.out)
    produced = summary["rows"]["produced"]
    assert produced <= tally.steps <= produced + (proxy.cuts + 3) * WIDTH
    assert summary["rows"]["dropped"] > 0
    assert [rank for rank, _ in meddler.started] == [0]
    assert "Traceback" not in (meddler.out / "log.txt").read_text()


def test_hosts_are_spread_over_the_learners(meddler, worker_threads):
    port = free_ports(2)

    def meddle() -> None:
        mine = [worker_threads(run_env_host, port) for _ in range(4)]
        wait_until(lambda: all(worker.is_connected() for worker in mine), what="all are admitted")
        where = sorted(worker.address for worker in mine)
        assert where == [f"127.0.0.1:{port}"] * 2 + [f"127.0.0.1:{port + 1}"] * 2
        meddler.at_work()
        steps = learned()
        meddler.until(lambda: all(a > b for a, b in zip(learned(), steps, strict=True)), "both learn")
        finish(meddler, *mine)

    def learned() -> list[int]:
        return [x["learned"] for x in last_checkpoint(meddler.out)[1]["learners"]]

    assert meddler.run(central(meddler.out, port, "gossip"), meddle) == 75
    check_rows(meddler.out)


def test_a_host_that_waits_for_a_stopped_learner_may_leave(meddler, worker_threads):
    """Another one goes on afterwards, and reports how long its envs wait for their actions."""
    port = free_port()

    def meddle() -> None:
        mine = [worker_threads(run_env_host, port, times=(0.5, 1.0)) for _ in range(2)]
        meddler.at_work()
        meddler.until(lambda: all(one.is_connected() for one in mine), "they have begun")
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
        progress = re.compile(r" env steps; actions came after [\d.]+ ms \(p50\), ")
        meddler.until(lambda: any(map(progress.search, mine[1].lines)), "it reports how long actions take")
        finish(meddler, mine[1])

    assert meddler.run(central(meddler.out, port), meddle) == 75
    check_rows(meddler.out)


def test_a_learner_without_hosts_does_not_keep_the_run_from_its_end(meddler, worker_threads):
    port = free_ports(2)

    def meddle() -> None:
        worker_threads(run_env_host, port).thread.join(PATIENCE)

    assert meddler.run(central(meddler.out, port, "gossip", steps=500), meddle) == 0
    assert check_rows(meddler.out)["status"] == "finished"
    learned = [x["learned"] for x in last_checkpoint(meddler.out)[1]["learners"]]
    assert learned[0] >= 500
    assert learned[1] == 0


def test_actors_join_and_leave_while_a_run_trains(command, meddler):
    port = free_port()
    env = ["--env", "CartPole-v1", "--env.delay", "0.005", "--env.threads", "1"]

    def meddle() -> None:
        mine = command(lambda out: ["actor", "--connect", f"127.0.0.1:{port}", *env])
        mine.until(lambda: "an actor with " in mine.text(), "it is admitted")
        meddler.at_work()
        goes_on(meddler)
        mine.end(signal.SIGTERM)
        assert "left: " in mine.text()
        goes_on(meddler)
        finish(meddler)

    args = decoupled(meddler.out, port, **{"model.normalize_obs": True})
    assert meddler.run(args, meddle) == 75
    check_rows(meddler.out)


def test_an_actor_reconnects_after_cuts_and_a_restart_of_the_learner(meddler, worker_threads):
    port = free_port()

    def meddle(proxy: Proxy) -> None:
        mine = worker_threads(run_actor, port, behind=proxy.port)
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

"""The board: counts of which none is lost, orders, and the same numbers in every process."""

from __future__ import annotations

import ctypes
import threading
import time
from functools import partial

import pytest

from coterie.errors import CoterieError
from coterie.exchange.base import Peers
from coterie.exchange.gossip import Gossip
from coterie.exchange.shared_weights import Staleness
from coterie.exchange.solo import Solo
from coterie.parallel import clock
from coterie.parallel.board import COUNTS, EVALUATE, HOLD, LAST, SAVE, Board
from coterie.parallel.clock import Budget
from coterie.parallel.heartbeats import Heartbeats, shown_alive
from coterie.parallel.processes import listen
from coterie.types import Post
from tests.exchange.harness import collect, flat, make_setup, start, together

PROCESSES, EACH, ADDS = 4, 16, 100


def solo(board: Board, rank: int) -> Solo:
    return Solo(make_setup(flat(3), peers=Peers(rank, board)))


def count(post: Post, board: Board, process: int) -> None:
    """Sixteen workers in threads, each with a row of its own, beside fifteen of each other process."""

    def work(rank: int) -> None:
        learner, seen = solo(board, rank), 0
        for k in range(ADDS):
            learner.count(k % 7 + 1)
            total = learner.env_steps
            assert total >= seen  # it never goes back
            seen = total

    together([partial(work, process * EACH + k) for k in range(EACH)], 60.0)


def test_sixty_four_workers_lose_no_increment():
    board = Board(PROCESSES * EACH)
    said = collect([start(count, board, process) for process in range(PROCESSES)])
    assert said == [[("end", "ended with exit code 0")]] * PROCESSES
    each = sum(k % 7 + 1 for k in range(ADDS))
    assert board.counts["started"].tolist() == [each] * 64
    assert solo(board, 0).env_steps == board.sum("started") == 64 * each
    assert board.sum("learned") == 0


def test_steps_of_the_whole_run():
    """A custom exchange, too, counts those of all learners: with its own alone it would train twice its budget."""
    board = Board(3)
    learners = [solo(board, rank) for rank in range(3)]
    for learner, own in zip(learners, (100, 50, 150), strict=True):
        learner.start(own, 300)
    learners[1].count(7)
    assert [learner.env_steps for learner in learners] == [307] * 3
    lockstep = Gossip(make_setup(flat(3), peers=Peers(0, board), gossip__tau=0))
    lockstep.start(100, 290)
    lockstep.count(7)
    assert lockstep.env_steps == 321  # three that do as much


def test_an_order_has_a_number_and_what_it_asks_for_in_one_word() -> None:
    """On every processor: a learner that sees the number sees what belongs to it."""
    board, after = Board(1), Board(1)
    assert board.order == (0, 0)
    assert [board.give(what) for what in (SAVE, SAVE | EVALUATE | LAST | HOLD)] == [1, 2]
    assert board.order == (2, SAVE | EVALUATE | LAST | HOLD)
    board.seal()
    board.set_attribute("level", 3)
    after.continue_orders(board)  # all learners have started again
    assert (after.order, after.sealed) == ((2, 0), 2)
    assert (after.attributes(0) or (0, {}))[1] == {"level": 3}


def meet_often(post: Post, board: Board, rank: int) -> None:
    for _ in range(50):
        board.meet(rank, 60.0)
        board.counts["produced"][rank] += 1
        assert board.counts["produced"].max() <= board.counts["produced"][rank] + 1


def test_learners_meet_as_often_as_each_of_them_calls():
    both = Board(2)
    assert collect([start(meet_often, both, rank) for rank in range(2)]) == [[("end", "ended with exit code 0")]] * 2
    with pytest.raises(CoterieError, match=r"another learner hangs: learner 1 waited for 0\.01 s"):
        both.meet(1, 0.01)


def write_on(post: Post, board: Board) -> None:
    board.write(1, {"learned": 12})
    post("counts", board.read(1))
    post("order", board.order)
    board.stop()


def test_all_processes_have_the_same_counts_and_numbered_orders():
    board = Board(3)
    board.write(1, {"learned": 11, "produced": 2**53 + 1})
    assert [board.give(what) for what in (SAVE, EVALUATE)] == [1, 2]
    assert not board.stopping
    (said,) = collect([start(write_on, board)])
    counts = dict.fromkeys(COUNTS, 0) | {"learned": 12, "produced": 2**53 + 1}  # counts that are not written stay
    assert said == [("counts", counts), ("order", (2, EVALUATE)), ("end", "ended with exit code 0")]
    assert board.read(1) == counts
    board.write(0, {"learned": 3})
    assert board.sum("learned") == 15
    assert board.heartbeats[1] > board.heartbeats[2] == 0
    assert board.stopping
    assert board.order == (2, EVALUATE)


def test_a_blocked_process_is_not_the_one_that_hangs():
    board, silent = Board(3), {0: 90.0, 1: 80.0, 2: 10.0}
    assert board.stale(silent, 50.0) == [0, 1]
    with board.blocked(0):
        assert board.stale(silent, 50.0) == [1]
        assert board.stale({0: 90.0, 2: 10.0}, 50.0) == []  # 0 is blocked by 2, which is at work
        assert board.stale({0: 90.0}, 50.0) == [0]  # no other is at work
    assert board.stale({2: 10.0}, 50.0) == []
    # Of those that all wait: one was stopped while it waited, the other went on until it had to wait for it.
    with board.blocked(0), board.blocked(1):
        assert board.stale({0: 80.0, 1: 81.0}, 50.0) == [1, 0]


def wait_for_others(post: Post, board: Board, row: int, how: str) -> None:
    """For ever; where it is `held`, native code holds Python's lock (GIL)."""
    with shown_alive(board, row, 4.0), board.blocked(row):
        post("waits", None)
        if how == "held":
            threading.Thread(target=ctypes.PyDLL(None).sleep, args=(60,), daemon=True).start()
        if how == "in C":
            ctypes.CDLL(None).sleep(60)
        while True:
            time.sleep(0.01)


def test_a_process_that_is_frozen_while_it_waits_is_noticed_and_one_that_waits_is_not():
    """Beside another one that is at work."""
    board, heartbeats, late = Board(4), Heartbeats(), set[int]()
    children = [start(wait_for_others, board, row, how) for row, how in enumerate(("polls", "in C", "held"))]
    try:
        said = [kind for child in children for _, kind, _ in listen([child], 60.0)]
        assert said == ["waits"] * 3
        pids, end = {row: child.process.pid for row, child in enumerate(children)}, time.monotonic() + 7.5
        while time.monotonic() < end:
            board.heartbeat(3)
            stalled = heartbeats.stalled(board, pids | {3: None}, 2.5)
            if stalled and not late:
                end = min(end, time.monotonic() + 1.5)  # for others, wrongly
            late |= {stalled[0]} if stalled else set()
            time.sleep(0.05)
        assert late == {2}
        board.start(2)  # another process takes its place
        assert heartbeats.stalled(board, pids | {3: None}, 2.5) is None
    finally:
        for child in children:
            child.kill()


def test_a_process_is_silent_only_while_its_watcher_is_awake(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    board, heartbeats = Board(2), Heartbeats()
    clock.awake()
    heartbeats.silent(board, [0, 1])
    for _ in range(100):
        now[0] += 0.5
        board.heartbeat(1)
        silent = heartbeats.silent(board, [0, 1])
    assert (silent[0], silent[1]) == (pytest.approx(50.0), 0.0)
    now[0] += 3600.0  # both were stopped
    silent = heartbeats.silent(board, [0, 1])
    assert silent[0] < 53
    assert silent[1] < 3


def test_a_budget_forgets_what_is_older_than_an_hour(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    budget = Budget(3)
    assert budget.spend(2)
    now[0] = 1800.0
    assert budget.spend()
    assert budget.left == 0
    now[0] = 3601.0
    assert budget.left == 2
    assert budget.spend(2)
    assert not budget.spend()
    assert budget.total == 6


def test_staleness_is_what_others_did_between_a_snapshot_and_its_update() -> None:
    board = Board(3)
    mine, theirs = solo(board, 0), solo(board, 2)
    theirs.count(7)
    staleness = Staleness(board, 0)
    staleness.snapshot()
    mine.count(5)  # its own rows make nobody's weights old
    staleness.update()
    assert staleness.gauges() == {"staleness/mean": 0, "staleness/max": 0}
    theirs.count(20)
    mine.count(5)
    staleness.update()
    staleness.snapshot()
    theirs.count(4)
    staleness.update()
    assert staleness.gauges() == {"staleness/mean": 8, "staleness/max": 20}

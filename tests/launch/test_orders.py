"""When a checkpoint is late, and what ends a run at once."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from coterie.envs.news import EnvNews, Means
from coterie.launch import retries
from coterie.launch.coordinator import Coordinator
from coterie.launch.retries import RestartDelays
from coterie.parallel.board import Board
from coterie.roles.callbacks import Callback, Callbacks, Run
from coterie.runs import checkpoint
from tests.conftest import VECTOR
from tests.launch.test_coordinator import now, run, save  # noqa: F401


def test_signals_of_one_cause_are_one(run: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A terminal that closes sends SIGHUP twice, and a sweep passes on a SIGTERM that its runs have received, too."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        run._on_signal(number)
        assert run.board.stopping  # at once: an evaluation in this process polls nothing else
    run.signaled -= 60
    run._on_signal(signal.SIGHUP)
    assert run.signal == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        run._on_signal(signal.SIGTERM)
    run.signaled = math.inf
    with pytest.raises(KeyboardInterrupt):
        run._on_signal(signal.SIGINT)


def test_a_part_is_not_late_while_its_learner_waits_for_others(run: Coordinator, now: list[float]) -> None:  # noqa: F811
    run.order_checkpoint()
    for _ in range(3):  # half of the time
        with run.board.blocked(0), run.board.blocked(1):
            now[0] += 10 * run.config.log.stall
            run.poll()
        now[0] += 0.3 * run.config.log.stall
        run.poll()
        assert run.order is not None
    now[0] += 0.2 * run.config.log.stall
    run.poll()
    assert run.retries.failed


def test_the_delay_before_an_actor_that_keeps_dying_is_restarted_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    time, delays = [0.0], RestartDelays()
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: time[0]))
    for _ in range(1100):  # 2.0**1100 is no float
        delays.died(3)
        assert delays.due() == []
        time[0] += 60
        assert delays.due() == [3]


def test_a_warning_of_an_algorithm_is_shown_and_other_news_are_logged_only(run: Coordinator) -> None:  # noqa: F811
    shown = list[str]()
    run.display.note = shown.append  # type: ignore[method-assign]
    run.receive(0, "report", EnvNews(["a client has left", "too narrow"], Means(), ["too narrow"]))
    assert shown == ["too narrow"]
    assert re.findall(r"a client has left|too narrow", (run.folder / "log.txt").read_text()) == [
        "a client has left",
        "too narrow",
    ]


def test_restarts_are_counted_over_resumes(run: Coordinator, tmp_path: Path) -> None:  # noqa: F811
    run.ledger.restarts = 2
    run.order_checkpoint()
    save(run, 100)
    state = checkpoint.load_state(run.sealed or tmp_path)
    later = Coordinator(run.config, tmp_path, VECTOR, Board(2), state=state, quiet=True)
    later.ledger.restarts = 1
    assert later.summary("finished", "")["restarts"] == 3
    later.writer.close()


def test_learners_in_lockstep_know_of_a_callbacks_stop_at_once() -> None:
    class Stop(Callback):
        def should_stop(self, run: Run) -> bool:  # noqa: F811
            return True

    board, posted = Board(2), list[str]()
    callbacks = Callbacks(cast(Run, SimpleNamespace(_board=board)), [Stop], lambda kind, what: posted.append(kind))
    callbacks._made = [Stop()]
    callbacks.call("should_stop")
    assert board.stopping
    assert posted == ["stop"]

"""What a run makes of its learners' messages, without learners: which scores count, and when an evaluation is due."""

from __future__ import annotations

import math
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import coterie
from coterie import presets
from coterie.build.evaluate import Scores
from coterie.envs.news import EnvNews, Means
from coterie.errors import CoterieError
from coterie.launch import coordinator, retries
from coterie.launch.coordinator import Coordinator
from coterie.parallel.board import EVALUATE, LAST, SAVE, Board
from coterie.roles.entry import LearnerReport, Saved
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics
from tests.conftest import VECTOR, make_config

NEWS = EnvNews([], Means())
REPORT = LearnerReport([], {}, 0, {}, [], 0, NEWS, {}, first_step=1e9, lr=0.1, rss_mb=1.0, gauges={}, counts={})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Coordinator]:
    """Two learners that have made their first checkpoint, and an evaluation due at 1000 env steps."""
    config = make_config(learners=2, steps=100_000, **{"eval.every": 1000, "log.tensorboard": False, "log.every": 1e9})
    run = Coordinator(config, tmp_path, VECTOR, Board(2), state=None, quiet=True)
    run.poll()
    save(run, 0)
    assert run.order is None
    yield run
    run.writer.close()


def save(run: Coordinator, learned: int, ranks: Sequence[int] = (0, 1)) -> None:
    """What learners do to obey."""
    draft = checkpoint.draft_path(run.root, f"order_{run.order}")
    for rank in ranks:
        checkpoint.write(draft, {f"learner_{rank}/model": {"w": torch.zeros(2)}})
        counts = {**run.board.read(rank), "learned": learned}
        run.receive(rank, "saved", Saved(run.order or 0, counts, "x"))


def scores(run: Coordinator, mean: float, order: int) -> None:
    run.board.evaluated[0] = order
    run.receive(0, "scores", (order, Scores("made-up", [mean, mean])))


def learn(run: Coordinator, learned: int) -> None:
    for rank in range(2):
        run.board.write(rank, {"learned": learned})
        run.receive(rank, "report", REPORT)


def evaluations(run: Coordinator) -> list[float]:
    return [line["eval/return"] for line in read_metrics(run.folder) if "eval/return" in line]


def test_an_evaluation_is_due_once_for_each_stretch_of_steps(run: Coordinator) -> None:
    learn(run, 400)
    assert run.order is None
    learn(run, 1600)  # 3,200 of both: it was due at 1,000
    assert run.board.order[1] == SAVE | EVALUATE
    scores(run, 5.0, run.board.order[0])
    save(run, 1600, [0])
    save(run, 1600, [1])
    assert run.order is None
    assert evaluations(run) == [5.0]
    assert run.next_eval == 4000
    assert checkpoint.best(run.root)[0] == run.root / f"step_{3200:012d}"
    learn(run, 1900)
    assert run.order is None


def test_the_evaluation_that_falls_due_at_the_end_is_made_before_the_last_order(run: Coordinator) -> None:
    run.idle.add(1)
    learn(run, 600)
    run.receive(0, "idle", None)
    scores(run, 5.0, run.board.order[0])
    save(run, 600)
    assert (evaluations(run), run.board.order[1]) == ([5.0], SAVE | LAST)


def test_an_evaluation_whose_learner_dies_is_made_again_and_its_late_score_is_not_taken(run: Coordinator) -> None:
    learn(run, 600)
    first = run.board.order[0]
    run.give_up_order()  # learner 0 is gone
    run.poll()
    assert run.board.order == (first + 1, SAVE | EVALUATE)
    scores(run, 99.0, first)
    assert evaluations(run) == []
    assert run.ledger.last_eval == {}
    scores(run, 7.0, first + 1)
    save(run, 600, [0])
    save(run, 600, [1])
    assert evaluations(run) == [7.0]
    assert checkpoint.best(run.root)[1] == 7.0


def test_a_group_that_goes_back_takes_its_counts_and_episodes_back(run: Coordinator) -> None:
    learn(run, 400)
    run.last_checkpoint = -1e9
    run.poll()
    run.receive(0, "report", REPORT._replace(episodes=[(1.0, 10, 0)]))
    save(run, 400)
    state = checkpoint.load(checkpoint.latest(run.root) or run.root)[1]
    run.receive(1, "report", REPORT._replace(episodes=[(2.0, 20, 0)]))
    run.order_checkpoint(SAVE | EVALUATE)
    for rank in range(2):
        run.board.write(rank, {"learned": 450, "produced": 460})
    board, orders = Board(2), run.board.order[0]
    for rank in range(2):
        board.write(rank, {"learned": 400, "produced": 400})
    run.join(board, [], state)
    assert run.evaluation == 0, "a checkpoint would wait for that of the learners that are gone"
    assert run.board.order[0] == orders, "an order of the new group would have the draft of an old one"
    assert (run.ledger.rolled_back, run.ledger.dropped) == (100, 20)
    assert run.ledger.episodes.count == 1
    assert run.ledger.env_steps == 800
    rows = run.ledger.summary({})["rows"]
    assert rows == {"produced": 920, "learned": 800, "in_flight": 0, "dropped": 20, "rolled_back": 100}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the coordinator's deadlines."""
    time = [1000.0]
    for module in (coordinator, retries):
        monkeypatch.setattr(module, "awake", lambda: time[0])
    return time


def test_a_checkpoint_that_cannot_be_written_is_ordered_again_later(run: Coordinator, now: list[float]) -> None:
    learn(run, 600)
    waits, first = list[float](), run.order
    for _ in range(4):
        number, begin = run.order, now[0]
        shutil.rmtree(checkpoint.draft_path(run.root, f"order_{number}"))  # another process cleans up
        run.receive(0, "unsaved", (number, "the disk is full"))
        run.receive(1, "unsaved", (number, "the disk is full"))
        learn(run, 600)
        assert run.order is None, "it is not given again at once"
        while run.order is None:
            now[0] += 0.1
            run.poll()
        waits.append(now[0] - begin)
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]
    assert run.board.order == ((first or 0) + 4, SAVE), "a retry does not repeat the evaluation"
    run.receive(1, "unsaved", (first, "a late answer to an order that was given up"))
    assert run.order is not None
    save(run, 600)
    assert checkpoint.latest(run.root) == run.root / f"step_{1200:012d}"
    learn(run, 600)
    assert run.board.order == ((first or 0) + 5, SAVE | EVALUATE), "it is due once a checkpoint is complete"
    log = (run.folder / "log.txt").read_text()
    assert log.count("the disk is full; training goes on, and it is tried again") == 1


def test_a_run_whose_folder_is_moved_away_goes_on_and_saves_when_it_is_back(run: Coordinator, now: list[float]) -> None:
    away = run.folder.with_name("away")
    run.folder.rename(away)
    run.last_checkpoint = -math.inf
    run.poll()
    assert "No such file or directory (checkpoints); training goes on" in (away / "log.txt").read_text()
    assert run.order is None
    assert not run.folder.exists()
    away.rename(run.folder)
    now[0] += 60
    run.poll()
    save(run, 50)
    assert checkpoint.latest(run.root) == run.root / f"step_{100:012d}"


def test_a_run_whose_checkpoints_fail_for_too_long_ends_with_the_reason(run: Coordinator, now: list[float]) -> None:
    learn(run, 600)
    run.receive(0, "unsaved", (run.order, "the disk is full"))
    now[0] += run.config.log.unsaved_limit + 1
    run.poll()
    with pytest.raises(CoterieError, match=r"^the disk is full, for 3601 s \(log\.unsaved_limit\)$"):
        run.receive(0, "unsaved", (run.order, "the disk is full"))


def test_after_a_signal_a_checkpoint_that_fails_is_tried_often_and_until_the_same_limit(
    run: Coordinator, now: list[float]
) -> None:
    run.last_checkpoint = -math.inf
    run._on_signal(signal.SIGTERM)
    run.poll()

    def fail() -> None:
        last, end = now[0], now[0] + 4000
        while now[0] < end:
            run.poll()
            if run.order is not None:
                assert now[0] - last < 6
                last = now[0]
                run.receive(1, "unsaved", (run.order, "the disk is full"))
            now[0] += 0.5

    with pytest.raises(CoterieError, match=r"^the disk is full, for 360\d s \(log\.unsaved_limit\)$"):
        fail()


def test_an_order_that_a_learner_does_not_answer_is_given_up_and_given_again(
    run: Coordinator, now: list[float]
) -> None:
    learn(run, 600)
    first = run.order
    now[0] += 10 * run.config.log.stall
    run.poll()
    assert run.order == first, "an evaluation may take long"
    scores(run, 5.0, first or 0)
    save(run, 600, [0])
    now[0] += run.config.log.stall + 1
    run.poll()
    assert run.order is None
    assert "no checkpoint: no part of learner 1 for 900 s" in (run.folder / "log.txt").read_text()
    now[0] += 60
    run.poll()
    assert run.order == (first or 0) + 1


def test_an_evaluation_of_which_all_messages_are_lost_is_made_again(run: Coordinator, now: list[float]) -> None:
    learn(run, 600)
    first = run.order or 0
    run.board.evaluated[0] = first
    now[0] += run.config.log.stall + 1
    run.poll()
    assert run.order is None
    now[0] += 60
    run.poll()
    assert run.board.order == (first + 1, SAVE), "a checkpoint first"
    save(run, 600)
    learn(run, 600)
    assert run.board.order == (first + 2, SAVE | EVALUATE)
    now[0] += 10 * run.config.log.stall
    run.poll()
    assert run.order == first + 2, "this one may take long, too"


@pytest.mark.parametrize(
    ("learned", "stop", "ended"),
    [
        (400, None, ("interrupted", "SIGTERM")),
        (50_000, None, ("finished", "")),
        (400, ("solved", None), ("finished", "solved")),
    ],
)
def test_a_signal_interrupts_no_run_that_is_complete(run: Coordinator, learned, stop, ended) -> None:
    """It comes during the last checkpoint, whose retries must not take long any more."""

    def work() -> None:
        learn(run, learned)
        if stop is not None:
            run.receive(0, "stop", stop)
        run._on_signal(signal.SIGTERM)
        run.poll()

    summary = run.go(work, lambda: None)
    assert (summary["status"], summary["reason"]) == ended
    assert run.board.resumes == (ended[0] == "interrupted"), "else its clients wait for it"
    assert run.retries.longest == retries._HURRY_S


@pytest.mark.parametrize("code", [0, 75])
def test_an_env_that_exits_fails_the_run_and_a_signal_of_its_start_ends_it(run: Coordinator, code: int) -> None:
    run.display.starting.code = code
    with pytest.raises(SystemExit if code else CoterieError, match="^75$" if code else "^SystemExit: 0; last good "):
        run.go(partial(sys.exit, code), lambda: None)


def test_a_run_ends_although_a_draft_vanished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one: nothing else is learned, so nothing but the wait itself makes the coordinator try again."""
    write, calls = checkpoint.write, list[Path]()

    def vanish(draft: Path, tensors: checkpoint.Tensors) -> None:
        calls.append(draft)
        if len(calls) == 2:
            shutil.rmtree(draft)
        write(draft, tensors)

    monkeypatch.setattr(checkpoint, "write", vanish)
    changes = {"env.num_envs": 4, "algo.unroll_length": 16, "log.tensorboard": False, "log.checkpoint_every": 1e6}
    config = presets.a2c(env="CartPole-v1", steps=300, out=str(tmp_path / "run"), **changes)
    summary = coterie.train(config, quiet=True)
    assert summary["status"] == "finished"
    assert len(calls) == 3
    assert "cannot be written: No such file" in (tmp_path / "run" / "log.txt").read_text()

"""What a run makes of its learners' messages, without learners: which scores count, and when an evaluation is due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie.build.evaluate import Scores
from coterie.launch.coordinator import Run
from coterie.parallel.board import EVALUATE, LAST, SAVE, Board
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics
from tests.conftest import VECTOR, make_config

REPORT = {
    "games": [],
    "metrics": {},
    "batches": 0,
    "stages": {},
    "lr": 0.1,
    "rss_mb": 1.0,
    "gauges": {},
    "lags": {},
    "lag_by_row": [],
    "rollouts": 0,
    "failures": [],
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Two learners that have made their first checkpoint, and an evaluation due at 1000 env steps."""
    config = make_config(**{"eval.every": 1000, "log.tensorboard": False, "steps": 100_000, "log.every": 1e9})
    run = Run(config, tmp_path, VECTOR, Board(2), state=None, quiet=True)
    run.poll()
    for rank in range(2):
        save(run, rank, 0)
    assert run.order is None
    yield run
    run.writer.close()


def save(run: Run, rank: int, learned: int) -> None:
    """What a learner does to obey."""
    draft = checkpoint.draft_path(run.root, f"order_{run.order}")
    checkpoint.write(draft, {f"learner_{rank}/model": {"w": torch.zeros(2)}})
    counts = {**run.board.read(rank), "learned": learned}
    run.receive(rank, "saved", {"order": run.order, "counts": counts, "digest": "x"})


def scores(run: Run, mean: float, order: int) -> None:
    run.receive(0, "scores", {"order": order, "scores": Scores("made-up", [mean, mean])})


def learn(run: Run, learned: int) -> None:
    for rank in range(2):
        run.board.write(rank, {"learned": learned})
        run.receive(rank, "report", dict(REPORT))


def evaluations(run: Run) -> list[float]:
    return [line["eval/return"] for line in read_metrics(run.folder) if "eval/return" in line]


def test_an_evaluation_is_due_once_for_each_stretch_of_steps(run: Run) -> None:
    learn(run, 400)
    assert run.order is None
    learn(run, 1600)  # 3,200 of both: it was due at 1,000
    assert run.board.order[1] == SAVE | EVALUATE
    scores(run, 5.0, run.board.order[0])
    save(run, 0, 1600)
    save(run, 1, 1600)
    assert run.order is None
    assert evaluations(run) == [5.0]
    assert run.next_eval == 4000
    best = checkpoint.best(run.root)
    assert best is not None
    assert best.name == f"step_{3200:012d}"
    learn(run, 1900)
    assert run.order is None


def test_an_evaluation_whose_learner_dies_is_made_again_and_its_late_score_is_not_taken(run: Run) -> None:
    learn(run, 600)
    first = run.board.order[0]
    run.give_up_order()  # learner 0 is gone
    run.poll()
    assert run.board.order == (first + 1, SAVE | EVALUATE)
    scores(run, 99.0, first)
    assert evaluations(run) == []
    assert run.account.last_eval == {}
    scores(run, 7.0, first + 1)
    save(run, 0, 600)
    save(run, 1, 600)
    assert evaluations(run) == [7.0]
    assert checkpoint.best_score(run.root) == 7.0


def test_a_group_that_goes_back_takes_its_counts_and_games_back(run: Run) -> None:
    learn(run, 400)
    run.last_checkpoint = -1e9
    run.poll()
    run.receive(0, "report", {**REPORT, "games": [(1.0, 10, 0)]})
    for rank in range(2):
        save(run, rank, 400)
    path = checkpoint.latest(run.root)
    assert path is not None
    state = checkpoint.load(path)[1]
    run.receive(1, "report", {**REPORT, "games": [(2.0, 20, 0)]})
    for rank in range(2):
        run.board.write(rank, {"learned": 450, "produced": 460})
    board = Board(2)
    for rank in range(2):
        board.write(rank, {"learned": 400, "produced": 400})
    run.join(board, [], state)
    assert (run.account.rolled_back, run.account.dropped) == (100, 20)
    assert run.account.episodes.count == 1
    assert run.account.env_steps == 800
    rows = run.account.summary({})["rows"]
    assert rows == {"produced": 920, "learned": 800, "in_flight": 0, "dropped": 20, "rolled_back": 100}


def test_the_last_order_ends_the_run(run: Run) -> None:
    learn(run, 500)
    run.give_up_order()
    run.receive(0, "idle", None)
    assert run.board.order[1] != SAVE | LAST
    run.receive(1, "idle", None)
    if run.board.order[1] != SAVE | LAST:  # the evaluation first
        save(run, 0, 500)
        save(run, 1, 500)
    assert run.board.order[1] == SAVE | LAST
    assert run.ending
    save(run, 0, 500)
    save(run, 1, 500)
    assert run.over
    assert run.digests == {0: "x", 1: "x"}

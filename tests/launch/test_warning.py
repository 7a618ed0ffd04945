"""A warning that the machine may be taken away, while the learners carry out an order."""

from __future__ import annotations

from coterie.launch.coordinator import Coordinator
from coterie.parallel.board import EVALUATE, SAVE
from coterie.parallel.signals import WARNING
from tests.launch.test_coordinator import learn, run, save, scores

__all__ = ["run"]  # the fixture


def test_a_warning_makes_a_checkpoint_due_without_an_evaluation_and_also_during_an_order(run: Coordinator) -> None:
    learn(run, 600)
    assert run.board.order[1] == SAVE | EVALUATE
    run._on_signal(WARNING)  # the other learner may have written its part already
    scores(run, 5.0, run.board.order[0])
    save(run, 600)
    learn(run, 610)
    assert run.board.order[1] == SAVE
    save(run, 610)
    learn(run, 620)
    assert run.order is None
    run._on_signal(WARNING)
    learn(run, 1100)  # an evaluation is due, too
    assert run.board.order[1] == SAVE
    save(run, 1100)
    learn(run, 1110)
    assert run.board.order[1] == SAVE | EVALUATE

"""What is saved of a run whose learner is gone, and which parts of a checkpoint fit together."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coterie.build.factory import ProcessContext
from coterie.build.resources import resolve_config
from coterie.launch import supervisor
from coterie.launch.coordinator import Coordinator
from coterie.launch.rescue import Rescue
from coterie.launch.supervisor import Supervisor
from coterie.parallel.board import HOLD, SAVE, Board
from coterie.parallel.processes import PeerLost
from coterie.roles import learner_process
from coterie.roles.entry import LearnerService, Saved
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from tests.conftest import VECTOR, make_config


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Coordinator]:
    """Three learners in lockstep that have made their first checkpoint."""
    config = make_config(learners=3, exchange="allreduce", steps=100_000, **{"log.tensorboard": False})
    run = Coordinator(config, tmp_path, VECTOR, Board(3), state=None, quiet=True)
    run.poll()
    save(run, {0: 0, 1: 0, 2: 0})
    assert run.order is None
    yield run
    run.writer.close()


def save(run: Coordinator, steps: dict[int, int]) -> None:
    """What learners do to obey. `steps`: the env steps that each of them counts."""
    number = run.order or 0
    for rank, env_steps in steps.items():
        checkpoint.write(
            checkpoint.draft_path(run.root, f"order_{number}"), {f"learner_{rank}/model": {"w": torch.ones(2)}}
        )
        run.receive(rank, "saved", Saved(number, run.board.read(rank), "", env_steps))


def test_parts_of_two_steps_are_not_one_checkpoint(run: Coordinator) -> None:
    """A learner that started late has carried out the order before its first step."""
    run.order_checkpoint()
    first = run.order or 0
    save(run, {0: 640, 1: 0, 2: 640})
    assert run.board.sealed < first
    assert run.order == first + 1, "a new order, for all"
    save(run, {0: 960, 1: 960, 2: 960})
    assert run.board.sealed == first + 1


@pytest.mark.parametrize("exchange", ["allreduce", "hogwild", "store"])
def test_a_rescue_whose_time_is_over_takes_what_is_there(run: Coordinator, exchange: Any) -> None:
    """In lockstep, and of shared weights, the part of one learner holds everything."""
    run.config = dataclasses.replace(run.config, exchange=exchange)
    rescue = Rescue(run, "learner 2 was killed")
    rescue.lose(2, None)
    save(run, {1: 0})
    assert not rescue.is_over
    rescue.settle()
    assert rescue.is_over
    assert run.board.sealed == rescue.order


def test_a_learner_that_lost_another_carries_out_the_rescue_and_not_an_older_order(tmp_path, monkeypatch):
    board, posted = Board(1), list[tuple[str, object]]()
    config = resolve_config(make_config(learners=1, **{"log.stall": 4.0, "log.flight": False}))
    with closing(LearnerProcess(config, 0, ProcessContext(board=board, folder=tmp_path))) as learner:
        service = LearnerService(learner, tmp_path, lambda kind, content: posted.append((kind, content)))

        def lose(parts: object, on_rollout: object) -> None:
            board.give(SAVE)
            checkpoint.open_draft(service.root, "order_2")
            threading.Timer(0.3, board.give, (SAVE | HOLD,)).start()
            raise PeerLost("another learner is gone")

        monkeypatch.setattr(learner_process, "learn", lose)
        learner._opened.callback(lambda: posted.append(("closed", None)))
        with pytest.raises(PeerLost):
            service.run()
    assert [content.order for kind, content in posted if kind == "saved"] == [2]
    kinds = [kind for kind, _ in posted]
    assert kinds.index("saved") < kinds.index("closed"), "envs may take longer to close than a rescue waits"


def test_a_run_that_stops_is_not_starved_while_rows_are_produced(monkeypatch):
    now, board = [0.0], Board(1)
    monkeypatch.setattr(supervisor, "awake", lambda: now[0])
    run = SimpleNamespace(board=board, over=False, idle=set(), members={0})
    parent = SimpleNamespace(run=run, waiting=(0.0, 0))
    board.stop()
    with board.blocked(0):
        for seconds, produced, starved in (
            (15, 0, False),
            (30, 0, True),
            (35, 8, False),
            (50, 9, False),
            (80, 9, True),
        ):
            now[0] = seconds
            board.write(0, {"produced": produced})
            assert Supervisor._is_starved(parent) is bool(starved)

"""Replays of runs whose processes were killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress

import pytest

from coterie.cli.main import main
from coterie.flight.record import read_life
from coterie.launch.session import resume
from coterie.roles.callbacks import Callback, Run
from tests.tools.replay.test_breaks import cut
from tests.tools.replay.test_replay import LAYOUTS, assert_equal, replayed, run

SECONDS = float(os.environ.get("COTERIE_REPLAY_S", "120"))


class Enough(Callback):
    """Ends the run some time after its first learner has started."""

    def on_start(self, run: Run) -> None:
        end = run.folder.parent / "end"
        if not end.exists():
            end.write_text(str(time.time() + float((run.folder.parent / "seconds").read_text())))
        self.end = float(end.read_text())

    def should_stop(self, run: Run) -> bool:
        return time.time() > self.end


def disturbed(out, seconds, **changes):
    """A run with faults; returns how often its processes were killed. A busy machine may need more time for that."""
    budgets = dict.fromkeys(("restarts", "decoupled.restarts", "central.restarts"), 10**6)
    every = max(0.8, seconds / 20)
    chaos = {"chaos.every": every, "chaos.seed": 25, "log.checkpoint_every": every / 2, "steps": 10**9}
    for longer in (1, 2, 4):
        (out.parent / "seconds").write_text(str(seconds * longer))
        (out.parent / "end").unlink(missing_ok=True)
        if kills := run(out, callbacks=(Enough,), **{**changes, **budgets, **chaos})["chaos"].get("kill", 0):
            break
        shutil.rmtree(out)
    return kills


@pytest.mark.parametrize("layout", ["impala", "seed"])
def test_a_replay_goes_through_kills(tmp_path, layout):
    """Of learners, which go on from checkpoints that were pruned since, and of actors and env hosts."""
    assert disturbed(tmp_path / "run", 8, **LAYOUTS[layout])
    assert_equal(replayed(tmp_path / "run"))


class Deadly(Callback):
    """Kills its learner once, between two rollouts."""

    def on_rollout(self, run: Run) -> None:
        if run.env_steps > 700:
            with suppress(FileExistsError):
                (run.folder.parent / "once").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_learner_saved_in_the_middle_of_a_rollout_is_found_again(tmp_path):
    """It had lost the other one there, and the checkpoint from which both went on was pruned since."""
    run(tmp_path / "run", (Deadly,), **LAYOUTS["ppo, synchronous"], **{"log.keep": 1, "restarts": 1})
    results = replayed(tmp_path / "run")
    assert sorted(result.life.header["life"] for result in results) == [0, 0, 1000, 1000]
    assert_equal(results)


class Rejoins(Deadly):
    """Ends the run some rollouts after its restarted learner has begun."""

    def on_start(self, run: Run) -> None:
        self.left = 20 if (run.folder.parent / "once").exists() else None

    def on_rollout(self, run: Run) -> None:
        super().on_rollout(run)
        self.left = None if self.left is None else self.left - 1

    def should_stop(self, run: Run) -> bool:
        return self.left is not None and self.left <= 0


def test_the_first_message_of_a_learner_that_was_killed_again_is_known(tmp_path):
    """It was killed in its first mix, so that its record does not have the mix. A peer averaged the message."""
    run(tmp_path / "run", (Rejoins,), **LAYOUTS["a2c, gossip"], **{"restarts": 1, "steps": 10**9})
    (again,) = (tmp_path / "run" / "flight").glob("learner_?.life_1000")
    life = read_life(again)
    ((first,),), rank = life.of("joined"), life.header["learner"]
    cut(again, 1, until="mix")
    results = replayed(tmp_path / "run")
    assert not any(result.difference for result in results)
    (peer,) = (x for x in results if x.life.header["learner"] != rank)
    assert peer.stopped == f"no further: the replay of learner {rank} ended before its message {first + 1}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "a2c"])  # which has one process
def test_two_minutes_with_kills_are_replayed(tmp_path, layout):
    assert disturbed(tmp_path / "run", SECONDS, **LAYOUTS[layout])
    results = replayed(tmp_path / "run")
    assert len(results) > LAYOUTS[layout].get("learners", 1), "no learner was killed"
    assert_equal(results)


def test_gossip_goes_through_kills_and_a_record_that_breaks_off_before(tmp_path):
    assert disturbed(tmp_path / "run", 8, **LAYOUTS["a2c, gossip"])
    assert_equal(results := replayed(tmp_path / "run"))
    longest = max((x for x in results if x.life.end is None), key=lambda x: x.rollouts)
    cut(longest.life.path, longest.rollouts // 2)
    again = replayed(tmp_path / "run")
    assert not any(result.difference for result in again)
    shorter = next(result for result in again if result.life.path == longest.life.path)
    assert (shorter.rollouts, shorter.stopped) == (longest.rollouts // 2, "the record breaks off there")


def test_a_life_whose_beginning_is_gone_does_not_hide_the_earlier_ones(tmp_path, capsys):
    folder = tmp_path / "run"
    run(folder, **LAYOUTS["impala"], **{"log.keep": 1})
    resume(folder, steps=3000, quiet=True)
    cut(folder / "flight" / "learner_0.life_0", 5)
    assert main(["replay", str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("learner 0, life 0, up to learner step 5: ")
    assert first.endswith("breaks off there")
    begun = read_life(folder / "flight" / "learner_0.life_1").header["checkpoint"]
    assert second.endswith(f"; no further: {begun} was pruned (log.keep), and no replay came to it")

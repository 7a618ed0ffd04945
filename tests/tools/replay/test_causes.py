"""A replay that differs says where, and by a second replay why."""

from __future__ import annotations

import re
import shutil

import pytest

from coterie.cli.main import main
from coterie.errors import CoterieError
from coterie.flight.record import lives
from coterie.runs import machine
from coterie.tools.replay import compare
from tests.tools.replay.test_breaks import cut
from tests.tools.replay.test_replay import LAYOUTS, assert_equal, edited, replayed, run


def test_an_env_that_is_not_deterministic_is_named(tmp_path):
    run(tmp_path / "run", algorithm="a2c", **{"env.id": "tests.support.fickle_env:Fickle", "env.threads": 1})
    (result,) = replayed(tmp_path / "run")
    assert (
        "rollout 1, before learner step 2: weights and first actions are equal, but what all 4 envs returned"
        in result.difference
    )
    why = r"; in a second replay env \d returns something else from row \d of 8 on: it is not deterministic$"
    assert re.search(why, result.difference)


def test_a_reset_that_is_not_deterministic_is_not_taken_for_the_arithmetic(tmp_path):
    run(tmp_path / "run", algorithm="a2c", **{"env.id": "tests.support.fickle_env:Unseeded", "env.threads": 1})
    (result,) = replayed(tmp_path / "run")
    assert re.match(
        "rollout 0, before learner step 1: from equal weights the policy's first actions", result.difference
    )
    why = "; in a second replay env 0, 1, 2, 3 begins otherwise: its reset is not deterministic"
    assert result.difference.endswith(why)


def test_an_env_that_has_changed_is_told_from_one_that_is_not_deterministic(tmp_path, monkeypatch):
    env = {"env.id": "tests.support.fickle_env:Changed", "env.threads": 1}
    run(tmp_path / "run", algorithm="a2c", **env)
    monkeypatch.setenv("REPLAYED", "1")
    (result,) = replayed(tmp_path / "run")
    assert result.difference.endswith(
        "these 8 rows is not; a second replay returns the same, so the env has probably changed (or the weights of "
        "later rows have); torch, processor and instruction set are the recorded ones"
    )
    monkeypatch.setattr(compare, "versions", lambda: {"numpy": "0"})
    said = list[str]()
    (result,) = replayed(tmp_path / "run", say=said.append)
    assert re.search(r"rows have\); numpy: [\d.]+ recorded, 0 here$", result.difference)
    assert re.fullmatch(r"note: numpy: [\d.]+ recorded, 0 here", said[0])


def test_a_difference_of_the_weights_names_the_step_and_the_tensor(tmp_path, monkeypatch):
    run(tmp_path / "run", algorithm="a2c", **{"log.digest_every": 5})

    def edit(event):
        if event[:2] == ["weights", 15]:
            event[2][3] += 1

    edited(tmp_path / "run", edit)
    (result,) = replayed(tmp_path / "run")
    name = lives(tmp_path / "run", 0)[0].header["tensors"][3]
    assert result.difference.startswith(f"learner steps 11 to 15: {name} differ after equal rollouts; torch, processor")
    monkeypatch.setattr(machine, "processor", lambda: "another one")
    said = list[str]()
    (result,) = replayed(tmp_path / "run", say=said.append)
    assert "; processor: " in result.difference
    assert len(said) == 1
    assert said[0].endswith("recorded, another one here")


def test_a_policy_that_acts_otherwise_is_not_taken_for_an_env(tmp_path, recorded):
    folder = shutil.copytree(recorded("impala"), tmp_path / "run")

    def edit(event):
        if event[:2] == ["rollout", 4]:
            event[5] += 1

    edited(folder, edit)
    (result,) = replayed(folder)
    assert "rollout 4, before learner step 5: from equal weights the policy's first actions differ" in result.difference


def test_weights_that_were_not_compared_are_not_called_equal(tmp_path):
    run(tmp_path / "run", **LAYOUTS["impala"], **{"log.digest_every": 100})

    def edit(event):
        if event[:2] == ["rollout", 4]:
            event[5] += 1

    edited(tmp_path / "run", edit)
    (result,) = replayed(tmp_path / "run")
    what = r"the policy's first actions differ, by weights of learner step \d, which were not compared"
    why = r"\(those of step 0 are equal\): the update or the arithmetic differs, and a run with --log\.digest-every 1"
    assert re.match(f"rollout 4, before learner step 5: {what} {why}", result.difference)


def test_the_last_weights_are_compared_whatever_their_step(tmp_path, capsys):
    run(tmp_path / "run", algorithm="a2c", **{"log.digest_every": 100})
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert "learner step 49: 49 rollouts and 1 digest of weights are equal, mean" in capsys.readouterr().out
    edited(tmp_path / "run", lambda event: event[2].append(event[2].pop() + 1) if event[0] == "final" else None)
    assert main(["replay", str(tmp_path / "run")]) == 1
    assert "life 0 differs: learner steps 1 to 49: normalizers differ after equal rollouts" in capsys.readouterr().out
    cut(tmp_path / "run" / "flight" / "learner_0.life_0", 30)
    assert main(["replay", str(tmp_path / "run")]) == 0
    said = "30 rollouts and 0 digests of weights are equal (none of the last 30 learner steps)"
    assert said in capsys.readouterr().out


def test_a_nan_is_met_again(tmp_path, capsys):
    """The same error at the same learner step, from a copy of the folder alone, and the batch behind it."""
    nan = {"env.id": "tests.support.fickle_env:Poisonous", "env.threads": 1}
    with pytest.raises(CoterieError, match=r"value_loss is not finite at learner step \d+") as failed:
        run(tmp_path / "run", **LAYOUTS["impala"], **nan)
    step = re.search(r"learner step (\d+)", str(failed.value))[1]
    (tmp_path / "run").rename(tmp_path / "gone")
    shutil.copytree(tmp_path / "gone", tmp_path / "run")
    (result,) = replayed(tmp_path / "run")
    assert result.error in str(failed.value)
    assert result.difference == ""
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert "; it ends as recorded: value_loss is not finite at learner step " in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "run"), "--trust", "--export-step", step]) == 0
    assert f"learner_step_{step}.safetensors: the batch, the gradient" in capsys.readouterr().out


def test_a_batch_that_was_skipped_for_a_nan_is_skipped_again(tmp_path):
    poisoned = {"env.id": "tests.support.fickle_env:Poisoned", "env.threads": 1, "optim.on_nonfinite": "skip"}
    summary = run(tmp_path / "run", **LAYOUTS["impala"], **poisoned)
    assert 0 < summary["skipped_batches"] < summary["learner_steps"]
    assert_equal(replayed(tmp_path / "run"))

"""A counterfactual: the replay of a life as it was, and from a learner step on with another setting."""

from __future__ import annotations

import re

import pytest
import torch

from coterie.cli.main import main
from coterie.flight.record import lives
from coterie.launch.session import resume
from coterie.runs.trust import open_run
from coterie.tools.replay.asked import SWITCHED, ReplayRequest
from coterie.tools.replay.command import replay_run
from tests.tools.replay.test_replay import LAYOUTS, run

RUNS = {
    "a2c": LAYOUTS["a2c"],
    "ppo": {"algorithm": "ppo"},
    "impala": {**LAYOUTS["impala"], "optim.max_grad_norm": 0.0},
    "dqn": LAYOUTS["dqn, actors"],
    "r2d2": {**LAYOUTS["seed, r2d2"], "acting": "inline", "actors": 0, "replay.alpha": 0.6},
    "sac": {"algorithm": "sac", "env.id": "Pendulum-v1", "q.batch_size": 8, "q.intensity": 1.0},
}
VALUES = {
    "a2c": {
        "algo.gae_lambda": 0.5, "algo.value_coef": 2.0, "algo.entropy_coef": 0.5, "algo.entropy_schedule.warmup": 10**4,
        "algo.normalize_advantage": True, "optim.lr": 0.1, "optim.schedule.warmup": 10**4, "optim.max_grad_norm": 0.01,
        "reward.clip": "tanh", "reward.scale": 0.1,
    },
    "ppo": {"ppo.clip": 1e-4, "ppo.clip_schedule.warmup": 10**8, "ppo.clip_value": 1e-4},
    "impala": {
        "vtrace.correction": "one-step", "vtrace.rho_bar": 1.5, "vtrace.c_bar": 0.01, "vtrace.pg_rho_bar": 0.01,
        "vtrace.loss": "sum",
    },
    "dqn": {"q.double": False, "q.huber": 0.01, "q.target_every": 1},
    "r2d2": {"r2d2.rescale": False, "r2d2.eta": 0.1},
    "sac": {"sac.tau": 0.5, "sac.learn_alpha": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_setting_is_switched_at_a_learner_step(tmp_path, kind):
    """The weights are the recorded ones up to there, and others later."""
    folder, (since, last) = tmp_path / "run", (24, 40) if kind == "dqn" else (16, 24)
    run(folder, **RUNS[kind])
    found = list[torch.Tensor]()  # the weights at the last learner step
    for edit in (None, *VALUES[kind]):
        edits = {} if edit is None else {edit: VALUES[kind][edit]}
        asked = ReplayRequest(
            str(since), last, edits, last, lambda moment: found.append(moment.learner.params.data.clone())
        )
        (result,) = replay_run(folder, open_run(folder), asked, print)
        assert (result.difference, result.switched) == ("", since if edits else None)
        assert result.digests == (since if edits else last)
        assert torch.equal(found[0], found[-1]) == (edit is None), edit


def test_an_edit_that_no_learner_step_was_made_with_is_said(tmp_path, capsys):
    """A rollout of ppo has 8 of them."""
    run(tmp_path / "run", **RUNS["ppo"])
    note = "note: --edit: it takes effect between rollouts, and no learner step up to 16 was made with it\n"
    for end, made in (("14", False), ("17", True)):
        asked = ["--from", "10", "--to", end, "--edit", "optim.lr=0.1"]
        assert main(["replay", str(tmp_path / "run"), *asked]) == 0
        out = capsys.readouterr().out
        assert (note in out, "up to learner step 16, and from there on it has other" in out) == (not made, made)


@pytest.mark.parametrize(
    ("layout", "edit"),
    [
        ({**LAYOUTS["impala"], "algorithm": "ppo", "ppo.proximal": True}, "ppo.epochs=1"),
        (LAYOUTS["impala"], "vtrace.minibatch=1"),
        (LAYOUTS["dqn, actors"], "q.batch_size=16"),
    ],
)
def test_an_edit_may_change_the_number_of_learner_steps(tmp_path, layout, edit, capsys):
    """The actors then take the weights before the same rollouts."""
    run(tmp_path / "run", **{**layout, "steps": 600})
    ends = list[str]()
    for options in ([], ["--edit", edit]):
        assert main(["replay", str(tmp_path / "run"), *options]) == 0
        ends += re.findall(r"up to learner step ([\d,]+): ", capsys.readouterr().out)
    assert len(set(ends)) == 2


def test_all_settings_that_can_be_switched_are_tested():
    tested = [name for values in VALUES.values() for name in values]
    assert {next(x for x in tested if x == known or x.startswith(f"{known}.")) for known in SWITCHED} == set(tested)


def test_a_learner_step_is_found_in_the_last_life_that_has_it(tmp_path, capsys):
    """Without an edit, that life and what follows is replayed; with one, that life alone."""
    folder = tmp_path / "run"
    run(folder, algorithm="a2c", **{"log.keep": 2})
    resume(folder, steps=3000, quiet=True)
    resume(folder, steps=4500, quiet=True)
    replay, edit = ["replay", str(folder), "--from"], ["--edit", "algo.entropy_coef=0.5"]

    def said(*options):
        assert main([*replay, *options]) == 0
        line = r"life (\d), up to learner step (\d+).*? equal( up to learner step \d+)?"
        return re.findall(line, capsys.readouterr().out)

    last = [life.of("rollout")[-1][0] for life in lives(folder, 0)]
    ends = [(str(life), str(step + 1), "") for life, step in enumerate(last)]
    assert said(str(last[1] + 5)) == ends[2:]
    assert said(str(last[1])) == ends  # the checkpoint that the second life began with was pruned
    assert said(str(last[0]), *edit) == [(*ends[0][:2], f" up to learner step {last[0]}")]
    assert said(str(last[1]), *edit) == [ends[0], (*ends[1][:2], f" up to learner step {last[1]}")]
    assert main([*replay, "999"]) == 2
    assert f"--from: learner 0 has rollouts up to learner step {last[2]}, none after 999" in capsys.readouterr().err
    assert main([*replay, "20", "--edit", "algo.gamma=0.5"]) == 2
    assert capsys.readouterr().err == "coterie: --edit: algo.gamma is read as a life begins, and not after --from 20\n"

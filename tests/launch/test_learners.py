"""Runs of several learners: what they leave behind, how they are resumed, what is the same twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import coterie
from coterie.build import warm_start
from coterie.build.factory import make_model, normalizers
from coterie.build.resources import resolve_config
from coterie.build.warm_start import first_model
from coterie.cli.main import main
from coterie.envs.make import make_spec
from coterie.launch import session
from coterie.launch.placement import Placement
from coterie.parallel.params import FlatParams
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics
from tests.support.begun import check_begins_with
from tests.support.runs import (
    ROLLOUT,
    central_options,
    check_accounts,
    check_rows,
    decoupled_options,
    inline_options,
    last_checkpoint,
    read_summary,
    save_checkpoint,
    tiny,
)

slow = pytest.mark.slow


def parameters(tensors: checkpoint.Tensors, rank: int) -> dict[str, torch.Tensor]:
    """A learner's weights, without the normalizers."""
    return {k: x for k, x in tensors[f"learner_{rank}/model"].items() if x.dtype == torch.float32}


@pytest.mark.parametrize("exchange", ["allreduce", "gossip"])
def test_two_learners_finish_and_their_checkpoints_can_be_evaluated(tmp_path, capsys, exchange):
    out = tmp_path / "run"
    # Slow envs: the others must not come to the end while learner 0 evaluates.
    assert main(inline_options(out, exchange, **{"eval.every": 800, "eval.episodes": 3, "env.delay": 0.01})) == 0
    summary = check_accounts(out)
    assert summary["status"] == "finished"
    assert 3000 <= summary["env_steps"] <= 3000 + 4 * ROLLOUT
    assert summary["restarts"] == summary["rows"]["dropped"] == summary["rows"]["rolled_back"] == 0
    assert "finished" in (out / "log.txt").read_text()
    tensors, state = last_checkpoint(out)
    assert len(summary["digests"]) == 2
    assert all(summary["digests"])
    assert all(row["learner_steps"] > 0 for row in state["learners"])
    if exchange == "allreduce":
        assert len(set(summary["digests"])) == 1
        first, second = (tensors[f"learner_{rank}/exchange"] for rank in range(2))
        assert all(torch.equal(first[k], second[k]) for k in first)
    scores = [line["eval/return"] for line in read_metrics(out) if "eval/return" in line]
    assert scores
    root = out / "checkpoints"
    assert checkpoint.best(root)[1] == pytest.approx(max(scores))
    best, _ = checkpoint.load(checkpoint.best(root)[0])
    capsys.readouterr()
    wanted = {
        "0": best["learner_0/model"],
        "1": best["learner_1/model"],
        "mean": {k: (x.double() + best["learner_1/model"][k]) / 2 for k, x in best["learner_0/model"].items()},
    }
    for which, weights in wanted.items():
        loaded = coterie.load(out, which).model.state_dict()
        assert all(torch.allclose(loaded[k].double(), x.double()) for k, x in weights.items())
        assert main(["eval", str(out), "--learner", which, "--episodes", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["episodes"] == 2
    for which, hint in (("2", ""), ("best", "; `best` is now 0"), ("-1", "")):
        assert main(["eval", str(out), f"--learner={which}"]) == 2
        assert f"{which!r} is not one of 0, 1, mean{hint}\n" in capsys.readouterr().err


@pytest.mark.parametrize("exchange", ["hogwild", "store"])
def test_shared_weights_and_normalizers_begin_as_those_of_init_from(tmp_path, exchange):
    """Each learner takes them at its first pull."""
    config = resolve_config(tiny(tmp_path / "new", exchange, init_from=str(tmp_path)))
    spec = make_spec(config.env, config.atari)
    old = make_model(config, spec)
    for tensor in old.state_dict().values():
        tensor.fill_(7.0)
    save_checkpoint(tmp_path / "checkpoints", 0, {"learner_0/model": dict(old.state_dict())}, {})
    placement = Placement(config, spec)
    model = first_model(config, spec)
    for name, first in (("moments", normalizers(config, model).read()), ("data", FlatParams(model).data)):
        assert 7.0 in first
        assert np.array_equal(placement.memory.arrays[name], first), name
    placement.close()


def test_all_learners_begin_with_the_same_checkpoint_of_a_run_that_still_trains(tmp_path, monkeypatch, capsys):
    first, out = tmp_path / "first", tmp_path / "run"
    coterie.train(tiny(first, "solo", learners=1, steps=200), quiet=True)
    source = checkpoint.latest(first / "checkpoints")

    def begin_from(path, model, elsewhere):
        line = warm_start.begin_from(path, model)
        changed = {"learner_0/model": {k: torch.zeros_like(x) for k, x in model.state_dict().items()}}
        save_checkpoint(first / "checkpoints", 10**6, changed, {})
        return line

    monkeypatch.setattr(session, "begin_from", begin_from)
    coterie.train(tiny(out, "allreduce", steps=400, init_from=str(first)), quiet=True)
    old, new = (checkpoint.load(path)[0] for path in (source, out / "checkpoints/step_000000000000"))
    for rank in (0, 1):
        check_begins_with(new[f"learner_{rank}/model"], old["learner_0/model"])
    assert json.loads((out / "config.json").read_text())["init_from"] == str(first)
    assert main(["replay", str(out)]) == 0, capsys.readouterr().out
    more = {"learners": 1, "steps": 100, "init_from": str(source)}
    assert coterie.train(tiny(tmp_path / "more", "solo", **more), quiet=True)["status"] == "finished"


@pytest.mark.parametrize(
    ("exchange", "changes"),
    [
        ("allreduce", {}),
        pytest.param("gossip", {}, marks=slow),
        pytest.param("hogwild", {"optim.rule": "adam"}, marks=slow),
        ("store", {"optim.rule": "adam", "store.local_steps": 2}),
    ],
)
def test_resumed_learners_continue_with_their_weights_counts_and_moments(tmp_path, exchange, changes):
    out = tmp_path / "run"
    before = coterie.train(tiny(out, exchange, **changes), quiet=True)
    tensors, state = last_checkpoint(out)
    # The learning rate falls to nothing towards the end: what was loaded is what is saved again.
    coterie.resume(out, steps=before["env_steps"] + 1, quiet=True)
    again = check_accounts(out)
    gained = again["env_steps"] - before["env_steps"]
    assert 0 < gained <= 5 * ROLLOUT
    assert again["rows"]["rolled_back"] == 0
    assert all(again[name] > before[name] for name in ("learner_steps", "samples_trained", "seconds"))
    assert all(again[name] >= before[name] for name in ("episodes", "masked_steps"))
    new, counts = last_checkpoint(out)
    assert counts["life"] == 1
    for old, now in zip(state["learners"], counts["learners"], strict=True):
        assert now["learned"] > old["learned"]
        assert now["learner_steps"] > old["learner_steps"]
    central = exchange in ("hogwild", "store")
    spread = max(float((x - tensors["learner_1/model"][k]).abs().max()) for k, x in parameters(tensors, 0).items())
    near = 2e-3 + (spread if exchange == "gossip" else 0)  # gossiping learners move to their mean
    for rank in range(2):
        for k, x in parameters(tensors, 0 if central else rank).items():  # central weights, as learner 0 saw them
            assert torch.allclose(new[f"learner_{rank}/model"][k], x, atol=near, rtol=0), k
        square, was = (t[f"learner_{0 if central else rank}/exchange"]["square"] for t in (new, tensors))
        assert (square >= 0.8 * was).all()  # it decays by 0.99 at a step
        assert was.max() > 0
    rows = [t["learner_0/model"]["obs_norm.obs_.count"] for t in (tensors, new)]
    most = max(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"] for rank in range(2))  # gossip has their mean
    assert rows[0] <= rows[1] <= most + gained + 6 * ROLLOUT


@pytest.mark.parametrize(
    ("options", "exchange", "changes"),
    [
        (inline_options, "allreduce", {}),
        (inline_options, "gossip", {"gossip.tau": 0}),
        (decoupled_options, "allreduce", {"decoupled.lockstep": True}),
        (
            central_options,
            "solo",
            {"central.lockstep": True, "algorithm": "a2c", "model.core": "lstm", "model.core-size": 8},
        ),
    ],
)
def test_deterministic_modes_give_the_same_weights_twice(tmp_path, options, exchange, changes):
    """Whatever the timing: a slow learner, evaluations and checkpoints in between change nothing."""
    disturbed = {"env.delay": 0.01, "env.delay_learner": 1, "eval.every": 200, "eval.episodes": 2}
    disturbed |= {"log.checkpoint_every": 0.0}
    digests = []
    for i, more in enumerate(({}, disturbed)):
        assert main(options(tmp_path / str(i), exchange, **{"steps": 1000, **changes, **more})) == 0
        summary = check_rows(tmp_path / str(i))
        assert summary["rows"]["in_flight"] == summary.get("restarts", 0) == 0
        assert options is inline_options or set(summary["policy_lag"]) == {"0"}
        digests.append(summary["digest"])
    assert digests[0] == digests[1]


def test_the_end_of_a_learner_that_has_saved_is_no_death(tmp_path, odd):
    """The other one still writes its part. The last checkpoint holds both."""
    out = tmp_path / "run"
    changes = {"model.torso": "odd:slow_save", "steps": 1000}
    summary = coterie.train(tiny(out, "allreduce", **changes), quiet=True)
    assert summary["restarts"] == summary["rows"]["rolled_back"] == 0
    assert all(summary["digests"])
    check_accounts(out)


SCRIPT = """
import sys
import coterie
from coterie import presets
print("begins as", __name__, flush=True)
changes = {{"steps": 1000, "log.tensorboard": False, "learners": 2, "exchange": "allreduce", "out": {out!r}}}
summary = coterie.train(presets.a2c(env="CartPole-v1", **changes), quiet=True)
print("ends", summary["status"], summary["env_steps"], sys.modules["__main__"].__file__)
"""


@slow
def test_a_script_without_a_main_guard_runs_once_also_with_a_long_path_for_temporary_files(tmp_path):
    """Batch systems set such a path for each job; a socket's path may not be as long."""
    script, out, temporary = tmp_path / "script.py", tmp_path / "run", tmp_path / ("t" * 100)
    script.write_text(SCRIPT.format(out=str(out)))
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    begins, ends = done.stdout.splitlines()
    assert begins == "begins as __main__"
    assert ends == f"ends finished {read_summary(out)['env_steps']} {script}"
    assert list(temporary.iterdir()) == []


def test_a_run_that_cannot_work_is_refused_in_one_line_and_leaves_no_folder(tmp_path, capsys):
    assert main(inline_options(tmp_path / "run", "gossip", **{"gossip.topology": "bipartite", "learners": 3})) == 2
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    assert stderr.startswith("coterie: gossip.topology: ")
    assert os.listdir(tmp_path) == []


def test_gossip_in_lockstep_stays_within_proposition_1_and_compares_gradients(tmp_path):
    out = tmp_path / "run"
    changes = {"learners": 3, "gossip.tau": 0, "log.consensus": True, "log.cosines": 64, "log.every": 0.05}
    coterie.train(tiny(out, "gossip", **changes, **{"env.delay": 0.005}), quiet=True)
    lines = [line for line in read_metrics(out) if "consensus/bound" in line]
    assert len(lines) >= 3
    assert all(0 < line["consensus/distance"] <= line["consensus/bound"] for line in lines)
    cosines = [line for line in read_metrics(out) if "cosine/peers" in line]
    assert cosines
    assert all(-1 <= line[f"cosine/{pair}"] <= 1 for line in cosines for pair in ("0-1", "0-2", "1-2"))


def test_learners_that_only_fill_their_replays_agree_on_orders_and_the_end(tmp_path):
    """Under allreduce these travel with the gradients, of which there are none yet."""
    out = tmp_path / "run"
    changes = {"q.learn_start": 10**6, "replay.capacity": 20_000, "steps": 6000, "eval.every": 2000, "eval.episodes": 1}
    config = coterie.presets.dqn(env="CartPole-v1", out=str(out), learners=2, exchange="allreduce", **changes)
    coterie.train(config, quiet=True)
    summary = check_accounts(out)
    assert summary["status"] == "finished"
    assert 6000 <= summary["env_steps"] <= 6000 + 4 * 2 * 8 * 8
    assert summary["learner_steps"] == 0
    scored = [line["env_steps"] for line in read_metrics(out) if "eval/return" in line]
    assert len(scored) == len(set(scored)) >= 1


@pytest.mark.parametrize("exchange", ["hogwild", "store"])
def test_every_part_of_the_last_checkpoint_has_the_newest_shared_weights(tmp_path, exchange):
    """Learner 0 is through first, since the other's envs are slow."""
    slow_one = {"env.delay": 0.1, "env.delay_learner": 1, "eval.every": 0, "optim.schedule.kind": "constant"}
    slow_one["model.normalize_obs"] = True
    assert main(inline_options(tmp_path / "run", exchange, **slow_one)) == 0
    tensors, state = last_checkpoint(tmp_path / "run")
    assert all(row["learner_steps"] > 0 for row in state["learners"])
    first, second = (tensors[f"learner_{rank}/model"] for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)

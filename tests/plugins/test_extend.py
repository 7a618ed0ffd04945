"""Each file of the guides on custom parts is written to a folder outside the package and used in training."""

from __future__ import annotations

import json

import pytest
import torch

from coterie.cli.main import main
from coterie.config import Model
from coterie.plugins import named
from coterie.runs import checkpoint
from coterie.types import ObsSpec
from tests.plugins.page import evaluate, inside, train, train_here, write_files
from tests.support.commands import coterie


@pytest.fixture
def folder(tmp_path):
    names = ["late", "local_sgd", "spo", "robust", "reinforce", "corridor", "signpost", "residual", "patches"]
    assert write_files(tmp_path) == [f"{name}.py" for name in names]
    return tmp_path


def test_the_environment_of_the_page_is_solved(folder):
    longer = ["--env.kwargs", '{"length": 12}']
    train_here(folder, "run", "ppo", "--env", "corridor:Corridor", *longer, "--steps", "20000")
    assert evaluate(folder, "run") == pytest.approx(1 - 0.01 * 11, abs=1e-5)  # the shortest way, every time


def test_the_environment_with_text_of_the_page_is_solved(folder):
    train_here(folder, "run", "ppo", "--env", "signpost:Signpost", "--seed", "0", "--steps", "10000")
    assert evaluate(folder, "run") == 1.0  # without reading: 0.5


def test_the_torso_for_vectors_of_the_page_learns(folder):
    residual = ["--env", "CartPole-v1", "--seed", "0", "--model.torso", "residual:Torso"]
    assert train_here(folder, "run", "ppo", *residual, "--steps", "30000")["mean_return"] > 100  # a random policy: 20


@pytest.mark.slow
def test_the_torso_for_images_of_the_page_learns(folder):
    catch = ["--env", "coterie.envs.testing:Catch", "--env.kwargs", '{"image": true, "scale": 8}', "--seed", "0"]
    images = ["--model.torso", "patches:Torso", "--precision", "bf16"]
    assert train_here(folder, "run", "ppo", *catch, *images, "--steps", "24000")["mean_return"] > 0.2  # random: -0.6


@pytest.mark.parametrize("shape", [(40, 80, 3), (3, 80, 40)])
def test_the_torso_for_images_of_the_page_takes_both_layouts(folder, monkeypatch, shape):
    monkeypatch.syspath_prepend(str(folder))
    torso = named("model.torso", "patches:Torso")({"": ObsSpec(shape, "uint8")}, Model())
    assert torso(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, torso.size)


def test_the_algorithm_of_the_page_learns_and_is_found_again(folder):
    """It learns alone, is found again by resume and eval, and its loss is not PPO's."""
    cartpole = ["ppo", "--env", "CartPole-v1", "--seed", "0"]
    train(folder, "run", *cartpole, "--algorithm", "spo:SPO", "--steps", "40000")
    assert json.loads((folder / "run" / "config.json").read_text())["algorithm"] == "spo:SPO"
    done = coterie(folder, "resume", "run", "--steps", "60000")
    assert done.returncode == 0, done.stderr[-2000:]
    assert evaluate(folder, "run") > 250

    train_here(folder, "own", *cartpole, "--algorithm", "spo:SPO", "--steps", "2048")
    train_here(folder, "plain", *cartpole, "--steps", "2048")
    assert not same(weights(folder / "own", 0), weights(folder / "plain", 0))

    (folder / "spo.py").rename(folder / "elsewhere.py")
    done = coterie(folder, "eval", "run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "algorithm: cannot import 'spo:SPO': No module named 'spo'" in done.stderr


def test_the_algorithm_from_the_start_of_the_page_learns(folder):
    cartpole = ["--env", "CartPole-v1", "--seed", "0", "--steps", "40000"]
    cartpole += ["--algo.unroll-length", "100", "--log.norms", "9000"]
    summary = train_here(folder, "run", "a2c", "--algorithm", "reinforce:Reinforce", *cartpole)
    assert summary["mean_return"] > 40  # a random policy: 20
    assert evaluate(folder, "run", 10) > 60


@pytest.mark.parametrize(
    ("processes", "layout"),
    [  # the parent; two learners, or one with two actors, or one with a host: it asks the class
        (3, ["--learners", "2", "--exchange", "gossip"]),
        (4, ["--acting", "decoupled", "--decoupled.lockstep", "True", "--actors", "2"]),
        pytest.param(3, ["--acting", "central", "--central.lockstep", "True"], marks=pytest.mark.slow),
    ],
    ids=["gossip", "decoupled", "central"],
)
def test_every_process_finds_the_algorithm_of_the_page(folder, processes, layout):
    """Every process finds it: one that did not would act, or learn, as PPO does."""
    spy = "\nimport os\nopen('pids', 'a').write(f'{os.getpid()}\\n')\n"
    (folder / "spo.py").write_text((folder / "spo.py").read_text() + spy)
    train(folder, "run", "ppo", "--env", "CartPole-v1", "--algorithm", "spo:SPO", "--steps", "2000", *layout)
    assert len(set((folder / "pids").read_text().split())) == processes


def test_the_acting_of_the_page_takes_weights_at_every_eighth_rollout(folder):
    """Weights are taken at every eighth rollout: as many rows are 0, 1, ... 7 learner steps old."""
    o = ["--steps", "40000", "--env.num-envs", "8", "--algo.unroll-length", "10", "--seed", "0"]
    late = ["--acting", "inline", "--plugins.acting", "late:Late"]
    summary = train_here(folder, "run", "impala", "--env", "CartPole-v1", *late, *o)
    lags = {int(k): n for k, n in summary["policy_lag"].items()}
    assert sorted(lags) == list(range(8))
    assert max(lags.values()) - min(lags.values()) in (0, 80)  # rows of one rollout, where the last round is not whole
    assert summary["mean_return"] > 60  # a random policy: 20


def test_the_exchange_of_the_page_averages_weights_after_every_eighth_step(folder):
    """Two learners hold the same weights after every eighth step, and other ones in between."""
    # An env whose games do not end meanwhile: a rollout is 8 x 8 rows of each learner.
    o = ["--env", "Pendulum-v1", "--env.max-episode-steps", "100000", "--env.num-envs", "8"]
    o += ["--algo.unroll-length", "8", "--learners", "2", "--exchange", "local_sgd:LocalSGD"]
    for made in (16, 20):
        train_here(folder, f"run{made}", "a2c", *o, "--steps", str(made * 2 * 64))
        first, second = (weights(folder / f"run{made}", rank) for rank in (0, 1))
        assert same(first, second) == (made % 8 == 0)
    # 4 steps after the last mean, the resumed run makes its next one 4 steps on.
    with inside(folder):
        assert main(["resume", "run20", "--steps", str(24 * 2 * 64)]) == 0
    assert same(weights(folder / "run20", 0), weights(folder / "run20", 1))


def weights(run, rank: int) -> dict[str, torch.Tensor]:
    tensors, _ = checkpoint.load(checkpoint.latest(run / "checkpoints"))
    return checkpoint.learner(tensors, rank)["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, other[name]) for name, x in one.items())

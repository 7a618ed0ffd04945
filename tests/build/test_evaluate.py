"""Judging and watching a policy: whole games, budgets, a recurrent policy outside of training, a film."""

from __future__ import annotations

import pytest
import torch

import coterie
from coterie import presets
from coterie.build.evaluate import evaluate_run, load
from tests.launch.test_session import tiny


def test_evaluation_counts_whole_games_a_fixed_number_for_each_env(tmp_path):
    out = tmp_path / "run"
    coterie.train(tiny(out, steps=100), quiet=True)
    greedy = [evaluate_run(out, episodes=20, seed=s) for s in (1, 1, 2)]
    assert greedy[0] == greedy[1]
    assert greedy[0]["returns"] != greedy[2]["returns"]
    assert greedy[0]["episodes"] == 20
    assert greedy[0]["human_normalized"] is None
    returns = torch.tensor(greedy[0]["returns"])
    assert greedy[0]["mean_return"] == pytest.approx(float(returns.mean()))
    assert greedy[0]["stderr"] == pytest.approx(float(returns.std() / 20**0.5))
    sampled = evaluate_run(out, episodes=20, sampled=True)
    assert sampled["returns"] != greedy[0]["returns"]


def test_evaluation_stops_at_its_step_budget(tmp_path):
    out = tmp_path / "run"
    coterie.train(tiny(out, steps=100), quiet=True)
    from coterie.build.evaluate import Trial, evaluate

    policy = load(out)
    trial = Trial(50, sampled=True, max_steps=60)
    scores = evaluate(policy.algorithm, policy.model, policy.config, trial)
    assert scores.unfinished == 50 - len(scores.returns) > 0


def test_a_recurrent_policy_outside_of_training_keeps_and_resets_its_state(tmp_path):
    out = tmp_path / "run"
    coterie.train(tiny(out, steps=100, **{"model.core": "lstm", "model.core_size": 8}), quiet=True)
    policy = load(out)
    obs = torch.randn(3, 4).numpy()
    policy(obs)
    first = policy._player.state.clone()
    policy(obs)
    assert not torch.equal(policy._player.state, first)
    policy.reset(torch.tensor([True, False, True]).numpy())
    policy(obs)
    assert torch.allclose(policy._player.state[[0, 2]], first[[0, 2]])
    assert not torch.allclose(policy._player.state[1], first[1])


# imageio leaves its ffmpeg's pipes to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_watch_writes_a_film_of_real_frames(tmp_path):
    imageio = pytest.importorskip("imageio")
    from coterie.tools.watch import watch

    for env, size in (("Pong-v5", (210, 160)), ("CartPole-v1", None)):
        out = tmp_path / env
        changes = {"env.num_envs": 2, "env.decorrelate": 0, "env.max_episode_steps": 40, "ppo.minibatch_size": 16}
        changes |= {"ppo.batch_size": 0, "algo.unroll_length": 8}
        coterie.train(
            tiny(out, steps=10, **{"env.id": env, **changes})
            if size is None
            else presets.ppo(env=env, steps=10, out=str(out), **{"log.tensorboard": False, **changes}),
            quiet=True,
        )
        path, score, frames = watch(out)
        with imageio.get_reader(path) as reader:
            film = list(reader.iter_data())
        assert len(film) == frames > 5
        assert film[-1].std() > 1
        if size:
            assert film[0].shape[:2] == size
            assert score == 0  # forty steps of Pong: nobody has scored
        else:
            assert score == frames - 1  # CartPole: a point for each step

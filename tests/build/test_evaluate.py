"""Evaluating and watching a policy: whole episodes, budgets, a recurrent policy outside of training, a video."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from typing import Any

import gymnasium
import imageio
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.spaces import Box, Dict, Discrete
from imageio.plugins.ffmpeg import FfmpegFormat

import coterie
from coterie.build.evaluate import Trial, evaluate
from coterie.build.policy import evaluate_run, load
from coterie.cli.main import main
from coterie.envs.spaces import obs_fields
from coterie.errors import ConfigError, CoterieError
from coterie.tools.watch import watch
from tests.support.runs import small_ppo


def test_evaluation_counts_whole_episodes_and_stops_at_its_step_budget(tmp_path):
    out = tmp_path / "run"
    coterie.train(small_ppo(out, steps=100), quiet=True)
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
    policy = load(out)
    scores = evaluate(policy.algorithm, policy.model, policy.config, Trial(50, sampled=True, max_steps=60))
    assert scores.unfinished == 50 - len(scores.returns) > 0


def test_an_evaluation_says_how_far_it_is_and_ends_when_it_is_stopped(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    coterie.train(small_ppo(out, steps=100), quiet=True)
    monkeypatch.setattr("coterie.cli.ending.PROGRESS_S", 0.0)
    assert main(["eval", str(out), "--episodes", "3"]) == 0
    assert re.search(r"^coterie: [012] of 3 episodes, \d+ env steps so far$", capsys.readouterr().err, re.M)
    assert evaluate_run(out, episodes=3, stop=lambda done, steps: steps > 5)["unfinished"] == 3


class Scaled(gymnasium.Env):
    """Five steps, each worth `scale`."""

    observation_space, action_space = Dict(a=Box(0, 1, (2,), np.int8), b=Discrete(3)), Discrete(2)

    def __init__(self, scale=1.0, render_mode=None):
        self.scale, self.render_mode, self.left = scale, render_mode, 0

    def reset(self, *, seed=None, options=None):
        self.left = 5
        return {"a": np.zeros(2, np.int8), "b": 1}, {}

    def step(self, action):
        self.left -= 1
        return {"a": np.zeros(2, np.int8), "b": 1}, self.scale, self.left == 0, False, {}

    def render(self):
        return np.zeros((32, 32, 3), np.uint8) if self.render_mode == "rgb_array" else None


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_policy_plays_in_other_envs_with_the_same_spaces(tmp_path, capsys, monkeypatch):
    out, scale = tmp_path / "run", {"env.kwargs": {"scale": 5.0}}
    limit = {"eval.max_episode_steps": 4}
    coterie.train(small_ppo(out, steps=100, env=Scaled, **{"env.kwargs": {"scale": 2.0}}, **limit), quiet=True)
    for new, score in (({}, 8), (scale, 20), (scale | {"env.max_episode_steps": 3}, 15)):
        assert evaluate_run(out, episodes=3, **new)["mean_return"] == score
    other = {"env": partial(Scaled, scale=5.0), "env.kwargs": {}}
    assert evaluate_run(out, episodes=3, **other)["mean_return"] == 20
    with pytest.raises(ConfigError, match=r"^env\.max_episode_steps: -5 must"):
        load(out, **{"env.max_episode_steps": -5})
    with pytest.raises(ConfigError, match=r"^env\.kwargs: scale is also given by functools.partial"):
        evaluate_run(out, episodes=3, env=partial(Scaled, scale=5.0))
    with pytest.raises(ConfigError, match=r"^algo.gamma: in an existing run only env, .*env.kwargs"):
        evaluate_run(out, **{"algo.gamma": 0.5})
    more = ["--env.kwargs", '{"scale": 3}', "--env.max-episode-steps", "2"]
    assert main(["eval", str(out), "--episodes", "2", *more]) == 0
    assert "Scaled: 6.00 +- 0.00 (2 episodes" in capsys.readouterr().out
    assert main(["watch", str(out), *more]) == 0  # its constructor takes render_mode
    assert "3 frames, return 6.0" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^--out: \S+/w\.png must end in \.mp4 or \.gif$"):
        watch(out, str(tmp_path / "w.png"), **{"env.kwargs": {}})
    drawn = {"env": partial(Scaled, render_mode="rgb_array"), "env.kwargs": {}}
    assert watch(out, **drawn)[1:] == (4.0, 5)  # as an evaluation, to its limit
    monkeypatch.setattr(Scaled, "step", lambda self, action: int("x"))
    with pytest.raises(CoterieError, match=r"^the episode of .*Scaled: ValueError: invalid literal .* \(.*, line"):
        watch(out)
    first, *_, last = sorted((out / "checkpoints").glob("step_*"))
    assert [load(path).step for path in (first, last, out)] == [0, load(out).step, load(last).step]
    (tmp_path / "one").symlink_to(first)
    assert load(tmp_path / "one").step == load(last / ".." / first.name).step == 0
    shutil.copytree(first, tmp_path / "copied")
    with pytest.raises(ConfigError, match=r"^RUN: \S+/copied is a checkpoint outside of its run's folder$"):
        load(tmp_path / "copied")
    with pytest.raises(ConfigError, match=r"for one env use policy\.act"):
        load(out)({"a": np.zeros(2), "b": 1})
    with pytest.raises(ConfigError, match=r"^obs: a dict with keys a, b is needed, not an array$"):
        load(out)(np.zeros((1, 2)))
    with pytest.raises(ConfigError, match=r"^obs: 'b' is missing$"):
        load(out)({"a": np.zeros((1, 2))})
    with pytest.raises(ConfigError, match=r"^obs\['a'\] has numbers that its space's int8 cannot hold: 0.5 to 0.5$"):
        load(out)({"a": np.full((1, 2), 0.5), "b": np.ones(1, int)})
    with pytest.raises(ConfigError, match=r"^obs: its entries have 1 and 3 rows; each needs the same$"):
        load(out)({"a": np.ones((1, 2)), "b": np.ones(3, int)})
    assert load(out)({"a": np.ones((1, 2)), "b": np.ones(1, int)}).shape == (1,)
    (last / "manifest.json").unlink()
    for wrong in last, last.with_name("step_9"):
        with pytest.raises(ConfigError, match=rf"^RUN: \S+ is not a complete checkpoint; the run has {first.name}"):
            load(wrong)


class Nested(gymnasium.Env[Any, Any]):
    """Observations and actions that are no arrays."""

    observation_space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(2))))
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 2, (2,))))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return {"a": 1, "b": (np.zeros(2, np.float32), 0)}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], float(self.action_space.contains(action)), True, False, {}


def test_a_policy_acts_for_one_env_in_the_form_of_its_spaces(tmp_path):
    coterie.train(small_ppo(tmp_path / "run", steps=100, env=f"{__name__}:Nested"), quiet=True)
    policy, env = load(tmp_path / "run"), Nested()
    assert env.action_space.contains(policy.act(env.reset()[0], sampled=True))
    drawn = [policy.reset(seed=seed) or str(policy.act(env.reset()[0], sampled=True)) for seed in (3, 4, 3)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert evaluate_run(tmp_path / "run", episodes=3)["mean_return"] == 1


class Bytes(gymnasium.Env[Any, Any]):
    action_space = spaces.Discrete(2)

    def __init__(self, high: int) -> None:
        self.observation_space = spaces.Box(0, high, (4,), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(4, np.uint8), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 1.0, True, False, {}


def test_an_env_whose_bytes_have_another_bound_is_another(tmp_path):
    env = {"env": f"{__name__}:Bytes", "env.kwargs": {"high": 1}}
    coterie.train(small_ppo(tmp_path / "run", steps=100, **env), quiet=True)
    assert load(tmp_path / "run").act(np.ones(4, np.uint8)) in (0, 1)
    for high, now in ((9, r"uint8 \(4,\) up to 9"), (255, r"uint8 \(4,\)")):
        with pytest.raises(ConfigError, match=rf"observation uint8 \(4,\) up to 1 in the run, {now} now"):
            load(tmp_path / "run", **{"env.kwargs": {"high": high}})
    spec = json.loads((tmp_path / "run" / "spec.json").read_text())
    (tmp_path / "run" / "spec.json").write_text(json.dumps({k: x for k, x in spec.items() if k != "high"}))  # older
    with pytest.raises(ConfigError, match=r"observation uint8 \(4,\) in the run, uint8 \(4,\) up to 1 now"):
        load(tmp_path / "run")


def test_a_network_with_memory_that_sees_rewards_is_not_called_without(tmp_path):
    network = {"model.network": "tests.support.networks:Counter", "model.last_action_reward": True}
    coterie.train(small_ppo(tmp_path / "run", steps=100, **network), quiet=True)
    policy = load(tmp_path / "run")
    policy(np.zeros((3, 4)))
    with pytest.raises(ConfigError, match=r"^reward: this policy needs that of the last step"):
        policy(np.zeros((3, 4)))
    policy(np.zeros((3, 4)), reward=np.zeros(3))


def test_a_recurrent_policy_outside_of_training_keeps_and_resets_its_state(tmp_path):
    out = tmp_path / "run"
    memory = {"model.core": "lstm", "model.core_size": 8, "model.last_action_reward": True}
    coterie.train(small_ppo(out, steps=100, **memory), quiet=True)
    policy = load(out, 0)
    obs, last = torch.randn(3, 4).numpy(), {"reward": np.zeros(3)}
    with pytest.raises(ConfigError, match=r"^obs: \[B, 4\] is needed, not \[4\]; for one env use policy\.act$"):
        policy(obs[0])
    with pytest.raises(ConfigError, match=r"^obs: \[B, 4\] is needed, not \[3, 3\]$"):
        policy(obs[:, :3])
    for given, says in (
        (np.full((3, 4), np.nan), "obs: it holds NaN or infinite numbers"),
        (np.array([["a"] * 4]), "obs: numbers are needed, not <U1"),
        ([[1, 2, 3, 4], [1, 2]], "obs: not a batch of what the env gives: setting an array element"),
    ):
        with pytest.raises(ConfigError, match=rf"^{says}"):
            policy(given)
    for given in ({"x": obs}, {}):
        with pytest.raises(ConfigError, match=r"^obs: an array is needed, not a dict$"):
            policy(given)
    for wrong in {"episodes": 0}, {"episodes": 2.5}, {"episodes": "3"}, {"seed": -1}:
        with pytest.raises(ConfigError, match=rf"^{min(wrong)}: \S+ must be a whole number, at least \d$"):
            evaluate_run(out, **wrong)
    policy(obs)
    first = policy.player.state.clone()
    for given, says in (
        ({}, "reward: this policy needs that of the last step"),
        ({"reward": np.zeros(2)}, r"reward: \[3\] is needed, not \[2\]$"),
        ({"reward": np.full(3, np.inf)}, "reward: it holds something else than finite numbers"),
        ({"action_mask": np.ones((3, 2)), **last}, "action_mask: the env of this policy has none"),
    ):
        with pytest.raises(ConfigError, match=f"^{says}"):
            policy(obs, **given)
    policy(obs, **last)
    assert not torch.equal(policy.player.state, first)
    policy.reset([True, False, True])
    policy(obs, **last)
    assert torch.allclose(policy.player.state[[0, 2]], first[[0, 2]])
    assert not torch.allclose(policy.player.state[1], first[1])
    policy.fields = obs_fields("env", Discrete(4))
    with pytest.raises(ConfigError, match=r"^obs: not a batch of what the env gives"):
        policy(np.int64(1))


# imageio leaves its ffmpeg's pipes to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("env", "size"), [("Pong-v5", (210, 160)), ("CartPole-v1", None)])
def test_watch_writes_a_video_of_real_frames(tmp_path, env, size, monkeypatch):
    changes = {"env.num_envs": 2, "env.decorrelate": 0, "env.max_episode_steps": 40, "ppo.minibatch_size": 16}
    changes |= {"ppo.batch_size": 0, "algo.unroll_length": 8}
    coterie.train(small_ppo(tmp_path / "run", env=env, steps=10, **changes), quiet=True)
    path, score, frames = watch(tmp_path / "run")
    with imageio.get_reader(path) as reader:
        film = list(reader.iter_data())
    assert len(film) == frames > 5
    assert film[-1].std() > 1
    assert size in (None, film[0].shape[:2])
    assert score == (0 if size else frames - 1)  # forty steps of Pong score nothing; CartPole: a point for each step
    with pytest.raises(ConfigError, match=r"^--out: cannot write /proc/a.mp4: No such file or directory$"):
        watch(tmp_path / "run", "/proc/a.mp4")
    before, write = path.read_bytes(), FfmpegFormat.Writer._close
    monkeypatch.setattr(FfmpegFormat.Writer, "_close", lambda self: (write(self), os.truncate(self._filename, 99)))
    with pytest.raises(ConfigError, match=r"watch.mp4: the video is not whole; the disk may be full$"):
        watch(tmp_path / "run")
    assert (path.read_bytes(), list(path.parent.glob(".*.mp4"))) == (before, [])


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_watch_draws_a_vector_env_that_gymnasium_can_make_alone_and_refuses_others(tmp_path):
    changes = {"env.num_envs": 2, "env.backend": "vector", "algo.unroll_length": 8, "ppo.batch_size": 0}
    changes |= {"ppo.minibatch_size": 16, "steps": 20}
    for name, env, kwargs in (("id", "CartPole-v1", {"vectorization_mode": "sync"}), ("class", CartPoleVectorEnv, {})):
        coterie.train(small_ppo(tmp_path / name, env=env, **changes, **{"env.kwargs": kwargs}), quiet=True)
    assert watch(tmp_path / "id")[2] > 5
    with pytest.raises(ConfigError, match=r"^env\.backend: frames cannot be drawn with vector"):
        watch(tmp_path / "class")

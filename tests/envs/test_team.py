"""Several agents: each is a column, whether it is there or not, and everything else is as for any env."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie import presets
from coterie.build import validity
from coterie.build.evaluate import Trial, evaluate
from coterie.build.factory import make_algorithm, make_model
from coterie.build.resources import resolve_config
from coterie.envs.make import make_spec
from coterie.envs.spaces import random_actions
from coterie.errors import ConfigError
from coterie.tools.check_env import check_env
from coterie.tools.watch import watch
from tests.conftest import make_config
from tests.envs.env_harness import Seen, check_returns, make, pattern, play
from tests.support.cells import ON_POLICY
from tests.support.commands import run_example
from tests.support.crowd import Crowd

CROWD = "tests.support.crowd:Crowd"
# One is there all the time, one leaves at step 2, one comes at step 3.
PATTERNS = ["F....DF....DF", "F.TFFFF.TFFFF", "FFFF.DFFFF.DF"]


def check_crowd(seen: Seen) -> None:
    """By the env's arithmetic."""
    count, agent = seen.obs[..., 0], seen.obs[..., 2]
    real = seen.real
    columns = np.broadcast_to(np.arange(agent.shape[1]) % 3, agent.shape)
    np.testing.assert_array_equal(agent[1:][real], columns[1:][real])
    np.testing.assert_array_equal(count[1:][real], count[:-1][real] + 1)
    np.testing.assert_array_equal(seen.reward[1:][real], (16 * count[:-1] + 4 * agent[:-1] + seen.action)[real])
    for field in (seen.reward, seen.terminated, seen.truncated):
        assert not field[1:][~real].any()
    np.testing.assert_array_equal(~np.isnan(seen.episode_return), seen.done)
    check_returns(seen)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("groups", "threads"), [(1, 1), (1, 3), (2, 2)])
def test_agents_that_leave_or_come_later_have_masked_rows(groups: int, threads: int, bare: bool) -> None:
    with make(CROWD, 12, groups=groups, threads=threads, kwargs={"bare": bare}) as envs:
        assert envs.spec.agents == 3
        seen = play(envs, 12)
    assert [pattern(seen, i) for i in range(12)] == PATTERNS * 4
    assert seen.env_id[0].tolist() == list(range(12))
    if not bare:
        check_crowd(seen)


class Forgetful(Crowd):
    """Its `agents` still lists those whose episode has ended."""

    def step(self, actions):
        listed, self.agents = {*self.agents}, list(actions)
        answer = super().step(actions)
        self.agents = [a for a in self.possible_agents if a in listed.union(self.agents)]
        return answer


def test_an_agent_whose_episode_has_ended_is_gone_although_the_env_lists_it() -> None:
    with make(f"{__name__}:Forgetful", 3) as envs:
        seen = play(envs, 12)
    assert [pattern(seen, i) for i in range(3)] == PATTERNS
    check_crowd(seen)


class Reviving(Crowd):
    """Agent 1, which leaves at step 2, is back at step 3."""

    def step(self, actions):
        answer = super().step(actions)
        if self.steps == 3:
            self.agents.insert(1, "agent_1")
            answer[0].update(self._see(["agent_1"]))
            answer[4]["agent_1"] = {}
        return answer


def test_an_agent_that_comes_back_begins_another_episode() -> None:
    with make(f"{__name__}:Reviving", 2, kwargs={"lives": [[0, 9], [0, 2]]}, max_episode_steps=5) as envs:
        seen = play(envs, 12)
    assert [pattern(seen, i) for i in range(2)] == ["F....TF....TF", "F.TF.TF.TF.TF"]


def test_an_evaluation_ends_though_an_agent_never_appears() -> None:
    lives = json.dumps({"lives": [[0, 5], [9, 12]]})
    config = resolve_config(make_config(**{"env.id": CROWD, "env.kwargs": lives, "env.num_envs": 2}))
    spec, stops = make_spec(config.env, config.atari), iter([False] * 200 + [True])
    trial = Trial(4, max_steps=100, stop=lambda *_: next(stops))
    scores = evaluate(make_algorithm(config, spec), make_model(config, spec), config, trial)
    assert (len(scores.returns), scores.unfinished) == (2, 2)
    assert not next(stops)  # its budget ended it


def test_a_time_limit_truncates_all_that_are_there() -> None:
    with make(CROWD, 3, max_episode_steps=4) as envs:
        seen = play(envs, 10)
    assert [pattern(seen, i) for i in range(3)] == ["F...TF...TF", "F.TFFF.TFFF", "FFFFTFFFFTF"]
    check_crowd(seen)


@pytest.mark.parametrize("repeat", [2, 3])
def test_an_action_is_repeated_for_those_that_are_there(repeat: int) -> None:
    """The agent that comes at step 3 does so in the middle of a repetition, or at its end."""
    with make(CROWD, 3, action_repeat=repeat) as envs:
        seen = play(envs, 8)
    expected = {2: ["F..DF..DF", "FTFFFTFFF", "FFFDFFFDF"], 3: ["F.DF.DF.D", "FTFFTFFTF", "FFDFFDFFD"]}
    assert [pattern(seen, i) for i in range(3)] == expected[repeat]
    count = seen.obs[..., 0]
    steps = [n for a, b in zip(count[:-1, 0], count[1:, 0], strict=True) for n in [np.arange(a, b)]]
    wanted = [(16 * n + seen.action[t, 0]).sum() for t, n in enumerate(steps)]
    np.testing.assert_array_equal(seen.reward[1:, 0], np.where(seen.is_first[1:, 0], 0, wanted))
    check_returns(seen)


def test_an_agent_that_comes_and_leaves_within_a_repetition_has_no_episode() -> None:
    with make(CROWD, 2, action_repeat=3, kwargs={"lives": [[0, 5], [1, 2]]}) as envs:
        seen = play(envs, 6)
    assert [pattern(seen, i) for i in range(2)] == ["F.DF.DF", "FFFFFFF"]
    assert np.isnan(seen.episode_return[:, 1]).all()
    check_returns(seen)


def test_random_steps_before_the_run_are_those_of_whole_envs() -> None:
    with make(CROWD, 12, decorrelate=9) as envs:
        seen = play(envs, 30)
    assert len({tuple(seen.obs[0, i]) for i in range(0, 12, 3)}) > 1
    for agent, text in enumerate(PATTERNS):
        for i in range(agent, 12, 3):
            assert text[1:7] * 2 in pattern(seen, i)
            # The first episode that is reported is the first whole one.
            at = np.flatnonzero(~np.isnan(seen.episode_return[:, i]))[0]
            assert seen.episode_length[at, i] == (5, 2, 2)[agent]


@pytest.mark.parametrize(("how", "says"), [("raise", "ValueError: broken by design"), ("nan", "reward is not finite")])
def test_an_env_that_breaks_is_replaced_with_all_its_agents(how: str, says: str) -> None:
    with make(CROWD, 6, on_error="replace", kwargs={"how": how, "at": 4}) as envs:
        seen = play(envs, 8)
        assert (envs.reports.replaced, len(reasons := envs.reports.take().failures)) == (4, 4)
    assert reasons[1].startswith(f"replaced env 3: {says}")
    assert [pattern(seen, i) for i in range(6)] == ["F...F...F", "F.TFF.TFF", "FFFFFFFFF"] * 2
    check_returns(seen)


@pytest.mark.parametrize(("limit", "bare"), [(0, False), (4, True)])
@pytest.mark.parametrize("where", ["obs", "info"])
def test_each_agent_has_its_action_mask(where: str, limit: int, bare: bool) -> None:
    """At a time limit, too, and where the last observation is that of the step before; nothing is legal at an end."""
    with make(CROWD, 6, kwargs={"mask": where, "bare": bare}, max_episode_steps=limit) as envs:
        rng = np.random.default_rng(0)
        for _ in range(20):
            seen = envs.recv(0)
            envs.send(0, random_actions(envs.spec.action, rng, 6, seen.obs))  # the env raises at an illegal one
            assert isinstance(seen.obs, dict)
            (x,), mask = (y for k, y in seen.obs.items() if k != "action_mask"), seen.obs["action_mask"]
            legal = np.arange(4) != x[:, :1] % 4 if bare else np.ones((6, 4), bool)
            np.testing.assert_array_equal(mask[seen.truncated], legal[seen.truncated])
            assert mask[seen.terminated].all()


def test_an_env_of_pettingzoo_is_found_by_its_id() -> None:
    with make("pettingzoo/classic/rps_v2", 4) as envs:
        seen = play(envs, 17)
    assert [pattern(seen, i) for i in range(4)] == ["F" + "." * 14 + "TF."] * 4
    with pytest.raises(
        ConfigError, match="has no such parallel environment; nearest: pettingzoo/butterfly/pistonball_v6"
    ):
        make("pettingzoo/butterfly/pistonball_v5", 20)


def test_agents_must_have_the_same_spaces() -> None:
    says = r"but agent_0 and agent_2 differ in their action spaces, Discrete\(4\) and Discrete\(5\); SuperSuit's pad"
    with pytest.raises(ConfigError, match=says):
        make_spec(make_config(env=CROWD, **{"env.kwargs": '{"odd": true}'}).env, make_config().atari)


def test_the_number_of_agents_is_rounded_up_for_presets_and_refused_otherwise() -> None:
    assert presets.ppo(env=CROWD).env.num_envs == 18  # of 16
    assert presets.make("gala-ppo", env=CROWD).env.num_envs == 9  # of 8
    assert resolve_config(presets.impala(env=CROWD, learners=1), 4).env.num_envs % 3 == 0
    for changes, near in [({}, "15 or 18"), ({"env.groups": 2}, "12 or 18"), ({"env.num_envs": 2}, "3")]:
        bad = resolve_config(presets.ppo(env=CROWD, learners=1, **{"env.num_envs": 16, **changes}))
        with pytest.raises(ConfigError, match=rf"env.num_envs: \d+ must be a multiple of \d, as .* 3 agents: {near}$"):
            validity.check(bad, make_spec(bad.env, bad.atari))
    with pytest.raises(ConfigError, match=r"env\.num_envs: 4 in a group must be a multiple of the env's 3 agents"):
        make(CROWD, 4)


@pytest.mark.parametrize(
    ("algorithm", "acting"),
    [
        ("ppo", "inline"), ("a2c", "decoupled"), ("vtrace", "central"),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [("dqn", "inline"), ("r2d2", "decoupled")]),
    ],
)  # fmt: skip
def test_a_run_of_several_agents_counts_none_of_the_absent(algorithm: str, acting: str, tmp_path: Path) -> None:
    """Returns and lengths of all agents, in training and in evaluation, with a core and action masks."""
    value = {"q.learn_start": 150, "q.batch_size": 8, "q.target_every": 40, "replay.capacity": 2000}
    core = {} if algorithm == "dqn" else {"model.core": "lstm", "model.core_size": 8}
    lengths = dict.fromkeys(("r2d2.length", "r2d2.burn_in", "r2d2.stride"), 5)
    run = make_config(
        algorithm=algorithm, acting=acting, env=CROWD, steps=600, learners=1, out=str(tmp_path / "run"),
        **{
            "env.kwargs": json.dumps({"mask": "obs"}), "env.num_envs": 6, "algo.unroll_length": 5,
            "ppo.minibatch_size": 10, "decoupled.lockstep": algorithm in ON_POLICY, **value, **core, **lengths,
        },
    )  # fmt: skip
    summary = coterie.train(run, quiet=True)
    assert summary["status"] == "finished"
    scores = coterie.evaluate_run(tmp_path / "run", episodes=4)
    assert scores["episodes"] == 6  # of two envs with three agents each
    assert scores["mean_length"] == 3  # 5, 2 and 2 steps
    assert len(coterie.evaluate_run(tmp_path / "run", episodes=100)["returns"]) == 102


def test_agents_with_one_policy_learn_what_takes_two(tmp_path: Path) -> None:
    """In the example: robots that move at random have a mean return of 0.18, runs of 60,000 steps one of 0.8."""
    printed = run_example("multi_agent.py", tmp_path, "15000")
    assert float(printed.split()[-3]) > 0.4


def test_check_env_runs_the_test_of_pettingzoo_besides_its_own() -> None:
    assert "return the exact same space object" in check_env(CROWD)[0]
    assert check_env(CROWD, kwargs='{"how": "nan", "at": 2}')[0] == "reward: nan; a run replaces an env that gives it"
    assert check_env(lambda: Crowd(how="new", at=2))[0] == "agents contains ['x'], which possible_agents does not"
    assert check_env(lambda: Crowd(mask="info")) == []
    old = type("Old", (Crowd,), {"step": lambda self, actions: ({}, {}, {}, {})})
    assert check_env(old)[0] == "step must return (observation, reward, terminated, truncated, info), not 4 values"
    assert check_env("pettingzoo/classic/rps_v2", steps=20) == []


def test_watch_records_until_all_agents_are_done(tmp_path: Path) -> None:
    run = make_config(env=CROWD, steps=60, learners=1, out=str(tmp_path / "run"), **{"env.num_envs": 3})
    coterie.train(run, quiet=True)
    path, score, frames = watch(tmp_path / "run")
    assert path.exists()
    assert frames == 6
    assert score > 0

"""Self-play: whose turn it is, opponents that do not learn, and the rating by its formula."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import coterie
from coterie import presets
from coterie.build.factory import make_model
from coterie.build.policy import Policy
from coterie.build.resources import make_spec, resolve_config
from coterie.envs.gym import describe, layout, make_instance
from coterie.envs.spaces import random_actions
from coterie.errors import ConfigError
from coterie.runs.metrics import read_metrics
from coterie.tools import duel, selfplay
from coterie.tools.duel import Duel
from coterie.tools.selfplay import SelfPlay
from coterie.types import MASK
from tests.support.commands import run_example
from tests.support.crowd import DUOS, Crowd
from tests.tools.replay.test_replay import replayed


def test_a_full_disk_does_not_end_self_play(tmp_path, monkeypatch):
    """What it refused is tried again at the next checkpoint."""
    said = list[str]()
    run = SimpleNamespace(folder=tmp_path, log=said.append, recorded={}, set_env=lambda *_: None)
    checkpoint = tmp_path / "step_7"
    (checkpoint / "learner_0").mkdir(parents=True)
    (checkpoint / "learner_0" / "model.safetensors").write_bytes(b"weights")
    callback = SelfPlay()
    callback.on_start(run)
    monkeypatch.setattr(selfplay, "write_whole", lambda *_: os_error())
    callback.on_checkpoint(run, checkpoint)
    callback.on_checkpoint(run, checkpoint)
    assert said == ["self-play: games are not played against this checkpoint: No space left on device"]
    assert list(callback.members) == ["random"]
    monkeypatch.undo()
    callback.on_checkpoint(run, checkpoint)
    assert list(callback.members) == ["random", "7"]


def os_error():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_one_side_is_played_to_the_end_from_either_side() -> None:
    env, rng, seen = Duel("classic/tictactoe_v3"), np.random.default_rng(0), set[tuple[str, float]]()
    obs, _ = env.reset(seed=1)
    for _ in range(60):
        over = False
        while not over:
            ours, theirs = obs["observation"].sum((0, 1))
            assert ours - theirs == (0 if env.me == "player_1" else -1)  # it is our turn
            assert obs["action_mask"].sum() == 9 - ours - theirs
            action = int(rng.choice(np.flatnonzero(obs["action_mask"])))
            obs, reward, over, truncated, _ = env.step(action)
            assert not truncated
            assert over or reward == 0
        seen.add((env.me, reward))
        assert env.step(0)[1] == 0  # it is over
        obs, _ = env.reset()
    assert seen >= {(me, reward) for me in ("player_1", "player_2") for reward in (1.0, -1.0)}


def test_both_sides_of_a_game_without_turns_act_at_once() -> None:
    env = Duel("classic/rps_v2")
    env.reset(seed=1)
    steps = [env.step(0) for _ in range(15)]  # rock each time
    assert [cut for _, _, _, cut, _ in steps] == [False] * 14 + [True]
    theirs = [int(obs) for obs, *_ in steps[:-1]]  # rock, paper, scissors
    assert {*theirs} == {0, 1, 2}
    assert [reward for _, reward, *_ in steps[:-1]] == [(0, -1, 1)[move] for move in theirs]


@pytest.mark.parametrize(
    ("ends", "seen"),
    [((5, 2), {"agent_0": (5, 160), "agent_1": (2, 24)}), ((2, 5), {"agent_0": (2, 16), "agent_1": (5, 180)})],
)
def test_a_side_plays_on_when_the_other_has_left(ends: tuple[int, int], seen: Any) -> None:
    """Agent 0 terminates, agent 1 is truncated."""
    env, found = Duel("tests.support.crowd:Crowd", lives=[(0, end) for end in ends]), dict[str, Any]()
    env.reset(seed=1)
    for _ in range(8):
        steps = 1
        while not any(env.step(0)[2:4]):
            steps += 1
        found[env.me] = steps, env.total
        env.reset()
    assert found == seen


def test_an_observation_named_action_mask_is_no_mask_of_continuous_actions(monkeypatch: Any) -> None:
    box = DUOS["Box"][1]
    monkeypatch.setitem(DUOS, "named", (spaces.Dict({MASK: box, "x": box}), box, None))
    env = Duel("tests.support.crowd:Duo", kind="named")
    env.reset(seed=1)
    assert not env.step(np.zeros(2))[2]


def test_closing_one_side_closes_the_game(monkeypatch: Any) -> None:
    closed = list[Any]()
    monkeypatch.setattr(Crowd, "close", lambda self: closed.append(self))
    Duel("tests.support.crowd:Crowd", lives=[(0, 5)] * 2).close()
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("game", "says"),
    [
        ("tests.support.crowd:uneven", r"same spaces; .*Discrete\(5\)"),
        ("butterfly/knights_archers_zombies_v11", "needs a game for two sides"),
    ],
)
def test_games_that_are_not_for_two_equals_are_refused(game: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Duel(game)


def test_the_rating_follows_elos_formula_and_reads_each_result_once(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(folder=tmp_path, recorded={}, set_env=lambda name, value: None)
    rating = SelfPlay()
    rating.on_start(run)
    rating.members["7"] = 400.0
    cut = "7 0random 1.0\n7 0"  # by a full disk, twice
    (tmp_path / "selfplay" / "results" / "1").write_text(f"random 1.0\n7 0.5\ngone 1.0\n{cut}")
    rating.on_rollout(run)
    rating.on_end(run)
    rating.on_end(run)
    assert json.loads((tmp_path / "selfplay" / "pool.json").read_text())["elo"] == rating.elo
    first = 8 * (1 - 0.5)
    second = 8 * (0.5 - 1 / (1 + 10 ** ((400 - first) / 400)))
    assert rating.elo == pytest.approx(first + second)
    expected = {"selfplay/elo": rating.elo, "selfplay/pool": 2, "selfplay/win_rate": 0.75}
    assert run.recorded == pytest.approx(expected)
    resumed = SelfPlay()
    resumed.on_start(run)
    assert resumed.members == {"random": 0.0}, "a power cut left a member without its weights"


@pytest.mark.parametrize("kind", DUOS)
def test_opponents_of_both_kinds_play_in_every_space(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    game, kwargs = "tests.support.crowd:Duo", {"kind": kind}
    wanted = presets.make("ppo", f"selfplay/{game}", learners=1, device="cpu", **{"env.kwargs": json.dumps(kwargs)})
    config = resolve_config(wanted)
    spec = make_spec(config.env, config.atari)
    policy = Policy(tmp_path, config, spec, 0, make_model(config, spec))
    monkeypatch.setattr(duel, "frozen", lambda folder, name: policy)
    (tmp_path / "results").mkdir()
    env, rng, seen = Duel(game, **kwargs), np.random.default_rng(0), set[str]()
    env.pool = {"folder": str(tmp_path), "members": ["random", "7"]}
    declared = describe(game, env, 0)
    arrays = {name: np.zeros(*of) for name, of in layout(declared, 1).items()}
    instance = make_instance(game, env, 1, range(1), arrays, declared.mask)
    for _ in range(100):
        if instance.restart:
            instance.reset()
            seen.add(env.opponent)
        else:
            legal = {MASK: arrays[f"obs/{MASK}"]} if spec.masked else None
            arrays["action"][:] = declared.actions.to_env(random_actions(spec.action, rng, 1, legal))
            instance.step()  # the game raises at an action that is not in its space, or not legal
    assert seen == {"random", "7"}


def test_an_opponent_that_has_left_the_pool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Duel("classic/rps_v2")
    env.pool = {"folder": str(tmp_path), "members": ["7"]}
    with pytest.raises(ConfigError, match=f"the opponent 7 has left the pool of {tmp_path.parent}$"):
        env.reset(seed=1)
    monkeypatch.setenv(duel.REPLAYED, str(tmp_path / "moved" / "selfplay"))
    with pytest.raises(ConfigError, match=r"the opponent 7 has left the pool of .*/moved; .* before that game"):
        env.reset(seed=1)


class Small(SelfPlay):
    size = 3


@pytest.mark.parametrize(
    ("preset", "game"),
    [("ppo", "classic/tictactoe_v3"), pytest.param("impala", "classic/rps_v2", marks=pytest.mark.slow)],
    ids=["inline", "decoupled"],
)
def test_a_run_keeps_a_pool_that_it_resumes_with(preset: str, game: str, tmp_path: Path) -> None:
    small = {"env.num_envs": 4, "env.threads": 1, "ppo.minibatch_size": 32}
    if preset == "impala":
        small |= {"model.core": "lstm", "model.core_size": 8}
    log = {"log.checkpoint_every": 0.5, "log.every": 0.2, "log.tensorboard": False}
    config = presets.make(
        preset, f"selfplay/{game}", learners=1, steps=600, out=str(tmp_path / "run"), device="cpu", **small, **log
    )
    assert resolve_config(resolve_config(config)).callbacks == ("coterie.tools.selfplay:SelfPlay",)
    assert coterie.train(config, quiet=True)["status"] == "finished"
    pool = json.loads((tmp_path / "run" / "selfplay" / "pool.json").read_text())
    assert len(pool["members"]) >= 2
    assert pool["members"]["random"] == 0
    lines = [line for line in read_metrics(tmp_path / "run") if "selfplay/win_rate" in line]
    assert 0 < lines[-1]["selfplay/win_rate"] < 1
    assert read_metrics(tmp_path / "run")[-1]["selfplay/elo"] == pool["elo"]
    if preset == "ppo":  # a replay plays the same games, which the rating does not count again
        assert replayed(tmp_path / "run", "", 1)[0].rollouts == 1
        assert not list((tmp_path / "run" / "selfplay" / "results").iterdir())
    coterie.resume(tmp_path / "run", steps=1200, quiet=True)
    after = json.loads((tmp_path / "run" / "selfplay" / "pool.json").read_text())
    assert len(after["members"]) > len(pool["members"])
    assert after["elo"] != pool["elo"]
    assert after["members"].items() >= pool["members"].items()
    files = {file.stem for file in (tmp_path / "run" / "selfplay").glob("*.safetensors")}
    assert files == after["members"].keys() - {"random"}


def test_the_oldest_checkpoint_leaves_a_full_pool_and_its_file_a_little_later(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(folder=tmp_path, recorded={}, set_env=lambda name, value: None)
    rating = Small()
    rating.on_start(run)
    for step in (0, 10, 20, 30):
        folder = tmp_path / "checkpoints" / f"step_{step:012d}" / "learner_0"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        rating.on_checkpoint(run, folder.parent)
    assert list(rating.members) == ["random", "20", "30"]
    assert sorted(file.stem for file in rating.folder.glob("*.safetensors")) == ["10", "20", "30"]


@pytest.mark.slow
def test_the_example_finds_the_best_moves_of_nim(tmp_path: Path) -> None:
    printed = run_example("self_play.py", tmp_path, "15000")
    found = re.search(r"Elo (-?\d+); best moves (\d+) of 16; .* player (-?[\d.]+)", printed)
    assert found, printed
    elo, right, score = map(float, found.groups())
    assert elo > 50
    assert right > 8  # by chance 5
    assert score > 0.5

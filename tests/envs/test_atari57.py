"""Human-normalized scores: the published table, and every spelling of a game's id."""

from __future__ import annotations

import statistics

import pytest

from coterie.envs.atari57 import SCORES, game, human_normalized


def test_all_57_games_and_each_is_an_envpool_id() -> None:
    import envpool

    found = {game(name) for name in envpool.list_all_envs() if name.endswith("-v5")} - {None}
    assert found == set(SCORES)
    assert len(SCORES) == 57


@pytest.mark.parametrize(
    ("env_id", "score", "normalized"),
    [
        ("Pong-v5", 21.0, 41.7 / 35.3),
        ("Pong-v5", -20.7, 0.0),
        ("Breakout-v5", 30.5, 1.0),
        ("BeamRider-v5", 363.9, 0.0),
        ("MontezumaRevenge-v5", 4753.3, 1.0),
        ("Skiing-v5", -17098.1, 0.0),
        ("VideoPinball-v5", 17667.9, 1.0),
    ],
)
def test_scores_are_normalized_by_the_published_table(env_id: str, score: float, normalized: float) -> None:
    assert human_normalized(env_id, score) == pytest.approx(normalized, abs=1e-12)


def test_the_median_of_random_play_is_0_and_of_people_1() -> None:
    for column, expected in ((0, 0.0), (1, 1.0)):
        scores = [human_normalized(name, pair[column]) for name, pair in SCORES.items()]
        assert statistics.median(s for s in scores if s is not None) == pytest.approx(expected)
        assert all(high > low for low, high in SCORES.values())


def test_a_game_is_known_by_each_spelling_of_its_id_and_other_envs_have_no_reference() -> None:
    for env_id in ("Pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4", "Pong-v4", "PongDeterministic-v0", "Pong"):
        assert game(env_id) == "pong"
    for env_id in ("CartPole-v1", "PongRam-v5", "my.module:Pong", "ALE/Tetris-v5", ""):
        assert human_normalized(env_id, 1.0) is None

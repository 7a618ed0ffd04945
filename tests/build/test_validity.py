"""What messages of refused combinations offer, and where they are quoted; tests/cli/test_cli.py has each refusal."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from coterie import presets
from coterie.build import validity
from coterie.build.resources import resolve_config
from coterie.cli.options import config_of, possible
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from coterie.types import ActionSpec, ObsSpec, Spec

TROUBLESHOOTING = Path(__file__).parents[2] / "docs/guides/troubleshooting.md"


@pytest.mark.parametrize("changes", [{"env": "Pendulum-v1", "algorithm": "dqn"}, {"acting": "decoupled"}])
def test_the_page_of_troubleshooting_quotes_a_refusal_as_it_is(changes):
    config = presets.ppo(**{"env": "CartPole-v1"} | changes)
    with pytest.raises(ConfigError) as error:
        validity.check(resolve_config(config), make_spec(config.env, config.atari))
    assert f"| `{error.value}` |" in TROUBLESHOOTING.read_text()


def test_a_network_without_noisy_layers_is_refused_with_q_noisy(monkeypatch):
    monkeypatch.syspath_prepend(str(TROUBLESHOOTING.parents[2] / "examples"))
    config = presets.dqn("CartPole-v1", **{"model.network": "networks:Simba", "q.noisy": True})
    with pytest.raises(ConfigError, match=r"^q\.noisy: model\.network has no NoisyLinear"):
        validity.check(resolve_config(config), make_spec(config.env, config.atari))


def test_a_network_that_reads_the_last_reward_is_refused_where_single_steps_are_learned():
    for preset, says in (presets.a2c, ""), (presets.dqn, "model: its output for a step depends on the step before"):
        config = preset("CartPole-v1", **{"model.network": "tests.support.networks:Rewarded"})
        with pytest.raises(ConfigError, match=says) if says else nullcontext():
            validity.check(resolve_config(config), make_spec(config.env, config.atari))


def test_a_secondary_learner_needs_a_replay(monkeypatch):
    monkeypatch.syspath_prepend(str(TROUBLESHOOTING.parents[2] / "examples"))
    config = resolve_config(config_of(["pqn:pqn", "--env", "CartPole-v1", "--q.secondary-batch", "64"]))
    with pytest.raises(ConfigError, match=r"^q\.secondary_batch: 64 needs one learner with a replay"):
        validity.check(config, make_spec(config.env, config.atari))


@pytest.mark.parametrize("more", [["--decoupled.lockstep", "True"], ["--algorithm", "vtrace"],
                                  ["--algorithm", "ppo", "--ppo.proximal", "True"]])  # fmt: skip
def test_what_the_refusal_of_actors_with_older_weights_offers_is_possible(more):
    possible(config_of(["a2c", "--env", "CartPole-v1", "--acting", "decoupled", *more]))


VECTOR, TWO, BOX = (
    ObsSpec((4,), "float32"),
    ActionSpec("categorical", (2,)),
    ActionSpec("continuous", (), (-1.0,), (1.0,)),
)


@pytest.mark.parametrize(
    ("obs", "action", "found"),
    [
        ({"": ObsSpec((8,), "float32")}, TWO, "observation float32 (8,) in the run, float32 (4,) now"),
        ({"": VECTOR}, ActionSpec("categorical", (4,)), "4 actions in the run, 2 actions now"),
        ({"": VECTOR}, BOX, "1 continuous action from (-1.0,) to (1.0,) in the run, 2 actions now"),
        ({"": VECTOR, "pos": VECTOR}, TWO, "observation 'pos' float32 (4,) in the run, absent now"),
    ],
)
def test_of_other_spaces_what_differs_alone_is_named(tmp_path, obs, action, found):
    config, path = presets.ppo(env="CartPole-v1"), tmp_path / "spec.json"
    path.write_text(json.dumps(Spec("another", {"": VECTOR}, TWO).to_json()))
    assert validity.check_spec(tmp_path, config).env_id == "CartPole-v1"
    path.write_text(json.dumps(Spec("another", obs, action).to_json()))
    with pytest.raises(ConfigError) as error:
        validity.check_spec(tmp_path, config)
    assert str(error.value) == f"env.id: the spaces differ from the run's: {found}"

"""What `env.id` names: ids of the user's modules, and of packages that are not installed."""

import sys

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from coterie import config
from coterie.envs.make import make_spec
from coterie.errors import ConfigError, CoterieError
from tests.envs.env_harness import COUNTING, make, pattern, play


@pytest.mark.parametrize(("module", "env_id"), [("walkers", "walkers:Ours/Walker-v0"), ("ale_py", "ALE/Pong-v5")])
def test_importing_a_module_registers_an_id(module, env_id, tmp_path, monkeypatch):
    name = env_id.removeprefix("walkers:")
    (tmp_path / f"{module}.py").write_text(f"import gymnasium; gymnasium.register('{name}', '{COUNTING}')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        with make(env_id, 2, threads=2, kwargs={"length": 5}) as envs:
            assert pattern(play(envs, 12), 1) == "F....DF....TF"
    finally:
        gymnasium.registry.pop(name, None)


def test_without_ale_py_its_ids_point_to_envpool(monkeypatch):
    monkeypatch.setattr("coterie.envs.make.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^env.id 'ALE/Pong-v5' needs ale-py .*; EnvPool's Pong-v5 is the same game"):
        make_spec(config.Env("ALE/Pong-v5"), config.Atari())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (COUNTING, ".* registers it; give MODULE:Walker-v0, of that module, or the class itself"),
        (play, ".* registers it; give MODULE:Walker-v0, of that module, or"),
        ("gymnasium.envs.classic_control:CartPoleEnv", " cannot be made: NameNotFound: .*; an id that your own module"),
    ],
)
def test_an_id_that_no_worker_process_has_needs_its_module(made, says, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Walker-v0", EnvSpec("Walker-v0", made))
    with pytest.raises(CoterieError, match=f"^env.id 'Walker-v0'(:|){says}"), make("Walker-v0", 1) as envs:
        play(envs, 1)


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("Pong-v5", r"EnvPool is missing \(pip install .*\); try `coterie list envs`"),
        ("CartPol-v1", "; nearest: CartPole-v1"),
        ("LunarLander-v3", "^env.id 'LunarLander-v3' needs the extra 'gym': pip install "),
    ],
)
def test_without_the_extras_an_id_points_to_the_one_that_has_it(env_id, says, monkeypatch):
    monkeypatch.setattr("coterie.envs.make.modules", dict)
    monkeypatch.setattr("coterie.envs.pool.modules", dict)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(ConfigError, match=says):
        make_spec(config.Env(env_id, kwargs='{"gravity": -9}'), config.Atari())

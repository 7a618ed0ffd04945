"""EnvPool is imported without the libraries of its families, and nobody notices."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

LIBRARIES = "[m for m in sys.modules if m.startswith('envpool.') and m.endswith('_envpool')]"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_every_env_is_registered_and_no_family_is_loaded():
    lazily = run(
        "import sys; from coterie.envs.families import import_envpool; envpool = import_envpool();"
        f"print(sorted(envpool.registration.registry.specs)); assert not {LIBRARIES}, {LIBRARIES}"
    )
    assert "CartPole-v1" in lazily
    assert lazily == run("import envpool; print(sorted(envpool.registration.registry.specs))")


def test_a_family_is_loaded_at_its_first_use():
    loaded = run(
        "import sys; from coterie.envs.pool import has_env, pool_declared; from coterie.config import Atari, Env;"
        "assert has_env('Pong-v5'); print(pool_declared(Env('CartPole-v1'), Atari()).spec.env_id);"
        f"print({LIBRARIES})"
    )
    assert "CartPole-v1" in loaded
    assert "atari" not in loaded


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="no jax")
def test_jax_is_not_imported_and_still_there():
    run(
        "import sys; from coterie.envs.pool import pool_declared; from coterie.config import Atari, Env;"
        "pool_declared(Env('Pong-v5'), Atari()); assert 'jax' not in sys.modules; import jax;"
        "pool_declared(Env('CartPole-v1'), Atari()); assert sys.modules['jax'] is jax"
    )


def test_code_of_the_user_finds_all_of_it():
    run(
        "from coterie.envs.pool import modules; modules(); import envpool, envpool.mujoco.gym, envpool.atari;"
        "envpool.atari.AtariEnvSpec; envpool.make_gymnasium('FrozenLake-v1', num_envs=1)"
    )
    after = "from coterie.envs.pool import modules; modules(); import envpool;"
    run(f"{after} envpool.mujoco.gym, envpool.atari.AtariEnvSpec; assert not hasattr(envpool, 'nothing')")
    run("import envpool; from coterie.envs.pool import modules; assert modules(); envpool.atari.AtariEnvSpec")


def test_an_envpool_that_cannot_be_imported_counts_as_not_installed(tmp_path):
    family = tmp_path / "envpool" / "atari"
    family.mkdir(parents=True)
    (family / "__init__.py").write_text("")
    (family / "registration.py").write_text("")
    (family.parent / "__init__.py").write_text("import envpool.atari.registration\nraise ImportError('broken')\n")
    code = "from coterie.envs.pool import modules; assert modules() == {}"
    run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}")

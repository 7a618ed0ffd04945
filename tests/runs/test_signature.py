"""What the signature of a run's folder covers, now and in versions before."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.config import Config
from coterie.errors import ConfigError
from coterie.runs import trust
from coterie.runs.config_io import replace, save_config

DUEL = {"env.id": "coterie.tools.duel:Duel", "env.kwargs": '{"game": "classic/tictactoe_v3"}'}


def signed(folder: Path, fields: dict[str, object]) -> Config:
    config = replace(Config(), fields)
    trust.sign(folder, config)
    save_config(folder / "config.json", config)
    return config


@pytest.mark.parametrize("env", ["coterie.tools.duel:Duel", "gymnasium:make", "GymV26Environment-v0"])
def test_arguments_that_name_code_are_signed(tmp_path, env):
    config = signed(tmp_path, DUEL | {"env.id": env})
    assert trust.open_run(tmp_path) == config
    save_config(tmp_path / "config.json", replace(config, {"env.kwargs": '{"game": "evil:main"}'}))
    with pytest.raises(ConfigError, match="not signed with your key"):
        trust.open_run(tmp_path)


def test_a_signature_of_a_version_before_is_taken_where_it_names_the_env(tmp_path):
    config = signed(tmp_path, DUEL)
    before = {"env.id": "coterie.tools.duel:Duel"}
    (tmp_path / trust.SIGNATURE).write_text(trust._digest(trust._key(), before) + "\n")
    assert trust.open_run(tmp_path) == config


def test_a_signature_is_not_taken_for_an_env_that_it_never_covered(tmp_path):
    config = signed(tmp_path, {"callbacks": ("mine:X",)})
    old = {"env.id": "GymV26Environment-v0", "env.kwargs": '{"env_id": "evil:Env"}'}
    save_config(tmp_path / "config.json", replace(config, old))
    with pytest.raises(ConfigError, match="not signed with your key"):
        trust.open_run(tmp_path)

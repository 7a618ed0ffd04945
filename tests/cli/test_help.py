"""`coterie train PRESET --help`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coterie import presets
from coterie.choices import SECTIONS
from coterie.cli.help import OWN_ENVS
from coterie.cli.options import comments, config_of
from coterie.runs.config_io import fields
from tests.support.commands import printed


def test_help_shows_what_a_file_sets(tmp_path, capsys):
    (file := tmp_path / "a.toml").write_text("[optim]\nlr = 0.5")
    assert "learning rate [0.5]" in printed(capsys, "train", "ppo", "--config", str(file), "--help")


def test_every_field_has_a_help_text():
    assert [name for name, _ in fields() if not comments()[name]] == []


def test_help_has_the_options_of_the_presets_cell_and_help_all_every_one(capsys):
    def absent(out: str) -> set[str]:
        return {name.partition(".")[0] for name, _ in fields() if f"--{name.replace('_', '-')} " not in out}

    out = printed(capsys, "train", "ppo", "--env", "CartPole-v1", "--learners", "41", "--help")
    assert absent(out) == SECTIONS.keys() - {"ppo", "allreduce", "wire"}
    commands = ("--env.id TEXT", "--seeds A..B", "--jobs K", "--grid ", "--chaos ", "--config FILE", "--print-config ")
    assert all(option in out for option in commands)
    words = " ".join(out.split())
    assert "--steps N env steps of the whole run, which ends with the rollout that reaches them [1000000]" in words
    assert "--optim.rule rmsprop|rmsprop_tf|adam|adam_eps_hat" in words
    assert "before bias correction [adam]" in words
    assert "if there are none [41]" in words
    assert "--reward.normalize true|false" in words
    assert "Defaults are those of ppo for CartPole-v1" in words
    assert absent(printed(capsys, "train", "ppo", "--help", "all")) == set()
    assert absent(printed(capsys, "train", "impala", "-h")) == SECTIONS.keys() - {"vtrace", "decoupled", "wire"}
    for command in ("bench", "plan", "envs", "actor"):
        assert "`coterie train PRESET --help` lists all options" in printed(capsys, command, "--help")


def test_help_of_train_alone_lists_presets_and_no_defaults(capsys):
    out = printed(capsys, "train", "--help")
    assert "A preset is needed" in out
    assert all(f"\n  {name} " in out for name in presets.PRESETS)
    assert "--optim.lr" not in out


def test_the_list_of_commands_waits_for_no_library():
    code = (
        "import sys; from coterie.cli.main import main; main(['--help'])\n"
        "print(sorted({'numpy', 'torch', 'gymnasium'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize("preset", ["a3c", "sac", "seed-r2d2"])
def test_help_waits_for_neither_torch_nor_envpool(preset):
    code = (
        f"import sys; from coterie.cli.main import main; main(['train', '{preset}', '--help'])\n"
        "print(sorted({'torch', 'envpool'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_help_tells_the_presets_defaults(preset):
    assert config_of([preset], OWN_ENVS) == config_of([preset])

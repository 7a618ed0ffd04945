"""Completion scripts, tried out in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from coterie.cli.arguments import COMMANDS
from coterie.cli.main import main
from coterie.runs.config_io import fields

BASH = """
source "$1"; shift
complete -p coterie | grep -q -- '-F _shtab_coterie' || exit 9
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_coterie coterie "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
CORE = {"--model.core", *(f"--model.core-{x}" for x in ("heads", "layers", "memory", "size"))}
CASES = [
    (["re"], {"resume", "report", "reproduce", "replay"}),
    (["train", "imp"], {"impala", "impala-deep", "impala-paper"}),
    (["train", "ppo", "--model.co"], {"--model.compile", *CORE}),
    (["train", "ppo", "--exchange", "g"], {"gossip"}),
    (["bench", "ppo", "--env.num-envs", "4", "--acting", "d"], {"decoupled"}),
    (["train", "ppo", "--reward.normalize", "t"], {"true"}),
    (["list", "pr"], {"presets"}),
    (["plan", "ppo", "--host"], {"--hosts", "--host-cores"}),
]


@pytest.fixture
def script(tmp_path, capsys):
    def write(shell: str) -> str:
        assert main(["completion", shell]) == 0
        path = tmp_path / f"coterie.{shell}"
        path.write_text(capsys.readouterr().out)
        return str(path)

    return write


def run(*command: str, **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes_commands_presets_options_and_their_values(script):
    path = script("bash")
    for words, expected in CASES:
        assert set(run("bash", "-c", BASH, "bash", path, "coterie", *words).split()) == expected, words
    options = run("bash", "-c", BASH, "bash", path, "coterie", "train", "ppo", "--").split()
    assert set(options) >= {f"--{name.replace('_', '-')}" for name, _ in fields()} | {
        "--env",
        "--seeds",
        "--grid",
        "--config",
    }
    assert set(run("bash", "-c", BASH, "bash", path, "coterie", "").split()) == set(COMMANDS)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_the_same_as_bash(script, tmp_path):
    path = script("fish")
    for words, expected in CASES:
        line = f"source {path}; complete -C 'coterie {' '.join(words)}'"
        found = run("fish", "-c", line, HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path))
        assert {x.split("\t")[0] for x in found.splitlines()} == expected, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_accepts_its_completion_script(script):
    path = script("zsh")
    run("zsh", "-n", path)
    assert Path(path).read_text().startswith("#compdef coterie")

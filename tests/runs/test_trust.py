"""A run folder is data: no command imports what a folder from elsewhere names."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import coterie
from coterie import config
from coterie.cli.main import main
from coterie.envs import make, workers
from coterie.errors import ConfigError
from coterie.plugins import FIELDS, set_command_folder
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config, replace
from coterie.runs.manifest import _seal
from coterie.runs.trust import code_of
from coterie.tools.report.dashboard import Live
from tests.support import commands
from tests.support.runs import last_line, small_ppo
from tests.tools.report.recorded import record

HOSTILE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
OWN = """
from gymnasium.envs.classic_control import CartPoleEnv


class Mine(CartPoleEnv):
    def reset(self, **kwargs):
        import neighbor  # only now, in a process of its own

        return super().reset(**kwargs)
"""
SMALL = ("--steps", "300", "--env.num-envs", "4", "--log.tensorboard", "False", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    coterie.train(small_ppo(folder, steps=100), quiet=True)
    return folder


@pytest.fixture
def foreign(trained, tmp_path, monkeypatch) -> Path:
    """A folder `run` from elsewhere, in the current one, with code inside."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "evil.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield Path("run")
    assert not (tmp_path / "run" / "ran").exists()
    for name in [name for name in sys.modules if name.split(".")[0] == "run"]:
        del sys.modules[name]


def change(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    data = json.loads(file.read_text())
    for name, value in fields.items():
        *sections, last = name.split("__")
        at = data
        for section in sections:
            at = at[section]
        at[last] = value
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "run"],
        ["watch", "run"],
        ["export", "run"],
        ["resume", "run", "--steps", "1e6"],
        ["report", "run", "--video"],
        ["train", "run/config.json", "--out", "new"],
        ["train", "run/config.json", "--out", "new", "--seeds", "0..1"],
        ["train", "ppo", "--config", "run/part.json", "--out", "new"],
        ["bench", "run/config.json"],
        ["plan", "run/config.json"],
    ],
    ids=" ".join,
)
def test_commands_refuse_the_code_of_a_folder_from_elsewhere(foreign, capsys, words):
    change(foreign, env__id="run.evil:main")
    (foreign / "part.json").write_text('{"env.id": "run.evil:main"}')
    assert main(words) == 2
    assert "names code: env.id run.evil:main; if you trust it, give --trust" in last_line(capsys)
    assert not Path("new").exists()


NAMES: dict[str, object] = dict.fromkeys(FIELDS, "run.evil:main")
NAMES |= {"callbacks": ["run.evil:main"], "plugins.modules": ["run.evil"], "preset": "run.evil:main"}
NAMES |= {"env.id": "CartPole-v1,run.evil:main", "ray.runtime_env": '{"pip": ["evil"]}'}


@pytest.mark.parametrize("field", [*NAMES, "module of an id", "level of DeepMind Lab", "env of old gym"])
def test_every_setting_that_names_code_is_refused(foreign, field):
    more = {"module of an id": "run.evil:Walker-v0", "level of DeepMind Lab": "dmlab/rooms"}
    more |= {"env of old gym": "CartPole-v1, GymV26Environment-v0"}
    change(foreign, **({"env__id": more[field]} if field in more else {field.replace(".", "__"): NAMES[field]}))
    with pytest.raises(ConfigError, match=r"^run is not signed with your key, and names code: [^\n]+ --trust [^\n]+$"):
        coterie.load("run")
    with pytest.raises(ConfigError, match="names code"):
        coterie.resume("run", steps=10**6)


def test_code_of_is_empty_for_built_in_parts(trained):
    assert not code_of(load_config(trained / "config.json"))
    built_in = {"env.id": "ALE/Pong-v5,pettingzoo/butterfly/pistonball_v6", "model.core": "lstm", "algorithm": "dqn"}
    assert code_of(replace(config.Config(), built_in)) == {}
    assert "env.kwargs" in code_of(replace(config.Config(), {"env.id": "coterie.tools.duel:Duel"}))


def test_pages_about_a_folder_import_nothing(foreign):
    record(foreign.with_name("a"), "ppo", env__id="run.evil:main")
    change(foreign.with_name("a"), preset="run.evil:main")
    b = record(foreign.with_name("b"), "a2c", env__id="run.evil:main", algorithm="run.evil:main")
    assert "run.evil:main" in Live(Path("a")).html()
    for words in (["report", "a"], ["compare", "a", "b"], ["report", "b"]):
        assert main(words) == 0
    assert "Changed from preset a2c" in (b / "report.html").read_text()  # by the spaces in spec.json
    (b / "spec.json").unlink()
    assert main(["report", "b"]) == 0
    assert "Changed from preset a2c" not in (b / "report.html").read_text()


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with an env of the user's."""
    for name, text in (("mine.py", OWN), ("neighbor.py", "")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def command(folder: Path, *args: str) -> tuple[int, str]:
    """`coterie ARGS` from `folder`, as installed; returns its exit code and its last line."""
    done = commands.coterie(folder, *args)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.fixture
def here(project, monkeypatch, capsys) -> Iterator[Callable[..., tuple[int, str]]]:
    """`coterie ARGS` from the project, in this process; gives its exit code and its last line."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*args: str) -> tuple[int, str]:
        sys.modules.pop("mine", None)
        workers._declared.cache_clear()  # it is by name
        code, shown = main([*args]), capsys.readouterr()
        return code, (shown.out + shown.err).strip().splitlines()[-1]

    yield call
    sys.modules.pop("mine", None)


def test_ones_own_run_stays_trusted_until_it_names_other_code(project, here):
    assert here("train", "ppo", "--env", "mine:Mine", *SMALL, "--out", "run")[0] == 0
    key = project / "state" / "coterie" / "trust.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    shutil.copytree(project / "run", project / "copy")
    (project / "run").rename(project / "moved")
    for folder in ("copy", "moved"):
        assert here("eval", folder, "--episodes", "1")[0] == 0
    assert here("resume", "moved", "--steps", "600")[0] == 0
    assert here("train", "moved/config.json", "--out", "again", "--steps", "300")[0] == 0
    change(project / "copy", env__id="mine:Other")
    code, line = here("eval", "copy")
    assert (code, "names code: env.id mine:Other" in line) == (2, True)
    assert "no attribute 'Other'" in here("eval", "copy", "--trust")[1]
    key.unlink()  # another account
    assert here("eval", "moved")[0] == 2
    assert here("eval", "moved", "--episodes", "1", "--trust")[0] == 0
    assert here("train", "moved/config.json", "--env", "mine:Mine", "--out", "named")[0] == 0
    assert here("resume", "moved", "--steps", "2000")[0] == 2
    assert here("resume", "moved", "--steps", "2000", "--trust")[0] == 0
    assert command(project, "resume", "moved", "--steps", "4000")[0] == 0, "it is signed again"
    key.chmod(0o644)
    assert here("eval", "moved")[0] == 2, "others may have read the key"


def test_without_a_place_for_a_key_a_run_trains_and_says_what_to_do(project, here, monkeypatch):
    monkeypatch.setenv("COTERIE_TRUST_KEY", "/proc/nowhere/key")
    assert command(project, "train", "ppo", "--env", "mine:Mine", *SMALL, "--out", "run")[0] == 0
    assert "this run cannot be signed" in (project / "run" / "log.txt").read_text()
    assert here("eval", "run")[0] == 2
    assert here("eval", "run", "--episodes", "1", "--trust")[0] == 0


def test_what_is_given_again_from_python_needs_no_trust(foreign):
    change(foreign, env__id="run.evil:main")
    policy = coterie.load("run", env="CartPole-v1")
    assert policy.config.env.id == "CartPole-v1"
    assert coterie.load("run", env=lambda: CartPoleEnv()).spec.action.sizes == (2,)


WITHOUT_NVML = """
import sys
from importlib.machinery import PathFinder

class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        if name == "pynvml":
            if spec := PathFinder.find_spec(name, [p for p in sys.path if "site-packages" not in p]):
                return spec
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Elsewhere())
from coterie.cli.main import main

sys.exit(main())
"""


def test_an_optional_package_is_not_imported_from_the_current_folder(project):
    """On a machine without pynvml, which the meters of every run try to import."""
    (project / "pynvml.py").write_text(HOSTILE)
    train = ("train", "ppo", "--env", "CartPole-v1", *SMALL, "--out", "run")
    python = [sys.executable, "-P", "-c", WITHOUT_NVML, *train]
    subprocess.run(python, cwd=project, env={**os.environ, "PYTHONPATH": str(commands.ROOT)}, check=True, timeout=200)
    assert not (project / "ran").exists()


def test_the_processes_of_a_sweep_import_nothing_from_the_current_folder(project, here):
    (project / "json.py").write_text(HOSTILE)
    assert here("train", "ppo", "--env", "CartPole-v1", *SMALL, "--seeds", "0..0", "--out", "sweep")[0] == 0
    assert not (project / "ran").exists()
    (project / "json.py").unlink()
    assert here("train", "ppo", "--env", "mine:Mine", *SMALL, "--seeds", "0..0", "--out", "own")[0] == 0


@pytest.mark.parametrize(
    ("env", "kwargs", "why"),
    [
        ("os:system", '{"command": "touch ran"}', "os is a module of Python's standard library"),
        ("psutil:os.system", '{"command": "touch ran"}', "posix is a module of Python's standard library"),
        ("os:Walker-v0", "{}", "os is a module of Python's standard library"),
        ("numpy:array", '{"object": 1}', "is not an env, nor a Python function that makes one"),
        ("torch.nn:Linear", "{}", "is not an env, nor a Python function that makes one"),
    ],
)
def test_only_envs_and_functions_that_make_one_are_called(foreign, env, kwargs, why):
    for backend in ("auto", "vector"):
        with pytest.raises(ConfigError, match=why):
            make.make_spec(config.Env(id=env, kwargs=kwargs, num_envs=2, backend=backend), config.Atari())
    assert not Path("ran").exists()


def test_the_game_of_self_play_is_not_an_argument(foreign):
    make.make_spec(config.Env(id="selfplay/classic/tictactoe_v3", kwargs='{"game": "run.evil:main"}'), config.Atari())


def test_the_folder_of_the_command_is_searched_last_and_only_for_named_code(monkeypatch, tmp_path):
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.chdir(tmp_path)
    assert main(["list", "presets"]) == 0
    assert sys.path == before
    (tmp_path / "some_presets.py").write_text("from coterie.presets import ppo\n")
    assert main(["train", "some_presets:ppo", "--env", "CartPole-v1", "--print-config"]) == 0
    assert sys.path == [*before, str(tmp_path)]
    set_command_folder("")


def test_a_checkpoint_of_a_newer_format_is_refused_and_an_older_one_is_read(foreign):
    path = checkpoint.latest(foreign / "checkpoints")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.pop("format") == 1
    del manifest["sha256"]

    def write(body: dict[str, object]) -> None:
        (path / "manifest.json").write_text(json.dumps({**body, "sha256": _seal(body)}))

    write(manifest)
    checkpoint.load(path)
    write({**manifest, "format": 2})
    with pytest.raises(coterie.CoterieError, match=r"has format 2, and this version of coterie reads 1 to 1$"):
        coterie.load(foreign)


def test_best_json_names_a_checkpoint_of_the_same_run_only(foreign):
    root = foreign / "checkpoints"
    shutil.copytree(path := checkpoint.latest(root), elsewhere := foreign / "elsewhere")
    for name in ("../elsewhere", str(elsewhere.absolute()), "../..", "..", f"x/../{path.name}", path.name, "."):
        (root / "best.json").write_text(json.dumps({"checkpoint": name, "score": 1.0}))
        assert checkpoint.best(root)[0] == (path if name == path.name else None), name
    with pytest.raises(coterie.ConfigError, match=r"best\.json names no complete checkpoint .*, such as .*/step_\d+$"):
        coterie.load(foreign)

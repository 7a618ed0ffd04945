"""Envs and other parts that are given as objects: by name where they can be imported, otherwise by value."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from torch import nn

import coterie
from coterie import Callback
from coterie.cli.main import main
from coterie.envs.testing import CountingEnv
from coterie.errors import ConfigError
from coterie.exchange.allreduce import AllReduce
from coterie.plugins import label, named
from coterie.runs.metrics import read_metrics
from coterie.runs.objects import name_of
from tests.support.commands import ROOT, python

TINY = {
    "log.tensorboard": False,
    "device": "cpu",
    "env.num_envs": 4,
    "algo.unroll_length": 16,
    "ppo.minibatch_size": 16,
}
EXAMPLE = ROOT / "examples" / "own_env.py"
READ = """
import json, sys
from coterie.plugins import named
made = [named("env.id", name)() for name in sys.argv[1:]]
print(json.dumps([[type(env).__name__, env.length] for env in made]))
"""


def from_file(path):
    """A module in a folder that no process imports from."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_callback_may_be_an_object_with_a_step():
    class Counts(Callback):
        step = 0

    one = Counts()
    assert named("callbacks", name_of("callbacks", one)) is one
    with pytest.raises(ConfigError, match="this is one Counts"):
        name_of("env.backend", one)


def test_every_kind_of_object_is_made_in_another_process_of_this_user(tmp_path, monkeypatch):
    class Long(CountingEnv):
        def __init__(self, length: int = 9) -> None:
            super().__init__(length)

    (tmp_path / "loose.py").write_text("from coterie.envs.testing import CountingEnv\nclass Loose(CountingEnv): pass\n")
    loose = from_file(tmp_path / "loose.py")
    monkeypatch.setitem(sys.modules, "loose", loose)
    given = [Long, lambda: Long(3), functools.partial(Long, length=6), loose.Loose, CountingEnv]
    names = [name_of("env.id", one) for one in given]
    assert [*map(label, names)] == ["Long", "lambda", "Long", "Loose", "coterie.envs.testing:CountingEnv"]
    assert [named("env.id", name) for name in names] == given  # here, the objects themselves
    assert name_of("env.id", Long) == names[0]
    done = python("-c", READ, *names)
    assert done.returncode == 0, done.stderr
    made = [["Long", 9], ["Long", 3], ["Long", 6], ["Loose", 5], ["CountingEnv", 5]]
    assert json.loads(done.stdout) == made
    folder = next(Path(tempfile.gettempdir()).glob(f"coterie-*-*-{names[0].rpartition('@')[2]}"))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    done = python("-c", READ, names[0])
    folder.chmod(0o700)
    assert done.stderr.splitlines()[-1].endswith("is not a folder of this user only, so Long is not read from it")


def test_what_cannot_be_used_is_refused_in_one_sentence(tmp_path):
    lock = threading.Lock()

    def locked() -> CountingEnv:
        with lock:
            return CountingEnv()

    def far(**settings):
        coterie.train(env=lambda: CountingEnv(), out=tmp_path / "run", quiet=True, **settings)

    elsewhere = "env.id: lambda is an object of this machine; others need package.module:callable"
    config = coterie.presets.ppo(env=CountingEnv)
    for call, says in [
        (lambda: coterie.presets.ppo(env=CountingEnv()), "env.id: this is one CountingEnv, .*, or lambda: CountingEnv"),
        (lambda: coterie.presets.ppo(env=locked), "env.id: locked cannot be pickled .*'_thread.lock'.* module:locked$"),
        (
            lambda: coterie.presets.ppo(env=lambda: lock),
            "env.id: lambda cannot be pickled .*, or write it as a function of a module and give module:function$",
        ),
        (lambda: coterie.presets.ppo(env=7), "env.id: 7 is not a name, a class or a function$"),
        (lambda: coterie.presets.ppo(env=CountingEnv, model={"torso": nn.Linear(1, 1)}), "model.torso: this is one Li"),
        (lambda: named("env.id", "pickle:../../x"), "env.id: cannot import 'pickle:../../x'"),
        (lambda: coterie.train(config, steps=1), "steps: a config was given, too"),
        (lambda: coterie.load("nowhere", steps=1), "steps: in an existing run only env, acting, .*init_from"),
        (
            lambda: far(preset="dqn", **{"model.core": lambda *_: 0}),
            "model.core: 'lambda' must have no memory with dqn",
        ),
        (lambda: far(algorithm=lambda *_: 0), "algorithm: lambda is not a subclass of"),
        (
            lambda: far(learners=1, exchange=type("Mean", (AllReduce,), {})),
            "plugins.exchange: Mean is a subclass of All",
        ),
        (lambda: far(launch="ray"), elsewhere),
        (lambda: far(preset="impala", acting="decoupled", **{"wire.bind": "127.0.0.1:0"}), elsewhere),
        (lambda: far(exchange="gossip", **{"gossip.connect": "127.0.0.1:1"}), elsewhere),
    ]:
        with pytest.raises(ConfigError, match=f"^{says}"):
            call()
    assert not (tmp_path / "run").exists()


def test_the_script_of_the_examples_trains_its_own_class_and_goes_on_when_it_is_given_again(tmp_path, capsys):
    done = python(EXAMPLE, "12000", folder=tmp_path, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "ppo x Corridor x inline x solo" in done.stdout
    folder, mean = re.search(r"(runs/ppo-Corridor-s0-\S+): mean return (\S+),", done.stdout).groups()
    assert float(mean) == pytest.approx(0.93, abs=0.005)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # no pickled class is left

    run, own = tmp_path / folder, from_file(EXAMPLE).Corridor
    assert [line["env/success"] for line in read_metrics(run) if "env/success" in line][-1] > 0.9
    assert main(["eval", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "env.id: Corridor was an object of a Python process that has ended; give it again, as in" in error
    assert coterie.evaluate_run(run, episodes=2, env=own)["mean_return"] == pytest.approx(0.93, abs=0.005)
    assert coterie.resume(run, env=lambda: own(), steps=14_000, quiet=True)["env_steps"] >= 14_000
    with pytest.raises(ConfigError, match="the spaces differ"):
        coterie.load(run, env=lambda: own(length=5))


TYPED = """
import pathlib, os
from coterie.algorithms.ppo import PPO
from coterie.models.torsos import MLPTorso
class Mine(PPO):
    def batches(self, *args):
        pathlib.Path("algorithm").touch()
        return super().batches(*args)
def torso(obs, config):
    pathlib.Path(f"torso-{os.getpid()}").touch()
    return MLPTorso((5,), (8,), "tanh")
"""


@pytest.mark.parametrize("layout", [{"learners": 2}, {"acting": "decoupled", "decoupled.lockstep": True}])
def test_what_was_typed_in_reaches_every_process(tmp_path, layout):
    """Notebooks and standard input have a `__main__` that no other process can import."""
    objects = 'env=lambda: Corridor(5), algorithm=Mine, **{"model.torso": torso}'
    text = EXAMPLE.read_text().partition("if __name__")[0] + TYPED
    text += f"print(coterie.train(steps=300, quiet=True, {objects}, **{TINY | layout})['status'])"
    done = python(folder=tmp_path, typed=text, TMPDIR=str(tmp_path))
    assert (done.stderr, done.stdout) == ("", "finished\n")
    assert (tmp_path / "algorithm").exists()
    assert len([*tmp_path.glob("torso-*")]) >= 2

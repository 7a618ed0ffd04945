"""Callbacks in every layout: their calls and order, the ends that they give a run, metrics, attributes of envs."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest

import coterie
from coterie import presets
from coterie.cli.main import main
from coterie.config import Config, Wire
from coterie.envs.make import make_envs
from coterie.errors import ConfigError, CoterieError
from coterie.parallel.board import Board
from coterie.runs.config_io import load_config, replace
from coterie.runs.metrics import read_metrics
from tests.support.commands import run_example
from tests.support.runs import arguments, check_rows, last_checkpoint, last_line, read_summary

# An env behind a wrapper; a step's reward is its level, which callbacks set. `path`: seeds of the envs at level 2.
LEVELS = """
import gymnasium
from coterie.envs.testing import CountingEnv


class Levels(CountingEnv):
    level = 0

    def __init__(self, path):
        super().__init__()
        self.path = path

    def step(self, action):
        obs, _, *rest = super().step(action)
        if self.level == 2 and self.path:
            with open(self.path, "a") as file:
                file.write(f"{self.np_random_seed}\\n")
        return obs, float("nan") if self.level == 9 and self.episode == 0 else float(self.level), *rest


def make(path=""):
    return gymnasium.wrappers.TimeLimit(Levels(path), 100)
"""
LAYOUTS = {
    "inline": {},
    "allreduce": {"learners": 2, "exchange": "allreduce"},
    **{exchange: {"learners": 2, "exchange": exchange} for exchange in ("gossip", "hogwild", "store")},
    "decoupled": {"acting": "decoupled", "actors": 2, "decoupled.lockstep": True},
    "central": {"acting": "central", "actors": 2, "central.lockstep": True},
}
SMALL = {"env.num_envs": 4, "algo.unroll_length": 8, "log.tensorboard": False, "log.every": 0.0, "steps": 10**9}


@pytest.fixture
def config(tmp_path, module):
    module("levels", LEVELS)
    small = SMALL | {"out": str(tmp_path / "run"), "env.threads": 1}  # an evaluation starts as many processes

    def make(layout: str, **changes: object):
        return presets.a2c(env="levels:make", **{**small, **LAYOUTS[layout], **changes})

    return make


class Diary(coterie.Callback):
    """Writes down each call; raises the level, and stops after an evaluation when all of the last episodes show it."""

    def write(self, run: coterie.Run, word: str) -> None:
        with (run.folder / "calls").open("a") as file:
            file.write(f"{word}\n")

    def on_start(self, run):
        self.evaluated = False
        self.write(run, "start")

    def on_rollout(self, run):
        self.write(run, "rollout")
        run.record("steps", run.env_steps)
        if run.env_steps >= 300:
            run.set_env("level", 2)

    def on_evaluation(self, run, scores):
        assert scores.mean == 0  # an evaluation's envs keep their own level
        self.evaluated = True
        self.write(run, "evaluation")

    def on_checkpoint(self, run, folder):
        assert (folder / "manifest.json").is_file()
        self.write(run, "checkpoint")

    def should_stop(self, run):
        envs = len({seed for file in run.folder.parent.glob("seeds") for seed in file.read_text().split()})
        seen = envs in (0, 4 * run.config.learners)  # 0: these envs write no seeds
        return "solved" if self.evaluated and seen and run.metrics.get("mean_return", 0) == 10 else False

    def on_end(self, run):
        policy = run.policy()
        assert policy([[0.0, 0.0]]).shape == (1,)
        assert policy.step == run.env_steps
        run.record("ended", run.env_steps)
        self.write(run, "end")
        run.log("the last line")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_callback_sees_the_run_sets_its_envs_and_stops_it(tmp_path, config, layout):
    out = tmp_path / "run"
    changes = {"eval.every": 400, "eval.episodes": 2, "env.kwargs": json.dumps({"path": str(tmp_path / "seeds")})}
    summary = coterie.train(config(layout, **changes), callbacks=[Diary], quiet=True)
    assert (summary["status"], summary["reason"]) == ("finished", "solved")
    assert len({*(tmp_path / "seeds").read_text().split()}) == 4 * LAYOUTS[layout].get("learners", 1)  # all envs
    check_rows(out)
    state = last_checkpoint(out)[1]
    assert state["env_steps"] == summary["env_steps"]
    if layout == "allreduce":  # both learners ended at the same step
        assert len({row["learner_steps"] for row in state["learners"]}) == 1
    calls = (out / "calls").read_text().split()
    assert [calls[0], *calls[-2:]] == ["start", "checkpoint", "end"]
    assert set(calls[1:-1]) == {"rollout", "evaluation", "checkpoint"}
    assert calls.count("evaluation") < calls.count("checkpoint")
    assert "the last line" in (out / "log.txt").read_text()
    custom = [line["custom/steps"] for line in read_metrics(out) if "custom/steps" in line]
    assert custom == sorted(custom)
    assert 0 < custom[-1] <= summary["env_steps"]
    assert read_metrics(out)[-1]["custom/ended"] == summary["env_steps"]


class Broken(coterie.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)
        self.error = SystemExit if hook in ("on_evaluation", "on_rollout") else ValueError

    def fail(self, *args: object) -> None:
        raise self.error("broken by design")


@pytest.mark.parametrize(
    ("layout", "hook"),
    [("inline", "on_start"), ("inline", "on_evaluation"), ("inline", "on_end"), ("allreduce", "should_stop"),
     ("gossip", "on_rollout"), ("decoupled", "on_checkpoint"), ("central", "on_end")],
)  # fmt: skip
def test_a_callback_that_raises_ends_the_run_after_a_checkpoint_and_others_go_on(tmp_path, config, layout, hook):
    out, small = tmp_path / "run", config(layout, **{"steps": 600, "eval.every": 300, "eval.episodes": 2})
    with pytest.raises(CoterieError, match=rf"Broken\.{hook}: (ValueError|SystemExit): broken by design; last good"):
        coterie.train(small, callbacks=[Broken(hook), Diary()], quiet=True)
    log, summary = (out / "log.txt").read_text(), read_summary(out)
    assert (summary["status"], log.count("in fail\n    raise self.error")) == ("failed", 1)
    assert last_checkpoint(out)[1]["env_steps"] == summary["env_steps"] > 0
    assert (out / "calls").read_text().split()[-1] == "end"
    resumed = coterie.resume(out, steps=1200, callbacks=[Diary()], quiet=True)
    assert resumed["status"] == "finished"
    assert resumed["env_steps"] > summary["env_steps"]
    assert (out / "calls").read_text().split().count("start") == 2
    check_rows(out)


def test_callbacks_by_name_are_in_the_config_and_resume_calls_them_again(tmp_path, config, module, capsys):
    module("mine", "from tests.launch.test_callbacks import Diary as One\ndef two():\n    return One()\n")
    mixed = "class Hooks:\n    on_gpu = True\n    def on_error(self): ...\nclass Mixed(Hooks, Diary): ...\n"
    module("mixed", f"from tests.launch.test_callbacks import Diary\n{mixed}")
    module("typo", "import coterie\nclass Typo(coterie.Callback):\n    def on_rollouts(self, run): ...\n")
    out = tmp_path / "run"
    small = arguments("a2c", out, {**SMALL, "steps": 64, "env.id": "levels:make"})
    assert main([*small, "--out", str(tmp_path / "mixed"), "--callbacks", "mixed:Mixed"]) == 0
    assert main([*small, "--callbacks", "mine:One", "mine:two"]) == 0
    assert load_config(out / "config.json").callbacks == ("mine:One", "mine:two")
    assert main(["resume", str(out), "--steps", "128"]) == 0
    assert (out / "calls").read_text().split().count("start") == 4
    for name, reason in (
        ("mine:three", "cannot import"),
        ("numpy:ndarray", "not a subclass of coterie.Callback"),
        ("typo:Typo", "Typo.on_rollouts would never be called; there are on_start, on_rollout,"),
        ("levels:make", "callbacks: levels:make makes TimeLimit, not a Callback"),
        ("tests.launch.test_callbacks:Sets", "Sets must take no arguments (missing a required argument: 'name'); give"),
    ):
        assert main([*small, "--out", str(tmp_path / "other"), "--callbacks", name]) == 2
        assert reason in last_line(capsys)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("given", [Diary, Diary(), f"{__name__}:Diary"], ids=["class", "instance", "name"])
def test_a_single_callback_needs_no_list(tmp_path, config, given):
    coterie.train(config("inline", steps=64), callbacks=given, quiet=True)
    coterie.resume(tmp_path / "run", steps=128, callbacks=given, quiet=True)
    assert (tmp_path / "run" / "calls").read_text().split().count("start") == 2


class Slow(coterie.Callback):
    def on_start(self, run):
        time.sleep(1)
        (run.folder / "before").write_text(str(run.env_steps))


@pytest.mark.parametrize("exchange", ["gossip", "store"])
def test_no_learner_begins_before_the_callbacks_have_started(tmp_path, config, exchange):
    coterie.train(config("gossip", steps=64, exchange=exchange), callbacks=Slow, quiet=True)
    assert (tmp_path / "run" / "before").read_text() == "0"


def test_set_env_says_once_for_each_name_what_remote_envs_keep(tmp_path):
    said, board = list[str](), Board(1)
    learner = SimpleNamespace(config=Config(wire=Wire(bind="unix:s")), model=None, spec=None)
    learner.context = SimpleNamespace(board=board)
    run = coterie.Run(learner, tmp_path, lambda kind, line: said.append(line))
    for level, name in enumerate(["door", "door", "wall", "door"]):
        run.set_env(name, level)
    keep = "the envs of remote clients keep theirs"
    assert said == [f"set_env door: {keep}", f"set_env wall: {keep}"]
    assert board.attributes(0)[1] == {"door": 3, "wall": 2}


class NoKey(coterie.Callback):
    def __init__(self) -> None:
        self.key = {}["key"]


@pytest.mark.parametrize("layout", ["inline", "gossip"])
def test_a_callback_that_cannot_be_made_ends_the_run_before_it_writes_anything(tmp_path, config, layout, capsys):
    with pytest.raises(
        CoterieError, match=r"^callbacks: NoKey cannot be made: KeyError: 'key' \(.*, in __init__\)"
    ) as no:
        coterie.train(config(layout), callbacks=[NoKey], quiet=True)
    assert 'self.key = {}["key"]' in no.value.trace
    name = f"{__name__}:NoKey"
    assert main([*arguments("a2c", tmp_path / "run", {**SMALL, **LAYOUTS[layout]}), "--callbacks", name]) == 1
    shown = capsys.readouterr().err
    assert 'self.key = {}["key"]' in shown
    assert f"callbacks: {name} cannot be made: KeyError" in shown.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_what_cannot_work_is_refused_in_one_line(config):
    with pytest.raises(ConfigError, match=r"^callbacks: Sets cannot be pickled .*lock"):
        coterie.train(config("allreduce"), callbacks=[Sets("level", threading.Lock())], quiet=True)
    with pytest.raises(ConfigError, match=r"^callbacks: 7 is not a name, a class, an instance or a list of those"):
        coterie.train(config("inline"), callbacks=7, quiet=True)
    with pytest.raises(ConfigError, match=r"^callbacks: launch ray takes the config's only"):
        coterie.train(config("inline", launch="ray"), callbacks=[Diary], quiet=True)


class Sets(coterie.Callback):
    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def on_start(self, run):
        run.set_env(self.name, self.value)


@pytest.mark.parametrize(
    ("env", "callback", "reason"),
    [
        ("CartPole-v1", Sets("gravity", 9.8), "these envs have no attributes"),
        ("levels:make", Sets("depth", 1), "set_env: the env has no attribute 'depth'"),
        ("levels:make", Sets("level", object()), "not JSON serializable"),
        ("levels:make", Sets("level", "x" * 5000), "exceed 4096 bytes"),
    ],
)
def test_attributes_that_cannot_be_set_end_the_run(config, env, callback, reason):
    with pytest.raises(CoterieError, match=reason):
        coterie.train(replace(config("inline", steps=64), {"env.id": env}), callbacks=[callback], quiet=True)


@pytest.mark.parametrize("repeat", [1, 2])
def test_replaced_envs_and_new_workers_have_the_attributes(config, repeat):
    """At level 9 an env's first episode gives NaN, for which it is replaced."""
    settings, board = config("inline", **{"env.action_repeat": repeat}), Board(1)
    with make_envs(settings.env, settings.atari, seed=0, threads=2) as envs:
        envs.board = board
        action = envs.recv(0).env_id * 0

        def rewards() -> list[float]:
            envs.send(0, action)
            return envs.recv(0).reward.tolist()

        assert rewards() == [0] * 4
        board.set_attribute("level", 9)
        rewards()
        rewards()
        assert envs.reports.replaced == 8
        board.set_attribute("level", 3)
        assert rewards() == [3 * repeat] * 4
        backend = envs._backends[0]
        (backend if repeat == 1 else backend.inner)._workers[0].popen.kill()
        assert rewards().count(0) == 2
        assert min(rewards()) >= 3


def test_the_example_ends_early_with_its_metrics_and_videos(tmp_path):
    pytest.importorskip("imageio")
    printed = run_example("callbacks.py", tmp_path, "60000")
    assert "an evaluation reached 0.8" in printed.splitlines()[-1]
    (out,) = (tmp_path / "runs").iterdir()
    lines = read_metrics(out)
    assert max(line.get("custom/door", 0) for line in lines) > 2
    assert max(line.get("custom/weights", 0) for line in lines) > 0  # not in a line without a rollout
    assert list(out.glob("video-*.mp4"))

"""The command line: exit codes, one line for bad input, what the commands print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import envpool
import gymnasium
import pytest

from coterie import __version__, presets
from coterie.acting.table import ACTING
from coterie.algorithms.table import ALGORITHMS
from coterie.build import validity
from coterie.build.precision import ROUNDING
from coterie.build.resources import resolve_config
from coterie.cli.arguments import COMMANDS
from coterie.cli.main import main
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from coterie.exchange.table import EXCHANGES
from coterie.runs.config_io import get, replace


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


def listed(capsys, *args: str) -> list[str]:
    code, out, _ = run(capsys, "list", *args)
    assert code == 0
    return out.splitlines()


TRAIN, NO_PRESET = ("train", "ppo", "--env", "CartPole-v1"), "coterie.parallel.processes:location"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("trian",), "command: 'trian' is unknown; did you mean 'train'?"),
        (("train",), "PRESET: give one of a2c, ppo"),
        (("train", "poo"), "preset: 'poo' is unknown; did you mean 'ppo'?"),
        ((*TRAIN, "--ppo.minibatch-size", "9999"), "ppo.minibatch_size: 9999 must not exceed the samples of a rollout"),
        ((*TRAIN, "--seeds", "3..1"), "--seeds: '3..1'"),
        ((*TRAIN, "--seeds", "0..1", "--jobs", "0"), "--jobs: '0'"),
        ((*TRAIN, "--jobs", "2"), "--jobs: is for several runs"),
        ((*TRAIN, "--seeds", "1,1"), "--seeds: '1,1'"),
        ((*TRAIN, "--grid", "optim.lr"), "--grid: 'optim.lr' is not OPTION=VALUE,VALUE,..."),
        ((*TRAIN, "--grid", "optim.lr=1e-3,fast"), "optim.lr"),
        (("resume", "/nowhere"), "RUN: /nowhere is not a run folder"),
        (("eval", "/nowhere"), "RUN: /nowhere is not a run folder"),
        (("report", "/nowhere"), "/nowhere: not a run folder"),
        (("compare", "/nowhere", "/there"), "/nowhere: not a run folder"),
        (("export", "/nowhere"), "RUN: /nowhere is not a run folder"),
        (("train", "coterie.config:Range"), "preset: coterie.config:Range is a class, not a function that returns"),
        (("train", NO_PRESET, "--env", "x"), f"{NO_PRESET} must take other arguments: got an unexpected keyword"),
        (("train", NO_PRESET), "processes:location returns str, not a Config"),
        (("train", "os:getcwd"), "preset: os is a module of Python's standard library"),
        (("resume",), "arguments are required: run; usage: coterie resume RUN [--steps N]"),
        (("list", "games"), "usage: coterie list [envs|presets|matrix]"),
        (("list", "envs", "zzz"), "PATTERN: no envs have 'zzz' in their name or description"),
        (("list", "matrix", "zzz"), "PATTERN: no combinations have 'zzz' in their name or description"),
        (("resume", "/nowhere", "--steps", "1e400"), "--steps: inf is not a whole number of env steps"),
        (("completion", "dos"), "bash"),
        (("reproduce", "gala-1c"), "FIGURE: 'gala-1c' is unknown; did you mean 'gala-1"),
        (("reproduce", "gala-1", "--budget", "tiny"), "--budget: 'tiny' is not smoke, small, full or a number"),
        (("reproduce", "gala-1", "--seeds", "0"), "--seeds: 0 is not a number of seeds"),
        ((*TRAIN, "--optim.lr", "1e-4", "--grid", "optim.lr=1e-3"), "--grid: optim.lr is given as an option, too"),
        (("plan", "ppo", "--seconds", "0"), "--seconds: 0 is not a number of seconds from 1"),
        (("plan", "ppo", "--cores", "0"), "--cores: must be at least 1, not 0"),
        (("plan", "ppo", "--bandwidth", "0"), "--bandwidth: must be above 0 bytes/s, not 0"),
        (("plan", "ppo", "--core-hour", "nan"), "--core-hour: must be at least 0, not nan"),
        (("plan", "ppo", "--target", "0"), "--target: 0 is not a number of frames/s above 0"),
        (("plan", "ppo", "--services", "/nowhere"), "--services: /nowhere cannot be read as JSON"),
        (("actor", "--connect", "unix:s", "--env", "x", "--env.num-envs", "2"), "--env.num-envs: the run decides this"),
        (("envs", "--connect", "unix:s", "--env", "x", "--reward.scale", "2"), "--reward.scale: the run decides this"),
        (("actor", "--connect", "unix:s", "--env", "x", "--model.hidden", "2"), "--model.hidden: the run decides this"),
        (("envs", "--connect", "unix:s", "--env", "x", "--env.action-repeat", "2"), "--env.action-repeat: the run"),
        (("train", "ppo", "--env", "a", "--grid", "env=b,c"), "--grid: env.id is given as an option, too"),
        (("plan", "impala", "--env", "Pong-v5,Breakout-v5"), "env.id: plan needs a single task"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(capsys, args, says):
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith("starting: ")]  # printed after a second
    assert line.startswith("coterie: ")
    assert says in line
    assert len(err) < 400


CENTRAL, DECOUPLED = ({"acting": x, f"{x}.lockstep": True} for x in ("central", "decoupled"))
ACTORS = {"algorithm": "vtrace", "acting": "decoupled"}
R2D2 = {"algorithm": "r2d2", "model.core": "lstm", "algo.unroll_length": 20}
GOSSIP = {"exchange": "gossip", "gossip.bind": "127.0.0.1:8790"}
RING = {"learners": 2, "exchange": "allreduce", "allreduce.bind": "127.0.0.1:8791"}
SAC = {"env": "Pendulum-v1", "algorithm": "sac", "reward.normalize": False}
ALIKE = {"algorithm": "vtrace", "learners": 2, "exchange": "allreduce"}
# Fields with several refusals: words of the reason, and what meets it.
COUNTING, IMAGES = "coterie.envs.testing:CountingEnv", '{"continuous": true, "obs": "image"}'
MIXED = '{"kind": "mixed"}'
AMBIGUOUS = [
    ("MEMORY", "with dqn", {"algorithm": "dqn", "model.network": "tests.support.networks:Counter"}),
    ("MEMORY", "with r2d2", {"algorithm": "r2d2"}),
    ("MEMORY", "with sac", {"env": "Pendulum-v1", "algorithm": "sac", "model.core": "lstm"}),
    ("algorithm", "continuous actions", {"algorithm": "sac"}),
    ("algorithm", "a2c or vtrace", {"env": "tests.support.masked:Masked", "env.kwargs": MIXED, "algorithm": "dqn"}),
    ("algorithm", "vectors of numbers", {"env": COUNTING, "env.kwargs": IMAGES, "algorithm": "sac"}),
    *[("actors", x, {**of, "actors": 0}) for x, of in (("at least 1", DECOUPLED), ("or 0 where", CENTRAL))],
    ("acting", "older weights", {"acting": "decoupled", "actors": 2}),
    ("env.groups", "actors", {**DECOUPLED, "env.groups": 2, "env.num_envs": 6, "actors": 2}),
    ("env.groups", "lockstep", {**CENTRAL, "env.groups": 2}),
    ("algo.entropy_target", "each learner's own", {**ALIKE, "algo.entropy_target": 0.5, "algo.entropy_coef": 0.01}),
    ("algorithm", "between machines", {**RING, "algorithm": "dqn"}),
    ("allreduce.bind", "not 0.0.0.0", {**RING, "allreduce.bind": "0.0.0.0:8791"}),
    ("allreduce.connect", "a run either", {**RING, "allreduce.connect": "127.0.0.1:8791"}),
    ("wire.bind", "other machines", {"algorithm": "vtrace", "acting": "decoupled", "wire.bind": "0.0.0.0:8765"}),
    ("max_lag", "before they have a slot", {**ACTORS, "wire.bind": "unix:x", "max_lag": 1}),
    ("replay.initial", "by values", {**SAC, "replay.initial": "acting"}),
    ("max_lag", "hogwild and store", {**ACTORS, "learners": 2, "actors": 2, "exchange": "hogwild", "max_lag": 4}),
    ("gossip.bind", "other machines", {**GOSSIP, "learners": 2, "gossip.bind": "0.0.0.0:8790"}),
    ("gossip.connect", "a run either", {**GOSSIP, "gossip.connect": "127.0.0.1:8790"}),
]
CHOICES = (*EXCHANGES.values(), *ACTING.values(), *ALGORITHMS.values())
REFUSALS = {(r.field, r.reason): r for r in (*validity.REFUSALS, *(r for kind in CHOICES for r in kind.refusals))}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=lambda r: r.field)
def test_each_refusal_is_the_one_line_for_a_config_that_meets_it(refusal):
    meets = {
        "q.secondary_batch": {"q.secondary_batch": 64},
        "learners": {"learners": 2, "exchange": "solo"},
        "ppo.target_kl": {"learners": 2, "exchange": "allreduce", "ppo.target_kl": 0.1},
        "store.local_steps": {"learners": 2, "exchange": "store", "store.local_steps": 2, "optim.rule": "rmsprop"},
        "device": {"learners": 2, "exchange": "hogwild", "device": "cuda"},
        "model.torso": {"model.torso": "nature"},
        "model.last_action_reward": {"model.last_action_reward": True},
        "model.share": {"model.share": "no", "model.core": "lstm"},
        "acting": {"actors": 2},
        "ppo.minibatch_size": {"ppo.minibatch_size": 10**6},
        "model.normalize_obs": {"env": "Pong-v5", "model.normalize_obs": True},
        "central.batch_max": {**CENTRAL, "central.batch_min": 9, "central.batch_max": 8},
        "central.max_envs": {**CENTRAL, "central.max_envs": 2},
        "wire.bind": {"wire.bind": "127.0.0.1:8765"},
        "chaos.every": {"exchange": "solo", "chaos.every": 1.0},
        "allreduce.bind": {"allreduce.bind": "127.0.0.1:8791", "exchange": "gossip", "learners": 2},
        "allreduce.connect": {"allreduce.connect": "127.0.0.1:8791", "exchange": "gossip", "learners": 2},
        "allreduce.trusted_network": {**RING, "allreduce.bind": "10.0.0.1:8791"},
        "wire.token_file": {**RING, "allreduce.bind": "10.0.0.1:8791", "allreduce.trusted_network": True},
        **{f"gossip.{end}": {f"gossip.{end}": "127.0.0.1:8790"} for end in ("bind", "connect")},
        "decoupled.batch_size": {"algorithm": "vtrace", "acting": "decoupled", "actors": 2, "decoupled.batch_size": 20},
        "ACTING.batch_size": {**DECOUPLED, "actors": 2, "decoupled.batch_size": 20},
        "actors": {**DECOUPLED, "learners": 2, "actors": 3},
        "env.id": {"env.id": "CartPole-v1,CartPole-v1"},
        "ACTING.publish_every": {**DECOUPLED, "decoupled.publish_every": 2},
        "vtrace.replay_capacity": {"algorithm": "vtrace", "vtrace.replay_capacity": 8},
        "algo.entropy_target": {"algo.entropy_target": 0.5, "algo.entropy_coef": 0.0},
        "algorithm": {"env": "Pendulum-v1", "algorithm": "dqn"},
        "reward.normalize": {"algorithm": "dqn", "reward.normalize": True},
        "q.learn_start": {"algorithm": "dqn", "q.learn_start": 10},
        "replay.capacity": {"algorithm": "dqn", "replay.capacity": 50},
        "replay.envs": {"algorithm": "dqn", "replay.envs": 1},
        "q.v_min": {"algorithm": "dqn", "q.atoms": 51, "q.v_min": 1.0, "q.v_max": 1.0},
        "q.atoms": {**R2D2, "q.atoms": 51},
        "replay.initial": {"algorithm": "dqn", "q.atoms": 51, "replay.initial": "acting"},
        **{f"r2d2.{name}": {**R2D2, f"r2d2.{name}": 81} for name in ("length", "burn_in", "stride")},
        "bc.dataset": {"algorithm": "bc"},
        "vtrace.minibatch": {"algorithm": "vtrace", "vtrace.minibatch": 5},
        "vtrace.replay_share": {"algorithm": "vtrace", "vtrace.replay_share": 0.01, "vtrace.replay_capacity": 64},
        "vtrace.rho_bar": {"algorithm": "vtrace", "vtrace.rho_bar": 0.5},
    }  # fmt: skip
    changes = meets.get(refusal.field, {})
    for field, words, other in AMBIGUOUS:
        if field == refusal.field and words in refusal.reason:
            changes = other
    env = {"env": changes.get("env", "CartPole-v1")}
    good, bad = presets.ppo(**env), presets.ppo(**env | {k.removesuffix(".id"): x for k, x in changes.items()})
    validity.check(resolve_config(good), make_spec(good.env, good.atari))
    with pytest.raises(ConfigError) as error:
        validity.check(resolve_config(bad), make_spec(bad.env, bad.atari))
    memory = "model.network" if bad.model.network else "model.core"
    field = refusal.field.replace("ACTING", bad.acting).replace("MEMORY", memory)
    reason = refusal.reason.replace("ACTING", bad.acting).replace("ALGORITHM", bad.algorithm)
    said, _, nearest = str(error.value).partition("; nearest: ")
    assert said == f"{field}: {get(resolve_config(bad), field)!r} {reason}"
    for number in filter(None, nearest.split(" or ")):
        validity.check(resolve_config(replace(bad, {field: int(number)})), make_spec(bad.env, bad.atari))
    assert re.fullmatch(r"(must|needs|cannot) .*", refusal.reason)  # a sentence about the value, on one line


@pytest.mark.parametrize("name", ["a2c", "ppo"])
def test_presets_take_images_too_small_for_convolutions_for_vectors(name):
    env, kwargs = "coterie.envs.testing:Catch", {"env.kwargs": '{"image": true}'}
    small = presets.make(name, env, **kwargs)
    assert (small.model.torso, small.model.normalize_obs) == ("auto", False)  # bytes: nothing to normalize
    validity.check(resolve_config(small), make_spec(small.env, small.atari))
    assert presets.make(name, env, **{"env.kwargs": '{"image": true, "scale": 8}'}).model.torso == "a3c"
    assert presets.make(name, "BabyAI-GoToObj-v0").model.normalize_obs


def test_help_fits_one_screen_and_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 110
    assert all(f"coterie {name}" in out for name in COMMANDS)


def test_list_names_envs_presets_and_cells_in_aligned_columns(capsys):
    assert ["Breakout-v5", "Atari"] in [line.split() for line in listed(capsys, "envs", "breakout")]
    assert all("breakout" in line.lower() for line in listed(capsys, "envs", "breakout"))
    lines = listed(capsys, "presets")
    assert sorted(line.split()[0] for line in lines) == sorted(presets.PRESETS)  # each in one group
    assert len({line.index(line.split(maxsplit=1)[1]) for line in lines}) == 1
    assert max(map(len, lines)) <= 120
    assert [line.split()[0] for line in listed(capsys, "presets", "gossip")] == ["gala-a2c", "gala-ppo"]
    assert (
        listed(capsys, "matrix", "PPO")[2] == "| ppo | inline | solo, allreduce, hogwild, store, gossip | local, ray |"
    )
    assert all(f"coterie list {what}" in "\n".join(listed(capsys)) for what in ("presets", "envs", "matrix"))


def test_every_env_is_listed_once_with_its_suite(capsys):
    lines = listed(capsys, "envs")
    assert sorted(line.split()[0] for line in lines) == sorted({*envpool.list_all_envs(), *gymnasium.registry})
    suites = dict(line.split(maxsplit=1) for line in lines)
    assert (suites["LunarLander-v3"], suites["Hopper-v5"]) == ("Box2D", "MuJoCo")


def test_lists_on_a_terminal_have_headings_and_fit_its_width(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    for args, heading in (
        (("envs", "atari"), "\033[1mAtari\033[0m (104)"),
        (("presets",), "\033[1mGALA: gossiping learners\033[0m (2)"),
    ):
        lines = listed(capsys, *args)
        assert heading in lines
        assert len(lines) < 104
        assert max(len(line) for line in lines if "\033" not in line) <= 60


def test_train_eval_and_bench_print_what_follows(tmp_path, capsys):
    out = str(tmp_path / "run")
    code, text, _ = run(capsys, *TRAIN, "--steps", "3000", "--out", out, "--log.tensorboard", "False")
    assert code == 0
    said, file = "no --env is given: ppo takes Pong-v5", tmp_path / "pong.toml"
    assert said in run(capsys, "train", "ppo", "--print-config")[2]
    file.write_text('preset = "ppo"\nenv = "Pong-v5"\n')
    assert said not in run(capsys, "train", str(file), "--print-config")[2]
    assert f"evaluate: coterie eval {out}" in text
    assert f"resume:   coterie resume {out} --steps N\n" in text
    assert f"watch:    coterie watch {out}" in text
    code, text, _ = run(capsys, "eval", out, "--episodes", "4", "--json")
    result = json.loads(text)
    assert code == 0
    assert result["episodes"] == 4
    assert result["mean_return"] == pytest.approx(sum(result["returns"]) / 4)
    code, text, _ = run(capsys, "eval", out, "--episodes", "4")
    assert f"{result['mean_return']:.2f} +- {result['stderr']:.2f} (4 episodes, greedy" in text
    assert re.search(r"CartPole-v1: [\d.]+ \(1 episode, greedy", run(capsys, "eval", out, "--episodes", "1")[1])
    code, text, _ = run(capsys, "bench", "ppo", "--env", "CartPole-v1", "--seconds", "3", "--json")
    result = json.loads(text)
    assert code == 0
    assert 0 < result["training_over_env_only"] < 1  # a ratio of turns: on a busy machine not that of the two rates
    assert min(result["training"], result["acting"], result["env_only"]) > 0
    assert set(result["stages"]) >= {"env", "act", "train", "exchange"}
    assert result["bottleneck"] in result["core_us_per_step"]
    assert result["frames_per_s"] == result["training"]  # CartPole repeats no action


def test_the_package_runs_as_a_module_and_prints_its_version(capsys):
    done = subprocess.run([sys.executable, "-m", "coterie", "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), run(capsys, "help")) == (__version__, run(capsys, "--help"))


def test_the_time_at_which_a_command_was_typed_is_known():
    """Not in whole seconds of the system's boot, which could make the start of a run up to a second longer."""
    before = time.time()
    code = "import time; ready = time.time(); from coterie.cli.main import _typed; print(_typed(), ready)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    typed, ready = map(float, done.stdout.split())
    assert before - 0.02 < typed < ready + 0.02  # the system counts in ticks of 10 ms


def test_doctor_finds_this_machine_fit():
    done = subprocess.run([sys.executable, "-m", "coterie", "doctor"], capture_output=True, text=True, check=True)
    bf16 = re.search(r"^cpu bf16 .* largest difference (\d+\.\d)%: (.*); --precision auto takes", done.stdout, re.M)
    assert bf16[2].startswith("correct" if float(bf16[1]) < 100 * ROUNDING else "NOT ACCURATE")
    assert re.search(r"^envpool +Pong-v5 runs at [\d,]+ env steps/s", done.stdout, re.M)
    assert re.search(r"^plots +installed", done.stdout, re.M)
    assert not {"MISSING", "SLOW"} & set(done.stdout.split())

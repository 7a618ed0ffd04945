"""Config files on presets, `--print-config`, and the help of the config's options."""

from __future__ import annotations

import json
import sys
import tomllib

import pytest
import torch

from coterie import choices, presets
from coterie.algorithms.table import ALGORITHMS
from coterie.choices import SECTIONS, uses
from coterie.cli.ending import report
from coterie.cli.main import main
from coterie.cli.options import config_of
from coterie.config import Config
from coterie.errors import ConfigError, CoterieError
from coterie.presets import value as values
from coterie.runs.config_io import fields, replace, to_dict
from tests.support.commands import printed

CATCH = "coterie.envs.testing:Catch"
FILES = {
    "my.json": '{"env": {"id": "ENV", "kwargs": {"scale": 1}}, "optim": {"lr": 0.001}, "steps": 1e4%s}',
    "my.toml": 'env = {id = "ENV", kwargs = {scale = 1}}\noptim.lr = 1e-3\nsteps = 1e4\n%s',
    "my.yaml": "env:\n  id: ENV\n  kwargs: {scale: 1}\noptim.lr: 1e-3\nsteps: 1e4\n%s",
}
PRESET = {"my.json": ', "preset": "ppo"', "my.toml": 'preset = "ppo"', "my.yaml": "preset: ppo"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda name, text: (tmp_path / name).write_text(text)


@pytest.mark.parametrize("name", FILES)
def test_a_partial_file_is_layered_on_its_preset_and_options_on_the_file(write, name):
    changes = {"env.kwargs": '{"scale": 1}', "optim.lr": 1e-3, "steps": 10_000}
    expected = presets.ppo(CATCH, **changes)
    write(name, FILES[name].replace("ENV", CATCH) % PRESET[name])
    for args in ([name], ["--config", name], ["ppo", "--config", name]):
        assert config_of([*args, "--trust"]) == expected
        assert config_of([*args, "--env", CATCH]) == expected
    other = config_of(["a2c", f"--config={name}", "--env", "Pendulum-v1", "--optim.lr", "0.5", "--env.kwargs", "{}"])
    assert other == presets.a2c("Pendulum-v1", **{"optim.lr": 0.5, "steps": 10_000})
    write(name, FILES[name].replace("ENV", CATCH) % "")
    assert config_of(["--config", name, "--preset", "ppo", "--trust"]) == expected
    with pytest.raises(ConfigError, match=rf"^PRESET: {name} names none: give one of a2c, ppo"):
        config_of([name, "--trust"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"optim": {"lrr": 1}}', r"optim.lrr: no such field; .* \(in a.json\)"),
        ("a.toml", "optim.learning_rate = 1", r"optim.learning_rate: no such field; the nearest is optim.lr"),
        ("a.toml", "optim.lr = 'fast'", r"optim.lr: 'fast' is not a number \(in a.toml\)"),
        ("a.toml", "optim = 1", r"optim: no such field; the fields of optim are"),
        ("a.yaml", "steps: []", r"steps: needs a value; it takes an integer \(in a.yaml\)"),
        ("a.yaml", "[1, 2]", "config: a.yaml is not a table of settings"),
        ("a.yaml", "preset: [1]", r"preset: '\['1'\]|preset: '\[1\]'"),
        ("a.toml", "steps = ", "a.toml: cannot be read: Invalid value"),
        ("a.yaml", "optim: {yes: 1}", "a.yaml: the key True is not text: quote it"),
        ("a.yaml", "a: b: c", "a.yaml: cannot be read: mapping values"),
        ("a.ini", "", r"--config: a.ini does not end in .json, .toml, .yaml, .yml"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(write, name, text, says):
    write(name, text)
    with pytest.raises(CoterieError, match=says) as caught:
        config_of(["ppo", "--config", name] if "preset" not in text else [name])
    assert str(caught.value).isprintable()


def test_the_arguments_in_a_file_are_not_given_with_the_name_of_the_env(write):
    """`gymnasium:make` imports what its arguments name."""
    write("my.json", '{"env.kwargs": {"id": "evil:Walker-v0"}}')
    words = ["ppo", "--config", "my.json", "--env"]
    with pytest.raises(ConfigError, match=r"names code: env\.kwargs"):
        config_of([*words, "gymnasium:make"])
    write("my.json", '{"optim.lr": 0.5}')
    assert config_of([*words, "gymnasium.envs.classic_control:CartPoleEnv"]).optim.lr == 0.5


def test_the_preset_is_named_once(write):
    assert config_of(["--preset", "ppo", "--env", "CartPole-v1"]) == presets.ppo("CartPole-v1")
    with pytest.raises(ConfigError, match="--preset: 'a2c' is not 'ppo'"):
        config_of(["ppo", "--preset", "a2c"])


def test_yaml_needs_its_extra(write, monkeypatch):
    write("a.yaml", "")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"^a YAML file needs the extra 'yaml': pip install -e '.*\[yaml\]'$"):
        config_of(["a.yaml"])


def test_a_printed_config_is_whole_and_says_what_each_field_is(write, capsys):
    args = ["ppo", "--env", "CartPole-v1", "--optim.lr", "1e-5", "--out", 'ä"b\n']
    text = printed(capsys, "train", *args, "--print-config")
    assert tomllib.loads(text) == json.loads(json.dumps(to_dict(config_of(args))))
    assert "\nlr = 1e-05  # learning rate\n" in text
    write("my.toml", text)
    assert config_of(["my.toml"]) == config_of(args) == config_of(["ppo", "--config", "my.toml"])
    assert printed(capsys, "train", "my.toml", "--print-config") == text
    assert main(["train", "--config", "my.toml", "--chaos", "--print-config"]) == 2  # printed, then refused
    out, err = capsys.readouterr()
    assert "\nevery = 10.0  # mean seconds" in out
    assert err == "coterie: chaos.every: 10.0 needs child processes: several learners, actors, or env hosts\n"
    with pytest.raises(ConfigError, match=r"^preset: my\.toml has the whole config of 'ppo', not of 'dqn'"):
        config_of(["dqn", "--config", "my.toml"])
    assert main(["train", *args, "--seeds", "0..1", "--print-config"]) == 2
    assert "--print-config: prints one run" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["train", *args, "--device", "cuda", "--print-config"]) == 2
        assert "device: cuda is not available here" in capsys.readouterr().err


ATARI, MLP, NET = "one of EnvPool's Atari games", "the torso mlp", "tests.support.networks:Mixer"


@pytest.mark.parametrize(
    ("args", "needs"),
    [
        ("a2c --gossip.tau 3 --q.n-step 2", {"gossip.tau": "gossip", "q.n-step": "dqn or r2d2 or sac"}),
        ("a2c --log.consensus", {"log.consensus": "gossip"}),
        ("a2c --exchange gossip --gossip.tau 3 --learners 2 --optim.lr 1e-3", {}),
        ("ppo --atari.stack 2 --ppo.clip 0.1 --model.hidden 32", {"atari.stack": ATARI}),
        ("ppo --env Pong-v5 --atari.stack 2 --model.hidden 32", {"model.hidden": MLP}),
        ("ppo --env Pong-v5 --model.activation relu --model.torso mlp", {}),
        (f"ppo --model.network {NET} --model.core lstm", {"model.core": "no model.network"}),
        (f"ppo --model.network {NET} --model.core-size 8 --model.hidden 8 --env Pong-v5", {}),
        ("ppo --model.core tests.support.networks:Leaky --model.forget-bias 2", {}),
        ("ppo --optim.alpha 0.9 --optim.beta1 0.8", {"optim.alpha": "optim.rule rmsprop or rmsprop_tf"}),
        ("ppo --algorithm coterie.algorithms.ppo:PPO --q.n-step 2 --gossip.tau 0", {"gossip.tau": "gossip"}),
        ("ppo --algorithm coterie.algorithms.ppo:PPO --algo.value-target n-step --algo.gae-lambda 0.5", {}),
        ("ppo --exchange allreduce --learners 2 --wire.token-file x", {}),
        ("ppo --log.cosines 9 --learners 1", {"log.cosines": "several learners"}),
        ("ppo --env.timeout 9 --env Pong-v5", {"env.timeout": "envs in worker processes"}),
        ("ppo --env.backend vector --env.threads 2", {"env.threads": "env.backend auto, pool or workers"}),
        ("ppo --ppo.batch-size 2048 --algo.unroll-length 64", {"algo.unroll-length": "ppo.batch_size 0"}),
        ("seed-vtrace --central.batch-min 8 --central.newest-frame True", {"central.newest-frame": "wire.bind"}),
        (
            "seed-vtrace --central.lockstep True --central.batch-size 0 --central.queue 2",
            {"central.queue": "central.lockstep False"},
        ),
        ("impala --decoupled.queue 2", {}),
        ("impala --decoupled.queue 2 --decoupled.lockstep True", {"decoupled.queue": "decoupled.lockstep False"}),
        ("seed-vtrace --algo.poll 2", {"algo.poll": "exchange hogwild or store, or acting decoupled without lockstep"}),
        ("seed-r2d2 --q.epsilon 0.5", {"q.epsilon": "dqn or r2d2, without q.noisy or q.ladder"}),
        ("dqn --algo.gae-lambda 0.5 --q.epsilon 0.5", {"algo.gae-lambda": "a2c, ppo or vtrace"}),
        (
            "dqn --q.v-max 9 --replay.beta 0.5 --model.share no",
            {
                "q.v-max": "dqn, with q.atoms",
                "replay.beta": "a replay, with replay.alpha",
                "model.share": "an algorithm without a replay, and no model.network",
            },
        ),
        ("rainbow --q.v-max 9 --q.huber 2 --replay.beta 0.5", {"q.huber": "dqn or r2d2, without q.atoms"}),
        ("dqn --algo.entropy-schedule.warmup 9", {"algo.entropy-schedule.warmup": "an algorithm without a replay"}),
        (
            "a2c --optim.schedule.kind constant --optim.schedule.end 0.5",
            {"optim.schedule.end": "optim.schedule.kind linear"},
        ),
        ("a2c --optim.schedule.kind linear --optim.schedule.end 0.5", {}),
        ("impala --vtrace.replay-share 0.3", {"vtrace.replay-share": "vtrace, with vtrace.replay_capacity"}),
        ("impala --algo.value-target n-step", {"algo.value-target": "a2c or ppo"}),
        (
            "ppo --ppo.rho-max 3 --eval.episodes 3",
            {"ppo.rho-max": "ppo, with ppo.proximal", "eval.episodes": "eval.every"},
        ),
        (
            "impala --vtrace.correction none --vtrace.rho-bar 2 --vtrace.pg-rho-bar 2",
            {"vtrace.rho-bar": "vtrace.correction vtrace", "vtrace.pg-rho-bar": "vtrace.correction vtrace or one-step"},
        ),
        ("dqn --q.secondary-lr 0.1", {"q.secondary-lr": "q.secondary_batch"}),
        ("a2c --reward.scale 0.5", {"reward.scale": "reward.normalize False"}),
        (
            "ppo --model.clip-last-reward False --env.delay-learner 0",
            {"model.clip-last-reward": "model.last_action_reward", "env.delay-learner": "env.delay"},
        ),
        ("ppo --log.wandb-group a", {"log.wandb-group": "log.wandb"}),
        ("ppo --algo.poll 4", {"algo.poll": "exchange hogwild or store, or acting decoupled without lockstep"}),
        ("impala --algo.poll 4", {}),
        ("a3c --algo.poll 4", {}),
        ("sac --q.noisy True --env Pendulum-v1", {"q.noisy": "dqn or r2d2"}),
        ("sac --model.activation tanh --env Pendulum-v1", {"model.activation": "another algorithm than sac"}),
        ("sac --model.torso typo:X --env Pendulum-v1", {"model.torso": "another algorithm than sac"}),
    ],
)
def test_an_option_without_effect_is_a_line_that_names_what_it_needs(capsys, args, needs):
    env = "" if "--env " in args else "--env CartPole-v1"
    assert main(f"train {args} {env} --print-config".split()) == 0
    lines = [f"coterie: --{name} has no effect in this run: it needs {what}" for name, what in needs.items()]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_preset_that_needs_much_or_was_not_shown_to_learn_says_so(capsys):
    for env, kind in (("Pong-v5", "images"), ("LunarLander-v3", "vectors"), ("Hopper-v5", "continuous control")):
        for preset, make in presets.PRESETS.items():
            if make.__module__ == values.__name__ and (preset == "sac") != (kind == "continuous control"):
                continue  # it takes the actions of other envs
            data = ("--bc.dataset", "d/e-v0") if preset == "bc" else ()
            assert main(["train", preset, "--env", env, "--steps", "1000", *data, "--print-config"]) == 0
            millions = presets.make(preset, env).steps // 1_000_000
            much = f"is set up for {millions:,} million env steps or more" if millions >= 10 else ""
            what = "continuous control (such as MuJoCo's)" if kind == "continuous control" else f"from {kind}"
            unseen = f"has not been shown to learn {what} with its defaults"
            line = " and ".join(filter(None, (much, "" if presets.is_shown(preset, kind) else unseen)))
            assert capsys.readouterr().err == (f"coterie: {preset} {line}; try ppo first\n" if line else "")


def test_presets_that_are_said_to_be_the_same_without_images_are():
    for env in ("LunarLander-v3", "Hopper-v5"):
        for one, other in presets._SAME.items():
            assert replace(presets.make(one, env), {"preset": other}) == presets.make(other, env)


def test_another_runs_config_is_trained(write, tmp_path, capsys):
    first = ["train", "ppo", "--env", "CartPole-v1", "--steps", "64", "--env.num-envs", "4", "--optim.lr", "0.123"]
    small = ["--algo.unroll-length", "8", "--ppo.batch-size", "0", "--ppo.minibatch-size", "8", "--ppo.epochs", "1"]
    assert main([*first, *small, "--out", "one"]) == 0
    assert main(["train", "one/config.json", "--seed", "3", "--out", "two"]) == 0
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert two == {**one, "seed": 3, "out": "two"}
    capsys.readouterr()
    assert main(["train", "no.json"]) == 2
    assert "no.json: cannot be read: No such file" in capsys.readouterr().err


def test_an_algorithm_of_the_users_may_use_any_section(monkeypatch):
    config = replace(Config(), {"algorithm": "robust"})
    assert not uses("ppo", config)
    monkeypatch.setitem(choices._MODULES, ("algorithm", "robust"), "mine")
    assert uses("ppo", config)


def test_sections_are_of_choices_that_there_are():
    assert {*ALGORITHMS} <= set().union(*SECTIONS.values()) | {"a2c"}
    assert set(SECTIONS) <= {name.partition(".")[0] for name, _ in fields()}


def test_the_hint_to_resume_says_that_a_callback_has_ended_the_run(capsys):
    report(
        {"status": "finished", "reason": "solved", "env_steps": 5, "seconds": 1.0, "mean_return": 1.0, "folder": "r"}
    )
    assert "resume:   coterie resume r  # its callback may end it again\n" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_torch_does_not_take_is_refused(capsys, seed):
    assert main(["eval", "/nowhere", "--seed", str(seed)]) == 2
    line = f"coterie: --seed: {seed} is not a whole number from 0 to 2**63 - 1\n"
    assert capsys.readouterr().err == line

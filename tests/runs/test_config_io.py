"""The config: to JSON and back, overrides, the command line, and one line for whatever is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

from coterie.config import Algo, Config, Env, Schedule, Wire
from coterie.errors import ConfigError, CoterieError
from coterie.runs.config_io import fields, from_dict, get, load_config, plain, replace, to_dict
from coterie.runs.old_names import OLD, PEERS
from coterie.runs.validate import validate
from tests.support.options import parse_cli

FIELDS = {name: plain(kind) for name, kind in fields()}


def other(kind: Any, value: Any) -> Any:
    """A value of the kind that differs from `value`, if there is one."""
    if get_origin(kind) is Literal:
        return next((v for v in get_args(kind) if v != value), value)
    if get_origin(kind) is Union:
        return other(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        return tuple(get_args(kind)[0](v) for v in (3, 5, 8))
    return {int: 7919, float: 0.4375, bool: not value, str: "Some-Text_1"}[kind]


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    text = str(caught.value)
    assert text.isprintable(), f"not one line: {text!r}"
    return text


def test_fields_lists_every_field_of_the_config() -> None:
    def leaves(data: dict[str, Any]) -> int:
        return sum(leaves(v) if isinstance(v, dict) else 1 for v in data.values())

    assert len(FIELDS) == leaves(dataclasses.asdict(Config()))
    assert {"env.id", "optim.schedule.at", "learners"} <= FIELDS.keys()


CHANGED = {name: other(kind, get(Config(), name)) for name, kind in FIELDS.items()}
EXTREME = {"env.kwargs": 'ä "\n\0', "steps": 2**70, "optim.lr": 5e-324, "algo.gamma": -math.inf, "model.hidden": ()}


@pytest.mark.parametrize("data", [CHANGED, {**CHANGED, **EXTREME}], ids=["changed", "extreme"])
def test_every_value_of_a_config_survives_json(data: dict[str, Any]) -> None:
    config = replace(Config(), data)
    assert {name: get(config, name) for name in data} == data
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert all(type(get(again, name)) is type(get(config, name)) for name in data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"lerners": 2}, ["lerners", "learners"]),
        ({"env": {"num_env": 2}}, ["env.num_env:", "env.num_envs"]),
        ({"optim": {"schedule": {"warmpu": 2}}}, ["optim.schedule.warmpu", "optim.schedule.warmup"]),
        ({"env": {"num_envs": "16"}}, ["env.num_envs", "'16'", "an integer"]),
        ({"env": {"num_envs": True}}, ["env.num_envs", "True", "an integer"]),
        ({"optim": {"lr": "fast"}}, ["optim.lr", "'fast'", "a number"]),
        ({"optim": {"lr": 10**400}}, ["optim.lr", "a number"]),
        ({"log": {"tensorboard": 1}}, ["log.tensorboard", "1", "true or false"]),
        ({"env": {"id": None}}, ["env.id", "None", "a class or a function"]),
        ({"env": {"on_error": "end"}}, ["env.on_error", "'end'", "fail, replace"]),
        ({"model": {"hidden": 64}}, ["model.hidden", "64", "a list of integers"]),
        ({"model": {"hidden": [64, "x"]}}, ["model.hidden", "'x'", "an integer"]),
        ({"env": "Pong-v5"}, ["env", "'Pong-v5'", "a table of settings"]),
        ({"env": {"a\nb": 1}}, ["env.a", "no such field"]),
        ({"env": {"kwargs": {"a": "long " * 1000}}}, ["env.kwargs", "..."]),
        ([], ["config", "a table of settings"]),
    ],
)
def test_bad_config_data_is_one_line_that_names_the_field(data: Any, says: list[str]) -> None:
    text = refused(from_dict, data)
    assert all(s in text for s in says), text
    assert len(text) < 200


def test_an_error_in_a_config_file_names_the_field_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"env": {"num_envs": "x"}}')
    text = refused(load_config, path)
    assert "env.num_envs" in text
    assert str(path) in text
    path.write_text('{"env": ')
    with pytest.raises(CoterieError, match=r"config\.json: cannot be read"):
        load_config(path)
    with pytest.raises(CoterieError, match=r"gone\.json: cannot be read: No such file"):
        load_config(tmp_path / "gone.json")


def test_replace_accepts_dotted_names_sections_and_env() -> None:
    sections = {"algo": Algo(gamma=0.5), "optim.schedule": Schedule("linear")}
    config = replace(Config(), {"env": "Pong-v5", "env.num-envs": 1e2, "optim.lr": 1, **sections})
    assert (config.env.id, config.env.num_envs, config.algo) == ("Pong-v5", 100, Algo(gamma=0.5))
    assert type(config.env.num_envs) is int
    assert config.optim.schedule == Schedule("linear")
    assert type(config.optim.lr) is float
    assert replace(Config(), {}) == Config()


def test_numbers_and_arrays_of_numpy_are_those_of_python() -> None:
    given = {"optim.lr": np.float32(0.5), "steps": np.int64(7), "model.hidden": np.array([32, 16]), "seed": np.uint8(1)}
    config = replace(Config(), given)
    assert (config.optim.lr, config.steps, config.model.hidden, config.seed) == (0.5, 7, (32, 16), 1)
    own = replace(config, {"settings.limit": np.float32(2)})
    assert json.loads(to_dict(own)["settings"]) == {"limit": 2}


@pytest.mark.parametrize("texts", [["64", "32"], ["64,32"], ["[64, 32]"], ["[64,", "32]"], ["64 32"]])
def test_a_list_of_numbers_may_have_commas_and_brackets(texts: list[str]) -> None:
    assert parse_cli(Config(), ["--model.hidden", *texts]).model.hidden == (64, 32)


def test_a_text_may_be_a_path() -> None:
    assert replace(Config(), {"out": Path("runs/a")}).out == "runs/a"


def test_replace_refuses_unknown_fields_and_names_the_nearest() -> None:
    near = {"num_envs": "env.num_envs", "optim.rate": "optim.rate", "optim": "optim.lr", "env.id.x": "env.id.x"}
    for name, says in near.items():
        assert says in refused(replace, Config(), {name: 4})
    assert "optim.schedule.id" in refused(replace, Config(), {"optim.schedule": Env()})


@pytest.mark.parametrize("hyphens", [False, True])
@pytest.mark.parametrize("equals", [False, True])
def test_every_field_is_a_command_line_option(hyphens: bool, equals: bool) -> None:
    args = []
    for name, value in CHANGED.items():
        option = f"--{name.replace('_', '-') if hyphens else name}"
        if isinstance(value, tuple):
            args += [option, *map(str, value)]
        else:
            args += [f"{option}={value}"] if equals else [option, str(value)]
    assert parse_cli(Config(), args) == replace(Config(), CHANGED)


def test_options_change_only_the_fields_that_they_name() -> None:
    default = Config(learners=3, algo=Algo(gamma=0.5))
    line = "--env Pong-v5 --steps 2.5e6 --optim.lr -1e-3 --model.hidden 1e1 20 --seed 1 --seed 2"
    expected = {"env": "Pong-v5", "steps": 2_500_000, "optim.lr": -1e-3, "model.hidden": (10, 20), "seed": 2}
    assert parse_cli(default, line.split()) == replace(default, expected)
    assert parse_cli(default, []) == default
    assert parse_cli(default, ["--env=Pong-v5"]).env.id == "Pong-v5"
    assert parse_cli(default, ["--env.kwargs=--x"]).env.kwargs == "--x"
    assert parse_cli(default, ["--model.hidden"]).model.hidden == ()
    assert parse_cli(default, ["--token-file", "t", "--cert=c", "--key", "k"]).wire == Wire("", "t", "c", "k")


@pytest.mark.parametrize(
    ("texts", "value"), [(["", "true", "True", "yes", "1"], True), (["false", "False", "no", "0"], False)]
)
def test_a_boolean_takes_true_false_yes_no_and_no_value(texts: list[str], value: bool) -> None:
    default = replace(Config(), {"q.double": not value})
    for text in texts:
        config = parse_cli(default, ["--q.double", *text.split(), "--model.share", "no", "--steps", "1"])
        assert (config.q.double, config.model.share, config.steps) == (value, "no", 1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--env.num_envz 4", ["--env.num_envz", "env.num_envs"]),
        ("--lr=4", ["--lr", "optim.lr"]),
        ("--ppo 4", ["--ppo", "ppo.epochs", "ppo.clip"]),
        ("--qqqq 1", ["--qqqq", "--help"]),
        ("--log.no-tensorboard", ["--log.no-tensorboard", "log.tensorboard"]),
        ("--env.on_error 4", ["--env.on_error", "'4'", "fail, replace"]),
        (f"--env.on_error {'a' * 200}", ["--env.on_error", "aaa...", "fail, replace"]),
        ("--env.num_envs abc", ["--env.num_envs", "'abc'", "an integer"]),
        ("--env.num-envs", ["--env.num_envs", "needs a value", "an integer"]),
        ("--env.num-envs 3 4", ["--env.num_envs", "one value", "'3 4'"]),
        ("--optim.lr 1e-3 --optim.eps fast", ["--optim.eps", "'fast'", "a number"]),
        ("--model.hidden 64,x", ["--model.hidden", "'64,x'", "a list of integers"]),
        ("--log.tensorboard=maybe", ["--log.tensorboard", "'maybe'", "true or false"]),
        ("--algo.entropy-schedule.kind bad", ["--algo.entropy_schedule.kind", "'bad'", "constant, linear, steps"]),
        ("Pong-v5", ["'Pong-v5'", "--SECTION.FIELD"]),
        ("--seed 1 -x", ["'-x'", "--SECTION.FIELD"]),
    ],
)
def test_bad_usage_is_one_line_that_names_the_option(
    args: str, says: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused(parse_cli, Config(), args.split())
    assert all(s in text for s in says), text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", OLD)
def test_an_old_option_is_refused_by_a_sentence_that_names_what_replaces_it(name: str, tmp_path: Path) -> None:
    default, reason = OLD[name]
    assert reason.removeprefix("is now ") in FIELDS or reason.startswith("was removed")
    value = f"{default}7" if isinstance(default, str) else 7
    assert refused(parse_cli, Config(), [f"--{name.replace('_', '-')}", str(value)]).endswith(f": {reason}")
    assert refused(replace, Config(), {name: value}) == f"{name}: {reason}"
    if default is None:  # any value is ignored in a file
        return
    section, _, field = name.rpartition(".")
    data = to_dict(Config())
    path = tmp_path / "config.json"
    inside = {**data.get(section, {}), field: value}
    path.write_text(json.dumps({**data, **({section: inside} if section else inside)}))
    assert refused(load_config, path) == f"{name}: {reason} (in {path})"


def test_a_config_of_an_older_version_loads_if_its_old_options_have_their_defaults(tmp_path: Path) -> None:
    data = to_dict(Config(learners=3))
    del data["plugins"]
    for name, (default, _) in OLD.items():
        section, _, field = name.rpartition(".")
        (data.setdefault(section, {}) if section else data)[field] = default
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert load_config(tmp_path / "config.json") == Config(learners=3)


# Values just outside of each range, for some fields of each.
OUTSIDE: dict[float, str] = {
    0: "learners steps algo.unroll_length ppo.epochs ppo.minibatch_size log.keep eval.episodes model.core_size "
    "atari.frame_skip atari.stack atari.height optim.lr optim.eps ppo.clip env.timeout reward.scale",
    -1: "seed actors env.num_envs atari.noop_max optim.chunk torch_threads eval.every",
    -2: "gossip.tau",
    -0.1: "algo.value_coef algo.entropy_coef optim.max_grad_norm log.every algo.gamma optim.alpha",
    1.01: "algo.gamma algo.gae_lambda atari.sticky_actions",
    1.0: "optim.alpha optim.beta1 optim.beta2",
    math.nan: "optim.lr algo.gamma",
    math.inf: "optim.lr algo.gamma",
}
BAD: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for value, names in OUTSIDE.items() for name in names.split()),
    ({"q.atoms": 1}, "q.atoms"),
    ({"env.groups": 3}, "env.groups"),
    ({"env.groups": 2, "env.num_envs": 3}, "env.num_envs"),
    ({"env.id": " "}, "env.id"),
    ({"env.kwargs": "[1]"}, "env.kwargs"),
    ({"env.kwargs": "{a: 1}"}, "env.kwargs"),
    ({"model.hidden": (64, 0)}, "model.hidden"),
    ({"optim.schedule.kind": "steps"}, "optim.schedule.kind"),
    ({"optim.schedule": Schedule("steps", at=(1, 2), factors=(1.0,))}, "optim.schedule.at"),
    ({"optim.schedule": Schedule("steps", at=(2, 1), factors=(1.0, 0.5))}, "optim.schedule.at"),
    ({"optim.schedule": Schedule("steps", at=(-1,), factors=(1.0,))}, "optim.schedule.at"),
    ({"optim.schedule": Schedule("linear", at=(1,), factors=(1.0,))}, "optim.schedule.kind"),
    ({"algo.entropy_schedule": Schedule("steps", at=(1,), factors=(-1.0,))}, "algo.entropy_schedule.factors"),
    ({"ppo.clip_schedule": Schedule("linear", end=-0.5)}, "ppo.clip_schedule.end"),
    ({"ppo.clip_schedule": Schedule(warmup=-1)}, "ppo.clip_schedule.warmup"),
]


@pytest.mark.parametrize("name", PEERS)
def test_a_name_of_another_library_is_answered_with_ours(name: str) -> None:
    assert PEERS[name] in FIELDS
    text = refused(replace, Config(), {name: 1}).replace("the nearest are", "the nearest is")
    assert f"no such field; the nearest is {PEERS[name]}" in text


@pytest.mark.parametrize(("overrides", "name"), BAD, ids=[f"{n}-{list(o.values())}" for o, n in BAD])
def test_impossible_values_are_refused_by_name(overrides: dict[str, Any], name: str) -> None:
    assert refused(validate, replace(Config(), overrides)).startswith(f"{name}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"algo.gamma": 1.0, "algo.gae_lambda": 0.0, "atari.sticky_actions": 1.0, "atari.noop_max": 0},
        {"env.groups": 2, "env.num_envs": 2, "env.kwargs": ' {"continuous": true} '},
        {"model.hidden": (), "optim.max_grad_norm": 0.0, "algo.entropy_coef": 0.0, "seed": 2**40},
        {"optim.schedule": Schedule("steps", at=(0, 10), factors=(1.0, 0.0), warmup=5)},
    ],
)
def test_values_at_the_edge_of_a_range_are_accepted(overrides: dict[str, Any]) -> None:
    config = replace(Config(), overrides)
    assert validate(config) == config
    assert validate(from_dict(to_dict(config))) == config

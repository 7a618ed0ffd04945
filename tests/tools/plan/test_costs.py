"""Lines through measurements, and services in files."""

from __future__ import annotations

import json

import pytest

from coterie.tools.plan.costs import Line, fit, load, save
from coterie.types import ConfigError
from tests.tools.plan.harness import COSTS, services


def test_a_fit_recovers_its_line():
    line = Line(0.003, 0.0005)
    assert fit([(1, n, line(n)) for n in (4, 16)]) == Line(pytest.approx(0.003), pytest.approx(0.0005))
    parts = [(1, 160, line(160)), (4, 1280, 4 * line.fixed + 1280 * line.each)]  # `fixed` for each of four parts
    assert fit(parts) == Line(pytest.approx(0.003), pytest.approx(0.0005))


def test_a_fit_never_gives_negative_seconds():
    assert fit([(1, 4, 1.0), (1, 16, 5.0)]) == Line(0.0, pytest.approx(0.3))  # would begin below 0
    assert fit([(1, 4, 1.2), (1, 16, 0.8)]) == Line(pytest.approx(1.0), 0.0)  # would fall
    assert fit([(1, 320, 1.0), (4, 1280, 4.0)]) == Line(0.0, pytest.approx(1 / 320))  # cannot be told apart


def test_services_are_saved_and_loaded(tmp_path):
    some = services(env_cv=0.3, action_repeat=4, accelerator=COSTS, about={"env": "made-up"})
    save(some, tmp_path / "s.json")
    assert load(tmp_path / "s.json") == some


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("env_cv",), "much", "services.env_cv: must be a number of at least 0, not 'much'"),
        (("alone", "act", "each"), -1, "services.alone.act.each: must be a number of at least 0, not '-1'"),
        (("alone", "act", "each"), True, "services.alone.act.each"),
        (("alone", "act"), 3, "services.alone.act: must be an object, not '3'"),
        (("alone", "train"), None, "services.alone.train: is missing"),
        (("alone", "exchange", "gossip"), None, "services.alone.exchange.gossip: is missing"),
        (("crowded", "speed"), 1, "services.crowded.speed: no such field; fields are env, act"),
        (("threads", "act"), 0, "services: threads.turns, threads.act and threads.train must be above 0"),
        (("valid",), 2, "services: action_repeat must be at least 1"),
    ],
)
def test_a_wrong_field_of_the_services_is_named(tmp_path, at, value, says):
    data = json.loads(json.dumps(services().to_json()))
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    if value is None:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "s.json")
    assert str(error.value).startswith(says)


def test_crowded_costs_default_to_those_alone(tmp_path):
    data = services().to_json()
    del data["crowded"]
    (tmp_path / "s.json").write_text(json.dumps(data))
    assert load(tmp_path / "s.json") == services()

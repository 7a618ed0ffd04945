"""Lines through measurements, and services in files."""

from __future__ import annotations

import json

import pytest

from coterie.tools.plan.services import LinearCost, fit, load, save
from coterie.types import ConfigError
from tests.tools.plan.harness import COSTS, services


def test_a_fit_recovers_its_line():
    line = LinearCost(0.003, 0.0005)
    assert fit([(1, n, line(n)) for n in (4, 16)]) == LinearCost(pytest.approx(0.003), pytest.approx(0.0005))
    parts = [(1, 160, line(160)), (4, 1280, 4 * line.fixed + 1280 * line.each)]  # `fixed` for each of four parts
    assert fit(parts) == LinearCost(pytest.approx(0.003), pytest.approx(0.0005))


def test_a_fit_never_gives_negative_seconds():
    assert fit([(1, 4, 1.0), (1, 16, 5.0)]) == LinearCost(0.0, pytest.approx(0.3))  # would begin below 0
    assert fit([(1, 4, 1.2), (1, 16, 0.8)]) == LinearCost(pytest.approx(1.0), 0.0)  # would fall
    assert fit([(1, 320, 1.0), (4, 1280, 4.0)]) == LinearCost(0.0, pytest.approx(1 / 320))  # cannot be told apart


def test_services_are_saved_and_loaded(tmp_path):
    some = services(env_cv=0.3, action_repeat=4, accelerator=COSTS, about={"env": "made-up"})
    save(some, tmp_path / "s.json")
    assert load(tmp_path / "s.json") == some


@pytest.mark.parametrize(
    "change", [{"costs": None}, {"costs": {"act": 3}}, {"alone": {}}, {"valid": 2}, {"action_repeat": "much"}]
)
def test_a_file_that_is_not_of_services_is_refused(tmp_path, change):
    save(services(), tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(data | change))
    with pytest.raises(ConfigError, match="is not a services file of this version"):
        load(tmp_path / "s.json")

"""Verdicts: the rule on known numbers, and every figure's claim and checks."""

from dataclasses import replace

import pytest

from coterie.tools.reproduce.figure import FIGURES, ArmResult
from coterie.tools.reproduce.measures import MEASURES
from coterie.tools.reproduce.verdict import compared, decide, outcome
from tests.tools.reproduce.test_figures import results


def test_a_check_holds_if_every_run_has_more_than_every_other():
    assert outcome([4, 5, 6], [1, 2, 3]) == outcome([3, 4, 5], [1, 2, 3], or_equal=True) == "holds"
    assert outcome([1, 2, 3], [4, 5, 6]) == "reversed"
    for above in ([3, 5, 6], [2, 5, 6], [5, 6], [4, 5, float("nan")]):  # equal, between, too few, unknown
        assert outcome(above, [1, 2, 3]) == "open"


@pytest.mark.parametrize(
    ("name", "numbers", "word", "unfinished"),
    [
        ("gala-2a", {"consensus__distance": 1.0, "consensus__bound": 4.0}, "agrees", "undecided"),  # a limit
        ("gala-2a", {"consensus__distance": 5.0, "consensus__bound": 4.0}, "differs", "differs"),  # the other ring's
        ("gala-1a", {}, "agrees", "undecided"),  # all runs converge
        ("gala-1a", {"level": lambda arm, *_: 99 - 60 * ("GALA" in arm.label and arm.x == 64)}, "differs", "undecided"),
        ("impala-e1", {"level": lambda arm, *_: 9 - ("no" in arm.label and arm.x == 64)}, "agrees", "undecided"),
        ("impala-table2", {"level": lambda arm, *_: 9 - ("no" in arm.label)}, "undecided", "undecided"),  # two of four
    ],
)
def test_a_verdict_is_that_of_all_checks_where_they_compare(name, numbers, word, unfinished):
    size = FIGURES[name].sizes["small"]
    made = results(FIGURES[name], size, **numbers)
    assert decide(FIGURES[name], made, size)[0] == word
    assert decide(FIGURES[name], made, replace(size, seeds=size.seeds + 1))[0] == "undecided"  # one did not start
    if word == "agrees":
        assert decide(FIGURES[name], made, replace(size, envs=(*size.envs, "Other-v0")))[0] == "undecided"  # nor an env
    del made[-1].runs[0].lines[-1], made[-1].runs[0].summary["status"]
    assert decide(FIGURES[name], made, size)[0] == unfinished


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_checks_name_measures_and_runs_of_the_small_size(figure):
    arms = [ArmResult(arm) for arm in figure.arms(figure.sizes["small"])]
    assert figure.claim.endswith(".")
    for check in figure.checks:
        assert check.measure in {*MEASURES, "convergent"}
        found = [one for pair in compared(figure, check, arms) for one in pair]
        assert {one.arm.args != () for one in found} == {isinstance(x, str) for x in (check.above, check.below)}
        assert figure.sizes["small"].seeds >= 3

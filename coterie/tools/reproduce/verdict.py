"""A figure's verdict in one word: what its checks of the paper's claim say, by a rule that is older than the runs.

A check compares two sides on one env. It holds if each side has at least three runs and every run of `above` has more
than every run of `below`; with three runs a side this happens by chance once in 20 (an exact permutation test). It is
reversed if every run of `above` has less. Otherwise it is open, also where a run is unfinished or lacks the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from coterie.tools.report.tables import Table, number
from coterie.tools.reproduce.drawings import all_envs, named
from coterie.tools.reproduce.figure import Arm, ArmResult, Check, Figure, Size
from coterie.tools.reproduce.measures import MEASURES, Measure
from coterie.tools.reproduce.special import convergence

ENOUGH = 3  # runs a side


def decide(figure: Figure, results: Sequence[ArmResult], size: Size) -> tuple[str, Table]:
    """`differs` if any check is reversed, `agrees` if all hold, else `undecided`; and a table of the checks. `size`:
    which runs there should be.
    """
    rows = [row for check in figure.checks for row in _rows(figure, check, results, size)]
    outcomes = {row[-1] for row in rows}
    word = "differs" if "reversed" in outcomes else "agrees" if outcomes == {"holds"} else "undecided"
    head = ["measure", "env", "above", "its runs", "below", "its runs", "outcome"]
    return word, Table("Checks of the claim", head, rows)


def outcome(above: Sequence[float], below: Sequence[float], or_equal: bool = False) -> str:
    """`holds`, `reversed` or `open`. `or_equal`: it also holds where the sides meet in equal runs."""
    if min(len(above), len(below)) < ENOUGH or not all(map(math.isfinite, (*above, *below))):
        return "open"
    if min(above) > max(below) or (or_equal and min(above) == max(below)):
        return "holds"
    return "reversed" if max(above) < min(below) else "open"


def compared(figure: Figure, check: Check, results: Sequence[ArmResult]) -> list[tuple[ArmResult, ArmResult]]:
    """The pairs of a check. Runs named by their keys are compared at each value that both are swept to. A limit, and a
    run that this size does not have, are results without runs.
    """
    above, below = (
        [r for r in results if side in (r.arm.key, _name(r))] or [ArmResult(Arm(str(side), (), ""))]
        for side in (check.above, check.below)
    )
    by_value = {check.above, check.below} <= set(figure.runs)
    return [(a, b) for a in above for b in below if a.arm.point == b.arm.point or not by_value]


def _rows(figure: Figure, check: Check, results: Sequence[ArmResult], size: Size) -> Iterator[list[str]]:
    measure = convergence(results)[0] if check.measure == "convergent" else MEASURES[check.measure]
    planned = [env for result in results for env in result.arm.envs or size.envs]  # some may have no run
    envs = dict.fromkeys([*all_envs(results), *planned])
    for a, b in compared(figure, check, results):
        for env in envs:
            sides = (check.above, a), (check.below, b)
            above, below = (_values(side, r, env, measure, size.seeds) for side, r in sides)
            runs = [", ".join(map(number, values)) if r.runs else "-" for r, values in ((a, above), (b, below))]
            yield [measure.what, env, _name(a), runs[0], _name(b), runs[1], outcome(above, below, check.or_equal)]


def _values(side: str | float, result: ArmResult, env: str, measure: Measure, seeds: int) -> list[float]:
    if not isinstance(side, str):
        return [side] * ENOUGH
    found = [measure.of(run) if run.finished else math.nan for run in result.of(env)]
    return found + [math.nan] * (seeds - len(found))  # those that did not start


def _name(result: ArmResult) -> str:
    return ": ".join([result.arm.panel] * bool(result.arm.panel) + [named(result.arm)])

"""Numbers of a run that figures are drawn of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.algorithms.table import ALGORITHMS
from coterie.tools.report.runs import RecordedRun
from coterie.tools.report.sections import cosines
from coterie.tools.report.tables import final_return, number
from coterie.types import Array

_HOUR_STEPS = 50_000_000  # env steps of a run of the papers, whose hours are compared


@dataclass(frozen=True)
class Measure:
    """A number of a run, NaN where the run does not have it."""

    of: Callable[[RecordedRun], float]
    what: str
    unit: str  # the axis' label


def order(run: RecordedRun) -> float:
    """A sort key: the final return; runs without one come first."""
    score = final_return(run)
    return score if math.isfinite(score) else -math.inf


def begins(run: RecordedRun) -> float:
    """The env steps after which the run trains."""
    algorithm = ALGORITHMS.get(str(run.config.get("algorithm")))
    return float(run.config.get("q.learn_start") or 0) if algorithm and algorithm.has_replay else 0.0


def rate(run: RecordedRun) -> float:
    """Env steps/s of a run without its start: from the first line after a third of the env steps (and after value
    learning has begun to train) to the last; over the whole run if it has fewer than two lines.
    """
    x, seconds = run.series("seconds")
    for least in (max(x[-1] / 3, begins(run)), x[-1] / 3, 0.0) if len(x) else ():
        late = x >= least
        if late.sum() > 1 and seconds[late][-1] > seconds[late][0]:
            return float((x[late][-1] - x[late][0]) / (seconds[late][-1] - seconds[late][0]))
    whole = float(run.summary.get("seconds") or 0)
    return float(run.summary["env_steps"]) / whole if whole else math.nan


def _frame_rate(run: RecordedRun) -> float:
    """Frames/s; the frames of an env step follow from the run's own rates of both."""
    steps, frames = (run.series(f"{what}_per_s")[1] for what in ("env_steps", "frames"))
    known = steps > 0
    return rate(run) * float((frames[known] / steps[known]).mean()) if known.any() else math.nan


def _hours(run: RecordedRun) -> float:
    return _HOUR_STEPS / rate(run) / 3600 if rate(run) > 0 else math.nan


def _watts(run: RecordedRun) -> float:
    """Mean power of all incarnations of the run: a resumed run's counter begins at zero again."""
    seconds, joules = run.series("joules", "seconds")
    used, took = np.diff(joules), np.diff(seconds)
    same = (used >= 0) & (took > 0)
    return float(used[same].sum() / took[same].sum()) if same.any() else math.nan


def _frames_per_kj(run: RecordedRun) -> float:
    """NaN where the machine does not count its energy."""
    return float((run.summary.get("energy") or {}).get("frames_per_kj") or math.nan)


def _busy(name: str) -> Callable[[RecordedRun], float]:
    """Percent in use, a mean over the run's time."""

    def measure(run: RecordedRun) -> float:
        seconds, share = run.series(f"busy/{name}", "seconds")
        return 100 * float(np.average(share, weights=np.diff(seconds, prepend=0.0))) if len(share) else math.nan

    return measure


def _over(name: str, statistic: Callable[[Array], Any]) -> Callable[[RecordedRun], float]:
    """A statistic of a metric over the run's lines."""
    return lambda run: float(statistic(y)) if len(y := run.series(name)[1]) else math.nan


def _of_bound(statistic: Callable[[Array], Any]) -> Callable[[RecordedRun], float]:
    """A statistic of the distance to consensus as a share of its bound."""

    def measure(run: RecordedRun) -> float:
        bound, distance = run.series("consensus/distance", "consensus/bound")
        known = bound > 0
        return float(statistic(distance[known] / bound[known])) if known.any() else math.nan

    return measure


def _cosine(run: RecordedRun) -> float:
    """The mean over all pairs of learners."""
    pairs = cosines(run)
    return math.nan if pairs is None else float(np.nanmean(pairs[~np.eye(len(pairs), dtype=bool)]))


MEASURES: dict[str, Measure] = {
    "return": Measure(final_return, "final return", "final return"),
    "rate": Measure(rate, "rate", "env steps/s"),
    "frames": Measure(_frame_rate, "frames per second", "frames/s"),
    "hours": Measure(_hours, "hours for 50 million env steps", "hours"),
    "cpu": Measure(_busy("cpu"), "use of the cores", "cores in use, %"),
    "gpu": Measure(_busy("gpu"), "use of the GPUs", "GPUs in use, %"),
    "watts": Measure(_watts, "power", "watts"),
    "frames_per_kj": Measure(_frames_per_kj, "frames per kilojoule", "frames/kJ"),
    "latency_p50": Measure(_over("latency/p50_ms", np.median), "inference latency, median", "milliseconds"),
    "latency_p99": Measure(_over("latency/p99_ms", np.median), "inference latency, 99th percentile", "milliseconds"),
    "saturation": Measure(
        _over("cosine/half", np.mean), "gradient saturation", "cosine of half a batch's gradient with the whole's"
    ),
    "policy_saturation": Measure(_over("cosine/half_policy", np.mean), "saturation without value loss", "cosine"),
    "bound": Measure(_of_bound(np.max), "largest distance / bound (the proposition: at most 1)", "share"),
    "tightness": Measure(_of_bound(np.mean), "mean of distance / bound", "share"),
    "cosine": Measure(_cosine, "mean cosine of two learners' gradients", "cosine"),
    "peers": Measure(_over("cosine/peers", np.mean), "mean cosine of peers", "cosine"),
    "others": Measure(_over("cosine/others", np.mean), "mean cosine of others", "cosine"),
    "closer_peers": Measure(
        lambda run: MEASURES["peers"].of(run) - MEASURES["others"].of(run), "cosine of peers minus others", "cosine"
    ),
}


def average(values: Iterable[float]) -> float:
    """Mean of the finite values, NaN if there are none."""
    known = [v for v in values if math.isfinite(v)]
    return float(np.mean(known)) if known else math.nan


def spread(values: Sequence[float]) -> str:
    """Mean over seeds with its standard error."""
    x = np.array([v for v in values if math.isfinite(v)])
    if len(x) < 2:
        return number(float(x[0])) if len(x) else "-"
    return f"{number(float(x.mean()))} +- {number(float(x.std(ddof=1) / len(x) ** 0.5))}"

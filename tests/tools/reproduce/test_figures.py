"""Every figure: its commands are valid, and its drawings of known numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.options import config_of, possible
from coterie.tools.report.runs import RecordedRun
from coterie.tools.reproduce.figure import BUDGETS, FIGURES, MISSING, Arm, ArmResult, Figure, Size
from coterie.tools.reproduce.measures import rate
from coterie.tools.reproduce.runs import planned
from coterie.tools.reproduce.special import draw

_LAYERS = ("q.advantage", "q.value.10", "torso.layers.0.conv", "torso.layers.2", "torso.layers.11")
OTHER = {
    **{"consensus__distance": 1.0, "consensus__bound": 4.0, "eval__return": 90.0, "eval__secondary_return": 45.0},
    **{"cosine__0-1": 0.25, "cosine__peers": 0.3, "cosine__others": 0.1, "cosine__half": 0.8},
    **{"latency__p50_ms": 1.5, "latency__p99_ms": 9.0, "busy__cpu": 0.25},
    **{"return__Pong-v5": 7.0, "return__Breakout-v5": 8.0},
    **{f"norm__{kind}__{layer}.weight": 2.0 for kind in ("weights", "gradient", "step") for layer in _LAYERS},
}
KINDS = {name: figure for figure in FIGURES.values() for name in figure.draw}  # a figure for each kind of drawing


def made_up(
    arm: Arm, env: str = "CartPole-v1", seed: int = 0, level: float = 100.0, rate: float = 500.0, **more: float
) -> RecordedRun:
    """A run of 1,000 env steps whose mean return is `level` from half on, at `rate` env steps/s; `more`: on every line,
    with __ for a slash.
    """
    metrics = {name.replace("__", "/"): value for name, value in more.items()}
    rates = {"env_steps_per_s": rate, "frames_per_s": 4 * rate}
    lines = [
        {"env_steps": n, "seconds": n / rate, "mean_return": level * min(1.0, n / 500), **rates, **metrics}
        for n in range(100, 1001, 100)
    ]
    config = {"preset": arm.args[0], "env.id": env, "seed": seed}
    energy = {"frames_per_kj": None, "reason": "no counter"}
    summary = {"status": "finished", "env_steps": 1000, "seconds": 1000 / rate, "energy": energy}
    return RecordedRun(Path(f"{arm.label}-{arm.x:g}-{env}-{seed}"), config, lines, summary, {})


def results(
    figure: Figure,
    size: Size,
    level: Callable[[Arm, str, int], float] = lambda arm, env, seed: 100.0,
    rate: Callable[[Arm], float] = lambda arm: 500.0,
    **more: float,
) -> list[ArmResult]:
    """Every arm of a figure with a made-up run for each env and seed."""
    found = []
    for arm in figure.arms(size):
        result = ArmResult(arm)
        for env in arm.envs or size.envs:
            if figure.verb != "train":
                result.reports.append(report(figure, arm, env))
                continue
            for seed in range(size.seeds):
                result.runs.append(made_up(arm, env, seed, level(arm, env, seed), rate(arm), **more))
            result.evaluations[env] = {"mean_return": 21.0, "stderr": 0.5}
        found.append(result)
    return found


def report(figure: Figure, arm: Arm, env: str) -> dict[str, Any]:
    """The parts of the JSON of `coterie bench` or `plan` that a figure uses."""
    if figure.verb == "bench":
        return {"env": env, "cores": 2, "env_only": 1000.0 * arm.x, "acting": 700.0 * arm.x, "training": 300.0 * arm.x}
    prices = {("decoupled", 1): 80.0, ("central", 1): 20.0, ("inline", 1): 50.0, ("central", 2): 99.0}
    layouts = [
        {
            "layout": {"acting": acting, "learners": learners},
            "frames_per_s": 1e4 * arm.x,
            "dollars_per_billion_frames": price,
            "bottleneck": "gpu",
        }
        for (acting, learners), price in prices.items()
    ]
    return {"env": env, "layouts": layouts}


def drawn(name, budget="smoke", **numbers):
    figure = FIGURES[name]
    return draw(figure, results(figure, figure.sizes[budget], **numbers), figure.sizes[budget])


@pytest.mark.parametrize("name", FIGURES)
def test_the_commands_of_a_figure_are_valid(name):
    """Of the smallest size; those of the others only differ in numbers."""
    figure = FIGURES[name]
    for budget in BUDGETS:
        size = figure.sizes[budget]
        assert figure.notes(size), "every size differs from the paper's"
        plans = planned(figure, size, budget, Path("x"))
        assert len({p.job.folder for p in plans}) == len({p.job.name for p in plans}) == len(plans)
        if budget == "smoke" and figure.verb == "train":
            for plan in {(plan.arm.key, plan.job.args[0]): plan for plan in plans}.values():
                config = config_of(list(plan.job.args))
                possible(config)
                assert config.steps == size.steps
    assert set(figure.paper) - set(figure.runs) or set(figure.paper) == set(figure.runs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_drawing_has_rows_and_titles(kind):
    figure = replace(KINDS[kind], draw=[kind])
    size = figure.sizes["smoke"]
    found = draw(figure, results(figure, size, **OTHER), size)
    assert found.charts or found.tables
    assert all(chart.rows for chart in found.charts)
    assert all(len(row) == len(table.head) for table in found.tables for row in table.rows)
    assert all(isinstance(cell, str) for table in found.tables for row in table.rows for cell in row)
    titles = [chart.title for chart in found.charts]
    assert len(set(titles)) == len(titles)
    empty = results(figure, size)  # runs without metrics are drawn without an error
    for result in empty:
        result.evaluations.clear()
        for run in result.runs:
            run.lines.clear()
    draw(figure, empty, size)


def test_a_run_is_made_for_each_value_of_the_list_that_it_mentions():
    size = replace(FIGURES["accel-2"].sizes["small"], envs=("Pong-v5",))
    arms = FIGURES["accel-2"].arms(size)
    assert [(arm.panel, arm.label) for arm in arms[:3]] == [("A2C", f"{n} simulators") for n in (16, 64, 256)]
    assert arms[3].args[3:7] == ("--env.num-envs", "16", "--algo.unroll-length", "128")  # 2048 // 16
    assert arms[5].args[6] == "8"
    assert [arm.label for arm in arms if arm.panel == "A3C"] == ["1 learners", "2 learners"]
    pairs = FIGURES["accel-5"].arms(FIGURES["accel-5"].sizes["small"])
    assert [arm.label for arm in pairs] == ["32 of 512", "512 of 32", "128 of 128"]


def test_the_differences_from_the_paper_depend_on_the_size():
    figure = FIGURES["gala-table1"]
    small, full = (figure.notes(figure.sizes[name]) for name in ("small", "full"))
    assert "CartPole-v1 stands for" in small
    assert "60,000 env steps instead of 40,000,000; 3 runs of each instead of 10" in small
    assert "stands for" not in full
    assert "instead of" not in full


def test_convergent_runs_have_more_than_half_of_the_nominal_score():
    def level(arm, env, seed):
        if arm.label == "A2C":
            return 100.0 if arm.x == 16 else 49.0
        return 51.0 if seed else 49.0

    chart = drawn("gala-1a", "small", level=level).charts[0]
    found = {(label, x): y for label, x, y, *_ in chart.rows}
    gala = next(label for label, _ in found if label.startswith("GALA"))
    assert found["A2C", 16] == 100
    assert found["A2C", 32] == found["A2C", 64] == 0
    assert found[gala, 16] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("name", "budget", "made", "row"),
    [  # the paper's values beside ours: by env, by what is swept, by the run, and by a run of a panel
        ("gala-table1", "full", {}, ["GALA-A2C", "Breakout-v5", "690 +- 72", "21 +- 0.5"]),
        ("gala-table1", "smoke", {}, ["GALA-A2C", "CartPole-v1", MISSING, "21 +- 0.5"]),
        ("accel-table2", "full", {"rate": lambda arm: 50e6 / 3600}, ["A2C", "Breakout-v5", "8", "0.59", "1"]),
        ("accel-table2", "full", {"rate": lambda arm: 50e6 / 3600}, ["A3C", "Breakout-v5", "4", "1.3", "1"]),
        ("impala-table1", "smoke", {"rate": lambda arm: 250.0}, [..., "17K / 20.5K (48 actors)", "1,000"]),
        ("impala-table2", "smoke", {}, [..., "V-trace", "LunarLander-v3", "47.1, 35.8, 34.5, 250.8, 46.9", "100"]),
        ("seed-table1", "smoke", {"rate": lambda arm: 300.0 if arm.label == "SEED" else 200.0}, [..., "1.5"]),
        ("seed-cost", "small", {}, [..., "16", "0.25"]),  # of layouts with one learner
        # The runs' own metrics: distance and bound, the secondary's evaluations, one agent's return of each task.
        ("gala-2a", "smoke", OTHER, [..., "0.25"]),
        ("accel-5", "smoke", OTHER, [..., "45"]),
        ("impala-transfer", "smoke", OTHER, [..., "8"]),
    ],
)
def test_a_row_of_a_table_has_the_papers_value_or_metric_beside_ours(name, budget, made, row):
    rows = drawn(name, budget, **made).tables[0].rows
    expected = [x for x in row if x is not ...]
    assert expected in [found[-len(expected) :] if row[0] is ... else found for found in rows]


def test_a_curve_of_the_best_runs_is_the_mean_of_three():
    figure = FIGURES["gala-1"]
    size = replace(figure.sizes["full"], envs=("Pong-v5",), seeds=4)
    found = draw(figure, results(figure, size, lambda arm, env, seed: 10.0 * seed), size)
    chart = next(chart for chart in found.charts if chart.title == "best 3 runs, Pong-v5: return per step")
    ends = {label: y for label, _, y, *_ in chart.rows}
    assert len(ends) == 4
    assert set(ends.values()) == {20.0}  # of 10, 20 and 30


def test_charts_show_the_runs_own_metrics_speeds_over_simulators_and_dollars():
    titles = {chart.title.partition(":")[0] for chart in drawn("accel-8", **OTHER).charts}
    layers = {"torso.layers.0.conv.weight", "torso.layers.11.weight"}  # the first and the last
    assert titles == {"CartPole-v1", *layers}
    assert ("envs alone (no inference)", 2.0, 4000.0, 4000.0, 4000.0) in drawn("accel-1b").charts[0].rows
    several = replace(FIGURES["accel-1b"].sizes["smoke"], envs=("CartPole-v1", "Acrobot-v1"))
    charts = draw(FIGURES["accel-1b"], results(FIGURES["accel-1b"], several), several).charts
    assert [chart.title for chart in charts] == ["Sampling, CartPole-v1", "Sampling, Acrobot-v1"]
    lags = drawn("staleness", "small").charts[0]
    assert [x for label, x, *_ in lags.rows if label == "PPO"] == [0, 4, 16, 64, 256]
    assert ">0</text>" in lags.svg[lags.svg.index("xtick_1") : lags.svg.index("xtick_2")]  # no lag has a place, too
    dollars = {(label, y) for label, _, y, *_ in drawn("seed-cost", "small").charts[0].rows}
    assert dollars == {("IMPALA (decoupled)", 80.0), ("SEED (central)", 20.0)}


def test_median_over_games_is_of_normalized_scores():
    levels = {"Pong-v5": 14.6, "Breakout-v5": 30.5}  # the published human scores
    charts = drawn("seed-7", "small", level=lambda arm, env, seed: levels[env]).charts
    median = next(chart for chart in charts if chart.title == "Median over games per step")
    assert median.rows[-1][2] == pytest.approx(1.0)


def test_use_of_the_cores_and_power_are_means_over_the_whole_run():
    figure, size = FIGURES["gala-3"], FIGURES["gala-3"].sizes["smoke"]
    runs = results(figure, size)
    for run in (run for result in runs for run in result.runs):
        lines = [(1, 100.0, 0.5), (3, 200.0, 0.5), (4, 10.0, 0.0), (6, 110.0, 0.25)]  # resumed after the second
        run.lines[:] = [{"env_steps": s, "seconds": s, "joules": j, "busy/cpu": cpu} for s, j, cpu in lines]
    charts = {chart.title.rpartition(": ")[2]: chart for chart in draw(figure, runs, size).charts}
    assert {y for _, _, y, *_ in charts["power"].rows} == {50.0}
    assert [y for _, _, y, *_ in charts["use of the cores"].rows] == [pytest.approx(100 * 2 / 6)] * 2


def test_the_rate_of_a_run_leaves_out_its_start():
    """And the time before value learning trains; a run of one line or none has its summary's rate."""
    one = made_up(FIGURES["accel-3"].arms(FIGURES["accel-3"].sizes["smoke"])[0])
    one.lines[:] = [{"env_steps": n, "seconds": s} for n, s in [(0, 10), (300, 20), (500, 21), (500, 22), (900, 24)]]
    assert rate(one) == pytest.approx(600 / 4)
    one.config.update({"algorithm": "dqn", "q.learn_start": 1000})
    one.lines[:] = [{"env_steps": n, "seconds": s} for n, s in [(500, 1), (1000, 2), (1100, 4), (1200, 6)]]
    assert rate(one) == pytest.approx(50)
    one.summary.update({"env_steps": 1200, "seconds": 6.0})
    for left in (one.lines[-1:], []):
        one.lines[:] = left
        assert rate(one) == pytest.approx(200)

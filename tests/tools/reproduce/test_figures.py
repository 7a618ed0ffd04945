"""Every figure: what it would run is possible, and what it draws of known numbers is right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.cli.options import config_of, possible
from coterie.tools.reproduce.catalogue import FIGURES
from coterie.tools.reproduce.command import scaled
from coterie.tools.reproduce.draw import rate
from coterie.tools.reproduce.figure import MISSING, PAPERS
from coterie.tools.reproduce.runs import planned, sized
from tests.tools.reproduce.made_up import cells, results
from tests.tools.reproduce.made_up import run as made_up

OTHER = {
    "consensus__distance": 1.0, "consensus__bound": 4.0, "cosine__0-1": 0.25, "cosine__peers": 0.3,
    "cosine__others": 0.1, "latency__p50_ms": 1.5, "latency__p99_ms": 9.0, "cosine__half": 0.8,
    "eval__return": 90.0, "eval__secondary_return": 45.0, "return__Pong-v5": 7.0, "return__Breakout-v5": 8.0,
    **{f"norm__{kind}__{layer}.weight": 2.0 for kind in ("weights", "gradient", "step")
       for layer in ("q.advantage", "q.value.10", "torso.layers.0.conv", "torso.layers.2", "torso.layers.11")},
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_every_command_of_every_size_is_possible(name):
    """And so is the short run of it that tells how long it will take."""
    figure = FIGURES[name]
    assert set(figure.sizes) == {"smoke", "small", "full"}
    assert figure.paper in PAPERS
    assert figure.scaled
    for budget, size in figure.sizes.items():
        assert scaled(figure, size)
        plans = planned(figure, size, budget, Path("x"))
        assert len({p.job.folder for p in plans}) == len({p.job.name for p in plans}) == len(plans)
        short = planned(figure, replace(size, steps=figure.sizes["smoke"].steps, seeds=1), "smoke", Path("x"))
        each = {id(p.arm): p for p in [*plans, *short][::-1] if p.arm.verb == "train"}  # an env of each arm
        for plan in list(each.values())[:40]:
            config = config_of(list(plan.job.args))
            possible(config)
            assert config.steps in (size.steps, figure.sizes["smoke"].steps)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_what_it_is_given(name):
    figure = FIGURES[name]
    drawn = figure.draw(results(figure, figure.sizes["smoke"], **OTHER), figure.sizes["smoke"])
    assert drawn.charts or drawn.tables
    assert figure.said or "paper" in cells(drawn.tables)  # what the paper states is there
    assert not [c.title for c in drawn.charts if not c.rows]
    assert all(len(row) == len(table.head) for table in drawn.tables for row in table.rows)
    assert all(isinstance(cell, str) for table in drawn.tables for row in table.rows for cell in row)
    titles = [chart.title for chart in drawn.charts]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_runs_that_told_nothing_is_drawn_too(name):
    figure, size = FIGURES[name], FIGURES[name].sizes["smoke"]
    empty = results(figure, size)
    for result in empty:
        for run in result.runs:
            run.lines.clear()
        result.evaluations.clear()
    figure.draw(empty, size)


def test_convergent_is_more_than_half_of_the_nominal_score():
    figure, size = FIGURES["gala-1a"], FIGURES["gala-1a"].sizes["small"]

    def level(arm, env, seed):
        if arm.label == "A2C":
            return 100.0 if arm.x == 16 else 49.0
        return 51.0 if seed else 49.0

    chart = figure.draw(results(figure, size, level), size).charts[0]
    found = {(label, x): y for label, x, y, *_ in chart.rows}
    gala = next(label for label, _ in found if label.startswith("GALA"))
    assert found["A2C", 16] == 100
    assert found["A2C", 32] == found["A2C", 64] == 0
    assert found[gala, 16] == pytest.approx(200 / 3)


def test_table_1_of_gala_has_the_paper_beside_ours():
    figure = FIGURES["gala-table1"]
    size = figure.sizes["full"]
    drawn = figure.draw(results(figure, size), size)
    rows = {(method, env): (paper, ours) for method, env, paper, ours in drawn.tables[0].rows}
    assert rows["GALA-A2C", "Breakout-v5"] == ("690 +- 72", "21 +- 0.5")
    assert rows["IMPALA", "SpaceInvaders-v5"][0] == "4071 +- 393"
    small = figure.draw(results(figure, figure.sizes["small"]), figure.sizes["small"])
    assert {row[2] for row in small.tables[0].rows} == {MISSING}  # the paper has no CartPole


def test_the_three_best_runs_are_the_best():
    figure = FIGURES["gala-1"]
    size = figure.sizes["full"]
    drawn = figure.draw(results(figure, size, lambda arm, env, seed: 10.0 * seed), size)
    ends = {}
    for chart in drawn.charts:
        if chart.title == "best 3 runs, Pong-v5: return per step":
            for label, _, y, *_ in chart.rows:
                ends[label] = y
    assert len(ends) == 4
    assert set(ends.values()) == {80.0}  # of 70, 80 and 90


def test_distance_beside_its_bound():
    figure = FIGURES["gala-2a"]
    drawn = figure.draw(results(figure, figure.sizes["smoke"], **OTHER), figure.sizes["smoke"])
    assert drawn.tables[0].rows[0][2:] == ["0.25", "0.25"]


def test_hours_are_of_fifty_million_steps():
    figure = FIGURES["accel-table2"]
    size = figure.sizes["full"]
    drawn = figure.draw(results(figure, size, rate=lambda arm: 50e6 / 3600), size)
    rows = drawn.tables[0].rows
    assert {row[3] for row in rows} == {"1"}
    assert ["A2C", "8", "0.59", "1"] in rows
    assert not [row for row in rows if row[:2] == ["A3C", "1"]]


def test_sampling_is_over_simulators_for_each_core():
    figure, size = FIGURES["accel-1b"], FIGURES["accel-1b"].sizes["smoke"]
    (chart,) = figure.draw(results(figure, size), size).charts
    assert ("envs alone (no inference)", 2.0, 4000.0, 4000.0, 4000.0) in chart.rows


def test_a_secondary_learner_stands_beside_its_primary():
    figure, size = FIGURES["accel-5"], FIGURES["accel-5"].sizes["small"]
    assert [arm.label for arm in figure.arms(size)] == ["32 of 512", "512 of 32", "128 of 128"]
    table = figure.draw(results(figure, size, **OTHER), size).tables[0]
    assert [row[3] for row in table.rows[:2]] == ["90", "45"]


def test_frames_are_compared_with_the_table():
    figure, size = FIGURES["impala-table1"], FIGURES["impala-table1"].sizes["smoke"]
    text = cells(figure.draw(results(figure, size, rate=lambda arm: 250.0), size).tables)
    assert "IMPALA, actors on the same cores | 17K / 20.5K (48 actors) | 1,000" in text


def test_all_corrections_with_and_without_replay():
    figure, size = FIGURES["impala-table2"], FIGURES["impala-table2"].sizes["smoke"]
    rows = figure.draw(results(figure, size), size).tables[0].rows
    assert len(rows) == 8
    assert rows[4][:3] == ["V-trace", "with replay", "47.1, 35.8, 34.5, 250.8, 46.9"]


def test_one_agent_is_scored_by_task():
    figure, size = FIGURES["impala-transfer"], FIGURES["impala-transfer"].sizes["smoke"]
    rows = figure.draw(results(figure, size, **OTHER), size).tables[0].rows
    assert [row[2] for row in rows] == ["7", "8"]


def test_speed_is_a_ratio_to_impala():
    figure, size = FIGURES["seed-table1"], FIGURES["seed-table1"].sizes["smoke"]
    drawn = figure.draw(results(figure, size, rate=lambda arm: 300.0 if arm.label == "SEED" else 200.0), size)
    assert [row[1] for row in drawn.tables[0].rows] == ["1.5"]
    assert "2.5 times as fast" in dict(figure.said).values()


def test_dollars_of_both_layouts():
    figure, size = FIGURES["seed-cost"], FIGURES["seed-cost"].sizes["small"]
    drawn = figure.draw(results(figure, size), size)
    assert {(label, y) for label, _, y, *_ in drawn.charts[0].rows} == {
        ("IMPALA (decoupled)", 80.0), ("SEED (central)", 20.0)
    }  # fmt: skip


def test_cost_is_a_share_of_impalas():
    figure, size = FIGURES["seed-cost"], FIGURES["seed-cost"].sizes["small"]
    ratios = figure.draw(results(figure, size), size).tables[0]
    assert [row[1:] for row in ratios.rows] == [["1", "0.25"], ["4", "0.25"], ["16", "0.25"]]


def test_what_is_not_as_in_the_paper_depends_on_the_size():
    figure = FIGURES["gala-table1"]
    small, full = (" ".join(scaled(figure, figure.sizes[name])) for name in ("small", "full"))
    assert "CartPole-v1 stands for" in small
    assert "60,000 env steps instead of 40,000,000; 3 runs of each instead of 10" in small
    assert "32 simulators instead of 64" in small
    assert "stands for" not in full
    assert "instead of" not in full


def test_a_rate_leaves_the_start_out_and_waits_count():
    one = made_up(FIGURES["gala-1a"].arms(FIGURES["gala-1a"].sizes["smoke"])[0])
    one.lines[:] = [
        {"env_steps": steps, "seconds": seconds, "env_steps_per_s": told}
        for steps, seconds, told in [(0, 10, 0), (300, 20, 30), (500, 21, 200), (500, 22, 0), (900, 24, 200)]
    ]
    assert rate(one) == pytest.approx(600 / 4)


def test_settings_are_the_same_for_all_and_sorted():
    figure, size = FIGURES["seed-4"], FIGURES["seed-4"].sizes["small"]
    arms = figure.arms(size)
    drawn = {arm.label: [a.args[-4:] for a in arms if a.label == arm.label] for arm in arms}
    assert len({str(settings) for settings in drawn.values()}) == 1
    assert len({str(s) for s in drawn["SEED"]}) == 24
    chart = figure.draw(results(figure, size, lambda arm, env, seed: (arm.x * 5) % 24), size).charts[0]
    assert [y for label, _, y, *_ in chart.rows if label == "A2C"] == [*range(23, -1, -1)]


def test_median_over_games_is_of_normalised_scores():
    figure = FIGURES["seed-7"]
    size = figure.sizes["small"]  # Pong (random -20.7, human 14.6) and Breakout (1.7 and 30.5)
    levels = {"Pong-v5": 14.6, "Breakout-v5": 30.5}
    charts = figure.draw(results(figure, size, lambda arm, env, seed: levels[env]), size).charts
    median = next(chart for chart in charts if chart.title == "Median over games per step")
    assert median.rows[-1][2] == pytest.approx(1.0)


def test_saturation_is_the_mean_cosine():
    figure, size = FIGURES["accel-saturation"], FIGURES["accel-saturation"].sizes["smoke"]
    drawn = figure.draw(results(figure, size, cosine__half=0.75), size)
    assert all(y == pytest.approx(0.75) for _, _, y, *_ in drawn.charts[0].rows)
    assert f"{1 / math.sqrt(2):.4f}" in dict(figure.said)["noise alone"]


def test_norms_are_of_the_torsos_first_and_last_layer():
    figure, size = FIGURES["accel-8"], FIGURES["accel-8"].sizes["smoke"]
    titles = {chart.title.partition(":")[0] for chart in figure.draw(results(figure, size, **OTHER), size).charts}
    assert titles == {"torso.layers.0.conv.weight", "torso.layers.11.weight"}


def test_the_paper_is_asked_for_the_methods_row_whatever_the_learners():
    figure, size = FIGURES["accel-table1"], FIGURES["accel-table1"].sizes["small"]
    rows = figure.draw(results(figure, size), size).tables[0].rows
    assert [row[1] for row in rows if row[0] == "APPO, 2 x 8"] == ["8.8 / 1.2 (8 x 8)"]
    batches = {arm.label: config_of(list(planned(figure, size, "small", Path("x"))[i].job.args)).q.batch_size
               for i, arm in enumerate(figure.arms(size))}  # fmt: skip
    assert batches["DQN, batch 32"] == batches["C51, batch 32"] == 32
    assert batches["DQN, batch 512"] == batches["e-Rainbow, batch 512"] == 512
    assert batches["C51, batch 2048"] == 2048


def test_a_size_of_ones_own_is_told_by_what_it_is():
    figure = FIGURES["gala-1"]
    own = " ".join(scaled(figure, replace(figure.sizes["full"], envs=("Pong-v5",), seeds=3)))
    assert "3 runs of each instead of 10" in own
    assert "simulators instead" not in own
    assert "env steps instead" not in own
    value = FIGURES["accel-3"]
    assert "explores for a fifth" in " ".join(scaled(value, value.sizes["small"]))
    assert "explores for a fifth" not in " ".join(scaled(value, sized(value, "2000000")))


def test_a_rate_is_of_what_trains_and_of_one_line_by_the_summary():
    one = made_up(FIGURES["accel-3"].arms(FIGURES["accel-3"].sizes["smoke"])[0])
    one.config.update({"algorithm": "dqn", "q.learn_start": 1000})
    one.lines[:] = [{"env_steps": n, "seconds": s} for n, s in [(500, 1), (1000, 2), (1100, 4), (1200, 6)]]
    assert rate(one) == pytest.approx(50)
    one.lines[:] = one.lines[-1:]
    one.summary.update({"env_steps": 1200, "seconds": 6.0})
    assert rate(one) == pytest.approx(200)


def test_power_is_over_all_lives_of_a_run():
    figure, size = FIGURES["gala-3"], FIGURES["gala-3"].sizes["smoke"]
    runs = results(figure, size)
    for result in runs:
        for run in result.runs:
            told = [(1, 100.0), (3, 200.0), (4, 10.0), (6, 110.0)]  # resumed after the second
            run.lines[:] = [{"env_steps": n, "seconds": n, "joules": j} for n, j in told]
    power = next(chart for chart in figure.draw(runs, size).charts if chart.title.endswith(": power"))
    assert {y for _, _, y, *_ in power.rows} == {50.0}


def test_use_of_the_cores_is_a_mean_over_time():
    figure, size = FIGURES["gala-3"], FIGURES["gala-3"].sizes["smoke"]
    drawn = figure.draw(results(figure, size, busy__cpu=0.25), size)
    shown = next(chart for chart in drawn.charts if "use of the cores" in chart.title)
    assert {y for _, _, y, *_ in shown.rows} == {25.0}
    runs = results(figure, size, busy__cpu=1.0)
    runs[0].runs[0].lines[-1] |= {"seconds": 3.6, "busy/cpu": 0.0}  # half of the time in the last line
    shown = next(c for c in figure.draw(runs, size).charts if "use of the cores" in c.title)
    assert [y for label, _, y, *_ in shown.rows if label == runs[0].arm.label] == [pytest.approx(50.0)]

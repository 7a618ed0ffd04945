"""The pages as files and, where there is one, in a real browser."""

from __future__ import annotations

import html
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.tools.report.charts import Line, intervals, lines
from coterie.tools.report.page import of_runs
from coterie.tools.report.runs import read_run
from tests.support.http import BROWSER, needs_browser
from tests.tools.report.recorded import record

SVG = "{http://www.w3.org/2000/svg}"
RETURN = "return, mean of the last 100 episodes|score over all tasks"
# The axis labels of each kind of chart, by its title (of a heat map also the color bar's). Labels have units where the
# quantity has one: returns, scores, norms and cosines have none.
AXES = (
    (r".+: return per step", "env steps", RETURN),
    (r".+: return per second", "seconds", RETURN),
    (r".+: return per kilojoule", "energy of the machine, kJ", RETURN),
    (r".+,.+: evaluations", "env steps", "score over all tasks"),
    (r".+: evaluations", "env steps", "return of evaluation episodes"),
    (r"Final scores: .+", r"return|human-normalized score \(0 random, 1 human\)", "method"),
    (r"Policy lag: .+", "age of the acting weights, learner steps", "env steps"),
    (r"Importance weights: .+", "env steps", "fraction of the samples"),
    (r"Consensus: .+", "env steps", "Frobenius norm"),
    (r"Gradients: .+", "learner", "learner", "cosine of two learners' gradients"),
    (r"Where the (learner|actors|env hosts)'s? time goes: .+", "env steps", "share, %"),
)
CONTROL = "http://control.invalid/x.png"  # requested by the probe, to show that requests are seen


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for k in range(3):
        record(folder / f"a{k}", "gala-a2c", seed=k, level=100.0 + k)
    add(record(folder / "b", "ppo", level=50.0), **{"stage/host/act": 0.2, "ess": 0.7, "rho_clipped": 0.4})
    (folder / "b/watch.mp4").write_bytes(b"not really a video")
    out = folder / "page.html"
    assert main(["compare", str(folder), "--out", str(out)]) == 0
    return out


def add(run: Path, **more: float) -> Path:
    """Add metrics to all lines of a run that have its mean return."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | more if "mean_return" in line else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def charts(text: str) -> list[tuple[str, ET.Element]]:
    """Each chart's title and drawing."""
    found = re.findall(r'<figure role="group" aria-label="([^"]*)">(<svg.*?</svg>)', text, re.S)
    assert len(found) == text.count("<svg")
    return [(html.unescape(title), ET.fromstring(svg)) for title, svg in found]


def texts(svg: ET.Element) -> list[str]:
    return ["".join(e.itertext()).strip() for e in svg.iter(f"{SVG}text")]


def groups(parent: ET.Element, name: str) -> list[ET.Element]:
    """The groups right inside it that matplotlib has named so and numbered."""
    return [g for g in parent.findall(f"{SVG}g") if re.fullmatch(rf"{name}_\d+", g.get("id", ""))]


def axis_labels(svg: ET.Element) -> list[list[str]]:
    """For each axis with ticks the texts beside it that are not a tick's."""
    return [
        [text for group in groups(axis, "text") for text in texts(group)]
        for figure in groups(svg, "figure")
        for axes in groups(figure, "axes")
        for axis in groups(axes, r"matplotlib\.axis")
        if groups(axis, "[xy]tick")
    ]


def test_every_axis_has_a_label_with_its_unit(page, tmp_path):
    on = [(preset, env) for preset in ("ppo", "a2c") for env in ("Pong-v5", "Breakout-v5")]
    games = [read_run(record(tmp_path / f"{preset}{env}", preset, env__id=env)) for preset, env in on]
    several = read_run(add(record(tmp_path / "tasks", "ppo", env__id="Pong-v5,Breakout-v5"), score=0.5))
    drawn = [chart for text in (page.read_text(), of_runs(games, "").html(), of_runs([several], "").html())
             for chart in charts(text)]  # fmt: skip
    kinds, seen = set(), set()
    for title, svg in drawn:
        kind, *wanted = next(kind for kind in AXES if re.fullmatch(kind[0], title))
        labels = axis_labels(svg)
        assert [len(label) for label in labels] == [1] * len(wanted), (title, labels)
        for (label,), want in zip(labels, wanted, strict=True):
            assert re.fullmatch(want, label), (title, label)
            seen.add(label)
        kinds.add(kind)
    assert kinds == {kind for kind, *_ in AXES}
    assert {"score over all tasks", "human-normalized score (0 random, 1 human)", "return"} <= seen


def dash_and_marker(svg: ET.Element, line: ET.Element) -> tuple[str, str | None]:
    """As they are drawn: lengths of strokes and gaps, and the marker's outline, which does not depend on color."""
    dash = re.search(r"stroke-dasharray: ([^;]+)", line.find(f"{SVG}path").get("style"))
    marker = line.find(f".//{SVG}use").get("{http://www.w3.org/1999/xlink}href")[1:]
    return dash[1] if dash else "solid", next(e.get("d") for e in svg.iter() if e.get("id") == marker)


def test_no_two_lines_of_a_chart_share_dash_and_marker():
    """Eight: more than there are colors, markers or dashes by themselves."""
    x, names = np.arange(20.0), [f"line {k}" for k in range(8)]
    chart = lines("eight", [Line(name, x, x + k) for k, name in enumerate(names)], "env steps", "return")
    svg = ET.fromstring(chart.svg)
    axes, legend = (next(g for g in svg.iter(f"{SVG}g") if g.get("id") == name) for name in ("axes_1", "legend_1"))
    drawn, explained = ([dash_and_marker(svg, line) for line in groups(g, "line2d")] for g in (axes, legend))
    assert len(drawn) == len(set(drawn)) == 8
    assert explained == drawn
    assert [text for group in groups(legend, "text") for text in texts(group)] == names


def test_long_names_are_wrapped_and_a_legend_is_below_the_plot():
    """pytest's settings make matplotlib's warning about a plot without room an error."""
    name = "ppo (" + ", ".join(f"model.torso number{k}:Torso" for k in range(9)) + ")"
    x = np.arange(20.0)
    svg = ET.fromstring(lines("long", [Line(f"{k} {name}", x, x + k) for k in range(6)], "env steps", "return").svg)
    legend, plot = next(g for g in svg.iter(f"{SVG}g") if g.get("id") == "legend_1"), next(svg.iter(f"{SVG}rect"))
    at = [float(re.search(r"translate\(\S+ (\S+)\)", e.get("transform"))[1]) for e in legend.iter(f"{SVG}text")]
    assert len(at) > 20
    assert float(plot.get("y")) + float(plot.get("height")) < min(at)
    assert max(at) < float(svg.get("viewBox").split()[3])
    assert float(plot.get("height")) > 150
    assert max(map(len, texts(legend))) <= 80
    chart = intervals("long", [(f"{k} {name}", 1.0, 0.0, 2.0) for k in range(6)], "return")
    assert max(map(len, texts(ET.fromstring(chart.svg)))) <= 40


def test_a_comparison_page_has_every_part(page):
    text = page.read_text()
    assert len(charts(text)) >= 12
    for words in (
        "the learner&#39;s time goes",
        "the actors&#39; time goes",
        "interquartile",
        "What differs",
        "Reproducibility",
        "FOLDER/config.json --out NEW",
        "a &lt;fast&gt; one",
        "data:video/mp4;base64,",
    ):
        assert words in text, words
    caption = html.unescape(re.search(r"<b>Consensus: gala-a2c.*?</b>(.*?)</figcaption>", text)[1])
    distance, bound = "distance to the mean of the learners' weights", "bound of GALA's Proposition 1"
    assert caption == f"{distance} ends at 0.1; {bound} ends at 0.2."


def test_nothing_is_fetched_and_no_id_is_used_twice(page):
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "<script" not in text
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    used = [i for one in ids for i in one if re.match(r"[mph][0-9a-f]{6,}$", i)]  # what other elements refer to
    assert used
    assert len(used) == len(set(used))


def test_a_run_that_still_trains_can_be_reported(tmp_path, capsys):
    run = record(tmp_path / "a", "ppo", optim__lr=0.5)
    (run / "summary.json").unlink()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    assert "running" in text
    assert re.search(r"<td>optim.lr</td><td>[^<]+</td><td>0.5</td>", text)
    (run / "metrics.jsonl").write_text("")  # nothing yet
    assert main(["report", str(run)]) == 0


def test_errors_of_report_compare_and_dashboard_are_one_line(tmp_path, capsys):
    run = record(tmp_path / "runs/a", "ppo")
    record(tmp_path / "runs/b", "ppo", seed=1)
    for words, why in (
        (["compare", str(run)], "give two runs or more"),
        (["report", str(tmp_path / "runs")], "holds 2 runs"),
        (["report", str(tmp_path / "nothing")], "not a run folder"),
        (["report", str(run), "--out", str(run / "config.json" / "x.html")], "cannot write"),
        (["dashboard", str(tmp_path / "nothing")], "not a run folder"),
        (["dashboard", str(run), "--port", "70000"], "port"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert why in err
        assert len(err.splitlines()) == 1


def reading_only() -> None:
    raise PermissionError("not your folder")


def test_links_in_a_folder_from_elsewhere_are_not_written_through_nor_read(tmp_path, monkeypatch):
    (run, mine), drafts = (record(tmp_path / "run", "ppo"), tmp_path / "mine"), (".report.html", "report.html")
    mine.write_text("not to be lost")
    for name in (*drafts, "watch.mp4"):
        (run / name).symlink_to(mine)
    assert main(["report", str(run)]) == 0
    assert mine.read_text() == "not to be lost"
    assert "An episode of" not in (run / "report.html").read_text()
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(mine)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: reading_only())  # its folder is somebody else's
    assert main(["report", str(run)]) == 1
    assert mine.read_text() == "not to be lost"


@needs_browser
def test_a_browser_draws_the_page_offline(page, tmp_path):
    """Chromium lays it out: charts have a size, and it requests nothing but the file itself."""
    probe = """<img src="CONTROL" hidden><script>addEventListener("load", () => {
      const all = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect());
      const wide = document.documentElement.scrollWidth <= innerWidth;
      const asked = performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"));
      const drawn = all.filter(r => r.width > 100 && r.height > 80).length;
      document.title = JSON.stringify({charts: all.length, drawn,
        inside: all.filter(r => r.right <= innerWidth).length, wide, asked});
    })</script></body>"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</body>", probe.replace("CONTROL", CONTROL)))
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,900", "--virtual-time-budget=5000"]
    done = subprocess.run([*words, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stderr[-2000:]
    found = json.loads(html.unescape(title[1]))
    assert found["charts"] >= 12
    assert found["drawn"] == found["inside"] == found["charts"]
    assert found["wide"], "the page is wider than the window"
    assert found["asked"] == [CONTROL]

"""The pages as files and, where there is one, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest

from coterie import cli
from tests.report.recorded import record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture
def page(tmp_path):
    for k in range(3):
        record(tmp_path / f"a{k}", "gala-a2c", seed=k, level=100.0 + k)
    record(tmp_path / "b", "ppo", level=50.0)
    (tmp_path / "b/watch.mp4").write_bytes(b"not really a film")
    out = tmp_path / "page.html"
    assert cli.main(["compare", str(tmp_path), "--out", str(out)]) == 0
    return out


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


def texts(svg: ET.Element) -> list[str]:
    return ["".join(e.itertext()).strip() for e in svg.iter("{http://www.w3.org/2000/svg}text")]


def test_every_part_is_there_with_units(page):
    text = page.read_text()
    labels = [set(texts(svg)) for svg in svgs(text)]
    assert len(labels) >= 12
    for axis in ("env steps", "seconds", "energy of the machine, kJ", "age of the weights that acted, learner steps",
                 "Frobenius norm", "cosine of two learners' gradients", "share, %"):  # fmt: skip
        assert any(axis in label for label in labels), axis
    for words in (
        "the learner&#39;s time goes",
        "the actors&#39; time goes",
        "interquartile",
        "What differs",
        "Reproducibility",
        "a &lt;fast&gt; one",
        "data:video/mp4;base64,",
    ):
        assert words in text, words


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


def test_curves_differ_without_colour(page):
    """Of one chart no two lines share dash and marker."""
    chart = next(
        svg for svg in svgs(page.read_text()) if "env steps" in texts(svg) and any("3 seeds" in t for t in texts(svg))
    )
    dashes = [
        re.search(r"stroke-dasharray: ([^;]+)", style)
        for e in chart.iter("{http://www.w3.org/2000/svg}path")
        if "stroke-width: 1.6" in (style := e.get("style", ""))
    ]
    assert len({m and m[1] for m in dashes}) >= 2


def test_a_report_of_a_run_that_goes_on(tmp_path, capsys):
    run = record(tmp_path / "a", "ppo", optim__lr=0.5)
    (run / "summary.json").unlink()
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    assert "goes on" in text
    assert re.search(r"<td>optim.lr</td><td>[^<]+</td><td>0.5</td>", text)
    (run / "metrics.jsonl").write_text("")  # nothing yet
    assert cli.main(["report", str(run)]) == 0


def test_what_cannot_be_is_one_line(tmp_path, capsys):
    run = record(tmp_path / "runs/a", "ppo")
    record(tmp_path / "runs/b", "ppo", seed=1)
    for words, why in (
        (["compare", str(run)], "give two runs or more"),
        (["report", str(tmp_path / "runs")], "holds 2 runs"),
        (["report", str(tmp_path / "nothing")], "no run is there"),
        (["report", str(run), "--out", str(run / "config.json" / "x.html")], "cannot write"),
    ):
        assert cli.main(words) in (1, 2)
        err = capsys.readouterr().err
        assert why in err
        assert len(err.splitlines()) == 1


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
def test_a_browser_draws_it_offline(page, tmp_path):
    """Chromium lays it out: charts have a size, text is text, nothing but the file itself is asked for."""
    log = tmp_path / "net.json"
    probe = """<script>addEventListener("load", () => {
      const all = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect());
      const wide = document.documentElement.scrollWidth <= innerWidth;
      const asked = performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"));
      const drawn = all.filter(r => r.width > 100 && r.height > 80).length;
      document.title = JSON.stringify({charts: all.length, drawn,
        inside: all.filter(r => r.right <= innerWidth).length, wide, asked});
    })</script></body>"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</body>", probe))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1200,900", f"--log-net-log={log}", "--virtual-time-budget=5000", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stderr[-2000:]
    found = json.loads(title[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert found["charts"] >= 12
    assert found["drawn"] == found["inside"] == found["charts"]
    assert found["wide"], "the page is wider than the window"
    assert found["asked"] == []

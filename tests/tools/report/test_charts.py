"""The lines of a chart are told apart without their colours, by dash and marker."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np

from coterie.tools.report.charts import Line, lines

SVG = "{http://www.w3.org/2000/svg}"
X = np.arange(20.0)


def parts(svg: ET.Element, within: str, name: str) -> list[ET.Element]:
    """Matplotlib's numbered elements of that name, directly inside the group `within`."""
    (parent,) = (g for g in svg.iter(f"{SVG}g") if g.get("id") == within)
    return [g for g in parent if re.fullmatch(rf"{name}_\d+", g.get("id", ""))]


def named(svg: ET.Element, name: str) -> ET.Element:
    return next(e for e in svg.iter() if e.get("id") == name)


def dash_and_marker(svg: ET.Element, line: ET.Element) -> tuple[str, str | None]:
    """As they are drawn: lengths of strokes and gaps, and the marker's outline, which does not depend on colour."""
    dash = re.search(r"stroke-dasharray: ([^;]+)", line.find(f"{SVG}path").get("style"))
    use = line.find(f".//{SVG}use")
    return dash[1] if dash else "solid", named(svg, use.get("{http://www.w3.org/1999/xlink}href")[1:]).get("d")


def labels(svg: ET.Element) -> list[str]:
    return ["".join(text.itertext()).strip() for text in parts(svg, "legend_1", "text")]


def test_no_two_lines_of_a_chart_share_dash_and_marker():
    """Eight: more than there are colours, markers or dashes by themselves."""
    names = [f"line {k}" for k in range(8)]
    chart = lines("eight", [Line(name, X, X + k) for k, name in enumerate(names)], "env steps", "return")
    svg = ET.fromstring(chart.svg)
    drawn = [dash_and_marker(svg, line) for line in parts(svg, "axes_1", "line2d")]
    assert len(drawn) == len(set(drawn)) == 8
    assert labels(svg) == names
    assert [dash_and_marker(svg, line) for line in parts(svg, "legend_1", "line2d")] == drawn

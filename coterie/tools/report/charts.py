"""Charts as SVG text: axes with units, lines that differ by dash and marker as well as by color."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from coterie.extras import needs
from coterie.types import Array

# Okabe and Ito's colors, which stay distinct for people with red-green color blindness; without the yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HEAD = ("label", "x", "y", "low", "high")
_CHARACTERS, _ROW = 78, 0.17  # in the width of a legend, and inches of each of its rows
_HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo")


@dataclass(frozen=True)
class Chart:
    """`text` describes it for readers who cannot see it; `rows` are its numbers, under `HEAD`."""

    title: str
    svg: str
    text: str
    rows: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True)
class Line:
    """`low` and `high` are a band around `y`, each `[N]`."""

    label: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


@dataclass
class _Drawn:
    svg: str = ""


@contextmanager
def _canvas(title: str, x: str, y: str, width: float = 6.0, height: float = 3.4) -> Iterator[tuple[Any, _Drawn]]:
    """Axes to draw on, and an object that has the SVG afterwards. `x` and `y`: labels, with units."""
    with needs("a chart", "plots"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    drawn, out = _Drawn(), io.StringIO()
    # Text stays text (it can be searched and read aloud); the salt keeps the ids of one page's charts apart.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        yield axes, drawn
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML header and the DOCTYPE, which names an address
    drawn.svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)


def lines(
    title: str, series: Sequence[Line], x: str, y: str, text: str = "", log_y: bool = False, log_x: bool = False
) -> Chart:
    """Curves on common axes; `x` and `y` are the axes' labels, with units."""
    names = [textwrap.fill(line.label, _CHARACTERS) for line in series]
    columns = max(1, min(3, _CHARACTERS // (8 + max(map(len, names), default=0))))  # 8: the line before a name
    rows_below = sum(1 + name.count("\n") for name in names) / columns if len(names) > 1 else 0
    with _canvas(title, x, y, height=3.4 + _ROW * rows_below) as (axes, drawn):
        styles = zip(cycle(COLORS), cycle(_DASHES), cycle(_MARKERS), strict=False)
        for line, name, (color, dash, marker) in zip(series, names, styles, strict=False):
            each = max(1, len(line.x) // 8)
            style = {"color": color, "linestyle": dash, "marker": marker, "markevery": each, "markersize": 4}
            axes.plot(line.x, line.y, label=name, linewidth=1.6, **style)
            if line.low is not None and line.high is not None and np.isfinite(line.low).any():
                axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
        axes.grid(alpha=0.3)
        if log_y:
            axes.set_yscale("log")
        if log_x:
            ticks = sorted({float(at) for line in series for at in line.x})
            least = next((at for at in ticks if at > 0), 1.0)
            axes.set_xscale("symlog", base=2, linthresh=least)  # logarithmic, with room for 0 below the least value
            axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
            axes.minorticks_off()
        if len(series) > 1:
            axes.figure.legend(fontsize=8, loc="outside lower center", ncols=columns, frameon=False)
    ends = "; ".join(f"{line.label} ends at {line.y[-1]:.4g}" for line in series if len(line.y))
    rows = []
    for line in series:
        low, high = (line.y if end is None else end for end in (line.low, line.high))
        rows += [(line.label, *point) for point in zip(line.x, line.y, low, high, strict=True)]
    return Chart(title, drawn.svg, f"{text} {ends}.".strip(), rows)


def histogram(title: str, counts: dict[int, float], x: str, y: str, text: str = "") -> Chart:
    """Bars for whole numbers, grouped so that there are at most about thirty."""
    low, high = min(counts), max(counts)
    width = max(1, -(-(high - low + 1) // 30))
    bars: dict[int, float] = {}
    for value, count in counts.items():
        begin = low + (value - low) // width * width
        bars[begin] = bars.get(begin, 0) + count
    with _canvas(title, x, y) as (axes, drawn):
        align = "edge" if width > 1 else "center"
        axes.bar(list(bars), list(bars.values()), width=0.9 * width, align=align, color=COLORS[0])
        axes.grid(alpha=0.3, axis="y")
    return Chart(title, drawn.svg, text, [("", value, count, "", "") for value, count in sorted(counts.items())])


def stacked(title: str, x: Array, parts: dict[str, Array], x_label: str, y_label: str, text: str = "") -> Chart:
    """Shares of one whole over `x`, one above another, hatched."""
    with _canvas(title, x_label, y_label) as (axes, drawn):
        areas = axes.stackplot(x, list(parts.values()), labels=list(parts), colors=list(COLORS), alpha=0.75)
        for area, hatch in zip(areas, cycle(_HATCHES), strict=False):
            area.set_hatch(hatch)
            area.set_edgecolor("white")
            area.set_linewidth(0)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    rows = [(name, at, share, "", "") for name, part in parts.items() for at, share in zip(x, part, strict=True)]
    return Chart(title, drawn.svg, text, rows)


def heatmap(title: str, table: Array, rows: Sequence[str], columns: Sequence[str], label: str, text: str = "") -> Chart:
    """A table of numbers in [-1, 1] with each number written in its cell; NaN is left empty."""
    with _canvas(title, "learner", "learner", 1.6 + 0.6 * len(columns), 1.4 + 0.5 * len(rows)) as (axes, drawn):
        image = axes.imshow(table, cmap="PuOr", vmin=-1, vmax=1, aspect="auto")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        for i, j in np.ndindex(*table.shape):
            if np.isfinite(table[i, j]):
                dark = abs(table[i, j]) > 0.7
                axes.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", color="white" if dark else "black")
        axes.figure.colorbar(image, ax=axes, label=label)
    cells = [(rows[i], columns[j], table[i, j], "", "") for i, j in np.ndindex(*table.shape)]
    return Chart(title, drawn.svg, text, cells)


def intervals(title: str, rows: Sequence[tuple[str, float, float, float]], x: str, text: str = "") -> Chart:
    """A dot with its interval for each `(label, value, low, high)`; NaN ends draw no interval."""
    names = [textwrap.fill(row[0], 36) for row in rows]
    height = sum(0.2 + 0.15 * (1 + name.count("\n")) for name in names)
    with _canvas(title, x, "method", height=0.9 + height) as (axes, drawn):
        styles = zip(cycle(COLORS), cycle(_MARKERS), strict=False)
        for i, ((_, value, low, high), (color, marker)) in enumerate(zip(rows, styles, strict=False)):
            axes.plot([low, high], [i, i], color=color, linewidth=6, alpha=0.35, solid_capstyle="butt")
            axes.plot([value], [i], marker=marker, color=color, linestyle="")
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(alpha=0.3, axis="x")
    return Chart(title, drawn.svg, text, [(label, "", *numbers) for label, *numbers in rows])

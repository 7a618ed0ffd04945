"""All figures by name."""

from __future__ import annotations

from coterie.reproduce import a3c_gae, accelerated, gala, impala, seed
from coterie.reproduce.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (*gala.FIGURES, *a3c_gae.FIGURES, *accelerated.FIGURES, *impala.FIGURES, *seed.FIGURES)
}

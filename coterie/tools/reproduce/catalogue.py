"""All figures by name."""

from __future__ import annotations

from coterie.tools.reproduce import a3c_gae, accelerated, batches, gala, impala, seed
from coterie.tools.reproduce.figure import Figure

_PARTS = (gala, a3c_gae, accelerated, batches, impala, seed)
FIGURES: dict[str, Figure] = {figure.name: figure for part in _PARTS for figure in part.FIGURES}

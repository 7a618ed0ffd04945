"""benchmarks/plan_papers.py: one table's fitted row, and one that follows from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3] / "benchmarks" / "plan_papers.py"


def test_a_row_follows_from_the_fitted_one():
    spec = importlib.util.spec_from_file_location("plan_papers", HERE)
    papers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(papers)
    env = papers.env_of_row(0, 0.5)
    _, fitted, known = papers.IMPALA[0]
    assert papers.rate(fitted, env, 0.5) == pytest.approx(known[0], rel=0.02)
    name, one, known = papers.IMPALA[5]
    assert name.startswith("IMPALA, dynamic batching")
    assert papers.rate(one, env, 0.5) == pytest.approx(known[0], rel=0.2)

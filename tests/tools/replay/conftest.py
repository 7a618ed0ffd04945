"""Runs that several tests replay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.replay.test_replay import LAYOUTS, run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Callable[[str], Path]:
    """Gives the folder of a run of a layout. A test that changes it takes a copy."""

    @functools.cache
    def make(layout: str) -> Path:
        folder = tmp_path_factory.mktemp("recorded") / "run"
        run(folder, **LAYOUTS[layout])
        return folder

    return make

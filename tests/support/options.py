"""Options as they are typed, applied to a config."""

from __future__ import annotations

from coterie.config import Config
from coterie.runs.config_io import read_options, replace


def parse_cli(default: Config, args: list[str]) -> Config:
    return replace(default, read_options(args))

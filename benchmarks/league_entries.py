"""What benchmarks/league.toml lists: one entry for each group x env x method x seed, and the record that it leaves."""

from __future__ import annotations

import functools
import json
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.cli.options import config_of
from coterie.config import Config
from coterie.runs.config_io import fields, get

Record = dict[str, Any]  # "unfinished" is true in the record of a run that was stopped

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "results" / "league"
# Defaults of a config when the records were made. One that changes afterwards is a difference like any other, so that
# older records do not count; where it cannot matter to a score, change it here, too.
DEFAULTS: Record = json.loads((Path(__file__).parent / "league_defaults.json").read_text())
TABLE = tomllib.loads((Path(__file__).parent / "league.toml").read_text())


@dataclass(frozen=True)
class Entry:
    """One run of the league."""

    group: str
    method: str
    env: str  # the table's name for it: an option `env` says what it is where that is no name for a file
    seed: int
    steps: int
    episodes: int
    options: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.method}/{self.env}/{self.seed}"

    @property
    def path(self) -> Path:
        return RECORDS / f"{self.name.replace('/', '_')}.json"

    @property
    def command(self) -> list[str]:
        options = {"env": self.env, **dict(self.options), "steps": str(self.steps), "seed": str(self.seed)}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        if self.method.startswith("sb3-"):
            return ["python", "benchmarks/peers/sb3_league.py", self.method.removeprefix("sb3-"), *words]
        return ["coterie", "train", self.method, *words]

    @property
    def typed(self) -> str:
        """The command as a user types it."""
        return shlex.join(self.command)

    @property
    def settings(self) -> Record | None:
        """What the preset and the options change in a config. None for a peer."""
        return None if self.method.startswith("sb3-") else changes(*self.command[2:-2])

    @property
    def record(self) -> Record | None:
        """None where there is no run of this command with today's defaults. Records of before 30 November 2026 have the
        settings of the commit that they came with.
        """
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = found.get("command") == self.typed and found.get("settings") == self.settings
        return found if same else None

    @property
    def done(self) -> bool:
        return self.record is not None and not self.record.get("unfinished")


@functools.cache
def changes(*words: str) -> Record:
    """The options of a command that differ from a config's own defaults, as JSON has them."""
    before = own_defaults() | DEFAULTS
    return {name: value for name, value in values(config_of([*words])).items() if value != before.get(name)}


@functools.cache
def own_defaults() -> Record:
    return values(Config())


def values(config: Config) -> Record:
    """Options and their values, as JSON has them, but for what cannot matter to a score."""
    found: Record = json.loads(json.dumps({n: get(config, n) for n, _ in fields() if n not in ("preset", "out")}))
    return found


def listed() -> Iterator[Entry]:
    """By group; the first seed of everything comes first."""
    for group, row in TABLE["groups"].items():
        options = row.get("options", {})
        for seed in range(row["seeds"]):
            for env, steps in row["envs"].items():
                for method in [*row["presets"], *row.get("peers", [])]:
                    if env not in row.get("only", {}).get(method, row["envs"]):
                        continue
                    keys = (env, "all", method, f"{method}/{env}")
                    chosen = {name: value for key in keys for name, value in options.get(key, {}).items()}
                    budget = chosen.pop("steps", steps)
                    if seed >= chosen.pop("seeds", row["seeds"]):
                        continue
                    words = tuple((k, str(v).lower() if isinstance(v, bool) else str(v)) for k, v in chosen.items())
                    yield Entry(group, method, env, seed, budget, row["episodes"], words)


def entries() -> list[Entry]:
    """In the order in which they are run."""
    first = dict(enumerate(TABLE["first"]))
    return sorted(listed(), key=lambda e: next((i for i, name in first.items() if e.name.startswith(name)), len(first)))

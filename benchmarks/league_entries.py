"""What benchmarks/league.toml lists: one entry for each group x env x method x seed, and the record that it leaves."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "results" / "league"
TABLE = tomllib.loads((Path(__file__).parent / "league.toml").read_text())

Record = dict[str, Any]  # "unfinished" is true in the record of a run that was stopped


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
    def record(self) -> Record | None:
        """None where there is no run of this command: the budget or an option may have changed since."""
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found if found.get("command") == self.typed else None

    @property
    def done(self) -> bool:
        return self.record is not None and not self.record.get("unfinished")


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

"""`coterie list`. On a terminal under headings; into a pipe one name per line, in the first column."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator

from coterie.errors import ConfigError

Groups = dict[str, list[tuple[str, str]]]  # heading -> (name, description)

# By the paper that has them; docs/explanation has a page for each of the first five.
PAPERS = {
    "Accelerated Methods: synchronous, batched sampling": ("a2c", "ppo", "ppo-paper"),
    "A3C: shared weights, lock-free or in a store": ("a3c", "a3c-paper", "a3c-store", "appo", "dqn-async"),
    "IMPALA: decoupled actors": ("impala", "impala-paper", "impala-deep"),
    "SEED RL: central inference": ("seed-vtrace", "seed-football", "seed-r2d2"),
    "GALA: gossiping learners": ("gala-a2c", "gala-ppo"),
    "Value learning with replay": ("dqn", "dqn-512", "c51", "c51-2048", "rainbow", "rainbow-512", "apex-dqn"),
    "Continuous actions with replay": ("sac",),
    "Learning from data": ("bc",),
}
# Of EnvPool's modules; others have their own name.
SUITES = {"box2d": "Box2D", "mujoco.gym": "MuJoCo", "mujoco.dmc": "DeepMind Control", "gfootball": "Football"}
HELP = """coterie list presets [PATTERN]   presets for `coterie train`, by paper
coterie list envs [PATTERN]      installed environments, by suite
coterie list matrix [PATTERN]    the valid combinations of algorithm, acting, exchange and launch
"""


def presets() -> Groups:
    from coterie.presets import PRESETS

    # The first sentence of each docstring, on one line.
    about = {name: re.split(r"\.(?:\s+(?=[A-Z])|\s*$)", f.__doc__ or "")[0] for name, f in PRESETS.items()}
    return {
        paper: [(name, textwrap.shorten(about[name], 100, placeholder=" ...")) for name in names]
        for paper, names in PAPERS.items()
    }


def envs() -> Groups:
    import gymnasium

    from coterie.envs.pool import modules

    found: Groups = {}
    pooled = sorted(modules())
    for name in pooled:
        module = modules()[name]
        title = SUITES.get(module) or module.replace("mujoco.", "MuJoCo ").replace("_", " ")
        found.setdefault(title[0].upper() + title[1:], []).append((name, ""))
    found["gymnasium, in worker processes"] = [(name, "") for name in sorted(set(gymnasium.registry) - set(pooled))]
    return found


def lines(groups: Groups, pattern: str, columns: int) -> Iterator[str]:
    """The rows that contain `pattern`. `columns`: of the terminal; 0: plain rows for a pipe."""
    kept = {
        title: [row for row in rows if pattern.lower() in " ".join((*row, title)).lower()]
        for title, rows in groups.items()
    }
    if not columns:
        width = max((len(name) for rows in kept.values() for name, _ in rows), default=0)
        yield from (f"{name:{width}}  {about or title}" for title, rows in kept.items() for name, about in rows)
        return
    for title, rows in kept.items():
        if not rows:
            continue
        yield f"\033[1m{title}\033[0m ({len(rows)})"
        if rows[0][1]:
            for name, about in rows:
                yield f"  {name:12} {textwrap.shorten(about, columns - 16, placeholder='...')}"
        else:
            width = max(len(name) for name, _ in rows)
            each = max(1, (columns - 2) // (width + 2))
            for k in range(0, len(rows), each):
                yield "  " + "  ".join(f"{name:{width}}" for name, _ in rows[k : k + each]).rstrip()
        yield ""


def listing(options: Namespace) -> int:
    """Print what is available."""
    what, pattern = options.what, options.pattern
    if what is None:
        print(HELP, end="")
        return 0
    if what == "matrix":
        from coterie.build.validity import table

        *head, rows = table().split("\n", 2)
        what, found = "combinations", [row for row in rows.splitlines() if pattern.lower() in row.lower()]
    else:
        columns = max(40, shutil.get_terminal_size().columns) if sys.stdout and sys.stdout.isatty() else 0
        head, found = [], list(lines(presets() if what == "presets" else envs(), pattern, columns))
    if not found:
        raise ConfigError(f"PATTERN: no {what} have {pattern!r} in their name or description")
    print("\n".join([*head, *found]))
    return 0

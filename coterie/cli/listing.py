"""`coterie list`: what there is. On a terminal under headings; into a pipe one name per line, in the first column."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator

Groups = dict[str, list[tuple[str, str]]]  # heading -> names, each with what is said of it

# By the paper that has them; docs/architectures has a page for each of the first five.
PAPERS = {
    "Accelerated Methods: synchronous, batched sampling": ("a2c", "ppo"),
    "A3C: shared weights, lock-free or in a store": ("a3c", "a3c-store", "appo", "dqn-async"),
    "IMPALA: actors of their own": ("impala", "impala-deep"),
    "SEED RL: env hosts, one policy": ("seed-vtrace", "seed-football", "seed-r2d2"),
    "GALA: learners that gossip": ("gala-a2c", "gala-ppo"),
    "Value learning with replay": ("dqn", "dqn-512", "c51", "c51-2048", "rainbow", "rainbow-512", "apex-dqn"),
}
# EnvPool's modules and gymnasium's suites, in the order in which they are shown; others follow under their own names.
SUITES = {
    "atari": "Atari", "box2d": "Box2D", "classic_control": "Classic control", "toy_text": "Toy text",
    "mujoco.gym": "MuJoCo", "mujoco.dmc": "DeepMind Control", "mujoco.robotics": "MuJoCo robotics",
    "mujoco.metaworld": "Meta-World", "mujoco.playground": "MuJoCo Playground", "mujoco.myosuite": "MyoSuite",
    "minigrid": "MiniGrid and BabyAI", "procgen": "Procgen", "vizdoom": "ViZDoom", "gfootball": "Football",
    "highway": "Highway", "jumanji": "Jumanji", "pgx": "Pgx",
}  # fmt: skip
HELP = """coterie list presets [PATTERN]   what `coterie train` begins with, by paper
coterie list envs [PATTERN]      environments that are installed, by suite
coterie list matrix              which algorithm goes with which acting, exchange and launch
"""


def presets() -> Groups:
    from coterie.presets import PRESETS

    # The first sentence of each docstring, on one line.
    said = {name: re.split(r"\.(?:\s+(?=[A-Z])|\s*$)", f.__doc__ or "")[0] for name, f in PRESETS.items()}
    return {
        paper: [(name, textwrap.shorten(said[name], 100, placeholder=" ...")) for name in names]
        for paper, names in PAPERS.items()
    }


def envs() -> Groups:
    import envpool
    import gymnasium
    from envpool.registration import registry

    found: Groups = {title: [] for title in SUITES.values()}
    pooled = sorted(envpool.list_all_envs())
    for name in pooled:
        module = registry.specs[name][0].removeprefix("envpool.")
        found.setdefault(SUITES.get(module, module), []).append((name, ""))
    found["gymnasium, in worker processes"] = [(name, "") for name in sorted(set(gymnasium.registry) - set(pooled))]
    return found


def _lines(groups: Groups, pattern: str, wide: int) -> Iterator[str]:
    """`wide`: columns of the terminal; 0: into a pipe."""
    kept = {
        title: [row for row in rows if pattern.lower() in " ".join((*row, title)).lower()]
        for title, rows in groups.items()
    }
    longest = max((len(name) for rows in kept.values() for name, _ in rows), default=0)
    for title, rows in kept.items():
        first = longest if not wide else max((len(name) for name, _ in rows), default=0)
        if not wide:
            yield from (f"{name:{first}}  {said or title}" for name, said in rows)
        elif rows:
            yield f"\033[1m{title}\033[0m ({len(rows)})"
            if rows[0][1]:
                yield from (
                    f"  {name:12} {textwrap.shorten(said, wide - 16, placeholder='...')}" for name, said in rows
                )
            else:
                each = max(1, (wide - 2) // (first + 2))
                for k in range(0, len(rows), each):
                    yield "  " + "  ".join(f"{name:{first}}" for name, _ in rows[k : k + each]).rstrip()
            yield ""


def listing(args: list[str], parser: argparse.ArgumentParser) -> int:
    parser.add_argument("what", nargs="?", choices=("envs", "presets", "matrix"))
    parser.add_argument("pattern", nargs="?", default="", help="only what contains this")
    options = parser.parse_args(args)
    if options.what is None:
        print(HELP, end="")
    elif options.what == "matrix":
        from coterie.build.validity import table

        print(table())
    else:
        wide = max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0
        print("\n".join(_lines(presets() if options.what == "presets" else envs(), options.pattern, wide)))
    return 0

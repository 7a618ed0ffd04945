"""Write the pages that are made from the code: docs/reference/options.md, presets.md and matrix.md.

python docs/generate.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from coterie import presets
from coterie.build import validity
from coterie.cli.listing import PAPERS
from coterie.cli.options import comments
from coterie.config import Config, Range
from coterie.runs.config_io import fields, get, plain

REFERENCE = Path(__file__).parent / "reference"
FAMILIES = {"Atari": "Breakout-v5", "vectors": "LunarLander-v3", "MuJoCo": "Hopper-v5"}
NOTE = "*Written by `python docs/generate.py`.*\n"
OPTIONS = f"""# Options

Every setting of a run: `--SECTION.FIELD VALUE` on the command line (with `-` for `_`), the same name in a file given to
`train`, and `**{{"section.field": value}}` in Python. The defaults here are those of `Config`; a preset changes some
of them ([presets](presets.md)), and `coterie train PRESET --help` shows what it uses.

{NOTE}"""
PRESETS = f"""# Presets

A preset is a function that returns a config for an environment. It has settings for each kind of environment: images,
small vectors, continuous control. The tables show what differs from the [defaults](options.md), for Breakout (Atari),
LunarLander (vectors) and Hopper (MuJoCo); `-` means that the preset does not run there.

{NOTE}"""

MATRIX = f"""# Combinations

A run is four choices: algorithm x acting x exchange x launch. Every combination below trains; "lockstep" means that
actors and learner take turns, because the algorithm needs data of the present policy. `coterie list matrix` prints this
table. A custom acting or exchange adds rows ([custom parts](../guides/custom-acting-exchange.md)).

{NOTE}
"""


def accepted(annotated: Any) -> str:
    """The type and the range of a field, in words."""
    kind = plain(annotated)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    words = {int: "integer", float: "number", bool: "`true` or `false`", str: "string"}.get(kind, "list of integers")
    if get_origin(kind) is tuple and get_args(kind)[0] is float:
        words = "list of numbers"
    if not isinstance(kind, type) and get_origin(kind) is not tuple:
        words = "integer or `auto`"
    found = [one.text for one in getattr(annotated, "__metadata__", ()) if isinstance(one, Range)]
    short = re.sub(r", or auto$|^must (not )?be ", lambda m: "not " if m[1] else "", found[0]) if found else ""
    return f"{words}, {short}" if short else words


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


def options() -> str:
    config, parts, section, beside = Config(), [OPTIONS], None, comments()
    for name, annotated in fields():
        owner = name.rpartition(".")[0]
        holder = get(config, owner) if owner else config
        if owner != section:
            section = owner
            title = f"`{owner}`" if owner else "The run"
            parts.append(f"\n## {title}\n\n{' '.join((inspect.getdoc(type(holder)) or '').split())}\n")
            parts.append("| option | accepts | default | meaning |\n|---|---|---|---|")
        text = beside[name].replace("|", "\\|")
        option = f"--{name.replace('_', '-')}"
        parts.append(f"| `{option}` | {accepted(annotated)} | {shown(get(config, name))} | {text} |")
    return "\n".join(parts) + "\n"


def settings(name: str, env: str) -> dict[str, Any] | None:
    """What a preset sets for an env; None where it refuses it."""
    try:
        config = presets.make(name, env)
    except Exception:
        return None
    base = Config()
    left_out = ("preset", "env.id", "out")
    return {f: get(config, f) for f, _ in fields() if f not in left_out and get(config, f) != get(base, f)}


def preset(name: str) -> str:
    text = inspect.getdoc(presets.PRESETS[name]) or ""
    columns = {title: settings(name, env) for title, env in FAMILIES.items()}
    names = [f for f, _ in fields() if any(f in (c or {}) for c in columns.values())]
    base = Config()
    rows = [f"| option | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for option in names:
        cells = ["-" if c is None else shown(c.get(option, get(base, option))) for c in columns.values()]
        rows.append(f"| `{option}` | {' | '.join(cells)} |")
    return f"### {name}\n\n{text}\n\n" + "\n".join(rows) + "\n"


def all_presets() -> str:
    parts = [PRESETS]
    for paper, names in PAPERS.items():
        parts.append(f"## {paper}\n")
        parts += [preset(name) for name in names]
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    matrix = f"{MATRIX}{validity.table()}\n"
    texts = {"options.md": options(), "presets.md": all_presets(), "matrix.md": matrix}
    return {REFERENCE / name: text for name, text in texts.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)

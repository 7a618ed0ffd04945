"""Write the pages that are made from the code, in docs/reference: options.md, commands.md, presets.md, matrix.md and
python.md.

python docs/generate.py
"""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from commands import commands

import coterie
from coterie import presets
from coterie.build import validity
from coterie.cli.listing import PAPERS
from coterie.cli.options import comments, possible
from coterie.config import Atari, Config, Env, Range
from coterie.envs.make import make_spec
from coterie.presets.common import Family, flat
from coterie.runs.config_io import fields, get, plain, replace

REFERENCE = Path(__file__).parent / "reference"
FAMILIES = {"Atari": "Breakout-v5", "vectors": "LunarLander-v3", "MuJoCo": "Hopper-v5"}
KINDS: dict[str, Family] = {"Atari": "images", "vectors": "vectors", "MuJoCo": "continuous control"}
# Environments with settings of their own in a preset.
MOUNTAIN_CAR, DMLAB = {"MountainCar": "MountainCar-v0"}, {"DMLab": "dmlab/rooms_watermaze"}
LANDER = {"LunarLander, continuous": "LunarLanderContinuous-v3"}
MORE = {"ppo": MOUNTAIN_CAR | LANDER, "a2c": LANDER, "dqn": {"CartPole": "CartPole-v1"} | MOUNTAIN_CAR}
MORE |= {
    "a3c": MOUNTAIN_CAR,
    "a3c-paper": MOUNTAIN_CAR,
    "impala": DMLAB | LANDER,
    "impala-paper": DMLAB,
    "impala-deep": DMLAB,
    "seed-vtrace": DMLAB | LANDER,
}
# A family without a source of its own has that of the family beside it, as in the presets.
PARENTS = {"MuJoCo": "vectors", "MountainCar": "vectors", "CartPole": "vectors", "DMLab": "Atari"}
PARENTS |= {"LunarLander, continuous": "vectors"}
NOTE = "*Written by `python docs/generate.py`.*\n"
OPTIONS = f"""# Options

Every setting of a run: `--SECTION.FIELD VALUE` on the command line (with `-` for `_`), the same name in a file given to
`train`, and `**{{"section.field": value}}` in Python. The defaults here are those of `Config`; a preset changes some
of them ([presets](presets.md)), and `coterie train PRESET --help` shows what it uses.

{NOTE}"""
PRESETS = f"""# Presets

A preset is a function that returns a config for an environment. It has settings for each kind of environment: images,
small vectors, continuous control. The tables show what differs from the [defaults](options.md), for Breakout (Atari),
LunarLander (vectors) and Hopper (MuJoCo), and defaults that a paper has, too; a preset "as" another has the rest from
it, and `coterie train PRESET --help` shows all. `-` means that the preset does not run there.

Rewards of other images, and those of vectors other than LunarLander, CartPole, Acrobot and MountainCar, are normalized
(`reward.normalize`) without a replay, since they have any size. Not with `a3c-paper` and
`seed-football`; `dqn` and what derives from it clip those of all images, `seed-r2d2` none.

The last column says where a value comes from: a paper, its public code, or "ours" with the reason. "Not tuned": no
comparison with other values is recorded. A value without a source is the default.

| name | paper | public code |
|---|---|---|
| Accelerated Methods | Stooke and Abbeel 2018, arXiv 1803.02811 | accel_rl |
| GALA | Assran et al. 2019, arXiv 1906.04585 | gala |
| A3C with GAE | Christensen and Hansen | nicklashansen/a3c |
| IMPALA | Espeholt et al. 2018, arXiv 1802.01561 | scalable_agent |
| SEED RL | Espeholt et al. 2020, arXiv 1910.06591 | seed_rl |
| Ape-X | Horgan et al. 2018, arXiv 1803.00933 | none |
| SAC | Haarnoja et al. 2018, arXiv 1812.05905 | none |

{NOTE}
## Ours, or the paper's

Env steps of a run by default, in millions. With 10 million or more the settings are a paper's, or nearly so, and made
for this budget or a larger one (`impala` and `a3c`: ours). With fewer they are ours, for a few cores. "Not shown": the
preset has not been shown to learn such environments with its defaults; [the league](../results/league.md) has what was
learned. Continuous control means MuJoCo. A run says at its start which of these it is.
"""

GIVEN = ("Policy", "Run")  # classes whose objects a user gets, and does not make

MATRIX = f"""# Combinations

A run is four choices: algorithm x acting x exchange x launch. Every combination below trains; "lockstep" means that
actors and learner take turns, because the algorithm needs data of the present policy; `ppo.proximal` lets PPO learn
from older ones. `coterie list matrix` prints this
table. A custom acting mode or exchange adds rows ([custom parts](../guides/custom-acting-exchange.md)).

{NOTE}
"""


def accepted(annotated: Any) -> str:
    """The type and the range of a field, in words."""
    kind = plain(annotated)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    words = {int: "integer", float: "number", bool: "`true` or `false`", str: "string"}.get(kind, "")
    if get_origin(kind) is tuple:
        words = {int: "list of integers", float: "list of numbers", str: "list of strings"}[get_args(kind)[0]]
    if not isinstance(kind, type) and get_origin(kind) is not tuple:
        words = f"{'number' if float in get_args(kind) else 'integer'} or `auto`"
    found = [one.text for one in getattr(annotated, "__metadata__", ()) if isinstance(one, Range)]
    short = re.sub(r", or auto$|^must (not )?be ", lambda m: "not " if m[1] else "", found[0]) if found else ""
    return f"{words}, {short}" if short else words


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


def options() -> str:
    config, tables, beside = Config(), dict[str, list[str]](), comments()
    for name, annotated in fields():
        owner = name.rpartition(".")[0]
        if owner not in tables:
            about = " ".join((inspect.getdoc(type(get(config, owner) if owner else config)) or "").split())
            title = f"`{owner}`" if owner else "The run"
            head = "| option | accepts | default | meaning |\n|---|---|---|---|"
            tables[owner] = [f"\n## {title}\n\n{about}\n", head]
        text = beside[name].replace("|", "\\|")
        option = f"--{name.replace('_', '-')}"
        tables[owner].append(f"| `{option}` | {accepted(annotated)} | {shown(get(config, name))} | {text} |")
    return "\n".join([OPTIONS, *(line for table in tables.values() for line in table)]) + "\n"


def settings(name: str, env: str) -> dict[str, Any] | None:
    """What a preset sets for an env; None where it refuses it."""
    spec = make_spec(Env(FAMILIES["Atari"]), Atari()) if env.startswith("dmlab/") else None
    try:
        config = presets.make(name, env, spec)
        if spec is None:
            possible(replace(config, {"bc.dataset": "any"}))  # which no preset names
    except Exception:
        return None
    base = Config()
    left_out = ("preset", "env.id", "out")
    names = [f for f, _ in fields() if f not in left_out and shows(f, env)]
    return {f: get(config, f) for f in names if get(config, f) != get(base, f)}


def shows(option: str, env: str) -> bool:
    return not option.startswith("atari.") or env == FAMILIES["Atari"]


@functools.cache
def columns(name: str) -> dict[str, dict[str, Any]]:
    """What a preset sets, by family; without families that it refuses."""
    found = {family: settings(name, env) for family, env in (FAMILIES | MORE.get(name, {})).items()}
    return {family: changed for family, changed in found.items() if changed is not None}


@functools.cache
def sources() -> dict[str, dict[str, dict[str, str]]]:
    """docs/reference/sources.toml: preset -> family, or "all" -> setting -> source."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, table in tomllib.loads((REFERENCE / "sources.toml").read_text()).items():
        found[name] = {key: flat(table.pop(key)) for key in (*FAMILIES, *PARENTS) if key in table}
        found[name]["all"] = flat(table)
    return found


def own(name: str, family: str, option: str) -> str:
    """The source in the preset's own table; empty if it has none. Another family's holds for the same value only."""
    table, parent = sources().get(name, {}), PARENTS.get(family, family)
    found = columns(name)
    alike = parent in found and found[family].get(option) == found[parent].get(option)
    places = (family, parent, "all") if alike else (family, "all")
    return next((table[place][option] for place in places if option in table.get(place, {})), "")


def base_of(name: str) -> str:
    return sources().get(name, {}).get("all", {}).get("base", "")


def kept(name: str, family: str, option: str) -> bool:
    """Whether a derived preset leaves a setting as it is in its base."""
    base = base_of(name)
    return base != "" and columns(name)[family].get(option) == columns(base)[family].get(option)


def source(name: str, family: str, option: str) -> str:
    """Where a value comes from, or nothing. What a preset leaves as it is in its base has the base's source."""
    found = own(name, family, option)
    return found or (source(base_of(name), family, option) if kept(name, family, option) else "")


def unsourced() -> Iterator[str]:
    """What a preset changes without a source, in the defaults or back to them."""
    for name in presets.PRESETS:
        base = columns(base_of(name)) if base_of(name) else {}
        for family, changed in columns(name).items():
            for option in changed | base.get(family, {}):
                if not source(name, family, option):
                    yield f"{name}: {option} ({family})"


def unused() -> Iterator[str]:
    """Sources of what is no setting, and "ours: not tuned" of what the preset does not change. A default may be stated,
    too, where a paper has it or has another value.
    """
    known = {option for option, _ in fields()} | {"base"}
    for name, table in sources().items():
        changed = {option for family in columns(name).values() for option in family}
        for place, entries in table.items():
            for option, text in entries.items():
                if option not in (changed if text == "ours: not tuned" else known):
                    yield f"{name}: {option} ({place})"


def source_cell(name: str, option: str) -> str:
    """The sources of a row: one if the families agree, otherwise by family."""
    texts: dict[str, list[str]] = {}
    families = [f for f in columns(name) if not option.startswith("atari.") or f == "Atari"]
    for family in families:
        if text := source(name, family, option):
            texts.setdefault(text, []).append(family)
    if [*texts.values()] == [families]:
        return next(iter(texts))
    return "<br>".join(f"{', '.join(found)}: {text.replace('ours: ', 'ours, ')}" for text, found in texts.items())


def preset(name: str) -> str:
    """A section of the page. A derived preset has rows for what it changes in its base."""
    text = inspect.getdoc(presets.PRESETS[name]) or ""
    envs, found, base, default = FAMILIES | MORE.get(name, {}), columns(name), base_of(name), Config()
    names = [
        option
        for option, _ in fields()
        if any(
            own(name, f, option) or (not kept(name, f, option) if base else option in changed)
            for f, changed in found.items()
        )
    ]
    rows = [f"| option | {' | '.join(envs)} | source |", "|---|" + "---|" * (len(envs) + 1)]
    for option in names:
        cells = ["-" if f not in found else shown(found[f].get(option, get(default, option))) for f in envs]
        cells = [cell if shows(option, envs[f]) else "" for f, cell in zip(envs, cells, strict=True)]
        rows.append(f"| `{option}` | {' | '.join(cells)} | {source_cell(name, option)} |")
    beside = f"As [{base}](#{base}), but:\n\n" if base else ""
    return f"### {name}\n\n{text}\n\n{beside}" + "\n".join(rows) + "\n"


def budgets() -> str:
    """Each preset's env steps by family."""
    rows = [f"| preset | {' | '.join(KINDS.values())} |", "|---|" + "---|" * len(FAMILIES)]
    for name in presets.PRESETS:
        steps = [columns(name)[f].get("steps", Config().steps) / 1e6 if f in columns(name) else None for f in FAMILIES]
        shown = [presets.is_shown(name, KINDS[f]) for f in FAMILIES]
        notes = ["" if known else ", not shown" for known in shown]
        cells = ["-" if n is None else f"{n:,g}{note}" for n, note in zip(steps, notes, strict=True)]
        rows.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def all_presets() -> str:
    parts = [PRESETS, budgets()]
    for paper, names in PAPERS.items():
        parts.append(f"## {paper}\n")
        parts += [preset(name) for name in names]
    return "\n".join(parts)


def signature(name: str, what: Callable[..., Any]) -> str:
    """As it is typed, an argument a line where one line is too long."""
    found = inspect.signature(what)
    arguments = [p.replace(annotation=p.empty) for n, p in found.parameters.items() if n != "self"]
    plain = (str, int, float, tuple, type, type(None))
    arguments = [p if isinstance(p.default, plain) else p.replace(default=...) for p in arguments]
    line = f"{name}{found.replace(parameters=arguments, return_annotation=found.empty)}".replace("=Ellipsis", "=...")
    line = line.replace("'", '"')  # as ruff formats it
    return line if len(line) <= 100 else line.replace("(", "(\n    ", 1).replace(", ", ",\n    ")[:-1] + ",\n)"


def documented(match: re.Match[str]) -> str:
    """The signatures and docstrings of a public name."""
    what = getattr(coterie, name := match[1])
    made = "" if name in GIVEN else f"```py\n{signature(f'coterie.{name}', what)}\n```\n\n"
    text = f"{made}{inspect.getdoc(what)}\n"
    for method, function in vars(what).items() if inspect.isclass(what) else ():
        doc = inspect.getdoc(function.fget if isinstance(function, property) else function)
        if (
            doc
            and (method[0] != "_" or method == "__call__")
            and (callable(function) or isinstance(function, property))
        ):
            shown = method if isinstance(function, property) else signature(method, function)
            shown = shown.replace("__call__", name.lower())
            text += f"\n```py\n{shown}\n```\n\n{doc}\n"
    return f"<!-- coterie.{name} -->\n\n### coterie.{name}\n\n{text}\n<!-- end -->"


def python_api() -> str:
    page = (REFERENCE / "python.md").read_text()
    return re.sub(r"<!-- coterie\.(\w+) -->.*?<!-- end -->", documented, page, flags=re.S)


def pages() -> dict[Path, str]:
    matrix = f"{MATRIX}{validity.table()}\n"
    texts = {"options.md": options(), "presets.md": all_presets(), "matrix.md": matrix, "python.md": python_api()}
    texts["commands.md"] = commands(NOTE)
    return {REFERENCE / name: text for name, text in texts.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)

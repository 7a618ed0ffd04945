"""The package's rooms (its folders and top-level modules) import downwards only, and it is written in plain English."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "coterie"
# From the bottom up: a room imports from the rooms before it.
ROOMS = [
    "types", "config", "extras", "parallel", "wire", "ops", "plugins", "choices", "envs", "models", "replay", "runs",
    "flight", "exchange", "presets", "remote", "acting", "algorithms", "learner", "build", "instruments", "roles",
    "launch", "tools", "cli", "__main__",
]  # fmt: skip
UPWARDS: set[tuple[str, str]] = set()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"}


def imports(module: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.removeprefix("coterie.") for n in names if n.startswith("coterie.")}
    return found & set(MODULES)


def room(module: str) -> int:
    return ROOMS.index(module.split(".")[0])


def test_every_module_is_in_a_room() -> None:
    assert {module.split(".")[0] for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_lower_rooms_only(module: str) -> None:
    up = {other for other in imports(module) if room(other) > room(module) and (module, other) not in UPWARDS}
    assert not up, f"{module} imports {up}"


# Each acting and exchange reads its own section of the config; the rest of the program asks its kind.
SECTION = re.compile(r"(central|decoupled|allreduce|gossip|hogwild|store)(?:\.\w+)?")
SIMULATIONS = {"tools.plan.acting", "tools.plan.learners"}  # of each acting and exchange: their kinds name them
KINDS_ONLY = [m for m in MODULES if m.split(".")[0] in ("build", "launch", "tools") and m not in SIMULATIONS]


@pytest.mark.parametrize("module", KINDS_ONLY)
def test_only_the_module_of_a_choice_reads_its_section_of_the_config(module: str) -> None:
    found = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        match node:
            case ast.Attribute(attr=str(name)) | ast.keyword(arg=str(name)):
                found += [name] if SECTION.fullmatch(name) else []
            case ast.Constant(value=str(name)) if "." in name:
                found += [name] if SECTION.fullmatch(name) else []
    assert not found


def test_no_import_cycle_inside_a_room() -> None:
    seen: dict[str, bool] = {}  # True while its imports are followed

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert not seen.get(module), f"import cycle: {' -> '.join([*path, module])}"
        if module not in seen:
            seen[module] = True
            for other in imports(module) - {module}:
                if room(other) == room(module) and not module.startswith(other + "."):
                    follow(other, (*path, module))
            seen[module] = False

    for module in MODULES:
        follow(module, ())


def test_env_workers_load_without_torch() -> None:
    code = "import coterie, coterie.envs.worker_main, coterie.envs.make, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CELL = """
import sys
from coterie import presets
from coterie.build import evaluate, resources, validity
config = resources.resolve_config(presets.ppo(env="CartPole-v1", learners=1))
validity.check(config, resources.make_spec(config.env, config.atari))
print(*(name for name in sys.modules if name.startswith(("coterie.acting.", "coterie.exchange.", "grpc"))))
"""


def test_a_cell_loads_no_other_acting_or_exchange() -> None:
    found = subprocess.run([sys.executable, "-c", CELL], check=True, capture_output=True, text=True).stdout.split()
    acting = {f"coterie.acting.{name}" for name in ("base", "inline", "recorder", "table")}
    assert set(found) == acting | {f"coterie.exchange.{name}" for name in ("base", "solo", "table")}


ODD = re.compile(
    r"(?<!person )(?<!readers )\b(who|whom|whoever|nobody|somebody|everybody|anybody|anew|oftener|so many"
    r"|(is|are|was|were) told|hears|guests?|seats?|leash|films?|judges?|judged|judging)\b",
    re.IGNORECASE,
)
WORDS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_strings_and_comments_are_plain_english(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    found = [
        f"line {token.start[0] + token.string[: odd.start()].count(chr(10))}: {odd[0]}"
        for token in tokens
        if token.type in WORDS and not token.string.startswith('"gossip.seats"')  # an old option's name
        for odd in ODD.finditer(token.string)
    ]
    assert not found


@pytest.mark.parametrize("page", [*ROOT.parent.glob("*.md"), *ROOT.parent.glob("docs/**/*.md")], ids=str)
def test_pages_are_plain_english(page: Path) -> None:
    text = re.sub("`[^`]*`", "", page.read_text())
    assert [odd[0] for odd in ODD.finditer(text)] == []


@pytest.mark.parametrize("page", [*ROOT.parent.glob("docs/**/*.md")], ids=str)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    path = ""
    for file, name in re.findall(r"`([\w/]+\.py)?::(test_\w+)", page.read_text()):
        path = file or path
        text = (Path(__file__).parent / path).read_text()
        assert re.search(rf"^ *def {name}\(", text, re.M), f"{path}::{name}"


def test_every_folder_with_modules_is_a_package() -> None:
    """A wheel leaves out the others."""
    folders = {module.parent for module in ROOT.rglob("*.py")}
    assert sorted(folder for folder in folders if not (folder / "__init__.py").exists()) == []

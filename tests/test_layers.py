"""The rooms of the package (folders and top-level modules) import downwards only; all is in plain English."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1] / "coterie"
# From the bottom up: a room imports from the rooms before it.
ROOMS = [
    "errors", "types", "config", "extras", "parallel", "wire", "ops", "plugins", "choices", "envs", "models", "replay",
    "runs", "flight", "exchange", "presets", "remote", "acting", "algorithms", "learner", "build", "instruments",
    "roles", "launch", "tools", "cli", "__main__",
]  # fmt: skip


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


def test_modules_import_from_lower_rooms_only() -> None:
    found = [(module, other) for module in MODULES for other in imports(module) if room(other) > room(module)]
    assert not found


# Each acting and exchange reads its own section of the config; the rest of the program asks its kind.
SECTION = re.compile(r"(central|decoupled|allreduce|gossip|hogwild|store)(?:\.\w+)?")
SIMULATIONS = {"tools.plan.acting", "tools.plan.learners"}  # of each acting and exchange: their kinds name them
KINDS_ONLY = [m for m in MODULES if m.split(".")[0] in ("build", "launch", "tools") and m not in SIMULATIONS]


def test_only_the_module_of_a_choice_reads_its_section_of_the_config() -> None:
    found = []
    for module in KINDS_ONLY:
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            match node:
                case ast.Attribute(attr=str(name)) | ast.keyword(arg=str(name)) if SECTION.fullmatch(name):
                    found.append((module, name))
                case ast.Constant(value=str(name)) if "." in name and SECTION.fullmatch(name):
                    found.append((module, name))
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


def test_strings_and_comments_are_plain_english() -> None:
    found = [
        f"{path}:{token.start[0] + token.string[: odd.start()].count(chr(10))}: {odd[0]}"
        for path in ROOT.rglob("*.py")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type in WORDS and not token.string.startswith('"gossip.seats"')  # an old option's name
        for odd in ODD.finditer(token.string)
    ]
    assert not found


PAGES = {page: page.read_text() for page in (*ROOT.parent.glob("*.md"), *ROOT.parent.glob("docs/**/*.md"))}


def test_pages_are_plain_english() -> None:
    plain = {page: re.sub("`[^`]*`", "", text) for page, text in PAGES.items()}
    assert not [f"{page}: {odd[0]}" for page, text in plain.items() for odd in ODD.finditer(text)]


def test_links_lead_to_files() -> None:
    links = [(page, target) for page, text in PAGES.items() for target in re.findall(r"\]\(([^)#]+)\)", text)]
    assert not [x for x in links if not x[1].startswith("https://") and not (x[0].parent / x[1]).exists()]


def test_tests_that_a_page_names_exist() -> None:
    missing = []
    for page, text in PAGES.items():
        path = ""
        for file, name in re.findall(r"`([\w/]+\.py)?::(test_\w+)", text):
            path = file or path
            if not re.search(rf"^ *def {name}\(", (Path(__file__).parent / path).read_text(), re.M):
                missing.append(f"{page}: {path}::{name}")
    assert not missing


def test_every_folder_with_modules_is_a_package() -> None:
    """A wheel leaves out the others."""
    folders = {module.parent for module in ROOT.rglob("*.py")}
    assert sorted(folder for folder in folders if not (folder / "__init__.py").exists()) == []

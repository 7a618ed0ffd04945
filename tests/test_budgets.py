"""How large the package may grow. Raise a budget only in a commit of its own that says what it bought."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import MODULES, ROOT, imports

TESTS = Path(__file__).parent

# Planned: 16,000 for the library, 4,500 for the tools and 18,000 for the tests. A commit that raises one says for what.
LIBRARY_LINES = 29_050
TOOLS_LINES = 6_640
TESTS_LINES = 35_330
TOP_LEVEL_MODULES = 9
FILE_LINES = 300
FUNCTION_LINES = 60
PARAMETERS = 8
FILES = {"config.py": 460}  # every setting has its range and its help beside it
CHOICE_COMPARISONS = 15
MAIN_PATH = ("acting.inline", "acting.recorder", "types", "algorithms.a2c", "learner", "exchange.solo")
MAIN_PATH_LINES = 1_090
CELL_LINES = 4_435

CHOICES = {
    "a2c", "ppo", "vtrace", "dqn", "r2d2", "sac", "inline", "decoupled", "central",
    "solo", "allreduce", "hogwild", "store", "gossip",
}  # fmt: skip


def lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def sources(tools: bool) -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if (ROOT / "tools" in path.parents) == tools]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def choice_comparisons(path: Path) -> Iterator[int]:
    """Lines that compare something with the name of an algorithm, an acting or an exchange."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            parts = [leaf for side in (node.left, *node.comparators) for leaf in ast.walk(side)]
            if any(isinstance(leaf, ast.Constant) and leaf.value in CHOICES for leaf in parts):
                yield node.lineno


def closure(*modules: str) -> set[str]:
    found: set[str] = set()
    todo = set(modules)
    while todo:
        found.add(module := todo.pop())
        todo |= imports(module) - found
    return found


def test_the_library_keeps_its_size() -> None:
    assert lines(*sources(tools=False)) <= LIBRARY_LINES


def test_the_tools_keep_their_size() -> None:
    assert lines(*sources(tools=True)) <= TOOLS_LINES


def test_the_tests_keep_their_size() -> None:
    assert lines(*TESTS.rglob("*.py")) <= TESTS_LINES


def test_the_top_level_has_few_modules() -> None:
    assert len(list(ROOT.glob("*.py"))) <= TOP_LEVEL_MODULES


def test_files_keep_their_size() -> None:
    found = [
        f"{path}: {size} lines"
        for folder in (ROOT, TESTS)
        for path in folder.rglob("*.py")
        if (size := lines(path)) > FILES.get(path.relative_to(folder).as_posix(), FILE_LINES)
    ]
    assert not found


def test_functions_stay_short() -> None:
    found = []
    for module, path in MODULES.items():
        for function in functions(path):
            length, args = (function.end_lineno or 0) - function.lineno + 1, function.args
            named = [a for a in (*args.posonlyargs, *args.args, *args.kwonlyargs) if a.arg not in ("self", "cls")]
            if length > FUNCTION_LINES or len(named) > PARAMETERS:
                found.append(f"{module}:{function.name}: {length} lines, {len(named)} parameters")
    assert not found


def test_few_places_compare_the_name_of_a_choice() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in ROOT.rglob("*.py") for line in choice_comparisons(path)]
    assert len(found) <= CHOICE_COMPARISONS, found


def test_the_main_path_keeps_its_size() -> None:
    assert lines(*(MODULES[module] for module in MAIN_PATH)) <= MAIN_PATH_LINES


def test_a_cell_imports_little() -> None:
    assert lines(*(MODULES[module] for module in closure(*MAIN_PATH))) <= CELL_LINES

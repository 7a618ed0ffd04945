"""EnvPool without the libraries of its families, which take 0.7 s of processor time and 100 MiB of each process.

`import envpool` imports every family to have it registered. Here each family's package is left empty meanwhile, with
its module `registration` as usual; the library of a family is imported when one of its envs is made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_LOCK = threading.Lock()


class _EmptyFamilies(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self.made: list[ModuleType] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        for folder in (Path(parent, name) for parent in path or ()):
            if package.split(".")[0] == "envpool" and (folder / "registration.py").exists():
                spec = ModuleSpec(fullname, self, is_package=True)
                spec.submodule_search_locations = [str(folder)]
                return spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.made.append(module)

    def leave(self) -> None:
        """Make room for the families themselves."""
        sys.meta_path.remove(self)
        for module in self.made:
            package, _, name = module.__name__.rpartition(".")
            sys.modules.pop(module.__name__, None)
            if (parent := sys.modules.get(package)) is not None and name in vars(parent):
                delattr(parent, name)
                vars(parent)["__getattr__"] = partial(_family, package)


def _family(package: str, name: str) -> Any:
    """What `envpool.atari` is for code that imports no more than `envpool`."""
    try:
        return import_module(f"{package}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None


def import_envpool() -> Any:
    """The package, with all envs registered. Raises `ImportError` where it is not installed."""
    with _LOCK:
        if "envpool" not in sys.modules:
            sys.meta_path.insert(0, families := _EmptyFamilies())
            try:
                import envpool  # noqa: F401
            finally:
                families.leave()
    return sys.modules["envpool"]

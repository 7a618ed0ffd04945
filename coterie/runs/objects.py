"""Names for parts that are given as objects. Other processes import them where they can, or else read them, pickled by
value, from a temporary folder of this user only, which is removed when this process ends (`plugins.named`).
"""

from __future__ import annotations

import functools
import io
import re
import shutil
import sys
import types
import zlib
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import cloudpickle

from coterie.errors import ConfigError, one_line
from coterie.parallel.processes import scratch_folder
from coterie.plugins import OBJECTS, NameOrObject


def name_of(field: str, part: NameOrObject) -> str:
    """The name of `part`, for `named` in any process of this machine. Raises a `ConfigError` about `field` where it
    cannot be pickled, or is a made env or module.
    """
    if isinstance(part, str):
        return part
    made = field != "callbacks" and not isinstance(part, type)
    if made and (hasattr(part, "step") or hasattr(part, "forward")):
        kind, takes = type(part).__name__, "" if field == "env.id" else " *args"
        raise ConfigError(
            f"{field}: this is one {kind}, and a run makes its own; give the class, or lambda{takes}: {kind}(...)"
        )
    if not callable(part):
        raise ConfigError(f"{field}: {part!r:.60} is not a name, a class or a function")
    module, name = getattr(part, "__module__", None) or "", getattr(part, "__qualname__", "")
    found = _can_be_found(module)
    with suppress(ImportError, AttributeError, ValueError):  # <locals> and <lambda> are no names
        if found and resolve_name(f"{module}:{name}") is part:
            return f"{module}:{name}"
    return _pickled(field, part, None if found else sys.modules.get(module))


def _can_be_found(module: str) -> bool:
    """Whether another process with this one's `sys.path` can import it."""
    top = module.partition(".")[0]
    return top not in ("", "__main__") and any(finder.find_spec(top, None) for finder in sys.meta_path)


def _pickled(field: str, part: Any, module: Any) -> str:
    """`module`: where `part` is defined, if other processes cannot import that."""
    origin = getattr(part, "func", part)  # of a functools.partial
    label = re.sub(r"\W", "", getattr(origin, "__name__", type(origin).__name__))
    try:
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        with io.BytesIO() as file:
            _Pickler(file).dump(part)
            data = file.getvalue()
    except Exception as error:
        move = "write it as a function of a module and give module:function"
        raise ConfigError(
            f"{field}: {label} cannot be pickled for other processes ({one_line(error)}); create what it holds inside "
            f"of it, or {move if label == 'lambda' else f'move it to a module and give module:{label}'}"
        ) from error
    path = _folder() / f"{label}.{zlib.crc32(data):x}"
    if not path.exists():
        path.write_bytes(data)
    name = f"pickle:{path.name}@{path.parent.name.rpartition('-')[2]}"
    OBJECTS[name] = part
    return name


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the names of source files, which cloudpickle leaves out: tracebacks show them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType) and (reduce := self.dispatch_table.get(types.CodeType)):
            make, args = reduce(obj)
            return make, tuple(obj.co_filename if x == "<dynamic-code>" else x for x in args)
        return super().reducer_override(obj)


@functools.cache
def _folder() -> Path:
    folder = scratch_folder()
    util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)  # not in a forked child
    return folder

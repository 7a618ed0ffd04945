"""User-defined parts (docs/guides/custom-parts.md).

`package.module:callable` names an env, a part of the network, an algorithm, an acting mode or an exchange. The last
two replace the part that the run would have otherwise: they take the same arguments, and the same settings are refused.
A new acting mode or exchange is registered under a name (choices.py).

`pickle:LABEL.HASH@FOLDER` is an object from Python that cannot be imported (runs/objects.py).
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import re
import stat
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from coterie.config import Config
from coterie.errors import ConfigError, CoterieError, one_line, reason_of

PARTS = ("acting", "exchange")
NETWORKS = ("model.torso", "model.core", "model.network")
FIELDS = ("env.id", "env.backend", "algorithm", *NETWORKS, *(f"plugins.{part}" for part in PARTS))
GIVEN = ("env", *PARTS, *FIELDS)  # what they are called in Python
EVAL_SETTINGS = ("env.kwargs", "env.max_episode_steps")  # settings that an evaluation may change
LAB = "dmlab/"  # before a level of DeepMind Lab, whose module is the user's copy of examples/envs/dmlab.py
NameOrObject = str | Callable[..., Any]  # a part's name, or the part itself
P = ParamSpec("P")
T = TypeVar("T")
# Folders whose code is not the user's.
_OTHERS = (*(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))
_PICKLED = re.compile(r"pickle:((\w+)\.\w+)@(\w+)")  # a file, the object's label, and the end of its folder's name
OBJECTS: dict[str, Any] = {}  # by name: what this process was given, or has read from another
_command_folder = [""]  # the folder where the command was typed, if a command line runs this process


def label(name: str) -> str:
    """A part's name for people: of a pickled object that of its class or function, otherwise as it is."""
    pickled = _PICKLED.fullmatch(name)
    return pickled[2] if pickled else name


def _unpickled(field: str, pickled: re.Match[str]) -> Any:
    """What another process of this user has pickled. Only its folder is read, wherever the name may come from."""
    if (name := pickled.string) in OBJECTS:
        return OBJECTS[name]
    file, text, token = pickled.groups()
    folder = next(Path(tempfile.gettempdir()).glob(f"coterie-*-*-{token}"), None)
    if folder is None:
        again = "env=..." if field == "env.id" else f'**{{"{field}": ...}}'
        raise ConfigError(
            f"{field}: {text} was an object of a Python process that has ended; give it again, as in "
            f"coterie.load(RUN, {again}); coterie.resume and coterie.evaluate_run take it, too"
        )
    about = folder.lstat()
    if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
        raise ConfigError(f"{field}: {folder} is not a folder of this user only, so {text} is not read from it")
    try:
        OBJECTS[name] = pickle.loads((folder / file).read_bytes())
    except Exception as error:
        raise ConfigError(f"{field}: {text} cannot be unpickled here: {one_line(error)}") from error
    return OBJECTS[name]


def set_command_folder(folder: str) -> None:
    """Let user code also be found in `folder`, once a name of such code is resolved."""
    _command_folder[0] = folder


def prepare_import(field: str, module: str) -> None:
    """Prepare to import a module that a setting names; refuses those of the standard library.

    The folder of the command is on Python's path from here on, at its end, and not before: until then a package that is
    optional, such as pynvml, cannot come from it. It stays, as user code may import its neighbors at any time, and
    child processes inherit the path.
    """
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{field}: {module} is a module of Python's standard library")
    if top not in ("", "coterie") and _command_folder[0] and _command_folder[0] not in sys.path:
        sys.path.append(_command_folder[0])


@contextmanager
def importing(field: str, path: str) -> Iterator[None]:
    """Turn what the import of `path` raises into one line, with a traceback where the user's code is wrong."""
    try:
        yield
    except CoterieError:
        raise
    except ImportError as error:
        module, hint = path.partition(":")[0], ""
        if module == "__main__":
            hint = "; give the object itself, or move it to a file of its own"
        elif isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            hint = f" in {Path.cwd()} or on PYTHONPATH: change to the folder that has it, or add that to PYTHONPATH"
        raise ConfigError(f"{field}: cannot import {path!r}: {reason_of(error)}{hint}") from error
    except Exception as error:
        raise CoterieError(f"{field}: cannot import {path!r}: {raised(error)}", traceback.format_exc()) from error


def named(field: str, path: str) -> Any:
    """What `path` names. Raises a `ConfigError` about `field` where there is no such thing, or it cannot be called."""
    if pickled := _PICKLED.fullmatch(path):
        return _unpickled(field, pickled)
    module, _, name = path.partition(":")
    with importing(field, path):
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ImportError("it is not package.module:callable")
        prepare_import(field, module)
        found: Any = importlib.import_module(module)
        try:
            for part in name.split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise ImportError(str(error)) from None
    if not callable(found):
        raise ConfigError(f"{field}: {path!r} is {type(found).__name__}, which cannot be called")
    home = getattr(found, "__module__", None) or ""
    if getattr(sys.modules.get(home), getattr(found, "__name__", ""), None) is found:  # numpy:os.system is os.system
        prepare_import(field, home)
    return found


def named_env(field: str, path: str) -> Any:
    """What `path` names, which makes an env: a class with `reset` and `step`, or a function written in Python."""
    found = named(field, path)
    is_env = hasattr(found, "reset") and hasattr(found, "step")
    if inspect.isbuiltin(found) or (isinstance(found, type) and not is_env):
        raise ConfigError(f"{field}: {label(path)} is not an env, nor a Python function that makes one")
    return found


def call(field: str, path: str, *args: Any, **kwargs: Any) -> Any:
    """What the callable at `path` returns. Raises a `ConfigError` where it does not take these arguments."""
    found = named(field, path)
    try:
        inspect.signature(found).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}: {label(path)} must take other arguments: {error}") from None
    if missing := getattr(found, "__abstractmethods__", None):
        raise ConfigError(f"{field}: {label(path)} must define {', '.join(sorted(missing))}")
    return found(*args, **kwargs)


def check_own(config: Config) -> None:
    """Raise a one-line `ConfigError` where a user-defined part cannot be imported."""
    for part in PARTS:
        if path := getattr(config.plugins, part):
            named(f"plugins.{part}", path)
    for path in config.callbacks:
        named("callbacks", path)


def substitute(config: Config, part: str, default: Callable[P, T]) -> Callable[P, T]:
    """`default`, or the user's own `part` instead, which takes what `default` takes."""
    path: str = getattr(config.plugins, part)
    if not path:
        return default
    given, place = named(f"plugins.{part}", path), getattr(default, "__name__", str(default))
    # The modules that are called base have protocols, and what several parts share.
    mro = [c for c in (given.__mro__ if isinstance(given, type) else ()) if not c.__module__.endswith("base")]
    base = next((c for c in mro if c.__module__.startswith("coterie.")), default)
    if base is not default:
        raise ConfigError(f"plugins.{part}: {label(path)} is a subclass of {base.__name__}, but this run uses {place}")
    return in_one_line(f"plugins.{part}: {label(path)} cannot be made")(partial(call, f"plugins.{part}", path))


def raised(error: BaseException) -> str:
    """`one_line`, and where the user's code raised the exception, if that was not by Coterie."""
    if isinstance(error, CoterieError | SyntaxError):  # whose message has the place
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = [*frames, *(frame for frame in frames if not frame.filename.startswith(_OTHERS))][-1]
    return f"{one_line(error)} ({last.filename}, line {last.lineno}, in {last.name})"


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn what the user's code raises into one line, with its traceback."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        raise CoterieError(f"{what}: {raised(error)}", traceback.format_exc()) from error

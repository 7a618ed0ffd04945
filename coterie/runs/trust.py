"""Which code a run folder may name. A folder that names code is signed where it is made, with a key of its user. Names
of another folder, or of a config file, are imported only if the user gives them again, or says so with `--trust`.

The signature (HMAC-SHA256) is over the names alone: the user can move, copy and store the folder elsewhere.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from coterie.config import Config, Ray
from coterie.errors import ConfigError, reason_of
from coterie.plugins import FIELDS, GIVEN, LAB, NETWORKS, NameOrObject, label
from coterie.runs.config_io import get, load_config, replace
from coterie.runs.files import read, write_whole
from coterie.runs.validate import validate
from coterie.wire.auth import own_secret

SIGNATURE = "signature"
IMPORTED_BY_ACTORS = ("algorithm", *NETWORKS, "plugins.modules")  # of the learner's config
_KEY = "COTERIE_TRUST_KEY"  # the key's file, in place of the one in the user's state folder
# Envs that import what `env.kwargs` names: their ids begin so.
_IMPORTING = ("GymV2", "coterie.tools.duel:", "gymnasium:", "gymnasium.")
_UNUSABLE = (OSError, RuntimeError, ValueError)  # raised where there is no key; RuntimeError: no home folder


def code_of(config: Config) -> dict[str, str]:
    """The settings that make a run import or run code of others, by field, as they are typed. Built-in parts and
    registered envs are none.
    """
    found = {field: get(config, field) for field in ("preset", *FIELDS)}
    found = {field: name for field, name in found.items() if ":" in name or LAB in name}
    if any(task.strip().startswith(_IMPORTING) for task in config.env.id.split(",")):
        found["env.kwargs"] = config.env.kwargs
    found |= {field: " ".join(get(config, field)) for field in ("callbacks", "plugins.modules")}
    if config.ray.runtime_env != Ray.runtime_env:
        found["ray.runtime_env"] = config.ray.runtime_env  # it installs packages
    return {field: name for field, name in found.items() if name}


def refuse_code(code: Mapping[str, str], what: str, advice: str) -> None:
    """Raise a one-line `ConfigError` if there is `code`, which was not given here. `what`: names it."""
    if code:
        names = {field: label(name) for field, name in code.items()}
        listed = ", ".join(f"{field} {name if name.isprintable() else repr(name)}" for field, name in names.items())
        raise ConfigError(f"{what} names code: {listed}; if you trust it, {advice}")


def check_code(
    folder: Path, saved: Config, config: Config, new: Mapping[str, NameOrObject], what: str, advice: str
) -> None:
    """Refuse the code of `config` that the settings `new` do not name, unless `saved`, the config that is read from
    `folder`, names what this user's signature there is of.
    """
    if _is_signed(folder, code_of(saved)):
        return
    given = code_of(replace(Config(), dict(new)))
    if "env.kwargs" not in new and saved.env.kwargs != Config().env.kwargs:
        given.pop("env.kwargs", None)  # an env of `new` would import what the folder names
    refuse_code({field: name for field, name in code_of(config).items() if field not in given}, what, advice)


def open_run(
    folder: Path, new: Mapping[str, NameOrObject] = {}, trust: bool = False, may: Collection[str] = GIVEN
) -> Config:
    """The config of a run's folder, or one clear line. `new` and `trust`: as for `load`. `may`: what `new` may hold."""
    for name in new.keys() - {*may}:
        raise ConfigError(
            f"{name}: in an existing run only {', '.join(may)} can be changed; a new run may begin with its weights: "
            "init_from"
        )
    file = folder / "config.json"
    if (saved := read(folder, lambda: load_config(file) if file.is_file() else None)) is None:
        if folder.parent.name == "checkpoints" and (some := sorted(folder.parent.glob("step_*/manifest.json"))):
            names = ", ".join(file.parent.name for file in some)
            raise ConfigError(f"RUN: {folder} is not a complete checkpoint; the run has {names}")
        raise ConfigError(f"RUN: {folder} is not a run folder (it has no config.json)")
    config = replace(saved, dict(new))
    if "env.max_episode_steps" in new:
        config = replace(config, {"eval.max_episode_steps": 0})
    config = validate(config) if new else config
    if not trust:
        advice = "give --trust (from Python: trust=True)"
        check_code(folder, saved, config, new, f"{folder} is not signed with your key, and", advice)
    return config


def sign(folder: Path, config: Config) -> str:
    """Sign a run's folder if its config names code. Returns a line where this user can have no key."""
    if not (code := code_of(config)):
        return ""
    try:
        key = _key()
    except _UNUSABLE as error:
        return f"this run cannot be signed ({reason_of(error)}): `resume`, `eval` and others will need --trust"
    write_whole(folder / SIGNATURE, _digest(key, code) + "\n")
    return ""


def _is_signed(folder: Path, code: Mapping[str, str]) -> bool:
    with suppress(*_UNUSABLE):
        found, key = (folder / SIGNATURE).read_bytes().strip(), _key()
        # Folders signed before December 2026 lack the arguments of an env whose id is in the signature itself.
        before = {field: name for field, name in code.items() if field != "env.kwargs" or "env.id" not in code}
        return any(hmac.compare_digest(found, _digest(key, names).encode()) for names in (code, before))
    return False


def _digest(key: bytes, code: Mapping[str, str]) -> str:
    return hmac.new(key, json.dumps(code, sort_keys=True).encode(), "sha256").hexdigest()


def _key() -> bytes:
    """This user's key. Raises one of `_UNUSABLE` if there can be none, or if others may read it."""
    path = own_secret(os.path.abspath(file) if (file := os.environ.get(_KEY)) else "trust.key")
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"others may read {path}; use chmod 600")
    if len(key := path.read_bytes()) < 32:
        raise ValueError(f"{path} has less than 32 bytes")
    return key

"""What this package needs and what is installed of it, read from the package's own metadata."""

from __future__ import annotations

import re
from importlib import metadata


def version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def needed() -> dict[str, list[str]]:
    """Packages by extra, in the order of pyproject.toml; under "" those that every run needs. Empty where Coterie runs
    from a folder of sources that nobody installed.
    """
    try:
        lines = metadata.requires("coterie") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        package, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"](\w+)['\"]", line)
        if package:
            found.setdefault(extra[1] if extra else "", []).append(package[0])
    return found

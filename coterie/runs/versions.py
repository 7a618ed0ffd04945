"""What this package needs and what is installed of it, read from the package's own metadata."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement


def version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def needed() -> dict[str, list[str]]:
    """Packages by extra, in the order of pyproject.toml, with those that their own extras stand for; under "" those
    that every run needs. Empty where Coterie runs from a folder of sources that nobody installed.
    """
    try:
        extras = metadata.metadata("coterie").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {}
    always = _wanted("coterie", "")
    return {"": always, **{extra: [one for one in _wanted("coterie", extra) if one not in always] for extra in extras}}


def _wanted(package: str, extra: str) -> list[str]:
    """What an extra asks for on this Python and platform, or without one."""
    try:
        every = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    found = []
    for one in every:
        always = one.marker is None or one.marker.evaluate({"extra": ""})
        if always if not extra else not always and one.marker and one.marker.evaluate({"extra": extra}):
            found += [one.name, *(name for inner in sorted(one.extras) for name in _wanted(one.name, inner))]
    return found

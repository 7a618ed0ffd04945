"""The parts of pages that a script writes: each is between two comments."""

from __future__ import annotations


def replaced(text: str, name: str, by: str, part: str) -> str:
    """The page `text` with `part` between the comments of `name`. `by`: the command that writes it, in the first one.
    Raises `ValueError` where the page lacks one of them.
    """
    first, last = f"<!-- {name}: written by {by} -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"the page has no {first} with {last} after it")
    return f"{before}{first}\n\n{part}\n\n{last}{after}"

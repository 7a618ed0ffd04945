"""Plain English: the package does not use pronouns for processes, nor its old private words."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "coterie"
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

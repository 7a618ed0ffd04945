"""Text at the env's edge: an instruction becomes a row of word hashes, which a model embeds (models/text.py).

IMPALA's language channel (https://arxiv.org/abs/1802.01561, section 5), whose authors' code hashes words into 1000
buckets. Words are in lower case and without punctuation ("door," is "door"), bucket 0 is padding, and the hash is
crc32: unlike Python's hash it is the same in every process and run.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import Any

import numpy as np

from coterie.types import Array, ObsSpec

# Longer instructions are cut. Of 32 of each kind, BabyAI's longest (of its sequences of tasks) had 35 words.
WORDS = 40
BUCKETS = 1000
_WORD = re.compile(r"[\w']+")
TEXT_FORM = (
    f"words, which are what [\\w']+ finds in the text in lower case: crc32(UTF-8) % {BUCKETS - 1} + 1 of each, "
    f"zeros behind the last, {WORDS} in all"
)


def text_spec() -> ObsSpec:
    """`[WORDS]` int16: each word's bucket from 1 on, then zeros."""
    return ObsSpec((WORDS,), "int16", 0.0, BUCKETS - 1.0, text=True)


# An instruction lasts for an episode, and there are few different ones. The bound is for envs that never repeat one.
@functools.lru_cache(maxsize=8192)
def _row(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        text = text.partition(b"\0")[0].decode(errors="replace")
    row = np.zeros(WORDS, np.int16)
    for i, word in enumerate(_WORD.findall(text.lower())[:WORDS]):
        row[i] = zlib.crc32(word.encode()) % (BUCKETS - 1) + 1
    return row.tobytes()


def text_rows(x: Any) -> Array:
    """Texts `[n]` (str or bytes), or `[n, width]` uint8 of text that zeros end, to `[n, WORDS]` int16."""
    x = np.asarray(x)
    if x.dtype == np.uint8:
        x = np.ascontiguousarray(x).view(f"S{x.shape[-1]}")
    rows = bytearray().join([_row(text) for text in x.reshape(-1).tolist()])  # a bytearray, for it can be written to
    return np.frombuffer(rows, np.int16).reshape(-1, WORDS)

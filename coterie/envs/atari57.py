"""Random and human scores of the 57 Atari games (atari57.csv), for human-normalized scores.

Published figures, as collected by DQN Zoo's atari_data.py: at least three episodes each, 1 to 30 no-op starts, 108,000
frames at most. 0 is random play, 1 a professional tester. Video Pinball's random score is above the human one under
other protocols.
"""

from __future__ import annotations

import csv
import re
from importlib.resources import files

with (files(__package__) / "atari57.csv").open() as _file:
    SCORES = {row["game"]: (float(row["random"]), float(row["human"])) for row in csv.DictReader(_file)}


def game(env_id: str) -> str | None:
    """The game behind "Pong-v5", "ALE/Pong-v5" or "PongNoFrameskip-v4"; None if it is not one of the 57."""
    name = re.sub(r"-v\d+$", "", env_id.removeprefix("ALE/"))
    name = re.sub(r"(NoFrameskip|Deterministic)$", "", name).lower()
    return name if name in SCORES else None


def human_normalized(env_id: str, score: float) -> float | None:
    """(score - random) / (human - random), or None for another env."""
    name = game(env_id)
    if name is None:
        return None
    low, high = SCORES[name]
    return (score - low) / (high - low)

"""Data sets for behavior cloning: episodes of a rule that balances CartPole."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest


@functools.cache
def rule_plays_cartpole(episodes: int = 3, length: int = 200) -> str:
    """A folder with a data set of Minari's; as many steps as `episodes` times `length`."""
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer

    folder = Path(tempfile.mkdtemp(prefix="data-", dir=os.environ["COTERIE_TESTS_STATE"])) / "rule-v0"
    env = gymnasium.make("CartPole-v1", max_episode_steps=length)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # about authors, licenses, ...
        patch.setenv("MINARI_DATASETS_PATH", str(folder.parent))
        played = [EpisodeBuffer(**_play(env, seed)) for seed in range(episodes)]
        minari.create_dataset_from_buffers(folder.name, played, env="CartPole-v1")
    return str(folder)


def _play(env: Any, seed: int) -> dict[str, Any]:
    obs, _ = env.reset(seed=seed)
    seen, actions, rewards, ends = [obs], list[int](), list[float](), list[tuple[bool, bool]]()
    while not (ends and any(ends[-1])):
        x, speed, angle, turning = obs
        actions.append(int(angle + 0.5 * turning + 0.02 * x + 0.05 * speed > 0))
        obs, reward, terminated, truncated, _ = env.step(actions[-1])
        seen.append(obs)
        rewards.append(float(reward))
        ends.append((bool(terminated), bool(truncated)))
    terminations, truncations = map(list, zip(*ends, strict=True))
    given = {"rewards": rewards, "terminations": terminations, "truncations": truncations}
    return {"observations": np.array(seen), "actions": np.array(actions), **given}

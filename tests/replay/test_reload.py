"""Replays that were saved and read again."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from coterie.replay.sequences import Blocks, SequenceReplay
from coterie.replay.storage import Capacity, EnvReplay
from coterie.replay.transitions import TransitionReplay
from tests.replay.lives import GAMMA, IMAGE, STACK, Life, tell


def rows(seed: int) -> EnvReplay:
    return TransitionReplay(Capacity(IMAGE, 3, 3 * 31, STACK), GAMMA, 3, alpha=0.6, seed=seed)


def sequences(seed: int) -> EnvReplay:
    return SequenceReplay(Capacity(IMAGE, 3, 3 * 7 * 4, STACK), Blocks(4, 3, 1, (2,)), 0.6, seed)


@pytest.mark.parametrize("make", [rows, sequences])
def test_the_first_draw_after_a_reload_is_the_one_that_would_have_been_next(make):
    rng = np.random.default_rng(0)
    lives, ring = {env_id: Life(rng, IMAGE, number=env_id) for env_id in (3, 17, 1 << 20)}, make(0)
    for _ in range(40):
        whole = tell(lives, list(lives), 4, rng)
        ring.add(whole, whole.reward.numpy())
        if ring.size:
            ring.update(ring.draw(16), rng.exponential(size=16))
    again = make(1)  # its numbers are the saved one's, too
    again.load_state_dict({k: x.clone() for k, x in ring.state_dict().items()})
    kept, read = (asdict(one.gather(one.draw(32, 0.6))) for one in (ring, again))
    assert len(set(kept["picks"]["index"].tolist())) > 5
    torch.testing.assert_close(read, kept, atol=0, rtol=0)

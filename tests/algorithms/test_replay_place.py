"""Where a replay has its observations, and that batches do not depend on it."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch

from coterie.algorithms.replay_size import replay_capacity, stacked_frames
from tests.algorithms.harness import VARIANTS, build, drawn
from tests.conftest import VECTOR, make_config


@pytest.mark.parametrize("name", ["double", "rainbow", "noisy", "r2d2"])
def test_batches_are_the_same_where_observations_are_as_on_a_gpu(name, monkeypatch):
    """There the learner's thread prepares them; otherwise another does, while the batch before is trained on."""
    found, threads = [], []
    for device in (None, torch.device("cpu")):
        algorithm, model = build(**VARIANTS[name])
        made = algorithm.make_replay(replace(replay_capacity(algorithm.config, VECTOR), device=device))
        monkeypatch.setattr(algorithm, "make_replay", lambda room, made=made: made)
        prepare = algorithm._prepare
        algorithm._prepare = lambda *args, prepare=prepare: threads.append(threading.current_thread()) or prepare(*args)
        found.append([(x.rows.picks.index.tolist(), x.ahead) for x in drawn(algorithm, model)])
        assert {x is threading.main_thread() for x in threads} == {device is not None}
        threads.clear()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("env", "frames"), [("Pong-v5", 4), ("Pong-v5, Breakout-v5", 4), ("Pong-v5,CartPole-v1", 0), ("CartPole-v1", 0)]
)
def test_of_a_stack_the_newest_frame_is_stored_if_all_tasks_are_atari_games(env, frames):
    assert stacked_frames(make_config(**{"env.id": env})) == frames
    assert stacked_frames(make_config(**{"env.id": env, "env.action_repeat": 2})) == 0


@pytest.mark.parametrize("name", ["double", "r2d2"])
@pytest.mark.parametrize(
    ("learners", "short", "changes", "place"),
    [
        (1, 0, {}, "cuda"),
        (1, 1, {}, None),
        (3, 0, {}, "cuda"),  # two GPUs
        (3, 1, {}, None),
        (1, 0, {"replay.gpu": False}, None),
        (1, 0, {"replay.disk": "/tmp"}, None),
    ],
)
def test_a_replay_is_on_the_learners_gpu_if_half_of_its_free_memory_is_enough(
    name, learners, short, changes, place, monkeypatch
):
    """`short`: bytes that are missing. Where it fits but the memory is gone by then, it is on the host."""
    algorithm, _ = build(**VARIANTS[name], learners=learners, **changes)
    need, tried = algorithm.replay_bytes(algorithm.config, VECTOR), []
    assert (
        sum(x.rows.nbytes for x in algorithm.make_replay(replay_capacity(algorithm.config, VECTOR)).obs.values()) < need
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (2 * math.ceil(learners / 2) * need - short, 1 << 40)
    )

    def make(room):
        tried.append(room.device and room.device.type)
        if room.device is not None:
            raise torch.OutOfMemoryError
        return "on the host"

    algorithm.make_replay = make
    assert algorithm._replay_for(torch.device("cuda")) == "on the host"
    assert tried == ([place, None] if place else [None])

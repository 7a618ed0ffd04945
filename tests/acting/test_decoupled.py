"""Decoupled acting: a change of the learner's weights is seen in the actions; versions and lag are what they say."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from coterie.acting.actor import ActorMailbox, ActorMemory
from coterie.acting.base import MemorySetup
from coterie.build.resources import resolve_config
from coterie.errors import CoterieError
from coterie.parallel.board import Board
from coterie.parallel.stages import Stages
from coterie.types import Inputs
from tests.conftest import VECTOR, make_config
from tests.support.crew import crewed


def config(**changes):
    own = {"env.num_envs": 4, "actors": 2, "algo.unroll_length": 6, "model.normalize_obs": True, **changes}
    return make_config(algorithm="vtrace", acting="decoupled", **own)


def own_log_prob(learner, rollout):
    """Of the copy that acts, with the learner's weights of now."""
    learner.refresh_actor()
    inputs = Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward)
    with torch.no_grad():
        params, value, _ = learner.actor(inputs, rollout.core_state)
    return learner.algorithm.dist.log_prob(params[:-1], rollout.action), value


def steps(learner):
    """Learner steps, each with its rollout."""
    versions = count()
    return enumerate(learner.acting.rollouts(lambda: learner.acting.publish(next(versions))))


@pytest.mark.parametrize("image", [False, True])
def test_a_change_of_the_weights_is_seen_in_the_actors_policy(image):
    changes = {"decoupled.lockstep": True}
    if image:  # acted with bf16 copies
        catch = {"env.id": "coterie.envs.testing:Catch", "env.kwargs": '{"image": true, "scale": 8}'}
        changes |= {**catch, "model.torso": "a3c", "precision": "bf16", "model.normalize_obs": False, "env.threads": 1}
    close = {"atol": 0.02, "rtol": 0.01} if image else {"atol": 1e-5, "rtol": 1e-4}
    with crewed(config(**changes)) as learner:
        before = None
        for step, rollout in islice(steps(learner), 4):
            assert (rollout.policy_version == step).all()
            log_prob, value = own_log_prob(learner, rollout)
            torch.testing.assert_close(rollout.behavior_log_prob, log_prob, **close)
            torch.testing.assert_close(rollout.behavior_value, value, **close)
            if before is not None:  # the weights of the step before would not have said so
                learner.params.data.copy_(before)
                assert (own_log_prob(learner, rollout)[0] - rollout.behavior_log_prob).abs().max() > 0.1
            before = learner.params.data.clone()
            with torch.no_grad():
                rng = torch.Generator(learner.params.data.device).manual_seed(step)
                learner.model.policy.weight.normal_(0, 0.1 if image else 0.5, generator=rng)
            for norm in learner.model.obs_norm.values():  # normalizers travel with the weights
                norm.update(torch.randn(50, 4, device=rng.device) * (step + 2))
                before = None


def test_the_policy_lag_of_decoupled_acting_is_recorded_and_bounded():
    with crewed(config(**{"decoupled.queue": 1})) as learner:
        lags = [step - int(rollout.policy_version.min()) for step, rollout in islice(steps(learner), 30)]
        assert 0 < max(lags) <= 3  # as many batches as there are


def test_weights_are_published_every_n_learner_steps():
    with crewed(config(**{"decoupled.publish_every": 5, "decoupled.lockstep": True})) as learner:
        seen = [int(rollout.policy_version.max()) for _, rollout in islice(steps(learner), 12)]
        assert seen == [0] * 5 + [5] * 5 + [10] * 2


def test_a_learner_waits_for_no_more_rollouts_once_the_run_stops():
    with crewed(config(**{"env.delay": 60.0})) as learner:
        learner.context.board.stop()
        assert next(learner.acting.rollouts(lambda: None), None) is None


def test_decoupled_acting_without_rollouts_ends_with_a_reason():
    with crewed(config()) as learner:
        learner.acting.setup = replace(learner.acting.setup, timeout=0.3)
        learner.context.board.close()  # the actors leave
        with pytest.raises(CoterieError, match=r"no batch of rollouts for 0\.3 s: the actors hang"):
            deque(steps(learner))


def test_an_actor_waits_as_long_as_any_learner_is_alive(monkeypatch):
    """Its own may wait for one that evaluates."""
    mailbox, board, asked = ActorMailbox.__new__(ActorMailbox), Board(2, 1), count()
    monkeypatch.setattr(board, "heartbeats", np.full(3, time.monotonic() - 100))
    mailbox.board, mailbox.row, mailbox.number, mailbox.timeout = board, 2, 0, 0.2
    mailbox.check, mailbox.stages, mailbox.recorders = (lambda: None), Stages(), {(0, 0): "a recorder"}
    mailbox.slots = SimpleNamespace(take=lambda number: None, need={(0, 0): 0})
    mailbox.weights = SimpleNamespace(version=0)
    with pytest.raises(CoterieError, match=r"no slot for a rollout for 0\.2 s: the learner hangs"):
        mailbox.next()

    def take(number):
        board.heartbeats[0] = time.monotonic()
        time.sleep(0.05)
        return (0, 0) if next(asked) == 10 else None

    mailbox.slots.take = take
    assert mailbox.next() == "a recorder"


@pytest.mark.parametrize(("actors", "envs", "batch", "batches"), [(2, 32, 32, 3), (15, 240, 32, 10), (4, 16, 8, 4)])
def test_each_actor_has_a_slot_while_one_batch_trains_and_one_waits(actors, envs, batch, batches):
    settings = {"actors": actors, "env.num_envs": envs, "decoupled.batch_size": batch}
    memory = ActorMemory(MemorySetup(resolve_config(config(**settings)), VECTOR, 2, (), 4, 0))
    try:
        assert memory.slots.batches == batches
        assert (batches - 2) * memory.slots.per_batch >= actors
    finally:
        memory.close()


def test_actors_give_way_to_the_learner():
    """Where they share its cores it would wait for one while they act for rollouts that it cannot take yet."""
    with crewed(config()) as learner:
        next(learner.acting.rollouts(lambda: learner.acting.publish(0)))
        children = psutil.Process().children(recursive=True)
        assert sorted(child.nice() - psutil.Process().nice() for child in children)[-2:] == [5, 5]


def test_the_learner_raises_what_has_ended_the_thread_of_remote_rollouts(monkeypatch):
    """And at once, not after the time for a batch, with a message about actors."""
    with crewed(config()) as learner:
        learner.acting.remote = SimpleNamespace(error=OSError("no locks left"), close=lambda: None, envs=0, produced=0)
        with pytest.raises(OSError, match="no locks left"):
            next(steps(learner))
        monkeypatch.setattr(learner.acting.slots, "is_full", lambda *_: True)  # local actors are fast
        with pytest.raises(OSError, match="no locks left"):
            next(steps(learner))

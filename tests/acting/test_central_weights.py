"""Central acting in this process: which weights act, what rollouts hold, lockstep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.acting.central import Central
from coterie.config import Model
from coterie.models.build import Network
from coterie.types import AgentOutput, Inputs
from tests.acting.central_harness import QUIET_S, UNROLL, WAIT_S, Client, Rig, check, still
from tests.conftest import VECTOR
from tests.support.central import learner_setup, time_step
from tests.support.waiting import wait_until

# Weights, and rollouts.


def test_a_rollout_may_be_acted_with_several_versions(rig):
    one = rig(envs=2, batch_size=2)
    client, source = Client(one, 0), one.rollouts([0])
    for version in range(UNROLL):
        one.model.weight.fill_(version)
        one.central.publish(version)
        assert client.turn()[1] == version
    client.ask()  # what the last action led to
    rollout = next(one.central.rollouts(lambda: None))
    assert rollout.policy_version[:, 0].tolist() == list(range(UNROLL))
    assert rollout.behavior_value[:-1, 0].tolist() == list(range(UNROLL))
    source.close()


def test_weights_that_come_while_the_policy_acts_do_not_change_its_batch(rig):
    one = rig(envs=2, batch_size=2, unroll_length=100)
    client = Client(one, 0)
    one.central.publish(0)
    client.turn()
    one.busy.clear()
    one.gate.clear()
    client.ask()
    assert one.busy.wait(WAIT_S)
    for version in (1, 2, 3):  # more often than there are copies
        one.model.weight.fill_(version)
        one.central.publish(version)
    one.gate.set()
    assert client.answer()[1] == 0
    assert float(client.stream.recorder.fields["value"][client.stream.row - 1, 0]) == 0
    assert client.turn()[1] == 3
    assert float(client.stream.recorder.fields["value"][client.stream.row - 1, 0]) == 3


def test_a_real_model_acts_with_copies_of_its_weights():
    model = Network(VECTOR, Model(hidden=(16,), normalize_obs=True))
    seen: list[Tensor] = []

    def policy(model: Network, inputs: Inputs, *_: object) -> tuple[AgentOutput, None]:
        params, value, _ = model(inputs)
        seen.append(torch.cat((params, value[:, None]), 1))
        return AgentOutput(params.argmax(1), torch.zeros(len(value)), value), None

    central = Central(learner_setup(policy, model, {"env.num_envs": 2, "algo.unroll_length": 50}))
    mine = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    try:
        twins: list[Any] = [twin for twin, _ in central.models.copies]
        assert all(mine.isdisjoint(x.data_ptr() for x in (*t.parameters(), *t.buffers())) for t in twins)
        stream, answers = central.open_stream(0, 0, 0, 2), []
        arrays = time_step(np.ones((2, 3), np.float32))

        def act() -> Tensor:
            count = len(answers)
            stream.ask(arrays, lambda *answer: answers.append(answer))
            wait_until(lambda: len(answers) > count, what="an answer")
            return seen[-1]

        central.publish(0)
        before = act()
        with torch.no_grad():
            for x in model.parameters():
                x.add_(0.1)
        model.observe(torch.randn(50, 3) + 5, torch.ones(50, dtype=torch.bool))
        assert torch.equal(act(), before)
        central.publish(1)
        after = act()
        assert (after - before).abs().max() > 0.01
        with torch.no_grad():
            zeros = torch.zeros(2)
            inputs = Inputs(torch.ones(2, 3), zeros.bool(), zeros.long(), zeros)
            params, value, _ = model(inputs, None)
        torch.testing.assert_close(after, torch.cat((params, value[:, None]), 1))
    finally:
        central.close()


def test_batches_may_have_other_widths_than_the_streams(rig):
    one = rig(envs=7, batch_size=5)
    Client(one, 0, first_env=0, width=3).go()
    Client(one, 1, first_env=10, width=4).go()
    seen = list(islice(one.rollouts(), 12))
    check(seen)
    assert all(len(r.env_id) == 5 for r in seen)
    assert {env for r in seen for env in r.env_id.tolist()} == {0, 1, 2, 10, 11, 12, 13}
    assert {int(x) for r in seen for x in r.core_state} >= {0, 2, 4, 6}  # it goes on from rollout to rollout


def test_without_a_free_batch_no_host_is_answered_until_there_is_one(rig):
    one = rig()
    clients = [Client(one, n).go() for n in range(2)]
    source = one.rollouts()
    seen = [next(source)]
    # 3 batches, in each stream two rollouts that wait for one, less the one row that is due.
    count = 2 * UNROLL * (3 + 2)
    assert still(lambda: sum(c.answered for c in clients), count) == count
    seen.append(next(source))
    wait_until(lambda: sum(c.answered for c in clients) > count, what="they go on")
    seen += islice(source, 10)
    check(seen)
    assert max(int(x) for r in seen for x in r.policy_version.flatten()) > 5


# Lockstep.


def lockstep(rig: Callable[..., Rig], hosts: int = 2) -> tuple[Rig, list[Client]]:
    one = rig(envs=2 * hosts, lockstep=True, batch_min=1)
    return one, [Client(one, n).go() for n in reversed(range(hosts))][::-1]


def test_in_lockstep_all_act_together_and_wait_for_the_weights(rig):
    one, _ = lockstep(rig)
    version = [0]
    source = one.rollouts(version)
    for step in range(5):
        r = next(source)
        assert (r.policy_version == step).all()
        assert r.env_id.tolist() == [0, 1, 2, 3]
        count = still(lambda: len(one.batches), (step + 1) * (UNROLL + 1))
        assert count == (step + 1) * (UNROLL + 1), "one row more than there are actions: the last one's value"
        if step == 0:
            check([r])
    assert all([env for env, _ in batch] == [0, 1, 2, 3] for batch in one.batches)


def test_lockstep_waits_for_a_host_that_has_left(rig):
    one, clients = lockstep(rig)
    source = one.rollouts()
    next(source)
    clients[1].leave()
    before = still(lambda: len(one.batches))
    one.central.publish(1)
    time.sleep(QUIET_S)
    assert len(one.batches) == before


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_in_lockstep_a_host_that_returns_makes_the_one_rollout_that_it_owes(rig, whole, twice):
    """`whole`: it dies when its rollout of this round was done."""
    one, clients = lockstep(rig, 3)
    source = one.rollouts()
    seen = [next(source) for _ in range(4)]
    still(lambda: len(one.batches))
    learner = threading.Thread(target=lambda: seen.extend(islice(source, 6)))
    if not whole:
        clients[1].going = False  # after one answer more
        learner.start()
        still(lambda: sum(c.answered for c in clients), 3 * (4 * UNROLL + 1))
    for _ in range(1 + twice):
        clients[1] = clients[1].again()
    if whole:
        learner.start()
    clients[1].go()
    learner.join(WAIT_S)
    assert len(seen) == 10
    check(seen)
    for step, r in enumerate(seen):
        assert sorted(r.env_id.tolist()) == list(range(6)), f"each env once in batch {step}"
        assert (r.policy_version == step).all()

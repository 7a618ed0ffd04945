"""Central acting in this process: who is acted for together, what becomes of lives that end, which weights act."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.acting.central import Central, Shape
from coterie.actor import Stages, local_fields
from coterie.config import Model
from coterie.models.build import ActorCritic, acting_copy
from coterie.parallel.board import Board
from coterie.types import AgentOutput, CoterieError, Inputs, Rollout
from coterie.wire.codec import Newest, Refused, timestep_layout
from tests.acting.central_harness import CPU, QUIET_S, UNROLL, WAIT_S, Client, Rig, check, valid
from tests.conftest import IMAGE, VECTOR


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**changes: object) -> Rig:
        made.append(Rig(**changes))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        one.central.close()
        assert not any(thread.is_alive() for thread in one.central._threads)
        assert one.error is not None or one.central._error is None, one.central._error
        for batch in one.batches:
            assert len({env for env, _ in batch}) == len(batch), "an env is twice in a batch"


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def still(count: Callable[[], int]) -> int:
    """What it comes to when nothing more happens."""
    before = -1
    while (now := count()) != before:
        before = now
        time.sleep(QUIET_S)
    return now


# Who is acted for together.


def test_nobody_is_answered_before_there_are_weights(rig):
    one = rig()
    client = Client(one, 0)
    client.ask()
    time.sleep(QUIET_S)
    assert client.answered == 0
    one.central.publish(7)
    assert client.answer()[1] == 7


def test_a_batch_waits_for_batch_min_but_not_for_ever(rig):
    one = rig(batch_min=4, wait=WAIT_S)
    a, b = Client(one, 0), Client(one, 1)
    one.central.publish(0)
    a.ask()
    time.sleep(QUIET_S)
    assert a.answered == 0
    b.ask()
    a.answer(), b.answer()
    assert one.batches == [[(0, 0), (1, 0), (2, 0), (3, 0)]]
    short = rig(batch_min=4, wait=0.2)
    a, b = Client(short, 0), Client(short, 1)
    short.central.publish(0)
    begin = time.monotonic()
    a.turn()
    assert time.monotonic() - begin >= 0.2
    b.leave()
    begin = time.monotonic()
    until(lambda: len(short.central.seats) == 1, "the other is gone")
    a.turn()
    assert time.monotonic() - begin < 0.2 + WAIT_S / 2, "more than all there are is not waited for"


def test_a_batch_has_batch_max_envs_and_the_first_to_ask_come_first(rig):
    one = rig(envs=10, batch_size=10, batch_max=4)
    clients = [Client(one, n) for n in range(4)]
    wide = Client(one, 9, first_env=100, width=6)
    one.central.publish(0)
    one.gate.clear()
    clients[3].ask()
    assert one.busy.wait(WAIT_S)
    for k in (2, 0, 1):
        clients[k].ask()
    wide.ask()  # more than fit: alone
    one.gate.set()
    for client in (*clients, wide):
        client.answer()
    assert [[env for env, _ in batch] for batch in one.batches] == [[6, 7], [4, 5, 0, 1], [2, 3], [*range(100, 106)]]


def test_one_that_takes_its_time_keeps_nobody_waiting(rig):
    """Stopped, slowed, or gone without a word."""
    one = rig(batch_min=4, wait=0.002)
    slow, quick = Client(one, 0), Client(one, 1)
    slow.ask()
    source = one.rollouts()
    quick.go()
    seen = list(islice(source, 4))
    assert slow.answered == 1
    assert {env for r in seen for env in r.env_id.tolist()} == {2, 3}
    slow.go()  # again at work
    seen += islice(source, 20)
    assert {0, 1} <= {env for r in seen for env in r.env_id.tolist()}
    check(seen)


# Lives.


def test_a_superseded_seat_is_in_no_batch_with_its_successor(rig):
    """Its host is restarted twice before the batch that it is due for."""
    one = rig()
    other, first = Client(one, 1), Client(one, 0)
    one.central.publish(0)
    one.gate.clear()
    other.ask()
    assert one.busy.wait(WAIT_S)
    first.ask()
    second = first.again()
    second.ask()
    third = second.again()
    third.ask()
    one.gate.set()
    third.answer()
    assert one.batches == [[(2, 0), (3, 0)], [(0, 2), (1, 2)]]
    assert [first.answered, second.answered] == [0, 0]
    assert one.central.envs == 4
    for late in (first, second):  # their streams end only now
        late.seat.leave()
    assert one.central.envs == 4
    assert third.turn()


def test_a_late_question_of_a_superseded_seat_is_not_answered(rig):
    one = rig()
    one.central.publish(0)
    first = Client(one, 0)
    first.turn()
    second = first.again()
    second.turn()
    first.ask()
    time.sleep(QUIET_S)
    assert first.answered == 1
    assert second.turn()


@pytest.mark.parametrize("seed", range(3))
def test_lives_that_end_anywhere_are_never_mixed_and_every_row_is_in_the_books(rig, seed):
    """Hosts that leave, come back, and are replaced while others act and a learner learns."""
    one = rig(envs=8, batch_size=6, batch_max=[0, 2, 5][seed], batch_min=[0, 4, 0][seed])
    rng = random.Random(seed)
    clients = [Client(one, n).go() for n in range(4)]
    seen, source, over = list[Rollout](), one.rollouts(), threading.Event()

    def learn() -> None:
        while not over.is_set():
            seen.append(next(source))

    learner = threading.Thread(target=learn)
    learner.start()
    for _ in range(60):
        time.sleep(rng.uniform(0, 0.02))
        k = rng.randrange(4)
        if rng.random() < 0.5:
            clients[k].leave()
        for _ in range(rng.choice((1, 1, 2))):
            clients[k] = clients[k].again()
            if rng.random() < 0.8:
                clients[k].ask()
        clients[k].going = True
        if clients[k].shown == 0:
            clients[k].ask()
    over.set()
    learner.join(WAIT_S)
    assert not learner.is_alive()
    for client in clients:
        client.leave()
    central = one.central
    still(lambda: central.produced + central.dropped + central.inbox.qsize())
    check(seen)
    assert len({int(x) for r in seen for x in r.obs[0, :, 1] // 1000}) > 5
    # All that is neither learned nor dropped is in whole rollouts: of those let the learner have all batches.
    left = central.columns
    for _ in range(left // 6):
        seen.append(next(source))
    assert central.columns == left % 6
    check(seen)
    in_flight = central.produced - central.dropped - valid(seen)
    assert 0 <= in_flight <= central.columns * UNROLL
    assert (in_flight == 0) == (central.columns == 0)
    assert central.dropped > 0
    assert central.envs == 0


def test_rows_of_a_rollout_that_will_never_be_whole_are_dropped(rig):
    one = rig(unroll_length=20)
    one.central.publish(0)
    client = Client(one, 0)
    for _ in range(9):  # of which the first and the seventh begin an episode
        client.turn()
    assert one.central.counts() == {"produced": 14, "dropped": 0}
    client.leave()
    until(lambda: one.central.dropped == 14, "dropped")
    assert one.central.produced == 14
    client.seat.leave()
    after = client.again()
    after.turn(), after.turn()
    assert one.central.counts() == {"produced": 16, "dropped": 14}


def test_a_new_life_begins_anew_on_the_same_envs(rig):
    one = rig(envs=2, batch_size=2)
    client, source = Client(one, 0).go(), one.rollouts()
    seen = list(islice(source, 3))
    client = client.again().go()
    while True:
        seen.append(next(source))
        if seen[-1].obs[0, 0, 1] >= 1000:
            break
    check(seen)
    assert seen[-1].is_first[0].all()
    assert not seen[-1].core_state.any()
    assert not seen[-1].prev_action[0].any()
    assert seen[-2].core_state.any()


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


def test_a_weight_that_changes_is_seen_in_the_next_inference_once_published_and_not_before(rig):
    one = rig(envs=2, batch_size=2, unroll_length=100)
    client = Client(one, 0)
    one.central.publish(0)
    client.turn()
    value = lambda: float(client.seat.recorder.fields["value"][client.seat.row - 1, 0])  # noqa: E731
    for version in range(1, 6):
        before = value()
        one.model.weight.fill_(10.0 * version)  # in place, as an optimizer does it
        client.turn()
        assert value() == before
        one.central.publish(version)
        assert client.turn()[1] == version
        assert value() == 10.0 * version


def test_weights_that_come_while_the_policy_acts_do_not_change_its_batch(rig):
    one = rig(envs=2, batch_size=2, unroll_length=100)
    client = Client(one, 0)
    one.central.publish(0)
    client.turn()
    one.busy.clear()
    one.gate.clear()
    client.ask()
    assert one.busy.wait(WAIT_S)
    for version in (1, 2, 3):  # oftener than there are copies
        one.model.weight.fill_(version)
        one.central.publish(version)
    one.gate.set()
    assert client.answer()[1] == 0
    assert float(client.seat.recorder.fields["value"][client.seat.row - 1, 0]) == 0
    assert client.turn()[1] == 3
    assert float(client.seat.recorder.fields["value"][client.seat.row - 1, 0]) == 3


def test_a_real_model_acts_with_copies_of_its_weights():
    torch.manual_seed(0)
    model = ActorCritic(VECTOR, Model(hidden=(16,), normalize_obs=True))
    seen: list[Tensor] = []

    def policy(model: ActorCritic, inputs: Inputs, state: Tensor | None) -> tuple[AgentOutput, None]:
        params, value, _ = model(inputs, state)
        seen.append(torch.cat((params, value[:, None]), 1))
        return AgentOutput(params.argmax(1), torch.zeros(len(value)), value), None

    twins = [acting_copy(model, torch.float32, apart=True) for _ in range(2)]
    mine = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    assert all(mine.isdisjoint(x.data_ptr() for x in (*t.parameters(), *t.buffers())) for t, _ in twins)
    central = Central(
        Shape(VECTOR, 2, 50, 2, 3), twins, policy, lambda width: None,
        partial(local_fields, VECTOR, 50, device=CPU), Board(1), 0, Stages(), CPU,
    )  # fmt: skip
    try:
        seat, answers = central.sit(0, 0, 0, 2), []
        arrays = {
            "obs/": np.ones((2, 3), np.float32),
            **{k: np.zeros(2, bool) for k in ("terminated", "truncated", "is_first")},
            "reward": np.zeros(2, np.float32),
            **{k: np.full(2, np.nan) for k in ("episode_return", "episode_length")},
        }

        def act() -> Tensor:
            count = len(answers)
            seat.ask(arrays, lambda *answer: answers.append(answer))
            until(lambda: len(answers) > count, "an answer")
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


def test_the_recurrent_state_goes_on_from_rollout_to_rollout(rig):
    one = rig()
    for n in range(2):
        Client(one, n).go()
    seen = list(islice(one.rollouts(), 10))
    check(seen)
    assert {int(x) for r in seen for x in r.core_state} >= {0, 2, 4, 6}


def test_batches_of_other_widths_than_the_streams(rig):
    one = rig(envs=7, batch_size=5)
    Client(one, 0, first_env=0, width=3).go()
    Client(one, 1, first_env=10, width=4).go()
    seen = list(islice(one.rollouts(), 12))
    check(seen)
    assert all(len(r.env_id) == 5 for r in seen)
    assert {env for r in seen for env in r.env_id.tolist()} == {0, 1, 2, 10, 11, 12, 13}


def test_without_a_free_batch_nobody_is_answered_until_there_is_one(rig):
    one = rig()
    clients = [Client(one, n).go() for n in range(2)]
    source = one.rollouts()
    seen = [next(source)]
    count = still(lambda: sum(c.answered for c in clients))
    # 3 batches, in each stream two rollouts that wait for one, less the one row that is due.
    assert count <= 2 * UNROLL * (3 + 2)
    seen.append(next(source))
    until(lambda: sum(c.answered for c in clients) > count, "they go on")
    seen += islice(source, 10)
    check(seen)
    assert max(int(x) for r in seen for x in r.policy_version.flatten()) > 5


# Lockstep.


def lockstep(rig: Callable[..., Rig], hosts: int = 2) -> tuple[Rig, list[Client]]:
    one = rig(envs=2 * hosts, batch_size=2 * hosts, batches=1, lockstep=True, batch_min=1)
    return one, [Client(one, n).go() for n in reversed(range(hosts))][::-1]


def test_in_lockstep_all_act_together_and_wait_for_the_weights(rig):
    one, _ = lockstep(rig)
    version = [0]
    source = one.rollouts(version)
    for step in range(5):
        r = next(source)
        assert (r.policy_version == step).all()
        assert r.env_id.tolist() == [0, 1, 2, 3]
        count = still(lambda: len(one.batches))
        assert count == (step + 1) * (UNROLL + 1), "one row more than there are actions: the last one's value"
        check([r]) if step == 0 else None
    assert all([env for env, _ in batch] == [0, 1, 2, 3] for batch in one.batches)


def test_in_lockstep_who_is_gone_is_waited_for(rig):
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
def test_in_lockstep_who_comes_back_makes_the_one_rollout_that_it_owes(rig, whole, twice):
    """`whole`: it dies when its rollout of this round was done."""
    one, clients = lockstep(rig, 3)
    source = one.rollouts()
    seen = [next(source) for _ in range(4)]
    still(lambda: len(one.batches))
    learner = threading.Thread(target=lambda: seen.extend(islice(source, 6)))
    if not whole:
        clients[1].going = False  # after one answer more
        learner.start()
        still(lambda: len(one.batches))
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


# What is refused, and what goes wrong.


@pytest.mark.parametrize("name", ["reward", "obs/"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(rig, name, bad):
    one = rig()
    one.central.publish(0)
    client, other = Client(one, 0), Client(one, 1)
    arrays = client.arrays()
    arrays[name] = np.full_like(arrays[name], bad)
    with pytest.raises(Refused, match=f"{name} is not finite"):
        client.seat.ask(arrays, lambda *_: None)
    client.leave()
    assert other.turn()


def test_more_envs_than_max_envs_are_refused(rig):
    one = rig(max_envs=5)
    client = Client(one, 0, width=4)
    with pytest.raises(Refused, match=r"2 envs beside 4: central\.max_envs is 5"):
        Client(one, 1)
    assert one.central.envs == 4
    client.again()
    assert one.central.envs == 4
    with pytest.raises(Refused, match=r"central\.max_envs"):
        Client(one, 1, width=0)


def test_stacks_of_frames_are_put_together_again(rig):
    one = rig(spec=IMAGE, newest=True, envs=1, batch_size=1)
    layout = timestep_layout(IMAGE, 1, True)
    source, newest = one.rollouts(), Newest(layout)
    seat = one.central.sit(0, 0, 0, 1)
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 200, (36, 36), np.uint8) for _ in range(30)]
    shown: list[np.ndarray] = []

    def ask(*_: object) -> None:
        t = len(shown)
        first = t % 7 == 0
        stack = np.stack([frames[t]] * 2 if first else [shown[-1][1], frames[t]])
        stack[:, 0, :3] = 0  # env, episode and step, for the policy's record
        shown.append(stack)
        seen = {
            "obs/": stack[None],
            **{k: np.zeros(1, bool) for k in ("terminated", "truncated")},
            "is_first": np.array([first]),
            "reward": np.zeros(1, np.float32),
            **{k: np.full(1, np.nan) for k in ("episode_return", "episode_length")},
        }
        sent = newest.split(seen)
        if t < 20:
            seat.ask(layout.unpack(layout.pack(sent)), ask)

    ask()
    for k in range(4):
        r = next(source)
        assert np.array_equal(r.obs[:, 0].numpy(), np.stack(shown[k * UNROLL : (k + 1) * UNROLL + 1]))
    until(lambda: len(shown) == 21, "all are shown")
    again = one.central.sit(0, 0, 0, 1)  # on a new stream whole stacks are due
    sent = {"obs/": np.stack([[shown[-1][1], frames[-1]]]), "is_first": np.array([False])}
    small = {k: np.zeros(1, bool) for k in ("terminated", "truncated")}
    floats = {k: np.zeros(1, np.float32) for k in ("reward", "episode_return", "episode_length")}
    with pytest.raises(Refused, match="must have whole stacks"):
        again.ask(newest.split({**sent, **small, **floats}), ask)


@pytest.mark.parametrize("where", ["inference", "prefetch"])
def test_an_error_in_a_thread_is_the_learners(rig, where):
    one = rig()
    one.error = ValueError("odd by design")
    source = one.rollouts()
    if where == "prefetch":
        error, one.error = one.error, None
        one.central.finished.put((None, None))
        with pytest.raises((TypeError, AttributeError)):
            next(source)
        one.error = error
        return
    Client(one, 0).ask()
    with pytest.raises(ValueError, match="odd by design"):
        next(source)


def test_without_hosts_there_is_an_end_with_a_reason(rig):
    one = rig(timeout=0.3)
    Client(one, 0)
    with pytest.raises(CoterieError, match=r"no batch of rollouts for 0\.3 s: 1 streams of 2 envs are connected"):
        next(one.rollouts())


def test_a_run_that_is_over_does_not_wait_for_hosts_that_do_not_come(rig):
    one = rig()
    source = one.rollouts()
    one.central.is_over = lambda: True
    clients = [Client(one, n).go() for n in range(2)]
    next(source)  # what there is comes first
    for client in clients:
        client.going = False
    assert len(list(source)) <= 4


@pytest.mark.parametrize("when", ["idle", "full", "acting"])
def test_close_ends_both_threads(rig, when):
    one = rig()
    if when != "idle":
        clients = [Client(one, n).go() for n in range(2)]
        one.central.publish(0)
        if when == "full":
            still(lambda: sum(c.answered for c in clients))
    begin = time.monotonic()
    one.central.close()
    assert time.monotonic() - begin < WAIT_S / 2
    assert not any(thread.is_alive() for thread in one.central._threads)
    one.central.close()

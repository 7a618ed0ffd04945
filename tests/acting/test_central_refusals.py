"""Central acting in this process: what is refused, what goes wrong, and the end."""

from __future__ import annotations

import queue
import time

import numpy as np
import pytest

from coterie.errors import CoterieError
from coterie.remote.admission import FIRST_REMOTE_ID
from coterie.wire.codec import Newest, Refused, timestep_layout
from tests.acting.central_harness import QUIET_S, UNROLL, WAIT_S, Client, still
from tests.conftest import IMAGE
from tests.support.central import time_step
from tests.support.waiting import wait_until

# What is refused, and what goes wrong.


@pytest.mark.parametrize(
    ("name", "bad", "says"),
    [(name, bad, f"{name} is not finite") for name in ("reward", "obs/") for bad in (np.nan, np.inf, -np.inf)]
    + [("reward", 3e38, "^reward is beyond 1e")],
)
def test_numbers_that_no_learner_can_use_are_refused(rig, name, bad, says):
    one = rig()
    one.central.publish(0)
    client, other = Client(one, 0), Client(one, 1)
    arrays = client.arrays()
    arrays[name] = np.full_like(arrays[name], bad)
    with pytest.raises(Refused, match=says):
        client.stream.ask(arrays, lambda *_: None)
    client.leave()
    assert other.turn()


def test_rows_out_of_an_episodes_order_are_refused(rig):
    """A client that resets an env in the step in which its episode ended."""
    one = rig()
    one.central.publish(0)
    client = Client(one, 0)
    ended, begun = client.arrays(), client.arrays()
    ended["terminated"][:], begun["is_first"][:], begun["reward"][:] = True, True, 1.0
    client.stream.ask(ended, lambda *_: None)
    reset_at_once = {**ended, "is_first": begun["is_first"]}
    for arrays, says in (
        (client.arrays(), "after an episode's end has no is_first"),
        (begun, "has a reward or an end"),
        (reset_at_once, "has a reward or an end"),
    ):
        with pytest.raises(Refused, match=says):
            client.stream.ask(arrays, lambda *_: None)
    client.leave()
    again = Client(one, 0)
    again.stream.ask(begun, lambda *_: None)  # the row in flight when the stream was lost: a first row, whatever it has
    again.leave()


def test_more_envs_than_max_envs_are_refused(rig):
    one = rig(max_envs=5)
    client = Client(one, 0, width=4)
    with pytest.raises(Refused, match=r"cannot add 2 envs to 4: the limit is 5 \(central\.max_envs"):
        Client(one, 1)
    assert one.central.envs == 4
    client.again()
    assert one.central.envs == 4
    with pytest.raises(Refused, match=r"central\.max_envs"):
        Client(one, 1, width=0)


def test_remote_hosts_leave_room_for_the_runs_own(rig):
    one = rig(max_envs=6)  # 4 of them are the run's
    remote = Client(one, FIRST_REMOTE_ID, width=2)
    with pytest.raises(Refused, match=r"4 of them reserved"):
        Client(one, FIRST_REMOTE_ID + 1, width=1)
    own = Client(one, 0, width=4)
    own.leave()
    wait_until(lambda: one.central.envs == 2, what="the stream was left")
    remote.again()
    Client(one, 0, width=4)
    assert one.central.envs == 6


def test_a_remote_host_that_hangs_may_not_hold_the_others_up_until_the_learner_gives_up(rig):
    assert rig(timeout=90.0, max_lag=8).central.patience == 30
    assert rig(timeout=90.0).central.patience == 0, "nothing waits for it"


def test_clients_that_fill_rollouts_and_leave_do_not_pile_them_up(rig):
    """No learner takes them: the rollouts of streams that have ended wait, and at some point no other is begun."""
    one = rig(batch_size=4)  # max_envs is larger: what counts is who is there
    one.central.publish(0)
    most = 2 * 4 + one.central.batches * 4
    for life in range(most):
        client = Client(one, 0, first_env=0, width=4, life=life)
        for _ in range(UNROLL + 1):
            client.ask()
            try:
                client.answers.get(timeout=WAIT_S if one.central.columns < most else QUIET_S)
            except queue.Empty:
                break
        client.leave()
    assert most <= one.central.columns <= most + 4


def test_stacks_of_frames_are_rebuilt_from_the_newest_frames(rig):
    one = rig(spec=IMAGE, newest_frame=True, envs=1)
    layout = timestep_layout(IMAGE, 1, True)
    source, newest = one.rollouts(), Newest(layout)
    stream = one.central.open_stream(0, 0, 0, 1)
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 200, (36, 36), np.uint8) for _ in range(30)]
    shown: list[np.ndarray] = []

    def ask(*_: object) -> None:
        t = len(shown)
        first = t % 7 == 0
        stack = np.stack([frames[t]] * 2 if first else [shown[-1][1], frames[t]])
        stack[:, 0, :3] = 0  # env, episode and step, for the policy's record
        shown.append(stack)
        sent = newest.split(time_step(stack[None], is_first=np.array([first])))
        if t < 20:
            stream.ask(layout.unpack(layout.pack(sent)), ask)

    ask()
    for k in range(4):
        r = next(source)
        assert np.array_equal(r.obs[:, 0].numpy(), np.stack(shown[k * UNROLL : (k + 1) * UNROLL + 1]))
    wait_until(lambda: len(shown) == 21, what="all are shown")
    again = one.central.open_stream(0, 0, 0, 1)  # on a new stream whole stacks are due
    sent = newest.split(time_step(np.stack([[shown[-1][1], frames[-1]]])))
    with pytest.raises(Refused, match="must have whole stacks"):
        again.ask(sent, ask)


def test_an_error_in_a_thread_is_the_learners(rig):
    one = rig()
    one.error = ValueError("odd by design")
    source = one.rollouts()
    Client(one, 0).ask()
    with pytest.raises(ValueError, match="odd by design"):
        next(source)


def test_central_acting_without_hosts_ends_with_a_reason(rig):
    one = rig(timeout=0.3)
    Client(one, 0)
    with pytest.raises(CoterieError, match=r"no batch of rollouts for 0\.3 s: 1 streams of 2 envs are connected"):
        next(one.rollouts())


def test_a_learner_whose_hosts_are_still_to_come_does_not_hang(rig):
    one, beats = rig(timeout=0.8), list[int]()
    one.central.setup.board.heartbeat = beats.append
    with pytest.raises(CoterieError, match=r"no batch of rollouts for 0\.8 s: 0 streams of 0 envs are connected"):
        next(one.rollouts())
    assert len(beats) > 1  # the last one is that of the end


def test_a_run_that_is_over_does_not_wait_for_hosts_that_do_not_come(rig):
    one = rig(is_over=lambda: True)
    source = one.rollouts()
    clients = [Client(one, n).go() for n in range(2)]
    next(source)  # what there is comes first
    for client in clients:
        client.going = False
    assert len(list(source)) <= 4


@pytest.mark.parametrize("when", ["idle", "full", "acting"])
def test_closing_central_acting_ends_both_threads(rig, when):
    one = rig()
    if when != "idle":
        clients = [Client(one, n).go() for n in range(2)]
        one.central.publish(0)
        if when == "full":
            still(lambda: sum(c.answered for c in clients), 2 * UNROLL * (3 + 2))
    begin = time.monotonic()
    one.close()
    assert time.monotonic() - begin < WAIT_S / 2
    one.central.close()  # again

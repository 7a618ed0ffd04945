"""Runs that gossip with each other, over a wire or without: admission, loss and return of a connection, refusals."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from coterie.errors import ConfigError, CoterieError
from coterie.exchange.mailboxes import Mailboxes, Net, Relay
from coterie.remote.gossip_link import GossipHub
from coterie.wire.codec import Refused
from tests.conftest import make_config
from tests.exchange.gossip_harness import SIZE, linked, step
from tests.remote.gossip_runs import DIGEST, LAYOUT, METHOD, agree, frame, hello, train_until
from tests.support.net import free_port
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until
from tests.support.wire import TOKEN, Raw, channel_to, data_frame


def test_gossiping_runs_join_and_leave(address, hubs, gossip_clients):
    hub = hubs(address)
    hub.learner.params.data[:4] = hub.learner.params.data.new_tensor([3.0, 1, 4, 1])
    train_until(lambda: hub.learner.mixed[0] > 5, "the hub trains alone", hub.learner)
    one = gossip_clients(address)
    assert one.joins
    assert one.learner.params.data[:4].tolist() == [3, 1, 4, 1]  # it starts with the hub's weights
    agree(hub.learner, one.learner)
    other = gossip_clients(address)
    agree(hub.learner, one.learner, other.learner)
    assert hub.present == [0, 1, 2]
    assert hub.hub.gauges(1)["gossip/peers"] == one.client.gauges(1)["gossip/peers"] == 2
    one.learner.__exit__(None, None, None)
    one.client.close()
    train_until(lambda: hub.present == [0, 2], "one has left")
    train_until(lambda: other.client.gauges(1)["gossip/peers"] == 1, "the other has one peer less")
    agree(hub.learner, other.learner)
    third = gossip_clients(address)
    agree(hub.learner, other.learner, third.learner)
    assert hub.present == [0, 1, 2]
    assert hub.hub.gauges(10)["gossip/bytes_in_per_step"] > 4 * SIZE
    assert third.client.gauges(10)["gossip/bytes_out_per_step"] > 0.4 * SIZE
    assert third.learner.gauges()["gossip/remote_messages"] > 0


def test_a_new_run_waits_for_the_weights_of_a_hub_that_starts(address, hubs, gossip_clients):
    """It comes before the hub's learners, as on Ray. Its own weights, which are random, must not be averaged in."""
    hub = hubs(address, begun=False)
    with ThreadPoolExecutor() as pool:
        one = pool.submit(gossip_clients, address)
        wait_until(lambda: hub.hub.clients, 10, "it has connected")
        hub.learner.params.data[:4] = hub.learner.params.data.new_tensor([3.0, 1, 4, 1])
        hub.learner.__enter__()
        assert one.result(20).joins
    assert one.result().learner.params.data[:4].tolist() == [3, 1, 4, 1]


def test_two_learners_of_one_run_gossip_with_the_hub_before_and_after_it_restarts(address, hubs, gossip_clients):
    hub, two = hubs(address), gossip_clients(address, learners=2)
    two.learner.tau = two.learners[1].tau = -1
    for _ in range(2):
        agree(hub.learner, *two.learners)
        assert hub.present == [0, 1, 2]
        hub.close(over=False)
        train_until(lambda: f"no learner at {address}" in two.said(), "the hub is missed", *two.learners)
        assert two.client.gauges(1)["gossip/peers"] == 0
        two.log.clear()
        hub = hubs(address)
        train_until(
            lambda: f"gossip: a learner at {address} after" in two.said(),
            "the hub is found",
            hub.learner,
            *two.learners,
        )
    agree(hub.learner, *two.learners)


def test_the_end_of_the_run_that_listens_is_not_the_others(address, hubs, gossip_clients):
    hub, one = hubs(address), gossip_clients(address)
    agree(hub.learner, one.learner)
    hub.close()
    train_until(lambda: "is over (the run has ended): this run continues without it" in one.said(), "it is reported")
    train_until(lambda at=int(one.learner.mixed[0]): one.learner.mixed[0] > at + 20, "it goes on", one.learner)
    assert one.client.gauges(1)["gossip/peers"] == 0


def test_a_run_trains_on_without_its_link_and_gossips_again_after(tmp_path, hubs, gossip_clients):
    (token := tmp_path / "token").write_text(TOKEN)
    token.chmod(0o600)
    with Proxy(free_port()) as proxy:
        hub = hubs(f"127.0.0.1:{proxy.target}", **{"wire.token_file": str(token)})
        one = gossip_clients(f"127.0.0.1:{proxy.port}", **{"wire.token_file": str(token)})
        assert one.learner.params.data[:4].tolist() == [1, 0, 0, 0]  # the hub's
        agree(hub.learner, one.learner)
        train_until(lambda: proxy.cut() > 0, "there is a connection", hub.learner, one.learner)
        train_until(lambda: "gossip: a learner at" in one.said(), "it reconnects", hub.learner, one.learner)
        agree(hub.learner, one.learner)
        proxy.frozen.set()
        for run in (hub, one):
            before = run.learner.updates
            train_until(lambda run=run, before=before: run.learner.updates > before + 50, "no wait", run.learner)
        proxy.frozen.clear()
        agree(hub.learner, one.learner)


def test_a_run_that_reconnects_before_its_end_was_noticed_replaces_its_old_stream(address, hubs):
    hub = hubs(address)
    with channel_to(address) as channel:
        first = Raw(channel, hello(run_id=7), data_frame(0, frame()), method=METHOD)
        first.next(), first.next()
        assert hub.present == [0, 1]
        again = Raw(channel, hello(run_id=7), method=METHOD)
        again.next()
        assert hub.present == [0]  # until its learner reports itself
        other = Raw(channel, hello(run_id=8), data_frame(0, frame()), method=METHOD)
        other.next(), other.next()
        assert hub.present == [0, 2]
        first.out.put(data_frame(1, frame()))
        again.out.put(data_frame(0, frame()))
        again.next()
        first.out.put(None)
        time.sleep(0.2)
        assert hub.present == [0, 1, 2]  # the end of the old stream is not that of the run
        for stream in (again, other):
            stream.out.put(None)
        wait_until(lambda: not hub.hub.clients, 20.0, "both have left")
        assert hub.hub.mailboxes.lock.is_whole(1)
        newcomer = Raw(channel, hello(run_id=9), method=METHOD)
        newcomer.next()
        assert not hub.hub.mailboxes.lock.is_whole(1)  # it never gets the message of the learner before it
        newcomer.end()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env.id": "Acrobot-v1"}, "the run's envs are CartPole-v1, not 'Acrobot-v1'"),
        ({"digest": "another"}, "gossip.connect: the runs have different networks: use the same model"),
        ({"learners": 300}, "no room for 300 more learners: all runs together have at most 256"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_reason(address, hubs, gossip_clients, changes, reason):
    hub, before = hubs(address), threading.active_count()
    with pytest.raises(CoterieError, match=reason):
        gossip_clients(address, **changes)
    wait_until(lambda: not hub.hub.clients and threading.active_count() <= before, 20.0, "nothing is left of it")


def test_a_client_needs_the_token(tmp_path, address, hubs, gossip_clients):
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name} and long enough")
        (tmp_path / name).chmod(0o600)
    hub = hubs(address, **{"wire.token_file": str(tmp_path / "right")})
    wrong = {"wire.token_file": str(tmp_path / "wrong")}
    for changes, why in ({}, "the run's clients need its token"), (wrong, "not the run's token"):
        with pytest.raises(CoterieError, match=why):
            gossip_clients(address, **changes)
    assert hub.hub.lines() == ["refused unix: the run's clients need its token"]
    agree(hub.learner, gossip_clients(address, **{"wire.token_file": str(tmp_path / "right")}).learner)


def test_a_message_must_fit_the_wire(address):
    config = make_config(**{"exchange": "gossip", "gossip.bind": address, "wire.max_message_mb": 1})
    with pytest.raises(ConfigError, match=r"wire\.max_message_mb: a message has 2 MB, not 1"):
        GossipHub(config, 1, Net(DIGEST, 1 << 19, 1))


class Pair:
    """A run with two learners and a run with one, and a connection between them."""

    def __init__(self) -> None:
        self.memory, [self.x, self.y] = linked(2, np.eye(2, 4))
        self.far_memory, [self.z] = linked(1, np.eye(3, 4)[2:])
        self.near, self.far = Mailboxes(self.memory, 2), Mailboxes(self.far_memory, 1)
        self.ends = Relay(self.near, range(2), [2]), Relay(self.far, range(1), [1, 2])

    def carry(self, count: int = 1) -> list[int]:
        """Frames in both directions; the ids of the learners whose weights went from the first run to the second."""
        went = []
        for _ in range(count):
            frame = self.ends[0].send()
            went.append(int(frame["learner"][0]))
            self.ends[1].receive(LAYOUT.unpack(LAYOUT.pack(frame)))
            self.ends[0].receive(LAYOUT.unpack(LAYOUT.pack(self.ends[1].send())))
        return went


def test_only_the_newest_weights_of_each_learner_are_sent_in_turn():
    pair = Pair()
    assert pair.carry() == [-1]
    for k in range(1, 6):
        pair.x.params.data[3] = float(k)
        step(pair.x)
    assert pair.carry(2) == [0, -1]
    assert pair.far.read(1).weights[3] == 5.0
    for one in (pair.x, pair.y):
        step(one)
    step(pair.x)
    assert pair.carry(3) == [1, 0, -1]


def test_a_message_is_averaged_once_and_no_learner_waits_for_it():
    pair = Pair()
    step(pair.x)
    pair.carry()
    step(pair.z)
    assert pair.z.params.data[:3].tolist() == [0.5, 0, 0.5]
    step(pair.z)  # the same message again is no news
    assert pair.z.params.data[:3].tolist() == [0.5, 0, 0.5]
    assert pair.z.gauges()["gossip/remote_messages"] == 1
    for _ in range(50):
        step(pair.z)  # nothing comes: its time-out of 0 s would be the first wait
    assert pair.z.updates == 52


def test_moments_and_weights_of_several_runs_are_averaged_alike():
    pair = Pair()
    pair.x.params.data[:4], pair.y.params.data[:4] = pair.x.params.data.new_tensor([[3.0, 0, 0, 0], [0, 3, 0, 0]])
    pair.x.mixed[:] = pair.y.mixed[:] = 0
    for one in (pair.x, pair.y):
        one.mailboxes.write(one.rank, one.params.data.numpy(), np.zeros(1))
    pair.carry(2)
    pair.z.params.data[:4] = pair.z.params.data.new_tensor([0.0, 0, 3, 0])
    step(pair.z)
    np.testing.assert_allclose(pair.z.params.data[:4], [1, 1, 1, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "at", "value", "reason"),
    [
        ("weights", (0, 0), np.nan, "the other run sent weights that are not finite"),
        ("weights", (0, 0), -1e20, "the other run sent weights that are not finite"),
        ("moments", (0, 0), np.inf, "the other run sent moments that are not finite"),
        ("present", 2, True, "the other run sent a learner beyond its 2 learners"),
        ("learner", 0, 2, "the other run sent a learner beyond its 2 learners"),
        ("learner", 0, -1, "the other run sent a learner beyond its 2 learners"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_and_changes_nothing(name, at, value, reason):
    pair = Pair()
    step(pair.x)
    frame = pair.ends[0].send()
    bad = {k: v.copy() for k, v in frame.items()}
    bad[name][at] = value
    before = {k: v.copy() for k, v in pair.far_memory.arrays.items()}
    with pytest.raises(Refused, match=reason):
        pair.ends[1].receive(bad)
    for key, array in before.items():
        np.testing.assert_array_equal(pair.far_memory.arrays[key], array, key)
    pair.ends[1].receive(frame)
    assert pair.far.lock.is_whole(1)


def test_sums_of_squares_may_be_large():
    """Those of two million observations near 30,000 are."""
    pair = Pair()
    step(pair.x)
    frame = pair.ends[0].send()
    frame["moments"][:] = 1.8e15
    assert pair.ends[1].receive(frame)
    assert pair.far.read(1).moments.tolist() == [1.8e15]


def test_a_restarted_learner_takes_the_newest_weights_of_a_remote_one_where_it_is_alone():
    pair = Pair()
    step(pair.x)
    pair.carry()
    pair.z.__exit__(None, None, None)
    pair.z.rejoin = True
    with pair.z as back:
        assert back.params.data[:3].tolist() == [1, 0, 0]
        assert pair.far.present[0] == 1

"""Runs that gossip with each other: admission, loss and return of a connection, refusals."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from grpc import StatusCode

from coterie.exchange.mailboxes import message_layout
from coterie.remote.gossip import GossipHub
from coterie.types import ConfigError, CoterieError
from coterie.wire.codec import Layout, Tensor
from tests.conftest import make_config
from tests.exchange.gossip_harness import SIZE, linked
from tests.remote.gossip_runs import DIGEST, METHOD, agree, frame, hello, train_until
from tests.support.net import free_port
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until
from tests.support.wire import Raw, channel_to, data_frame


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


def test_a_client_keeps_its_weights_where_none_were_published(address, hubs, gossip_clients):
    hub = hubs(address)
    one = gossip_clients(address)
    assert not one.joins
    assert one.learner.params.data[:4].tolist() == [0, 1, 0, 0]
    agree(hub.learner, one.learner)


def test_two_learners_of_one_run_gossip_with_the_hub_before_and_after_it_restarts(address, hubs, gossip_clients):
    hub, two = hubs(address), gossip_clients(address, learners=2)
    two.learner.tau = two.learners[1].tau = -1
    for _ in range(2):
        agree(hub.learner, *two.learners)
        assert hub.present == [0, 1, 2]
        hub.close(over=False)
        train_until(lambda: "is away" in two.said(), "the hub is missed", *two.learners)
        assert two.client.gauges(1)["gossip/peers"] == 0
        two.log.clear()
        hub = hubs(address)
        train_until(lambda: f"back at {address}" in two.said(), "the hub is found", hub.learner, *two.learners)
    agree(hub.learner, *two.learners)


def test_the_end_of_the_run_that_listens_is_not_the_others(address, hubs, gossip_clients):
    hub, one = hubs(address), gossip_clients(address)
    agree(hub.learner, one.learner)
    hub.close()
    train_until(lambda: "is over (the run has ended): this one goes on without it" in one.said(), "it is reported")
    before = int(one.learner.mixed[0])
    train_until(lambda: one.learner.mixed[0] > before + 20, "it goes on", one.learner)
    assert one.client.gauges(1)["gossip/peers"] == 0


@pytest.mark.parametrize("how", ["cut", "frozen"])
def test_a_run_trains_on_without_its_link_and_gossips_again_after(how, hubs, gossip_clients):
    with Proxy(0) as proxy:
        proxy.target = free_port()
        hub = hubs(f"127.0.0.1:{proxy.target}")
        one = gossip_clients(f"127.0.0.1:{proxy.port}")
        agree(hub.learner, one.learner)
        if how == "cut":
            train_until(lambda: proxy.cut() > 0, "there is a connection", hub.learner, one.learner)
            train_until(lambda: "back at" in one.said(), "it reconnects", hub.learner, one.learner)
        else:
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


def test_a_newcomer_never_gets_the_message_of_the_learner_before_it(address, hubs, gossip_clients):
    hub, one = hubs(address), gossip_clients(address)
    agree(hub.learner, one.learner)
    one.client.close()
    wait_until(lambda: not hub.hub.clients, 20.0, "it has left")
    assert hub.hub.mailboxes.has_message(1)
    with channel_to(address) as channel:
        stream = Raw(channel, hello(run_id=9), method=METHOD)
        stream.next()
        assert not hub.hub.mailboxes.has_message(1)
        stream.end()


# --- refusals ---


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
    for changes in ({}, {"wire.token_file": str(tmp_path / "wrong")}):
        with pytest.raises(CoterieError, match="not the run's token"):
            gossip_clients(address, **changes)
    assert hub.hub.lines() == ["refused unix: not the run's token"]
    agree(hub.learner, gossip_clients(address, **{"wire.token_file": str(tmp_path / "right")}).learner)


def test_a_message_must_fit_the_wire(address):
    config = make_config(**{"exchange": "gossip", "gossip.bind": address, "wire.max_message_mb": 1})
    memory, _ = linked(1, np.eye(1, 4))
    memory.arrays["mailbox/weights"] = np.zeros((257, 1 << 19), np.float32)
    with pytest.raises(ConfigError, match=r"wire\.max_message_mb: a message has 2 MB, not 1"):
        GossipHub(config, memory, 1, DIGEST)


NUMBERED = Layout([Tensor("state", "int64", (3, 4))]).message()  # of an older version


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([hello(), data_frame(0, frame(1))], "it sends more than its 1 learners"),
        ([hello(), data_frame(0, frame()[:-1])], "a frame of"),
        ([hello(sends=NUMBERED)], "the run's frames hold present"),
        ([hello(sends=message_layout(9, 1).message())], "the run's frames hold present"),
    ],
)  # fmt: skip
def test_a_frame_that_no_run_sends_ends_its_stream_and_the_others_go_on(address, hubs, gossip_clients, frames, reason):
    hub = hubs(address)
    with channel_to(address) as channel:
        status, said = Raw(channel, *frames, method=METHOD).end()
    assert (status, reason in said) == (StatusCode.INVALID_ARGUMENT, True), (status, said)
    wait_until(lambda: hub.present == [0], 20.0, "it is out")
    assert [line.startswith("refused unix: ") for line in hub.hub.lines()] == [True]
    agree(hub.learner, gossip_clients(address).learner)

"""Runs that meet to gossip: who is let in, who leaves, who comes back, and what of it the others notice."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

import coterie.remote.gossip_client
from coterie.remote.gossip_client import Link
from coterie.remote.gossip_hub import HEARS
from coterie.remote.gossip_mirror import news_layout
from coterie.types import CoterieError
from coterie.wire.client import RunEnded
from coterie.wire.codec import Layout
from tests.exchange.gossip_harness import SIZE
from tests.remote.link_house import METHOD, SEATS, Guest, agree, hello, news, until
from tests.support.proxy import Proxy
from tests.support.wire import Raw, channel_to, data_frame


def test_runs_come_and_go(address, hubs, guests):
    hub = hubs(address)
    until(lambda: hub.learner.mixed[0] > 5, "the first trains alone", hub.learner)
    hub.learner.params.data[:4] = hub.learner.params.data.new_tensor([3.0, 1, 4, 1])
    until(lambda: hub.memory.arrays["message"][0, 0] == 3, "it says so", hub.learner)
    one = guests(address)
    assert one.joins
    assert one.learner.params.data[:4].tolist() == [3, 1, 4, 1]  # it begins with the other's weights
    agree(hub.learner, one.learner)
    other = guests(address)
    agree(hub.learner, one.learner, other.learner)
    assert (one.link.seat, other.link.seat, hub.here) == (1, 2, [1, 1, 1])
    assert hub.meeting.gauges(1)["gossip/peers"] == 2
    assert one.link.gauges(1)["gossip/peers"] == 2
    one.learner.__exit__(None, None, None)
    one.link.close()
    until(lambda: hub.here == [1, 0, 1], "it has left")
    until(lambda: other.memory.arrays["here"].tolist() == [1, 0, 1], "the others are told")
    agree(hub.learner, other.learner)
    third = guests(address)
    assert third.link.seat == 1
    agree(hub.learner, other.learner, third.learner)
    assert hub.meeting.gauges(10)["gossip/bytes_in_per_step"] > 4 * SIZE
    assert third.link.gauges(10)["gossip/bytes_out_per_step"] > 0.4 * SIZE


def test_before_anybody_has_said_anything_everybody_keeps_its_weights(address, hubs, guests):
    hub = hubs(address)
    one = guests(address)
    assert not one.joins
    assert one.learner.params.data[:4].tolist() == [0, 1, 0, 0]
    agree(hub.learner, one.learner)


def test_there_is_room_for_so_many(address, hubs, guests):
    hubs(address)
    guests(address)
    with pytest.raises(CoterieError, match=r"no room for 2 more learners: gossip\.seats 3"):
        guests(address, learners=2)
    guests(address)


def test_the_end_of_the_run_that_listens_is_not_the_others(address, hubs, guests):
    hub, one = hubs(address), guests(address)
    agree(hub.learner, one.learner)
    hub.meeting.close(True)
    until(lambda: "is over (the run has ended): this one goes on without it" in one.said(), "it is told")
    before = int(one.learner.mixed[one.learner.seat])
    until(lambda: one.learner.mixed[one.learner.seat] > before + 20, "it goes on", one.learner)
    assert one.link.gauges(1)["gossip/peers"] == 0


def test_a_run_that_is_started_again_finds_the_others(address, hubs, guests):
    """Its numbers begin anew."""
    hub, one = hubs(address), guests(address)
    for _ in range(2):
        agree(hub.learner, one.learner)
        until(lambda: one.learner.mixed[1] > 50, "there are numbers", hub.learner, one.learner)
        hub.meeting.close(False)
        until(lambda: "is away" in one.said(), "it is missed", one.learner)
        one.link.lines.clear()
        hub = hubs(address)
        until(lambda: f"back at {address}" in one.said(), "it is found", hub.learner, one.learner)
        one.link.lines.clear()
    agree(hub.learner, one.learner)


@pytest.mark.parametrize("how", ["cut", "frozen"])
def test_a_link_that_breaks_is_mended(how, hubs, guests):
    with Proxy(0) as proxy:
        hub = None
        for port in range(43_000, 43_100):
            try:
                hub = hubs(f"127.0.0.1:{port}")
                break
            except CoterieError:
                continue
        assert hub is not None
        proxy.target = port
        one = guests(f"127.0.0.1:{proxy.port}")
        agree(hub.learner, one.learner)
        if how == "cut":
            for _ in range(3):
                until(lambda: proxy.cut() > 0, "there is a connection", hub.learner, one.learner)
            until(lambda: "back at" in one.said(), "it comes back", hub.learner, one.learner)
        else:
            proxy.frozen.set()
            before = [int(x.made) for x in (hub.learner, one.learner)]
            until(
                lambda: hub.learner.made > before[0] + 50 and one.learner.made > before[1] + 50, "nobody waits",
                hub.learner, one.learner,
            )  # fmt: skip
            proxy.frozen.clear()
        agree(hub.learner, one.learner)


def test_a_break_between_its_two_streams_is_no_end(address, hubs, guests, monkeypatch):
    hub, opened = hubs(address), []
    stream = Link._stream

    def breaks_once(link: Link, hello: dict[str, Any], sends: Layout) -> Any:
        opened.append(hello["group"])
        if hello["group"] == HEARS and opened.count(HEARS) == 1:
            raise CoterieError("the server refused: the stream of group 0 comes first (invalid_argument)")
        return stream(link, hello, sends)

    monkeypatch.setattr(Link, "_stream", breaks_once)
    one = guests(address)
    assert opened.count(HEARS) == 2
    agree(hub.learner, one.learner)
    assert len(hub.meeting.guests) == 1


def test_who_cannot_come_in_leaves_nothing_behind(address, hubs, monkeypatch):
    hub, before = hubs(address), threading.active_count()
    monkeypatch.setattr(
        coterie.remote.gossip_client, "_read", lambda text: (_ for _ in ()).throw(CoterieError("no meeting"))
    )
    with pytest.raises(CoterieError, match="no meeting"):
        Guest(address)
    monkeypatch.undo()
    wrong = hub.meeting.layout
    hub.meeting.layout = news_layout(SEATS, SIZE, 2)
    with pytest.raises(CoterieError):
        Guest(address)
    hub.meeting.layout = wrong
    until(lambda: not hub.meeting.guests and threading.active_count() <= before, "it is gone")


def test_a_run_that_has_ended_is_none_to_join(address, hubs, monkeypatch):
    hubs(address)

    def over(link: Link) -> None:
        raise RunEnded("the run has ended")

    monkeypatch.setattr(Link, "_visit", over)
    with pytest.raises(CoterieError, match=r"gossip\.connect: the run at .* is over: the run has ended"):
        Guest(address)


def test_two_learners_of_one_run(address, hubs, guests):
    """Their run comes back to one that has begun anew."""
    hub, two = hubs(address), guests(address, learners=2)
    agree(hub.learner, *two.learners)
    until(lambda: two.learner.mixed[1] > 100, "there are numbers", hub.learner, *two.learners)
    hub.meeting.close(False)
    until(lambda: "is away" in two.said(), "it is missed", *two.learners)
    hub = hubs(address)
    until(lambda: f"back at {address}" in two.said(), "it is found", hub.learner, *two.learners)
    agree(hub.learner, *two.learners)
    assert "ended the gossip" not in two.said()


def test_what_was_said_at_a_seat_before_is_not_taken_for_the_newcomers(address, hubs, guests):
    hub, one = hubs(address), guests(address)
    agree(hub.learner, one.learner)
    one.link.close()
    until(lambda: not hub.meeting.guests, "it has left")
    assert hub.memory.arrays["begun"][1] > 0
    with channel_to(address) as channel:
        stream = Raw(channel, hello(run_id=9), method=METHOD)
        stream.next()
        assert hub.memory.arrays["begun"][1] == 0
        stream.out.put(None)
        with suppress(StopIteration):
            stream.next()


def test_a_run_that_comes_again_takes_its_own_seat(address, hubs):
    """The end of its first stream was not noticed."""
    hub = hubs(address)
    with channel_to(address) as channel:
        first = Raw(channel, hello(run_id=7), data_frame(0, news(1)), method=METHOD)
        assert first.next().welcome.first_env_id == 1
        first.next()
        assert hub.here == [1, 1, 0]
        again = Raw(channel, hello(run_id=7), method=METHOD)
        assert again.next().welcome.first_env_id == 1
        assert hub.here == [1, 0, 0]  # until it says that it is there
        other = Raw(channel, hello(run_id=8), method=METHOD)
        assert other.next().welcome.first_env_id == 2
        first.out.put(data_frame(1, news(1, 2)))
        again.out.put(data_frame(0, news(1, 1)))
        again.next()
        assert hub.here == [1, 1, 0]
        first.out.put(None)
        time.sleep(0.2)
        assert hub.here == [1, 1, 0]  # the end of the old stream is not that of the run
        for stream in (again, other):
            stream.out.put(None)
    until(lambda: not hub.meeting.guests, "both have left")

"""Runs that come to gossip and are not let in, or are put out: the reason, and that the others go on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from grpc import StatusCode

from coterie.exchange.base import Circle
from coterie.exchange.topology import matrices
from coterie.remote.gossip_client import _read
from coterie.remote.gossip_hub import HEARS, Meeting
from coterie.types import ConfigError, CoterieError
from tests.conftest import make_config
from tests.exchange.gossip_harness import SIZE, machine
from tests.remote.link_house import METHOD, NET, SEATS, Hub, agree, hello, news, until
from tests.support.wire import Raw, channel_to, data_frame


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env.id": "Acrobot-v1"}, "the run's envs are CartPole-v1, not Acrobot-v1"),
        ({"net": "another"}, "gossip.connect: the run's network or normalizers are others"),
    ],
)
def test_who_does_not_fit_is_told_why(address, hubs, guests, changes, reason):
    hub = hubs(address)
    with pytest.raises(CoterieError, match=reason):
        guests(address, **changes)
    until(lambda: hub.here == [1, 0, 0], "it is gone")


def test_a_token_is_asked_for(tmp_path, address, hubs, guests):
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name} and long enough")
        (tmp_path / name).chmod(0o600)
    hub = hubs(address, **{"wire.token_file": str(tmp_path / "right")})
    for changes in ({}, {"wire.token_file": str(tmp_path / "wrong")}):
        with pytest.raises(CoterieError, match="not the run's token"):
            guests(address, **changes)
    assert hub.meeting.tell() == ["refused unix: not the run's token"]
    agree(hub.learner, guests(address, **{"wire.token_file": str(tmp_path / "right")}).learner)


def test_elsewhere_needs_tls_and_a_token():
    with pytest.raises(ConfigError, match=r"gossip\.bind: 0\.0\.0\.0:1 is reachable from other machines"):
        Hub("0.0.0.0:1")


def test_messages_larger_than_the_wire_takes_are_refused_at_the_start(address):
    config = make_config(**{"exchange": "gossip", "gossip.bind": address, "wire.max_message_mb": 1})
    circle = Circle(0, matrices("complete", SEATS))
    memory = machine(SEATS, [0], np.eye(SEATS, 4))[0]
    memory.arrays["message"] = np.zeros((SEATS, 1 << 19), np.float32)
    with pytest.raises(ConfigError, match=r"wire\.max_message_mb: a message has 2 MB, not 1"):
        Meeting(config, circle, memory, 1, NET)


def _settings(**changes: object) -> str:
    return json.dumps({"env_id": "", "net": "", "weights": 4, "moments": 1, "seats": 2, **changes})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", _settings(seats=1), _settings(seats=10**6), _settings(weights=0), _settings(moments="x")]
)
def test_settings_that_are_none_are_one_line(text):
    with pytest.raises(CoterieError, match="is no meeting of runs"):
        _read(text)
    assert _read(_settings()).seats == 2


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([hello(), data_frame(0, news(2))], "it speaks for learners that are not its own"),
        ([hello(), data_frame(0, news(1)), data_frame(1, news(1))], "its message has come before"),
        ([hello(), data_frame(0, news(1, message=np.full((1, SIZE), np.nan)))], "its message are not finite"),
        ([hello(), data_frame(0, news(1)[:-1])], "a frame of"),
        ([hello(envs=4)], "no room for 4 more learners"),
        ([hello(envs=2**32 - 1)], "no room for 4294967295 more learners"),
        ([hello(env_id="x")], "the run's envs are CartPole-v1"),
        ([hello(sends=[])], "not of the run's network"),
        ([hello(group=2, sends=[])], "there is no group 2"),
        ([hello(group=HEARS, sends=[])], "the stream of group 0 comes first"),
        ([hello(envs=0, sends=[]), data_frame(0, b"")], "a stream of 0 envs must not send data frames"),
    ],
)
def test_what_no_run_sends_ends_its_stream(address, hubs, guests, frames, reason):
    hub = hubs(address)
    one = guests(address) if "speaks" not in reason and "its " not in reason and "frame" not in reason else None
    with channel_to(address) as channel:
        status, said = Raw(channel, *frames, method=METHOD).end()
    assert (status, reason in said) == (StatusCode.INVALID_ARGUMENT, True), (status, said)
    until(lambda: hub.here == [1, int(one is not None), 0], "it is out")
    assert [line.startswith("refused unix: ") for line in hub.meeting.tell()] == [True]
    agree(hub.learner, (one or guests(address)).learner)

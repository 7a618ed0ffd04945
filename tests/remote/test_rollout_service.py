"""The doors of actors that come by themselves behind a real server: whatever they send, the learner gets only what a
recorder could have written, and the others go on.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from coterie.remote.rollout_service import Guests
from coterie.wire.client import ask_settings
from coterie.wire.codec import Layout, Tensor
from tests.conftest import VECTOR, make_config
from tests.remote.guest_house import ASKS, GIVEN, MOST, PULL, PUSH, SPECS, TOKEN, UNROLL, WIDTH, House, path
from tests.wire.harness import Raw, channel_to, data_frame, is_empty, mutated, until


@pytest.fixture
def open_house(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., House]]:
    """Makes one, which must be as good as new in the end."""
    gc.collect()  # what other tests left in their loops is told of now, and not in the midst of this one
    made: list[House] = []

    def make(kind: str = "vector", core: tuple[int, ...] = ()) -> House:
        made.append(House(f"unix:{tmp_path}/s", SPECS[kind], core))
        made[0].publish(0)
        return made[0]

    yield make
    one = made[0]
    assert one.works()
    assert until(lambda: is_empty(one.server))
    assert not one.guests.arrived
    one.guests.close()
    assert not one.guests._thread.is_alive()
    one.server.close()
    one.slots.close()
    one.weights.close()
    told = [r.getMessage() for r in caplog.get_records("call") if r.levelname != "DEBUG"]
    assert told == [], "asyncio and gRPC log what the server did not catch"


@pytest.fixture(params=[*SPECS, "core"])
def house(request: pytest.FixtureRequest, open_house: Callable[..., House]) -> House:
    return open_house("vector", (2, 4)) if request.param == "core" else open_house(request.param)


# Who is let in.


def test_a_guest_is_served(house: House):
    assert house.works()
    assert not house.server.refused
    assert house.guests.produced == 2 * (UNROLL * WIDTH - 1)  # the fake step is none
    with channel_to(house.server.address) as channel:
        for method in (PUSH, PULL):
            welcome = ask_settings(channel, method, {}, TOKEN)
            assert json.loads(welcome.settings)["envs"] == WIDTH
            assert not welcome.sends


@pytest.mark.parametrize("method", [PUSH, PULL])
@pytest.mark.parametrize("given", [None, f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", TOKEN])
def test_without_the_token(open_house: Callable[..., House], method: str, given: str | None):
    house = open_house()
    metadata = given and (("authorization", given),)
    end = house.ends(house.hello(method), house.question(method), method=method, metadata=metadata)
    assert end == (StatusCode.UNAUTHENTICATED, "no such token")
    assert house.server.refused == {"unix": 1}


@pytest.mark.parametrize("method", [PUSH, PULL])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"env_id": "Pong-v5"}, "the run's actors have 2 envs of CartPole-v1 each"),
        ({"env_id": "\n" * 500}, "the run's actors have"),
        ({"envs": WIDTH + 1}, "the run's actors have"),
        ({"envs": 2**32 - 1}, "the run's actors have"),
        ({"layout": Layout([Tensor("version", "int32", (1,))])}, "its rollouts are not|is the version that one has"),
        ({"layout": Layout(())}, "its rollouts are not|is the version that one has"),
        ({"layout": Layout([Tensor("x", "uint8", (2**31,) * 4)])}, "more than"),
        ({"layout": Layout([Tensor("x", "O", (1,))])}, "'O' is none of"),
        ({"protocol": 2}, "protocol 2 is not 1"),
        ({"envs": 0}, "a stream of 0 envs has nothing to show"),  # who only looks
    ],
)
def test_who_is_not_let_in(open_house: Callable[..., House], method: str, changes: dict[str, Any], why: str):
    house = open_house()
    part = why.split("|")[-1 if method == PULL else 0]
    question = data_frame(0, b"") if changes == {"envs": 0} else house.question(method)
    house.is_refused(part, house.hello(method, **changes), question, method=method)


def test_each_tensor_of_a_rollout_must_be_the_runs(house: House):
    tensors = house.guests.reads.tensors
    for k, t in enumerate(tensors):
        fewer = t._replace(shape=(*t.shape[:-1], t.shape[-1] - 1))
        for other in (
            [t._replace(name="x")],
            [t._replace(dtype="int8")],
            [fewer],
            [t._replace(shape=t.shape[::-1])],
            [],
        ):
            layout = Layout([*tensors[:k], *other, *tensors[k + 1 :]])
            if layout.tensors != tensors:  # a shape may be the same backwards
                house.is_refused("its rollouts are not the run's", house.hello(layout=layout))


# What is refused of what they send.


@pytest.mark.parametrize("method", [PUSH, PULL])
def test_frames_that_are_none(open_house: Callable[..., House], method: str):
    house, rng = open_house(), random.Random(0)
    good = house.pack(house.rollout()) if method == PUSH else ASKS.pack({"version": np.array([0])})
    cases = {
        "first frame must be a hello": [data_frame(0, good)],
        "ends within": [house.hello(method), data_frame(0, good[:-1])],
        "1 more than was agreed": [house.hello(method), data_frame(0, good + b"x")],
        "data frame 1 came where 0 was due": [house.hello(method), data_frame(1, good)],
        "data frame 0 came where 1 was due": [house.hello(method), data_frame(0, good), data_frame(0, good)],
        "a data frame must come": [house.hello(method), house.hello(method)],
        "these bytes are no frame": [house.hello(method), rng.randbytes(60)],
        "bytes, more than": [house.hello(method), data_frame(0, good + bytes(5000))],
    }
    for why, frames in cases.items():
        with channel_to(house.server.address) as channel:
            status, said = Raw(channel, *frames, method=path(method), metadata=GIVEN).end()
            assert (status, why in said) == (StatusCode.INVALID_ARGUMENT, True), (why, status, said)
        house.learn()
    status, said = house.ends(house.hello(method), data_frame(0, bytes(MOST)), method=method)
    assert (status, "more than" in said) == (StatusCode.RESOURCE_EXHAUSTED, True), said
    assert house.server.refused == {"unix": len(cases) + 1}
    assert len(house.lines) == 1


def changed(house: House, name: str, value: float, at: Any = ..., **others: Any) -> bytes:
    arrays = house.rollout()
    arrays[name][at] = value
    for other, x in others.items():
        arrays[other][at] = x
    return data_frame(0, house.pack(arrays))


def floats(house: House) -> list[str]:
    return [t.name for t in house.guests.reads.tensors if t.dtype.startswith("float")]


def test_numbers_that_are_none_are_refused(house: House):
    for name in floats(house):
        for bad in (np.nan, np.inf, -np.inf):
            for at in (0, -1):
                frame = changed(house, name, bad, at)
                house.is_refused(
                    "a return without a length" if "episode" in name and bad != bad else name, house.hello(), frame
                )
    # Of a game that has not ended a host may say NaN; a recorder has nothing there.
    house.is_refused("episode_", house.hello(), changed(house, "episode_return", np.nan, episode_length=np.nan))


def test_actors_have_room_in_a_replay_or_are_refused(open_house: Callable[..., House]):
    house = open_house()
    assert house.guests.room > 1 << 30, "V-trace keeps nothing of them"
    value = {"algorithm": "dqn", "acting": "decoupled", "actors": 2, "env.num_envs": 8, "algo.unroll_length": UNROLL}
    for more, room in (({}, 0), ({"replay.envs": 12}, 4), ({"replay.envs": 12, "actors": 0}, 12)):
        guests = Guests(make_config(**value | more), VECTOR, 0, house.guests.acting, ())
        assert guests.room == room
        guests.close()
    house.guests.room = WIDTH
    with channel_to(house.server.address) as channel:
        one = Raw(channel, house.hello(run_id=1), method=path(PUSH), metadata=GIVEN)
        assert one.next().WhichOneof("kind") == "welcome"
        house.is_refused("2 envs beside 1 actors'", house.hello(run_id=2), house.question(PUSH))
        assert house.ends(house.hello(run_id=1), house.question(PUSH))[0] == StatusCode.OK, "it came again"
        one.end()
    assert house.ends(house.hello(run_id=2), house.question(PUSH))[0] == StatusCode.OK


def test_numbers_that_nobody_can_bear_are_refused(house: House):
    """They are finite, but not what becomes of them: a priority, a square, a sum."""
    for name in floats(house):
        if not name.startswith("obs/"):
            for bad in (3e38, -3e38):
                house.is_refused("1e+15", house.hello(), changed(house, name, bad, -1))


def test_actions_that_there_are_not(house: House):
    sizes = house.guests.spec.action.sizes
    for bad in (-1, 4, 2**62) if sizes else ():
        for at in (0, -1):  # the one before row 0 is the network's input, too
            house.is_refused("an action is none of the env's", house.hello(), changed(house, "action", bad, at))
    if len(sizes) > 1:  # what one component has another has not
        house.is_refused("an action is none", house.hello(), changed(house, "action", 2, (..., 1)))


def test_a_probability_above_1(house: House):
    frames = [house.hello(), changed(house, "log_prob", 0.01, (2, 1))]
    if house.guests.spec.action.sizes:
        house.is_refused("an action has a probability above 1", *frames)
        frames[1] = changed(house, "log_prob", 1e-7, (2, 1))  # as rounding makes of a certain one
    assert house.ends(*frames)[0] == StatusCode.OK  # a density may be any number
    assert house.learn() == 1


def test_what_the_fake_step_cannot_have_brought(open_house: Callable[..., House]):
    """Row 2 of env 0 leads from a final observation to a first one."""
    house, row = open_house(), (2, 0)
    for name in ("terminated", "truncated"):
        house.is_refused("the fake step", house.hello(), changed(house, name, True, row))
    house.is_refused("the fake step", house.hello(), changed(house, "episode_length", 1, row))
    house.is_refused("the fake step", house.hello(), changed(house, "reward", 1e-3, (3, 0)))
    # What came before row 0 is not of this rollout: an env that was reset in between has it and begins.
    assert house.ends(house.hello(), changed(house, "is_first", True, 0))[0] == StatusCode.OK
    assert house.learn() == 1


def test_a_game_of_negative_length(open_house: Callable[..., House]):
    house = open_house()
    house.is_refused("a negative length", house.hello(), changed(house, "episode_length", -1, (1, 0)))


# Versions.


def versions(house: House, *pushed: int | tuple[int, int]) -> list[bytes]:
    """Rollouts acted with these weights, or with some and then others."""
    frames = [house.hello()]
    for n, version in enumerate(pushed):
        arrays = house.rollout()
        before, after = version if isinstance(version, tuple) else (version, version)
        arrays["version"][:2], arrays["version"][2:] = before, after
        frames.append(data_frame(n, house.pack(arrays)))
    return frames


def test_weights_that_there_have_not_been(open_house: Callable[..., House]):
    house = open_house()
    house.publish(10)
    house.is_refused("weights that there have not been", *versions(house, -1))
    house.is_refused("weights that there have not been", *versions(house, (5, -(2**63))))
    # The first one of a stream may be of a time to which the run has not come again: it is passed over.
    for newer in (11, (3, 11), 2**63 - 1):
        assert house.ends(*versions(house, newer))[0] == StatusCode.OK
        assert house.learn() == 0
        house.is_refused("weights that there have not been", *versions(house, newer, newer))
    assert house.ends(*versions(house, 11, 10))[0] == StatusCode.OK
    assert house.learn() == 1
    assert house.guests.produced == UNROLL * WIDTH - 1
    assert house.ends(*versions(house, 7, (7, 9)))[0] == StatusCode.OK
    assert house.learn() == 3


def test_weights_that_become_older(open_house: Callable[..., House]):
    house = open_house()
    house.publish(10)
    with channel_to(house.server.address) as channel:
        for falling in ((7, 6), ((7, 9), (8, 9)), (10, 0)):
            taken = house.learn()
            raw = Raw(channel, *versions(house, *falling), method=path(PUSH), metadata=GIVEN)
            status, said = raw.end()
            assert (status, said) == (StatusCode.INVALID_ARGUMENT, "it acted with older weights than before")
            assert house.learn() == taken + 1
    assert house.ends(*versions(house, 3))[0] == StatusCode.OK  # on another stream it is another life


def test_what_a_guest_says_that_it_has(open_house: Callable[..., House]):
    """Weights go only to who has older ones, whatever number that is."""
    house = open_house()
    house.publish(10)
    said = (-(2**63), -1, 0, 9, 10, 11, 2**63 - 1)
    frames = [data_frame(n, ASKS.pack({"version": np.array([v])})) for n, v in enumerate(said)]
    with channel_to(house.server.address) as channel:
        raw = Raw(channel, house.hello(PULL), *frames, method=path(PULL), metadata=GIVEN)
        raw.next()
        answers = [raw.next().data for _ in said]
        assert raw.end()[0] == StatusCode.OK
    assert [bool(x.tensors) for x in answers] == [v < 10 for v in said]
    assert {x.version for x in answers} == {10}


# All of them together.


def test_others_go_on_beside_a_crowd_of_broken_ones(house: House):
    """Some streams are open all the while; what they send comes through between what is refused of others."""
    rng, ends = random.Random(3), dict[StatusCode, int]()
    with channel_to(house.server.address) as channel:
        good = [Raw(channel, house.hello(m, run_id=50), method=path(m), metadata=GIVEN) for m in (PUSH, PULL)]
        for raw in good:
            assert raw.next().WhichOneof("kind") == "welcome"
        for k in range(120):
            method = rng.choice((PUSH, PULL))
            frames = [house.hello(method, run_id=k % 5), *(house.question(method, n) for n in range(2))]
            broken = rng.randrange(4)
            frames = [mutated(f, rng) if n >= broken else f for n, f in enumerate(frames)]
            call = Raw(channel, *frames, method=path(method), metadata=GIVEN)
            status, said = call.end()
            ends[status] = ends.get(status, 0) + 1
            assert said or status == StatusCode.OK
            house.learn()
            if k % 10 == 0:
                for raw, m in zip(good, (PUSH, PULL), strict=True):
                    raw.out.put(house.question(m, k // 10))
                    assert raw.next().data.number == k // 10
                house.learn()
        assert all(raw.end()[0] == StatusCode.OK for raw in good)
    assert set(ends) == {StatusCode.OK, StatusCode.INVALID_ARGUMENT}
    assert house.server.refused == {"unix": ends[StatusCode.INVALID_ARGUMENT]}
    assert len(house.lines) == 1
    for arrays in house.learned:
        house.guests.check(arrays)


def test_who_is_gone_leaves_nothing(open_house: Callable[..., House]):
    """Its rollout waits for a slot when it is put out."""
    house = open_house()
    assert house.ends(house.hello(), *(house.question(PUSH, n) for n in range(2)))[0] == StatusCode.OK  # both slots
    with channel_to(house.server.address) as channel:
        for _ in range(3):
            raw = Raw(channel, house.hello(), house.question(PUSH), method=path(PUSH), metadata=GIVEN)
            assert raw.next().WhichOneof("kind") == "welcome"
            raw.call.cancel()
    assert until(lambda: is_empty(house.server))
    assert house.learn() == 2
    assert house.works()
    assert house.learn() == 4

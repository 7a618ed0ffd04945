"""The desk of central acting behind a real server: whatever its clients send, inference goes on for the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc import StatusCode
from torch import Tensor

from coterie.acting.central import Central, Shape
from coterie.acting.recorder import Stages, local_fields
from coterie.parallel.board import Board
from coterie.remote.admission import Hosts
from coterie.types import AgentOutput, Array, CoterieError, Inputs, Spec
from coterie.wire.client import Stream, ask_settings
from coterie.wire.codec import Layout, Newest, timestep_layout
from coterie.wire.server import Limits, Server
from tests.conftest import IMAGE, VECTOR, make_config
from tests.wire.harness import WAIT_S, Raw, channel_to, data_frame, hello_frame, is_empty, mutated, until

UNROLL = 16  # more than any stream here sends: nobody trains, and no rollout ends
MOST_ENVS = 8
CPU = torch.device("cpu")

# pytest forgets the filter that central.py sets; torch may warn once in a process, of a frame's bytes.


class House:
    """Central acting without a learner, and the door to it."""

    def __init__(self, address: str, spec: Spec, newest: bool) -> None:
        self.spec, self.newest = spec, newest
        config = make_config(**{"central.max_envs": MOST_ENVS, "central.newest_frame": newest})
        shape = Shape(spec, 0, UNROLL, 1, 1, newest=newest, max_envs=MOST_ENVS)
        model: Any = None

        def policy(model: Any, inputs: Inputs, state: Tensor | None, ids: Tensor) -> tuple[AgentOutput, None]:
            rows = len(inputs.is_first)
            assert all(torch.isfinite(x).all() for x in (inputs.obs, inputs.prev_reward))
            return AgentOutput(torch.full((rows,), 3), torch.zeros(rows), torch.zeros(rows)), None

        self.central = Central(
            shape, [(model, lambda: None)] * 2, policy, lambda width: None,
            partial(local_fields, spec, UNROLL), Board(1), 0, Stages(), CPU, CPU,
        )  # fmt: skip
        self.central.publish(0)
        hosts = Hosts(config, spec, 0, self.central, False)
        self.server = Server(address, {"Infer": hosts}, limits=Limits(message_bytes=1 << 16))

    def hello(self, envs: int = 2, **changes: Any) -> bytes:
        return hello_frame(**self.fields(envs), **changes)

    def fields(self, envs: int) -> dict[str, Any]:
        return {"env_id": "CartPole-v1", "envs": envs, "layout": timestep_layout(self.spec, envs, self.newest)}

    def seen(self, envs: int, step: int = 0) -> dict[str, Array]:
        s = self.spec.obs[""]
        return {
            "obs/": np.full((envs, *s.shape), step, s.dtype),
            "reward": np.zeros(envs, np.float32),
            **{name: np.zeros(envs, bool) for name in ("terminated", "truncated", "is_first")},
            "episode_return": np.full(envs, np.nan),
            "episode_length": np.full(envs, np.nan),
        }

    def works(self) -> bool:
        """A good host is served; without `Stream`, which would wait for as long as the server gives signs of life."""
        layout = timestep_layout(self.spec, 3, self.newest)
        newest = Newest(layout)
        frames = [layout.pack(newest.split(self.seen(3, step))) for step in range(2)]
        with channel_to(self.server.address) as channel:
            raw = Raw(channel, self.hello(3, run_id=99), *(data_frame(n, x) for n, x in enumerate(frames)))
            for kind in ("welcome", "data", "data"):
                try:
                    frame = raw.next()
                except grpc.RpcError as error:
                    raise AssertionError(str(error)) from self.central._error
                assert frame.WhichOneof("kind") == kind, self.central._error
            assert np.frombuffer(frame.data.tensors, np.int64).tolist() == [3, 3, 3]
            assert raw.end()[0] == StatusCode.OK
        return True


@pytest.fixture(params=["vector", "image", "newest"])
def house(request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[House]:
    one = House(f"unix:{tmp_path}/s", VECTOR if request.param == "vector" else IMAGE, request.param == "newest")
    yield one
    assert until(lambda: is_empty(one.server))
    one.server.close()
    one.central.close()
    assert one.central._error is None
    assert not one.central.seats
    assert one.central.envs == 0
    told = [r.getMessage() for r in caplog.get_records("call") if r.levelname != "DEBUG"]
    assert told == [], "asyncio and gRPC log what the server did not catch"


def test_an_env_host_is_served(house: House):
    assert house.works()
    with channel_to(house.server.address) as channel:
        assert '"unroll_length"' in ask_settings(channel, "Infer", {}, "").settings


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"env_id": "Pong-v5"}, "the run's envs are CartPole-v1, not 'Pong-v5'"),
        ({"env_id": "\n" * 500}, "the run's envs are CartPole-v1"),
        ({"envs": 3}, "its frames hold whole: bool[2]|its frames hold reward: float32[2]"),
        ({"envs": MOST_ENVS + 1}, "central.max_envs"),
        ({"envs": 2**32 - 1}, "central.max_envs"),
    ],
)
def test_who_is_not_let_in(house: House, changes: dict[str, Any], why: str):
    fields = house.fields(2)
    with channel_to(house.server.address) as channel:
        status, said = Raw(channel, hello_frame(**{**fields, **changes})).end()
    assert status == StatusCode.INVALID_ARGUMENT
    assert any(one in said for one in why.split("|"))
    assert house.works()


def test_who_only_looks_may_not_ask(house: House):
    with channel_to(house.server.address) as channel:
        status, said = Raw(channel, hello_frame(Layout(())), data_frame(0, b"")).end()
        assert status == StatusCode.INVALID_ARGUMENT
        assert "its frames" in said or "not ''" in said
        status, said = Raw(channel, hello_frame(Layout(()), envs=0), data_frame(0, b"")).end()
        assert (status, said) == (StatusCode.INVALID_ARGUMENT, "a stream of 0 envs has nothing to show")
    assert house.works()


def test_what_is_not_finite_is_refused(house: House):
    layout = timestep_layout(house.spec, 2, house.newest)
    for name in ("reward", *(["obs/"] if house.spec is VECTOR else [])):
        for bad in (np.nan, np.inf, -np.inf):
            seen = house.seen(2)
            seen[name][1] = bad
            frame = data_frame(0, layout.pack(Newest(layout).split(seen)))
            with channel_to(house.server.address) as channel:
                assert Raw(channel, house.hello(), frame).end() == (
                    StatusCode.INVALID_ARGUMENT,
                    f"{name} is not finite",
                )
    assert house.works()


@pytest.mark.parametrize(
    ("name", "bad", "why"),
    [
        ("episode_return", 1e308, "episode_return is beyond 1e+15: no loss would be finite"),
        ("episode_length", 1e300, "episode_length is beyond 1e+15: no loss would be finite"),
        ("episode_length", -5.0, "a game has a negative length"),
    ],
)
def test_a_game_that_the_books_cannot_bear_is_refused(house: House, name: str, bad: float, why: str):
    layout = timestep_layout(house.spec, 2, house.newest)
    seen = house.seen(2)
    for one in ("episode_return", "episode_length"):
        seen[one][1] = bad if one == name else 1.0
    with channel_to(house.server.address) as channel:
        said = Raw(channel, house.hello(), data_frame(0, layout.pack(Newest(layout).split(seen)))).end()
    assert said == (StatusCode.INVALID_ARGUMENT, why)
    assert house.works()


def test_a_host_that_starts_again_takes_its_place(house: House):
    """Its old stream may still seem to live; together they would be too many."""
    with channel_to(house.server.address) as channel:
        layout = timestep_layout(house.spec, MOST_ENVS, house.newest)
        hello = {"env_id": "CartPole-v1", "envs": MOST_ENVS, "run_id": 7}
        old = Stream(channel, "Infer", hello, layout, silence=WAIT_S)
        with pytest.raises(CoterieError, match=r"central\.max_envs"):
            Stream(channel, "Infer", {**hello, "run_id": 8}, layout, silence=WAIT_S)
        new = Stream(channel, "Infer", hello, layout, silence=WAIT_S)
        assert new.welcome.first_env_id == old.welcome.first_env_id
        new.send(Newest(layout).split(house.seen(MOST_ENVS)))
        assert len(new.receive()[0]["action"]) == MOST_ENVS
        for stream in (old, new):
            stream.close()
    assert until(lambda: is_empty(house.server))
    assert house.works()


def test_broken_frames_of_env_hosts(house: House):
    """Only what fits is acted on; nothing ends inference, or reaches it with another shape or without an end."""
    rng, layout, ends = random.Random(4), timestep_layout(house.spec, 2, house.newest), dict[StatusCode, int]()
    with channel_to(house.server.address) as channel:
        for k in range(120):
            newest = Newest(layout)
            content = [layout.pack(newest.split(house.seen(2, n))) for n in range(3)]
            frames = [house.hello(run_id=k % 5), *(data_frame(n, x) for n, x in enumerate(content))]
            broken = rng.randrange(5)
            frames = [mutated(f, rng) if n >= broken else f for n, f in enumerate(frames)]
            status, _ = Raw(channel, *frames).end()
            ends[status] = ends.get(status, 0) + 1
            assert house.central._error is None
    assert set(ends) == {StatusCode.OK, StatusCode.INVALID_ARGUMENT}
    assert house.works()

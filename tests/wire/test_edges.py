"""Corners of the wire: tensors of every dtype, stacks that are none, bounds without end, a late handshake."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from coterie.build.resources import resolve_config
from coterie.envs.text import text_spec
from coterie.remote.admission import Hosts
from coterie.types import ActionSpec, ObsSpec, Spec
from coterie.wire.codec import Frame, Layout, Newest, Tensor, layout_from, timestep_layout
from coterie.wire.server import SERVICE, Limits, Server
from tests.conftest import IMAGE, VECTOR, make_config

WAIT_S = 20.0


def seen(spec: Spec, envs: int) -> dict[str, np.ndarray]:
    """A frame's arrays: made up, but different in every element."""
    arrays = {f"obs/{k}": np.arange(envs * math.prod(s.shape)).reshape(envs, *s.shape) for k, s in spec.obs.items()}
    small = {name: np.arange(envs) for name in ("reward", "episode_return", "episode_length")}
    return arrays | small | {name: np.arange(envs) % 2 == 0 for name in ("terminated", "truncated", "is_first")}


def central(spec: Spec) -> SimpleNamespace:
    """As much of central acting as the door asks for."""

    def sit(number: int, group: int, first_env: int, width: int) -> SimpleNamespace:
        reads = timestep_layout(spec, width)
        return SimpleNamespace(reads=reads, writes=Layout(()), first_env_id=first_env, width=width, leave=lambda: None)

    return SimpleNamespace(sit=sit)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float32"])
def test_whatever_an_observation_may_be_can_be_sent(dtype):
    obs = text_spec() if dtype == "int16" else ObsSpec((3,), dtype)
    layout = timestep_layout(Spec("made-up", {"": obs}, VECTOR.action), 5)
    agreed = layout_from(layout.message(), layout.most)
    arrays = seen(Spec("made-up", {"": obs}, VECTOR.action), 5)
    got = agreed.unpack(layout.pack(arrays))
    assert got["obs/"].dtype == dtype
    for name, x in arrays.items():
        np.testing.assert_array_equal(got[name], x.astype(got[name].dtype))


@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=["vector", "image"])
def test_newest_frames_only_where_there_are_stacks(spec):
    layout = timestep_layout(spec, 4, newest=True)
    there, here = Newest(layout), Newest(layout)
    arrays = seen(spec, 4)
    got = here.join(layout.unpack(layout.pack(there.split(dict(arrays)))))
    assert got.keys() == arrays.keys()
    np.testing.assert_array_equal(got["obs/"], arrays["obs/"].astype(got["obs/"].dtype))


def test_settings_are_json_where_an_action_has_no_bounds():
    spec = Spec("CartPole-v1", VECTOR.obs, ActionSpec("continuous", low=(-math.inf, -2.0), high=(math.inf, 2.0)))
    hosts = Hosts(resolve_config(make_config()), spec, 0, central(spec), False)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    settings = json.loads(hosts.settings, parse_constant=refuse)
    assert settings["action"] == ["continuous", [], [None, -2.0], [None, 2.0]]


def test_env_ids_are_of_one_env_whatever_the_width_of_a_stream():
    hosts = Hosts(resolve_config(make_config()), VECTOR, 0, central(VECTOR), False)
    ids = []
    for run_id, group, envs in [(7, 0, 4), (8, 0, 4), (7, 0, 8), (9, 0, 1)]:
        hello = Frame(hello={"run_id": run_id, "group": group, "envs": envs, "env_id": "CartPole-v1"}).hello
        hello.sends.extend(timestep_layout(VECTOR, envs).message())
        seat = hosts(hello)
        ids += range(seat.first_env_id, seat.first_env_id + seat.width)
    assert len(ids) == len(set(ids))


def test_who_says_hello_while_the_run_ends_is_told_that_it_is_over(tmp_path):
    seat = SimpleNamespace(reads=Layout(()), writes=Layout(()), welcome=dict, leave=lambda: None)
    server = Server(f"unix:{tmp_path}/s", {"Infer": lambda hello: seat})
    out = queue.SimpleQueue()
    ending = threading.Thread(target=server.close, args=("enough",))
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
            stub = channel.stream_stream(f"/{SERVICE}/Infer", Frame.SerializeToString, Frame.FromString)
            other = stub(iter([Frame(hello={"protocol": 1})]), timeout=WAIT_S)
            assert next(other).WhichOneof("kind") == "welcome"
            call = stub(iter(out.get, None), timeout=WAIT_S)
            # Its stream is there before the run ends, which the second stream's frames prove; its hello is not.
            again = stub(iter([Frame(hello={"protocol": 1})]), timeout=WAIT_S)
            assert next(again).WhichOneof("kind") == "welcome"
            ending.start()
            deadline = time.monotonic() + WAIT_S
            while server.over is None:
                assert time.monotonic() < deadline
            out.put(Frame(hello={"protocol": 1}))
            frame = next(call)
            assert frame.WhichOneof("kind") == "over"
            assert frame.over.reason == "enough"
            out.put(None)
    finally:
        if ending.ident is None:
            ending.start()
        ending.join(WAIT_S)
    assert not ending.is_alive()


FLOATS = Layout([Tensor("x", "float32", (2,))])
HELLO, DATA = Frame(hello={"protocol": 1}), Frame(data={"number": 0, "tensors": bytes(8)})


@pytest.mark.parametrize(
    ("method", "token", "frames", "kinds", "status"),
    [
        ("Infer", "", [HELLO], [], "UNAUTHENTICATED"),
        ("Pull", "right", [HELLO], [], "UNIMPLEMENTED"),
        ("Infer", "right", [DATA], [], "INVALID_ARGUMENT"),
        ("Infer", "right", [Frame(hello={"protocol": 2})], [], "INVALID_ARGUMENT"),
        ("Infer", "right", [HELLO, HELLO], ["welcome"], "INVALID_ARGUMENT"),
        ("Infer", "right", [HELLO, Frame()], ["welcome"], "INVALID_ARGUMENT"),
        ("Infer", "right", [HELLO, DATA, DATA], ["welcome", "data"], "INVALID_ARGUMENT"),
        ("Infer", "right", [HELLO, Frame(data={"tensors": bytes(9)})], ["welcome"], "INVALID_ARGUMENT"),
        ("Infer", "right", [HELLO, Frame(data={"tensors": bytes(5000)})], ["welcome"], "RESOURCE_EXHAUSTED"),
        ("Infer", "right", [HELLO, DATA, None], ["welcome", "data"], "OK"),
    ],
    ids=[
        "token", "method", "no hello", "protocol", "two hellos", "sign of life", "number", "length", "size", "leaves"
    ],
)  # fmt: skip
def test_a_stream_ends_with_the_status_that_the_documentation_has(method, token, frames, kinds, status, tmp_path):
    seat = SimpleNamespace(
        reads=FLOATS, writes=FLOATS, welcome=dict, leave=lambda: None, ask=lambda arrays, answer: answer(arrays, 0)
    )
    limits = Limits(message_bytes=4096)
    server = Server(f"unix:{tmp_path}/s", {"Infer": lambda hello: seat}, token="right", limits=limits)
    out = queue.SimpleQueue()
    for frame in frames:
        out.put(frame)
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
            stub = channel.stream_stream(f"/{SERVICE}/{method}", Frame.SerializeToString, Frame.FromString)
            call = stub(iter(out.get, None), metadata=[("authorization", f"Bearer {token}")], timeout=WAIT_S)
            got = []
            with contextlib.suppress(grpc.RpcError):
                for frame in call:
                    got.append(frame.WhichOneof("kind"))
            assert (got, call.code().name) == (kinds, status), call.details()
            out.put(None)
    finally:
        server.close()


def test_the_bytes_of_a_frame_are_where_the_documentation_says():
    layout = timestep_layout(Spec("CartPole-v1", {"": ObsSpec((4,), "float32")}, VECTOR.action), 8)
    at, begins = 0, {}
    for t in layout.tensors:
        begins[t.name] = at
        at += t.shape[0] * t.row_bytes
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    said = page[page.index("Eight CartPoles make a frame of") :].split("The answer has 64 bytes")[0]
    assert f"frame of {at} bytes" in said
    assert {name: int(begin) for name, begin in re.findall(r"`([\w/]+)` (?:from byte )?(\d+)", said)} == begins

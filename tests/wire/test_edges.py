"""Corners of the wire: tensors of every dtype, stacks that are none, bounds without end, a late handshake."""

from __future__ import annotations

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

from coterie.envs.text import text_spec
from coterie.types import ObsSpec, Spec
from coterie.wire.codec import Frame, Layout, Newest, layout_from, timestep_layout
from coterie.wire.server import SERVICE, Server
from tests.conftest import IMAGE, VECTOR

WAIT_S = 20.0


def seen(spec: Spec, envs: int) -> dict[str, np.ndarray]:
    """A frame's arrays: made up, but different in every element."""
    arrays = {f"obs/{k}": np.arange(envs * math.prod(s.shape)).reshape(envs, *s.shape) for k, s in spec.obs.items()}
    small = {name: np.arange(envs) for name in ("reward", "episode_return", "episode_length")}
    return arrays | small | {name: np.arange(envs) % 2 == 0 for name in ("terminated", "truncated", "is_first")}


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


def test_who_says_hello_while_the_run_ends_is_told_that_it_is_over(tmp_path):
    seat = SimpleNamespace(reads=Layout(()), writes=Layout(()), welcome={}, leave=lambda: None)
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

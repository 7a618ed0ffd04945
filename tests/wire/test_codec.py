"""Frames: what is packed is unpacked, and nothing else is: whatever a peer sends, it is refused in one way."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coterie.types import ActionSpec, Array, ObsSpec, Spec
from coterie.wire.codec import (
    DTYPES,
    INFO_BYTES,
    WHOLE,
    Frame,
    FrameLayout,
    Newest,
    Refused,
    TensorMessage,
    TensorSpec,
    layout_from,
    pack_info,
    timestep_layout,
    unpack_info,
)
from tests.conftest import VECTOR

MOST = 1 << 20
ROOT = Path(__file__).parents[2]
ACTION = ActionSpec("categorical", (4,))
STACKS = Spec("stacks", {"": ObsSpec((3, 4, 5), "uint8")}, ACTION)
MIXED = Spec(
    "mixed",
    {"": ObsSpec((2, 4, 4), "uint8"), "one": ObsSpec((1, 4, 4), "uint8"), "v": ObsSpec((3,), "float32")},
    ACTION,
)


def message(name: str = "x", dtype: str = "uint8", shape: tuple[int, ...] = (2,), rows: str = "") -> Any:
    return TensorMessage(name=name, dtype=dtype, shape=shape, rows=rows)


@st.composite
def layouts(draw: st.DrawFn, least: int = 0) -> FrameLayout:
    """Any agreed frame: scalars, tensors of only some rows, axes of `least` and more."""
    tensors: list[TensorSpec] = []
    masks: list[TensorSpec] = []
    for k in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(least, 3), max_size=4)))
        rows = draw(st.sampled_from(masks)).name if masks and shape and draw(st.booleans()) else ""
        tensors.append(TensorSpec(f"t{k}", dtype, (0, *shape[1:]) if rows else shape, rows))
        if dtype == "bool" and not rows:
            masks.append(tensors[-1])
    return FrameLayout(tensors)


@st.composite
def frames(draw: st.DrawFn) -> tuple[FrameLayout, dict[str, Array]]:
    layout, content = draw(layouts()), dict[str, Array]()
    for t in layout.tensors:
        shape = (int(content[t.rows].sum()), *t.shape[1:]) if t.rows else t.shape
        content[t.name] = draw(hnp.arrays(t.dtype, shape))
    return layout, content


@given(frames())
@settings(max_examples=100, derandomize=True)
def test_packed_frames_are_unpacked_unchanged(frame: tuple[FrameLayout, dict[str, Array]]):
    layout, content = frame
    data = layout.pack(content)
    assert len(data) <= layout.most
    back = layout.unpack(data)
    assert list(back) == [t.name for t in layout.tensors]
    for t in layout.tensors:
        assert back[t.name].dtype == np.dtype(t.dtype)
        np.testing.assert_array_equal(back[t.name], content[t.name], strict=True)


@given(frames(), st.data())
@settings(max_examples=100, derandomize=True)
def test_a_frame_of_any_other_length_is_refused(frame: tuple[FrameLayout, dict[str, Array]], draw: st.DataObject):
    layout, content = frame
    data = layout.pack(content)
    with pytest.raises(Refused, match="more than declared"):
        layout.unpack(data + b"\0" * draw.draw(st.integers(1, 20)))
    if data:
        with pytest.raises(Refused, match="ends within"):
            layout.unpack(data[: draw.draw(st.integers(0, len(data) - 1))])


def test_a_bool_byte_that_is_neither_0_nor_1_is_true():
    layout = FrameLayout([TensorSpec("m", "bool", (3,)), TensorSpec("x", "uint8", (0,), "m")])
    back = layout.unpack(bytes([7, 0, 255, 10, 11]))
    assert back["m"].tobytes() == bytes([1, 0, 1])
    assert back["x"].tolist() == [10, 11]


HUGE = 2**31
REFUSED = {
    "dtype": [message(dtype="float16")],
    "code": [message(dtype="(1000000000,)f8")],
    "twice": [message(), message()],
    "axes": [message(shape=(1,) * 9)],
    "tensors": [message(str(k)) for k in range(257)],
    "its own mask": [message("x", "bool", rows="x")],
    "no mask": [message("x", rows="m")],
    "mask is no bool": [message("m"), message("x", rows="m")],
    "scalar with rows": [message("m", "bool"), message("x", shape=(), rows="m")],
    # Only the mask itself says how many rows it has: the most bytes of a frame would not be known.
    "mask of a mask": [message("m", "bool"), message("n", "bool", (0,), "m"), message("x", rows="n")],
    "an empty axis": [message(shape=(2, 0))],
    "bytes": [message(shape=(MOST + 1,))],
    "bytes of several": [message(str(k), "float64", (MOST // 16,)) for k in range(3)],
    "huge": [message(shape=(HUGE,) * 4)],
    "huge rows": [message("m", "bool", (1000,)), message("x", "float64", (0, 1000), "m")],
    "huge, but for an empty axis": [message(shape=(0, HUGE, HUGE, HUGE))],
    "huge rows, but for an empty axis": [message("m", "bool", (9,)), message("x", shape=(0, 0, HUGE, HUGE), rows="m")],
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_declaration_that_breaks_a_rule_is_refused(case: str):
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            layout_from(REFUSED[case], MOST)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "nothing is made of a size that is only claimed"
    finally:
        tracemalloc.stop()


def stream(spec: Spec, envs: int, steps: int, seed: int) -> list[dict[str, Array]]:
    """Stacks that slide, but for resets, frames that freeze, and envs that do as they like."""
    rng = np.random.default_rng(seed)
    out: list[dict[str, Array]] = []
    for step in range(steps):
        content: dict[str, Array] = {
            "reward": rng.normal(size=envs).astype(np.float32),
            **{name: rng.random(envs) < 0.2 for name in ("terminated", "truncated", "is_first")},
            "episode_return": rng.normal(size=envs),
            "episode_length": rng.normal(size=envs),
        }
        for key, s in spec.obs.items():
            x = (rng.random((envs, *s.shape)) * 255).astype(s.dtype)
            for env in range(envs if step else 0):
                last = out[-1][f"obs/{key}"][env]
                what = rng.random()
                if what < 0.6 and not content["is_first"][env] and s.is_image:
                    x[env, :-1] = last[1:]
                elif what < 0.8:  # nothing moves
                    x[env] = last
            content[f"obs/{key}"] = x
        out.append(content)
    return out


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("spec", [STACKS, MIXED, VECTOR], ids=lambda spec: spec.env_id)
@pytest.mark.parametrize("seed", range(2))
def test_stacks_are_restored_from_their_newest_frames(spec: Spec, newest: bool, seed: int):
    envs = 1 + 3 * seed
    layout = timestep_layout(spec, envs, newest)
    there, here = Newest(layout), Newest(layout)
    for content in stream(spec, envs, 30, seed):
        data = layout.pack(there.split(dict(content)))
        assert len(data) <= layout.most
        back = here.join(layout.unpack(data))
        assert back.keys() == content.keys()
        for name, x in content.items():
            np.testing.assert_array_equal(back[name], x, strict=True)


def test_only_the_newest_frame_of_a_stack_travels():
    layout = timestep_layout(STACKS, 2, newest=True)
    newest, sizes = Newest(layout), list[int]()
    content = stream(STACKS, 2, 1, 0)[0]
    content["is_first"][:] = False
    for _ in range(4):
        sizes.append(len(layout.pack(newest.split(content))))
        x = content["obs/"]
        content = {**content, "obs/": np.concatenate([x[:, 1:], x[:, :1] + 1], 1)}
    small = sizes[1]
    assert sizes == [small + 2 * 3 * 4 * 5, small, small, small]
    content["is_first"][1] = True
    assert len(layout.pack(newest.split(content))) == small + 3 * 4 * 5


def test_a_first_frame_without_whole_stacks_is_refused():
    layout = timestep_layout(STACKS, 2, newest=True)
    sent = Newest(layout).split(stream(STACKS, 2, 1, 0)[0])
    sent[WHOLE] = np.array([True, False])
    sent["stack/"] = sent["stack/"][:1]
    with pytest.raises(Refused, match="first frame"):
        Newest(layout).join(layout.unpack(layout.pack(sent)))


def test_the_bytes_of_a_frame_are_where_the_documentation_says():
    layout = timestep_layout(Spec("CartPole-v1", {"": ObsSpec((4,), "float32")}, ACTION), 8)
    at, begins = 0, {}
    for t in layout.tensors:
        begins[t.name] = at
        at += t.shape[0] * t.row_bytes
    page = (ROOT / "docs" / "reference" / "wire.md").read_text()
    said = page[page.index("Eight CartPoles make a frame of") :].split("The answer has 64 bytes")[0]
    assert f"frame of {at} bytes" in said
    assert {name: int(begin) for name, begin in re.findall(r"`([\w/]+)` (?:from byte )?(\d+)", said)} == begins


def sent(info: dict[str, Any]) -> Any:
    return Frame.FromString(Frame(data={"number": 0, "tensors": b"", "info": info}).SerializeToString()).data.info


def test_what_an_env_says_in_its_info_arrives():
    info = {"success": (3.0, 4), "deep/x": (-1.5, 1)}
    assert unpack_info(sent(pack_info(info))) == info
    wrong = dict.fromkeys(("x" * 101, "", "lap\ntime"), (1.0, 1))
    many = wrong | {f"name {i}": (0.5, 1) for i in range(10_000)}
    packed = pack_info(many)
    assert 100 < len(packed) < len(many)
    assert not set(wrong) & set(packed)
    assert Frame(data={"number": 0, "tensors": b"", "info": packed}).ByteSize() <= INFO_BYTES


@pytest.mark.parametrize(
    ("name", "total", "count", "why"),
    [
        ("", 1.0, 1, "is not a name"),
        ("x" * 101, 1.0, 1, "is not a name of 1 to 100"),
        ("a\x1b[2J", 1.0, 1, "is not a name"),
        ("a", float("nan"), 1, "not the sum of finite numbers"),
        ("a", float("inf"), 1, "not the sum of finite numbers"),
        ("a", 1e30, 1, "not the sum of finite numbers"),
        ("a", 0.0, 0, "not the sum of finite numbers"),
    ],
)
def test_info_that_would_harm_the_metrics_is_refused(name: str, total: float, count: int, why: str):
    with pytest.raises(Refused, match=why):
        unpack_info(sent({name: {"total": total, "count": count}}))

"""Spaces to specs, the conversions at the env's edge, and instructions: words hashed, cut and cached."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib

import numpy as np
import pytest
from gymnasium import spaces

from coterie.envs.spaces import action_map, flatten, obs_fields, random_actions, with_mask
from coterie.envs.testing import Mission
from coterie.envs.text import WORDS, text_rows, text_spec
from coterie.errors import ConfigError
from tests.envs.env_harness import make, play


def convert(space, batch):
    fields = obs_fields("env", space)
    return {f.name: f.spec for f in fields}, flatten(batch, fields)


def test_discrete_observations_become_one_hot():
    specs, x = convert(spaces.Discrete(3, start=5), np.array([5, 7]))
    assert specs[""].shape == (3,)
    np.testing.assert_array_equal(x, [[1, 0, 0], [0, 0, 1]])
    assert x.dtype == np.float32
    specs, x = convert(spaces.MultiDiscrete([2, 3]), np.array([[1, 0], [0, 2]]))
    np.testing.assert_array_equal(x, [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("space", "batch"),
    [
        (spaces.Discrete(5), [-1]),
        (spaces.Discrete(5), [5]),
        (spaces.Discrete(5, start=2), [1]),
        (spaces.Discrete(5), [2.7]),
        (spaces.Discrete(5), [np.nan]),
        (spaces.MultiDiscrete([3, 4]), [[3, 0]]),
        (spaces.MultiDiscrete([3, 4]), [[0, -1]]),
    ],
)
def test_a_discrete_observation_outside_its_space_takes_no_other_numbers_column(space, batch):
    with pytest.raises(ValueError, match="is no integer from"):
        convert(space, np.array(batch))


def test_boxes_keep_what_torch_knows_and_scalars_get_an_axis():
    specs, x = convert(spaces.Box(-1, 1, (2,), np.float64), np.zeros((4, 2)))
    assert (specs[""].dtype, x.dtype) == ("float32", np.float32)
    specs, x = convert(spaces.Box(0, 255, (1, 8, 8), np.uint8), np.full((4, 1, 8, 8), 9, np.uint8))
    assert specs[""].is_image
    assert (specs[""].low, specs[""].high) == (0, 255)
    specs, x = convert(spaces.Box(-1, 1, (), np.float32), np.array([0.25, 0.5], np.float32))
    assert specs[""].shape == (1,)
    np.testing.assert_array_equal(x, [[0.25], [0.5]])


@pytest.mark.parametrize("env_id", ["MiniGrid-Empty-5x5-v0", "minigrid:MiniGrid-Empty-5x5-v0", "a.b:BabyAI-GoTo-v0"])
def test_the_grid_of_minigrid_is_codes_also_where_a_module_registers_it(env_id):
    (field,) = obs_fields(env_id, spaces.Dict({"image": spaces.Box(0, 255, (7, 7, 3), np.uint8)}))
    assert field.spec.codes == (11, 6, 4)
    assert not field.spec.is_image


def test_nested_dicts_are_flat_with_dotted_names():
    space = spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "c": spaces.Box(-1, 1, (2,), np.float32)})
    specs, x = convert(space, {"a": {"b": np.array([1])}, "c": np.zeros((1, 2), np.float32)})
    assert list(specs) == ["a.b", "c"]
    np.testing.assert_array_equal(x["a.b"], [[0, 1]])


def test_actions_map_to_what_the_env_takes():
    m = action_map("env", spaces.Discrete(3, start=-1))
    assert (m.spec.kind, m.spec.sizes) == ("categorical", (3,))
    np.testing.assert_array_equal(m.to_env(np.array([0, 2])), [-1, 1])
    m = action_map("env", spaces.MultiDiscrete([3, 4], start=[1, 2]))
    assert (m.spec.kind, m.spec.sizes) == ("multi", (3, 4))
    np.testing.assert_array_equal(m.to_env(np.array([[0, 3]])), [[1, 5]])
    m = action_map("env", spaces.MultiBinary(3))
    assert m.spec.sizes == (2, 2, 2)


def test_continuous_actions_stretch_finite_bounds_and_leave_infinite_ones():
    low, high = np.array([-1, 0, -np.inf], np.float32), np.array([1, 10, np.inf], np.float32)
    m = action_map("env", spaces.Box(low, high, dtype=np.float32))
    x = m.to_env(np.array([[0.5, 0.5, 7], [2, -3, -9]], np.float32))
    np.testing.assert_allclose(x, [[0.5, 7.5, 7], [1, 0, -9]])
    assert x.dtype == np.float32
    largest = np.finfo(np.float32).max
    m = action_map("env", spaces.Box(np.array([-largest, 0], np.float32), largest, dtype=np.float32))
    np.testing.assert_allclose(m.to_env(np.array([[0.5, -3], [-7, 9]], np.float32)), [[0.5, 0], [-7, 9]])
    assert (m.spec.low, m.spec.high) == ((-np.inf, 0), (np.inf, np.inf))
    m = action_map("env", spaces.Box(-1, 1, (2, 2), np.float32))
    x = m.to_env(np.array([[0.5, -0.5, 4, 1]], np.float32))
    np.testing.assert_array_equal(x, [[[0.5, -0.5], [1, 1]]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_continuous_actions_stay_within_their_bounds_to_the_last_digit(dtype):
    ends = np.sort(np.random.default_rng(0).normal(scale=5, size=(2, 400)).round(2), 0)
    few = np.array([[0, -np.inf, -1e300, -0.1], [np.inf, 3, 1e300, 0.1]]) if dtype == np.float64 else ends[:, :1]
    for low, high in (ends, few):
        space = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
        m = action_map("env", space)
        for a in (-50, -1, 0, 1, 50):
            x = m.to_env(np.full((1, len(low)), a, np.float32))
            assert space.contains(x[0].astype(dtype)), a
            assert (x.dtype, m.nested(x).dtype) == (np.float32, dtype)


def test_tuples_are_flat_with_their_numbers_as_names():
    space = spaces.Tuple((spaces.Discrete(2), spaces.Dict({"a": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32),))})))
    specs, x = convert(space, (np.array([1]), {"a": (np.zeros((1, 2), np.float32),)}))
    assert list(specs) == ["0", "1.a.0"]
    np.testing.assert_array_equal(x["0"], [[0, 1]])


def test_boxes_of_integers_are_choices():
    m = action_map("env", spaces.Box(-2, np.array([0, 3]), (2,), np.int32))
    assert (m.spec.kind, m.spec.sizes) == ("multi", (3, 6))
    np.testing.assert_array_equal(x := m.nested(m.to_env(np.array([[0, 5]]))), [[-2, 3]])
    assert x.dtype == np.int32
    for dtype in (np.int64, np.uint64):  # in which the number of values would overflow
        with pytest.raises(ConfigError, match=r"Box, .*; integers may have at most 65,536 values"):
            action_map("env", spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, (2,), dtype))


def test_nested_actions_have_their_choices_first_and_become_what_the_env_takes():
    box = spaces.Box(0, 10, (1, 2), np.float64)
    space = spaces.Dict({"move": spaces.Tuple((box, spaces.Discrete(3, start=5))), "on": spaces.MultiBinary(2)})
    m = action_map("env", space)
    assert (m.spec.kind, m.spec.sizes, m.spec.low) == ("mixed", (3, 2, 2), (0, 0))
    a = np.array([[2, 1, 0, -1.0, 0.5], [0, 0, 1, 3.0, 0.0]], np.float32)
    nested = m.nested(m.to_env(a))
    np.testing.assert_allclose(nested["move"][0], [[[0, 7.5]], [[10, 5]]])
    np.testing.assert_array_equal(nested["move"][1], [7, 5])
    np.testing.assert_array_equal(nested["on"], [[1, 0], [0, 1]])
    assert [nested["move"][0].dtype, nested["move"][1].dtype, nested["on"].dtype] == [np.float64, np.int64, np.int8]
    alone = action_map("env", spaces.Tuple((spaces.Discrete(2), spaces.Discrete(4))))
    assert (alone.spec.kind, alone.spec.dtype) == ("multi", "int64")


def test_random_actions_are_legal():
    spec, rng = action_map("env", spaces.MultiDiscrete([2, 3])).spec, np.random.default_rng(0)
    mask = np.array([[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]], bool)
    for _ in range(50):
        (a, b), (c, d) = random_actions(spec, rng, 2, {"action_mask": mask})
        assert (a, c, d) == (0, 1, 0)
        assert b in (1, 2)


def test_random_actions_fit_the_spec():
    rng = np.random.default_rng(0)
    multi = random_actions(action_map("env", spaces.MultiDiscrete([2, 5])).spec, rng, 200)
    assert multi.shape == (200, 2)
    np.testing.assert_array_equal(multi.max(0), [1, 4])
    box = random_actions(action_map("env", spaces.Box(-9, 9, (3,), np.float32)).spec, rng, 200)
    assert (np.abs(box) <= 1).all()
    assert box.dtype == np.float32


def test_spaces_that_are_not_supported_are_refused():
    one = spaces.Discrete(2)
    same, nameless = spaces.Dict({"a.b": one, "a": spaces.Dict({"b": one})}), spaces.Dict({"": one, "a": one})
    for space in (spaces.Sequence(one), spaces.Dict({"g": spaces.Tuple([])}), spaces.Dict({}), same, nameless):
        with pytest.raises(ConfigError, match=r"env\.id 'env'"):
            obs_fields("env", space)
    with pytest.raises(ConfigError, match="the observation space is Sequence; it may be Box"):
        obs_fields("env", spaces.Sequence(one))
    with pytest.raises(ConfigError, match="action space"):
        action_map("env", spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}))
    for large in spaces.Box(0, 10**6, (1,), np.int64), spaces.Discrete(10**9), spaces.MultiDiscrete([2**62, 2**62]):
        with pytest.raises(ConfigError, match="integers may have at most 65,536 values"):
            action_map("env", large)
    fields = obs_fields("env", spaces.Dict({"x": spaces.Discrete(2), "action_mask": spaces.MultiBinary(2)}))
    with pytest.raises(ConfigError, match="with a value for each of 3 choices"):
        with_mask("env", fields, action_map("env", spaces.Discrete(3)).spec, False)


# --- instructions ---

MISSION = "coterie.envs.testing:Mission"


def bucket(word):
    return zlib.crc32(word.encode()) % 999 + 1


def padded(text, width=32):
    return np.frombuffer(text.encode().ljust(width, b"\0"), np.uint8)


def test_words_are_hashed_without_case_or_punctuation_and_cut():
    (row,) = text_rows(["Open the DOOR,  then stop!"])
    assert row.dtype == np.int16
    assert row.tolist() == [bucket(w) for w in ("open", "the", "door", "then", "stop")] + [0] * (WORDS - 5)
    (row,) = text_rows([" ".join(f"word{i}" for i in range(WORDS + 9))])
    assert row.tolist() == [bucket(f"word{i}") for i in range(WORDS)]
    every = text_rows([f"w{i}" for i in range(5000)])[:, 0]
    assert (every.min(), every.max()) == (1, 999)


def test_the_same_words_are_the_same_row_in_every_form_and_process():
    texts = ["go to the ball", "", "größer"]
    rows = text_rows(texts)
    rows[:] += 0  # they can be written to
    np.testing.assert_array_equal(text_rows(tuple(texts)), rows)
    np.testing.assert_array_equal(text_rows([t.encode() for t in texts]), rows)
    as_bytes = np.stack([padded(t) for t in texts])
    np.testing.assert_array_equal(text_rows(as_bytes), rows)
    np.testing.assert_array_equal(text_rows(as_bytes[::-1]), rows[::-1])
    as_bytes = as_bytes.copy()
    as_bytes[0, 20:25] = 65  # what is left of a longer text
    np.testing.assert_array_equal(text_rows(as_bytes), rows)
    code = "from coterie.envs.text import text_rows as f; print(f(['go to the ball'])[0].tolist())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == rows[0].tolist()
    rows[0] = 7  # changing a row does not change the cache
    assert text_rows(texts)[0, 0] == bucket("go")


class Texts(spaces.Space):
    """A space of texts that is not gymnasium's Text, as minigrid's."""

    def __init__(self):
        super().__init__(dtype=str)


@pytest.mark.parametrize("space", [spaces.Text(40), Texts()])
def test_spaces_of_texts_become_rows(space):
    (field,) = obs_fields("env", space)
    assert (field.name, field.spec) == ("", text_spec())
    fields = obs_fields("env", spaces.Dict({"a": spaces.Dict({"b": space}), "c": spaces.Discrete(2)}))
    seen = flatten({"a": {"b": ("go left", "stay")}, "c": np.array([0, 1])}, fields)
    assert seen["a.b"][:, :3].tolist() == [[bucket("go"), bucket("left"), 0], [bucket("stay"), 0, 0]]


def test_missions_from_worker_processes_line_up_with_rewards():
    """The reward shows which action was right, and so does the word after "go" of the row before."""
    with make(MISSION, 4, threads=2) as envs:
        assert envs.spec.obs["mission"] == text_spec()
        seen = play(envs, 40)
    rows = seen.obs["mission"]
    after_go = np.take_along_axis(rows, (rows == bucket("go")).argmax(-1)[..., None] + 1, -1)[..., 0]
    right = np.select([after_go == bucket(w) for w in Mission.actions], range(3), -1)
    assert set(right.reshape(-1)) == {0, 1, 2}
    real = ~seen.is_first[1:]
    assert (rows[1:] == rows[:-1]).all(-1)[real].all()
    expected = np.where(real, 0.25 * (seen.action == right[:-1]), 0)
    np.testing.assert_array_equal(seen.reward[1:], expected)


def test_envpools_missions_are_those_of_their_episodes():
    with make("BabyAI-GoToObj-v0", 4, max_episode_steps=6) as envs:
        assert envs.spec.obs["mission"] == text_spec()
        seen = play(envs, 40)
    rows = seen.obs["mission"]
    assert (rows[..., :3] == [bucket(w) for w in ("go", "to", "the")]).all()
    assert set(rows[..., 3].reshape(-1)) <= {bucket(w) for w in ("red", "green", "blue", "purple", "yellow", "grey")}
    assert set(rows[..., 4].reshape(-1)) == {bucket(w) for w in ("ball", "box", "key")}
    assert not rows[..., 5:].any()
    same = (rows[1:] == rows[:-1]).all(-1)
    assert same[~seen.is_first[1:]].all()
    assert not same[seen.is_first[1:]].all()

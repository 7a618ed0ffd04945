"""Spaces to specs, and the conversions at the env's edge."""

import numpy as np
import pytest
from gymnasium import spaces

from coterie.envs.spaces import action_map, flatten, obs_fields, random_actions
from coterie.types import ConfigError


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


def test_boxes_keep_what_torch_knows_and_scalars_get_an_axis():
    specs, x = convert(spaces.Box(-1, 1, (2,), np.float64), np.zeros((4, 2)))
    assert (specs[""].dtype, x.dtype) == ("float32", np.float32)
    specs, x = convert(spaces.Box(0, 255, (1, 8, 8), np.uint8), np.full((4, 1, 8, 8), 9, np.uint8))
    assert specs[""].is_image
    assert (specs[""].low, specs[""].high) == (0, 255)
    specs, x = convert(spaces.Box(-1, 1, (), np.float32), np.array([0.25, 0.5], np.float32))
    assert specs[""].shape == (1,)
    np.testing.assert_array_equal(x, [[0.25], [0.5]])


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
    m = action_map("env", spaces.Box(-1, 1, (2, 2), np.float32))
    x = m.to_env(np.array([[0.5, -0.5, 4, 1]], np.float32))
    np.testing.assert_array_equal(x, [[[0.5, -0.5], [1, 1]]])


def test_random_actions_fit_the_spec():
    rng = np.random.default_rng(0)
    multi = random_actions(action_map("env", spaces.MultiDiscrete([2, 5])).spec, rng, 200)
    assert multi.shape == (200, 2)
    np.testing.assert_array_equal(multi.max(0), [1, 4])
    box = random_actions(action_map("env", spaces.Box(-9, 9, (3,), np.float32)).spec, rng, 200)
    assert (np.abs(box) <= 1).all()
    assert box.dtype == np.float32


def test_spaces_that_are_not_supported_are_refused():
    for space in (spaces.Sequence(spaces.Discrete(2)), spaces.Dict({"g": spaces.Tuple([])}), spaces.Dict({})):
        with pytest.raises(ConfigError, match=r"env\.id 'env'"):
            obs_fields("env", space)
    with pytest.raises(ConfigError, match="action space"):
        action_map("env", spaces.Dict({"a": spaces.Discrete(2)}))

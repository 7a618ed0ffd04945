"""Grids of codes (MiniGrid's): told apart by name, and read together with what an instruction says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from coterie import config
from coterie.config import Model
from coterie.envs.make import make_spec
from coterie.envs.spaces import obs_fields
from coterie.envs.text import text_rows, text_spec
from coterie.models.build import Network
from coterie.models.torsos import GridTorso
from coterie.types import ActionSpec, Inputs, ObsSpec, Spec
from coterie.wire.codec import Refused, check_values
from tests.envs.env_harness import make, play

CODES = (11, 6, 4)
SPEC = Spec(
    "made-up",
    {"image": ObsSpec((7, 7, 3), "uint8", codes=CODES), "mission": text_spec()},
    ActionSpec("categorical", (4,)),
)


def params(model: Network, image: torch.Tensor, *missions: str) -> torch.Tensor:
    n = len(missions)
    obs = {"image": image.expand(n, -1, -1, -1), "mission": torch.from_numpy(text_rows(missions))}
    state = model.initial_state(n)
    return model(Inputs(obs, torch.zeros(n, dtype=torch.bool), torch.zeros(n).long(), torch.zeros(n)), state)[0]


def test_minigrids_image_is_a_grid_of_codes_and_what_it_shows_are_such():
    for env_id in ("MiniGrid-Fetch-5x5-N2-v0", "BabyAI-GoToObj-v0"):
        spec = make_spec(config.Env(env_id), config.Atari())
        image = spec.obs["image"]
        assert (image.codes, image.is_image, image.is_numeric) == (CODES, False, False)
        assert spec.to_json()["obs"]["image"] == [[7, 7, 3], "uint8", "codes", *CODES]
        with make(env_id, 4, max_episode_steps=20) as envs:
            seen = play(envs, 40)
        x = np.stack(seen.obs["image"])
        assert (x < np.array(CODES)).all()
        assert x[..., 0].max() > 2  # something beside walls
    space = make_spec(config.Env("Pong-v5"), config.Atari()).obs[""]
    assert (space.codes, space.is_image) == ((), True)


def test_only_an_image_of_so_many_channels_is_a_grid():
    from gymnasium import spaces

    grid, stack = (spaces.Box(0, 255, shape, np.uint8) for shape in ((7, 7, 3), (7, 7, 4)))
    codes = {f.name: f.spec.codes for f in obs_fields("MiniGrid-X-v0", spaces.Dict({"image": grid, "other": grid}))}
    assert codes == {"image": CODES, "other": ()}
    assert obs_fields("MiniGrid-X-v0", spaces.Dict({"image": stack}))[0].spec.codes == ()
    assert obs_fields("Other-v0", spaces.Dict({"image": grid}))[0].spec.codes == ()


@pytest.mark.parametrize("size", [3, 5, 7, 25])
def test_every_code_of_every_cell_is_told_apart(size):
    """By the first layer, to which each code of each channel is a channel of its own."""
    torch.manual_seed(0)
    torso = GridTorso((size, size, 3), CODES)
    seen: list[torch.Tensor] = []
    torso.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.zeros(sum(CODES), size, size, 3, dtype=torch.uint8)
    places = [(channel, code) for channel, count in enumerate(CODES) for code in range(count)]
    for i, (channel, code) in enumerate(places):
        x[i, 1, 2, channel] = code
    y = torso(x)
    assert y.shape == (len(x), torso.size)
    for i, (channel, code) in enumerate(places):
        hot = seen[0][i, :, 1, 2].reshape(-1)
        assert hot.sum() == len(CODES)
        assert hot[sum(CODES[:channel]) + code] == 1
    # Code 0 of one channel beside the zeros of the others is the same cell three times: all others differ.
    apart = torch.cdist(y.detach(), y.detach()) > 1e-4
    same = torch.tensor([code == 0 for _, code in places])
    assert (apart == ~(torch.eye(len(places), dtype=torch.bool) | (same[:, None] & same))).all()


def test_an_instruction_says_what_a_thing_in_the_image_means():
    """Without a layer over both, what the mission adds to each action would be the same whatever is seen."""
    torch.manual_seed(0)
    image = torch.stack([torch.randint(0, n, (2, 7, 7)) for n in CODES], -1).to(torch.uint8)
    for core in ("none", "lstm"):
        model = Network(SPEC, Model(core=core))
        assert (model.torso.joint is None) == (core == "lstm")
        told = [params(model, x, "get the red ball", "get the blue key") for x in image]
        first, second = (x[0] - x[1] for x in told)
        assert not torch.allclose(first, second, rtol=0.05)
    additive = Network(SPEC, Model())
    additive.torso.joint.bias.data.fill_(100.0)  # nothing is cut off
    told = [params(additive, x, "get the red ball", "get the blue key") for x in image]
    assert not torch.allclose(told[0][0], told[0][1])
    torch.testing.assert_close(told[0][0] - told[0][1], told[1][0] - told[1][1], atol=1e-4, rtol=1e-3)


def test_one_entry_needs_no_layer_over_it():
    assert Network(dataclasses.replace(SPEC, obs={"mission": text_spec()}), Model()).torso.joint is None


def test_a_code_out_of_range_is_refused_on_the_wire():
    zeros = {"reward": np.zeros(1), "episode_return": np.full(1, np.nan), "episode_length": np.full(1, np.nan)}
    arrays = {"obs/image": np.zeros((1, 7, 7, 3), np.uint8), "obs/mission": text_rows(["go"]), **zeros}
    check_values(SPEC, arrays)
    for channel, count in enumerate(CODES):
        arrays["obs/image"][:] = 0
        arrays["obs/image"][0, 3, 3, channel] = count - 1
        check_values(SPEC, arrays)
        arrays["obs/image"][0, 3, 3, channel] = count
        with pytest.raises(Refused, match="'image' has a code out of its range"):
            check_values(SPEC, arrays)

"""The first convolution over frames, on whatever pixels it is computed; bounds of bytes, and the axes of images."""

from __future__ import annotations

import pytest
import torch

from coterie.config import Model
from coterie.models.torsos import Frames, build_torso, layout
from coterie.types import ObsSpec


@pytest.mark.parametrize("hwc", [False, True])
@pytest.mark.parametrize("size", [(84, 84), (37, 39), (104, 80)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_folded_frames_have_the_outputs_and_gradients_of_a_convolution(hwc, size, channels):
    layer = Frames(channels, 16, 8, 4, 0, hwc)
    x = torch.randint(0, 256, (4, *((*size, channels) if hwc else (channels, *size))), dtype=torch.uint8)
    for part in (x, x[1:3], x[::2]):
        pixels = part.permute(0, 3, 1, 2) if hwc else part
        wanted = torch.nn.functional.conv2d(pixels.float() / 255, layer.conv.weight, layer.conv.bias, 4)
        found, upstream = layer(part), torch.randn_like(wanted)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        gradients = [torch.autograd.grad(y, layer.conv.parameters(), upstream) for y in (found, wanted)]
        torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


def test_folded_frames_are_right_in_bf16_and_where_they_cannot_be_folded():
    layer = Frames(4, 16, 8, 4, 0, False)
    x = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    wanted = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x).float(), wanted, atol=0.05, rtol=0.05)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), x.flatten()))[1:].view_as(x)
    assert shifted.storage_offset() == 1
    for other in (shifted, x.float()):
        torch.testing.assert_close(layer(other), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("shape", "torso"), [((9,), "mlp"), ((10, 10, 3), "impala"), ((40, 40, 1), "nature")])
def test_bytes_of_a_space_with_a_smaller_bound_are_fractions_of_that(shape, torso):
    nets = [build_torso({"": ObsSpec(shape, "uint8", 0.0, high)}, Model(torso=torso)) for high in (5.0, 255.0)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randint(0, 6, (2, *shape), dtype=torch.uint8)
    torch.testing.assert_close(nets[0](x), nets[1](51 * x))


def test_the_channels_of_an_image_are_its_shorter_side_or_beside_a_square():
    shapes = [(84, 84, 4), (4, 84, 84), (100, 50, 3), (17, 8, 8), (48, 42, 42)]
    assert [layout(shape)[1] for shape in shapes] == [True, False, True, False, False]

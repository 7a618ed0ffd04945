"""Torsos: observations in, a feature vector out. The only place where uint8 becomes float.

a3c (A3C, Accelerated Methods), a3c-gae (A3C with GAE; its FC-FC-LSTM is mlp and a core), gala (GALA), nature (DQN),
nature-conv (without its last layer, for dueling streams), impala (IMPALA's ResNet), football (SEED RL's, with a fourth
stage), mlp. Whatever the choice, text has the torso of models/text.py, a grid of codes has `GridTorso`, and a small
image beside a large one an MLP, unless the choice is a ResNet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.config import Model as ModelConfig
from coterie.errors import ConfigError
from coterie.models.heads import init
from coterie.models.mlp import MLPPair, MLPTorso, compute_dtype, scale_of
from coterie.models.text import TextTorso, uncompiled
from coterie.plugins import call
from coterie.types import ObsSpec

# (channels, kernel, stride) of each convolution, and the width of the layer after them (0: none, a core follows).
_CONVS: dict[str, tuple[tuple[tuple[int, int, int], ...], int]] = {
    "a3c": (((16, 8, 4), (32, 4, 2)), 256),
    "a3c-gae": (((16, 8, 4), (32, 4, 2), (16, 3, 1)), 0),
    "gala": (((32, 8, 4), (64, 4, 2), (32, 3, 1)), 512),
    "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    "nature-conv": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 0),
}
# Channels of each stage of a ResNet.
_RESNETS = {"impala": (16, 32, 32), "football": (16, 32, 32, 32)}
FOR_IMAGES = (*_CONVS, *_RESNETS)
NAMES = (*FOR_IMAGES, "mlp", "auto")
Image = tuple[int, int, int]  # channels, height, width
SMALLEST_CONV_IMAGE = 36  # pixels; the 8-4-3 stacks need as many
_SIDE = 4  # the stride of the first convolution of all but the ResNets


class Frames(nn.Module):
    """The first convolution over uint8 frames times `scale`, which its weights are multiplied by, not each pixel."""

    def __init__(
        self, channels: int, out: int, kernel: int, stride: int, padding: int, hwc: bool, scale: float = 1 / 255
    ) -> None:
        super().__init__()
        self.conv = init(nn.Conv2d(channels, out, kernel, stride, padding))
        self.hwc, self.scale = hwc, scale
        self.folds = (kernel, stride, padding) == (8, _SIDE, 0)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight * self.scale
        if self.folds and _foldable(x):
            return F.conv2d(*_folded(x, weight, self.hwc), self.conv.bias)
        if self.hwc:
            x = x.permute(0, 3, 1, 2)
        # What follows keeps this layout, in which oneDNN and cuDNN are fastest (IMPALA's ResNet on a Xeon with AMX: 1.5
        # times in float32, 2.3 times in bf16).
        x = x.to(compute_dtype(weight), memory_format=torch.channels_last)
        return F.conv2d(x, weight, self.conv.bias, self.conv.stride, self.conv.padding)


def _foldable(x: Tensor) -> bool:
    """Whether its bytes can be taken as integers: ONNX cannot, nor can a view that begins in between."""
    aligned = x.dtype == torch.uint8 and x.storage_offset() % _SIDE == 0
    return aligned and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _folded(x: Tensor, weight: Tensor, hwc: bool) -> tuple[Tensor, Tensor]:
    """Frames and weights of an 8x8 convolution of stride 4 as those of a 2x2 convolution of stride 1 with the same
    outputs: each square of 4x4 pixels becomes one pixel with 16 times the channels.

    Four channels are too few for oneDNN's kernels (Nature, 320 samples, forward and backward, one core of a Xeon with
    AMX: 53 instead of 73 ms in bf16; the a3c net 25 instead of 35; float32 gains 3 to 9%). Pixels move as bytes, four
    at a time.
    """
    if hwc:
        n, height, width, c = x.shape
        h, w = height // _SIDE, width // _SIDE
        cut = x[:, : h * _SIDE, : w * _SIDE].contiguous().view(n, h, _SIDE, w, _SIDE * c)
        squares, order = cut.view(torch.int32).transpose(2, 3), (3, 5, 1)  # y and x in a square, channel
    else:
        n, c, height, width = x.shape
        h, w = height // _SIDE, width // _SIDE
        cut = x[..., : h * _SIDE, : w * _SIDE].contiguous().view(n, c, h, _SIDE, w * _SIDE)
        squares, order = cut.view(torch.int32).permute(0, 2, 4, 1, 3), (1, 3, 5)
    pixels = squares.contiguous().view(torch.uint8).view(n, h, w, _SIDE * _SIDE * c)
    folded = weight.reshape(len(weight), c, 2, _SIDE, 2, _SIDE).permute(0, 2, 4, *order).flatten(3)
    return pixels.to(compute_dtype(weight)).permute(0, 3, 1, 2), folded.permute(0, 3, 1, 2)


class Torso(nn.Module):
    """Layers in a row, whose output is flattened to `maps` numbers, then a layer of `width` (0: none)."""

    def __init__(self, layers: Sequence[nn.Module], maps: int, width: int) -> None:
        super().__init__()
        dense = [init(nn.Linear(maps, width)), nn.ReLU(inplace=True)] if width else []
        self.layers = nn.Sequential(*layers, nn.Flatten(), *dense)
        self.size = width or maps

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _conv_torso(name: str, image: Image, hwc: bool, scale: float) -> Torso:
    """a3c, a3c-gae, gala, nature and nature-conv."""
    convolutions, width = _CONVS[name]
    channels, *sides = image
    # Accelerated Methods pads every convolution but the first on its 104x80 frames (12x9 maps in the end).
    padding = int(sides == [104, 80])
    layers: list[nn.Module] = []
    for out, kernel, stride in convolutions:
        pad = padding if layers else 0
        if layers:
            layers.append(init(nn.Conv2d(channels, out, kernel, stride, pad)))
        else:
            layers.append(Frames(channels, out, kernel, stride, pad, hwc, scale))
        layers.append(nn.ReLU(inplace=True))
        channels, sides = out, [(side + 2 * pad - kernel) // stride + 1 for side in sides]
    return Torso(layers, channels * math.prod(sides), width)


class Residual(nn.Module):
    """ReLU-conv-ReLU-conv plus the input (IMPALA, Figure 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)
        init(self.a)
        init(self.b, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(F.relu(x))))
        return x + y


def _resnet(name: str, image: Image, hwc: bool, scale: float) -> Torso:
    """IMPALA's deep net: stages of conv, max-pool (padded on both sides; TensorFlow: at the end) and two residual
    blocks.
    """
    channels, *sides = image
    layers: list[nn.Module] = []
    for out in _RESNETS[name]:
        if layers:
            layers.append(init(nn.Conv2d(channels, out, 3, padding=1)))
        else:
            layers.append(Frames(channels, out, 3, 1, 1, hwc, scale))
        layers += [nn.MaxPool2d(3, 2, padding=1), Residual(out), Residual(out)]
        channels, sides = out, [(side + 1) // 2 for side in sides]
    return Torso([*layers, nn.ReLU()], channels * math.prod(sides), 256)


class GridTorso(Torso):
    """Cells of codes (MiniGrid's) as one-hot vectors, two 3x3 convolutions, one layer: `[N, H, W, C]` -> `[N, 128]`.

    A code is a name. Divided by 255 like a pixel, its differences would be too small to learn from.
    """

    channels: Tensor
    names: Tensor

    def __init__(self, shape: tuple[int, ...], codes: tuple[int, ...]) -> None:
        pad = int(min(shape[:2]) < 5)
        layers: list[nn.Module] = []
        for channels in (sum(codes), 32):
            layers += [init(nn.Conv2d(channels, 32, 3, padding=pad)), nn.ReLU(inplace=True)]
        super().__init__(layers, 32 * math.prod(side - 4 + 4 * pad for side in shape[:2]), 128)
        names = [(channel, code) for channel, count in enumerate(codes) for code in range(count)]
        self.register_buffer("channels", torch.tensor([x for x, _ in names]), persistent=False)
        self.register_buffer("names", torch.tensor([x for _, x in names], dtype=torch.uint8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hot = (x.index_select(3, self.channels) == self.names).permute(0, 3, 1, 2)
        return super().forward(hot.to(compute_dtype(next(self.layers.parameters()))))


class DictTorso(nn.Module):
    """One torso for each entry of a dict observation, features side by side.

    `joint`: a layer over them. Without it, linear heads would add up each entry's separate contribution: an instruction
    could not select the object to walk to. A core has the same effect.
    """

    def __init__(self, torsos: dict[str, nn.Module], joint: bool) -> None:
        super().__init__()
        self.keys = list(torsos)
        self.torsos = nn.ModuleList(torsos.values())
        self.size = sum(cast(int, t.size) for t in torsos.values())
        self.joint: nn.Linear | None = None
        if joint:
            self.joint = init(nn.Linear(self.size, 128))
            self.size = 128

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        y = torch.cat([torso(x[key]).float() for key, torso in zip(self.keys, self.torsos, strict=True)], dim=-1)
        return y if self.joint is None else F.relu(self.joint(y.to(compute_dtype(self.joint.weight))))


def layout(shape: tuple[int, ...]) -> tuple[Image, bool]:
    """Channels, height and width of an image's shape, and whether it has channels last, as gymnasium's do."""
    square_last = shape[1] == shape[2] != shape[0]  # [C, H, W] with more channels than rows
    hwc = shape[-1] < shape[0] and not square_last
    return ((shape[2], shape[0], shape[1]) if hwc else (shape[0], shape[1], shape[2])), hwc


def torsos_of(obs: dict[str, ObsSpec], config: ModelConfig) -> dict[str, str]:
    """The name of each observation's torso. `model.torso` is for images; small ones beside a large one have it only if
    it is a ResNet.
    """
    own = {key: _by_kind(spec) for key, spec in obs.items()}
    if config.torso == "auto":
        return own
    small = {"mlp"} if config.torso in _RESNETS or "nature" not in own.values() else set()
    images = [key for key, name in own.items() if obs[key].is_image and name in {"nature"} | small]
    return own | dict.fromkeys(images, config.torso)


def _by_kind(spec: ObsSpec) -> str:
    if spec.text or spec.codes:
        return "text" if spec.text else "grid"
    return "nature" if spec.is_image and min(layout(spec.shape)[0][1:]) >= SMALLEST_CONV_IMAGE else "mlp"


def _one(spec: ObsSpec, config: ModelConfig, name: str) -> nn.Module:
    if name == "text":
        return (TextTorso if config.compile == "none" else uncompiled())(spec)
    if name == "grid":
        return GridTorso(spec.shape, spec.codes)
    if name == "mlp":
        return MLPTorso(spec.shape, config.hidden, config.activation, scale_of(spec))
    image, hwc = layout(spec.shape)
    if name in _RESNETS:
        return _resnet(name, image, hwc, scale_of(spec))
    if min(image[1:]) < SMALLEST_CONV_IMAGE:
        raise ConfigError(f"model.torso: {name} needs images of {SMALLEST_CONV_IMAGE} pixels; use mlp, impala or auto")
    return _conv_torso(name, image, hwc, scale_of(spec))


def build_torso(obs: dict[str, ObsSpec], config: ModelConfig) -> nn.Module:
    """The torso that `model.torso` names, with `size`, the width of its features.

    A custom one is `package.module:callable`, called with the observation specs and the model config, and takes the
    observation as the env gives it (`[N, ...]`, or a dict of such; text as rows of word hashes).
    """
    if ":" in config.torso:
        torso = call("model.torso", config.torso, obs, config)
        if not isinstance(torso, nn.Module) or not isinstance(getattr(torso, "size", None), Integral):
            raise ConfigError("model.torso: it must be a torch.nn.Module with size, the width of its features")
        return torso
    if config.torso not in NAMES:
        raise ConfigError(f"model.torso: {config.torso!r} is not one of {', '.join(NAMES)} or package.module:callable")
    made = {key: _one(obs[key], config, name) for key, name in torsos_of(obs, config).items()}
    joint = len(obs) > 1 and config.core == "none"
    return made[""] if list(obs) == [""] else DictTorso(made, joint)


def build_pair(obs: dict[str, ObsSpec], config: ModelConfig) -> MLPPair | None:
    """Both towers of a policy and a value that share nothing, where one module can hold them: vectors and an MLP."""
    if (
        list(obs) != [""]
        or not obs[""].is_numeric
        or ":" in config.torso
        or config.torso not in NAMES
        or not config.hidden
    ):
        return None
    return MLPPair(obs[""].shape, config.hidden, config.activation)

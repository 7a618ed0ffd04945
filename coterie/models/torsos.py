"""Torsos: observations in, a feature vector out. The only place where uint8 becomes float.

a3c (A3C, Accelerated Methods), a3c-gae (A3C with GAE; its FC-FC-LSTM is mlp and a core), gala (GALA), nature (DQN),
nature-conv (without its last layer, for dueling streams), impala (IMPALA's ResNet), football (SEED RL's, with a fourth
stage), mlp. Whatever is named here, an entry that is text has the torso of models/text.py, and a grid of codes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.config import Model as ModelConfig
from coterie.models.mlp import MLPPair, MLPTorso, compute_dtype, init
from coterie.models.text import TextTorso
from coterie.plugins import named
from coterie.types import ConfigError, ObsSpec

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
NAMES = (*_CONVS, *_RESNETS, "mlp", "auto")
_SMALLEST_CONV_IMAGE = 36  # pixels; the 8-4-3 stacks need as many


class Frames(nn.Module):
    """The first convolution over uint8 frames: the division by 255 is folded into its weights, not done per pixel."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, padding: int, hwc: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding)
        self.hwc = hwc
        init(self.conv)

    def forward(self, x: Tensor) -> Tensor:
        if self.hwc:
            x = x.permute(0, 3, 1, 2)
        dtype = compute_dtype(self.conv.weight)
        # oneDNN's float32 convolutions are 1.5x faster on channels-last; bf16 hardly differs.
        layout = torch.channels_last if dtype == torch.float32 else torch.contiguous_format
        weight = self.conv.weight * (1 / 255)
        return F.conv2d(x.to(dtype, memory_format=layout), weight, self.conv.bias, self.conv.stride, self.conv.padding)


class ConvTorso(nn.Module):
    """Convolutions, then one layer: a3c, gala and nature; a3c-gae has none, for the LSTM comes next."""

    def __init__(self, name: str, shape: tuple[int, int, int], hwc: bool) -> None:
        super().__init__()
        layers, width = _CONVS[name]
        channels, height, wide = shape
        # Accelerated Methods pads every convolution but the first on its 104x80 frames (12x9 maps in the end).
        pad = int((height, wide) == (104, 80))
        modules: list[nn.Module] = []
        for i, (out, kernel, stride) in enumerate(layers):
            if i == 0:
                modules.append(Frames(channels, out, kernel, stride, 0, hwc))
            else:
                modules.append(nn.Conv2d(channels, out, kernel, stride, pad))
                init(modules[-1])  # type: ignore[arg-type]
            modules.append(nn.ReLU(inplace=True))
            p = 0 if i == 0 else pad
            height, wide, channels = (height + 2 * p - kernel) // stride + 1, (wide + 2 * p - kernel) // stride + 1, out
        modules.append(nn.Flatten())
        self.size = channels * height * wide
        if width:
            linear = nn.Linear(self.size, width)
            init(linear)
            modules += [linear, nn.ReLU(inplace=True)]
            self.size = width
        self.layers = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


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


class ImpalaTorso(nn.Module):
    """IMPALA's deep net: stages of conv, max-pool and two residual blocks, then one layer of 256."""

    def __init__(self, shape: tuple[int, int, int], hwc: bool, channels: Sequence[int]) -> None:
        super().__init__()
        c, height, wide = shape
        modules: list[nn.Module] = []
        for i, out in enumerate(channels):
            if i == 0:
                modules.append(Frames(c, out, 3, 1, 1, hwc))
            else:
                modules.append(nn.Conv2d(c, out, 3, padding=1))
                init(modules[-1])  # type: ignore[arg-type]
            modules += [nn.MaxPool2d(3, 2, padding=1), Residual(out), Residual(out)]
            c, height, wide = out, (height + 1) // 2, (wide + 1) // 2
        linear = nn.Linear(c * height * wide, 256)
        init(linear)
        self.layers = nn.Sequential(*modules, nn.ReLU(), nn.Flatten(), linear, nn.ReLU(inplace=True))
        self.size = 256

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class GridTorso(nn.Module):
    """Cells of codes (MiniGrid's) as one-hot vectors, two 3x3 convolutions, one layer: `[N, H, W, C]` -> `[N, 128]`.

    A code is a name. As an amount, a part of 255, it is nearly nothing: a policy could not tell colours apart.
    """

    def __init__(self, shape: tuple[int, ...], codes: tuple[int, ...]) -> None:
        super().__init__()
        height, wide, _ = shape
        pad = int(min(height, wide) < 5)
        modules: list[nn.Module] = []
        for a, b in ((sum(codes), 32), (32, 32)):
            modules += [nn.Conv2d(a, b, 3, padding=pad), nn.ReLU(inplace=True)]
            init(modules[-2])  # type: ignore[arg-type]
            height, wide = height - 2 + 2 * pad, wide - 2 + 2 * pad
        linear = nn.Linear(32 * height * wide, 128)
        init(linear)
        self.layers = nn.Sequential(*modules, nn.Flatten(), linear, nn.ReLU(inplace=True))
        self.size = 128
        names = [(channel, code) for channel, count in enumerate(codes) for code in range(count)]
        self.register_buffer("channels", torch.tensor([x for x, _ in names]), persistent=False)
        self.register_buffer("names", torch.tensor([x for _, x in names], dtype=torch.uint8), persistent=False)

    channels: Tensor
    names: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hot = (x.index_select(3, self.channels) == self.names).permute(0, 3, 1, 2)
        return self.layers(hot.to(compute_dtype(next(self.layers.parameters()))))  # type: ignore[no-any-return]


class DictTorso(nn.Module):
    """One torso for each entry of a dict observation, features side by side.

    `joint`: a layer over them, without which heads right behind would add up what each entry says by itself: an
    instruction could not say which object to walk to. A core is such a layer.
    """

    def __init__(self, torsos: dict[str, nn.Module], joint: bool) -> None:
        super().__init__()
        self.keys = list(torsos)
        self.torsos = nn.ModuleList(torsos.values())
        self.size = sum(cast(int, t.size) for t in torsos.values())
        self.joint: nn.Linear | None = None
        if joint:
            self.joint = nn.Linear(self.size, 128)
            init(self.joint)
            self.size = 128

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        y = torch.cat([torso(x[key]).float() for key, torso in zip(self.keys, self.torsos, strict=True)], dim=-1)
        return y if self.joint is None else F.relu(self.joint(y.to(compute_dtype(self.joint.weight))))


def layout(shape: tuple[int, ...]) -> tuple[tuple[int, int, int], bool]:
    """`(channels, height, width)` of an image's shape, and whether it stores channels last, as gymnasium's do."""
    hwc = shape[-1] < shape[0]
    return ((shape[2], shape[0], shape[1]) if hwc else (shape[0], shape[1], shape[2])), hwc


def _one(spec: ObsSpec, config: ModelConfig) -> nn.Module:
    if spec.text:
        return TextTorso(spec)
    if spec.codes:
        return GridTorso(spec.shape, spec.codes)
    name, image = config.torso, None
    if spec.is_image:
        image, hwc = layout(spec.shape)
        if name == "auto":
            name = "nature" if min(image[1:]) >= _SMALLEST_CONV_IMAGE else "mlp"
    elif name in (*_CONVS, *_RESNETS, "auto"):
        name = "mlp"  # the vector beside an image, or a vector env
    if name == "mlp":
        return MLPTorso(spec.shape, config.hidden, config.activation, spec.dtype == "uint8")
    assert image is not None
    if name in _RESNETS:
        return ImpalaTorso(image, hwc, _RESNETS[name])
    if min(image[1:]) < _SMALLEST_CONV_IMAGE:
        raise ConfigError(f"model.torso: {name} needs images of {_SMALLEST_CONV_IMAGE} pixels; use mlp, impala or auto")
    return ConvTorso(name, image, hwc)


def build_torso(obs: dict[str, ObsSpec], config: ModelConfig) -> nn.Module:
    """The torso that `model.torso` names; it has `size`, the width of its features.

    A custom one is `package.module:callable`, called with the observation specs and the model config, and takes the
    observation as the env gives it (`[N, ...]`, or a dict of such; text as rows of word hashes).
    """
    if ":" in config.torso:
        return cast(nn.Module, named("model.torso", config.torso)(obs, config))
    if config.torso not in NAMES:
        raise ConfigError(f"model.torso: {config.torso!r} is not one of {', '.join(NAMES)} or package.module:callable")
    if list(obs) == [""]:
        return _one(obs[""], config)
    joint = len(obs) > 1 and config.core == "none"
    return DictTorso({key: _one(spec, config) for key, spec in obs.items()}, joint)


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

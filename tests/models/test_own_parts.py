"""Torsos and cores of the user's, and images of several sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coterie import presets
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Model
from coterie.errors import ConfigError, CoterieError
from coterie.models.build import Network, acting_copy
from coterie.models.tryout import try_out
from coterie.types import Inputs, ObsSpec
from tests.conftest import IMAGE, VECTOR, make_rollout
from tests.models.test_models import inputs_of


def custom_torso(obs, config):
    net = torch.nn.Linear(3, 6)
    net.size = 6
    return net


def broken_torso(obs, config):
    return custom_torso(obs, config)[1:]


class WideTorso(torch.nn.Module):
    """Torch raises, in a layer of another width."""

    size = 6

    def __init__(self, obs, config):
        super().__init__()
        self.layer = torch.nn.Linear(7, 6)

    def forward(self, obs):
        return self.layer(obs)


@pytest.mark.parametrize(("torso", "error"), [("broken_torso", "TypeError"), ("WideTorso", "RuntimeError")])
def test_a_mistake_in_a_custom_torso_is_one_line_with_its_place_and_a_traceback(torso, error):
    config = presets.ppo(env="CartPole-v1", model={"torso": f"{__name__}:{torso}"})
    says = rf"^model: the network cannot be made or used: {error}: .*own_parts\.py, line \d+, in (forward|{torso})\)"
    with pytest.raises(CoterieError, match=says) as caught:
        check(resolve_config(config), VECTOR)
    assert "Traceback" in caught.value.trace


def test_a_custom_torso_is_named_by_module_and_callable():
    model = Network(VECTOR, Model(torso="tests.models.test_own_parts:custom_torso", share="yes"))
    assert model.policy.in_features == 6


def make_core(size: int, config: Model) -> torch.nn.Module:
    """A core that leaves the dtype of its input as it is."""
    core = torch.nn.Linear(size, 6)
    core.forward = lambda x, is_first, state: (torch.nn.Linear.forward(core, x), state)  # type: ignore[method-assign]
    core.size, core.initial_state = 6, lambda batch: torch.zeros(batch, 1)  # type: ignore[assignment]
    return core


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (torch.zeros(3), r"initial_state\(3\) is torch.float32 \[3\], not float32 \[3, N"),
        (torch.zeros(3, 1, dtype=torch.float64), r"initial_state\(3\) is torch.float64"),
        (torch.zeros(1, 3, 4), r"is torch.float32 \[1, 3, 4\], not float32 \[3, N"),
        (torch.ones(3, 1), "initial_state must be zeros"),
        ((torch.zeros(3, 1), torch.zeros(3, 1)), "initial_state must return one tensor, not tuple"),
    ],
)
def test_the_state_of_a_custom_core_is_checked(monkeypatch, state, says):
    model = Network(VECTOR, Model(core="tests.models.test_own_parts:make_core"))
    monkeypatch.setattr(model.core, "initial_state", lambda batch: state)
    with pytest.raises(ConfigError, match=says):
        try_out(model)


def test_a_custom_core_is_as_wide_as_it_says():
    model = Network(VECTOR, Model(core="tests.models.test_own_parts:make_core"))
    model.core.size = 9
    with pytest.raises(ConfigError, match=r"^model\.core: its size is 9, but its output has shape \[2, 3, 6\]$"):
        try_out(model)


def no_module(size: int, config: Model) -> object:
    return SimpleNamespace(size=size, initial_state=lambda batch: torch.zeros(batch, 1))


def test_a_custom_core_must_be_a_module():
    with pytest.raises(ConfigError, match=r"^model\.core: it must be a torch\.nn\.Module with size"):
        Network(VECTOR, Model(core="tests.models.test_own_parts:no_module"))


def test_a_small_image_beside_a_large_one_has_a_torso_of_its_own():
    images = {"map": ObsSpec((11, 11, 3), "uint8"), "screen": ObsSpec((84, 84, 3), "uint8")}
    images["speed"] = ObsSpec((2,), "float32")
    torso = Network(replace(VECTOR, obs=images), Model(torso="a3c")).torso
    assert [type(part).__name__ for part in torso.torsos] == ["MLPTorso", "Torso", "MLPTorso"]
    with pytest.raises(ConfigError, match="a3c needs images of 36 pixels"):
        Network(replace(VECTOR, obs={"map": images["map"]}), Model(torso="a3c"))


def test_a_custom_core_acts_in_float32_behind_a_torso_in_bf16():
    model = Network(IMAGE, Model(torso="auto", core="tests.models.test_own_parts:make_core"))
    twin, _ = acting_copy(model, torch.bfloat16)
    seen = Inputs(*(x[0] for x in inputs_of(make_rollout(IMAGE, 1, 5), 1)))
    with torch.inference_mode():
        assert twin(seen, twin.initial_state(5))[0].dtype == torch.float32
    found = []
    model.core.register_forward_hook(lambda core, given, answer: found.append(answer[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):  # as in training
        model(seen, model.initial_state(5))
    assert found == [torch.float32]

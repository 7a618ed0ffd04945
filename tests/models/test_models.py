"""The nets: folding, resets, copies that act, normalizers."""

from __future__ import annotations

import pytest
import torch

from coterie.config import Model, Q
from coterie.errors import ConfigError
from coterie.models.build import Network, acting_copy
from coterie.models.mlp import Tanh
from coterie.models.torsos import Residual, build_torso
from coterie.parallel.params import FlatParams
from coterie.types import Inputs, ObsSpec
from tests.conftest import IMAGE, VECTOR, make_rollout


def inputs_of(rollout, t):
    obs = {k: x[:t] for k, x in rollout.obs.items()} if isinstance(rollout.obs, dict) else rollout.obs[:t]
    return Inputs(obs, rollout.is_first[:t], rollout.prev_action[:t], rollout.prev_reward[:t])


CORES = {
    "none": Model(),
    "lstm": Model(core="lstm", core_size=8, last_action_reward=True),
    "gru": Model(core="gru", core_size=8),
    "gtrxl": Model(core="gtrxl", core_size=8, core_memory=3, core_heads=2, last_action_reward=True),
    "own core": Model(core="tests.support.networks:Leaky", core_size=8),
    "own network": Model(network="tests.support.networks:Mixer"),
    "own network with memory": Model(network="tests.support.networks:Counter"),
}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=["vector", "image"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "acting"])
def test_a_network_over_a_whole_rollout_equals_it_step_by_step(spec, core, grad):
    model = Network(spec, CORES[core])
    rollout, t = make_rollout(spec, 12, 5), 7
    whole = inputs_of(rollout, 12)
    assert whole.is_first.any()
    state = model.initial_state(5)
    with torch.set_grad_enabled(grad):
        if state is not None:  # a memory of an earlier rollout, whose episode goes on
            _, _, state = model(whole.map(lambda x: x[:t]), state)
        rest = whole.map(lambda x: x[t:])
        params, value, last = model(rest, state)
        for i in range(12 - t):
            p, v, state = model(rest.map(lambda x, i=i: x[i]), state)
            torch.testing.assert_close(p, params[i], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(v, value[i], atol=1e-5, rtol=1e-4)
    if state is not None:
        torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("core", [name for name in CORES if name not in ("none", "own network")])
def test_a_memory_ends_with_its_episode_and_belongs_to_one_env(core):
    """What came before an episode, and what other envs saw, changes nothing; what the episode saw before does."""
    model = Network(VECTOR, CORES[core])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    inputs = inputs_of(make_rollout(VECTOR, 8, 3), 8)
    inputs.is_first[:] = False
    inputs.is_first[4, 0] = True

    def params(changed_obs):
        return model(inputs._replace(obs=changed_obs), model.initial_state(3))[0]

    before, changed = params(inputs.obs), inputs.obs.clone()
    changed[3] += 3.0
    difference = (params(changed) - before).abs().amax(-1)
    assert (difference[4:, 0] == 0).all()
    assert (difference[:3] == 0).all()
    assert (difference[4:6, 1:] > 0).all()
    changed = inputs.obs.clone()
    changed[:, 2] += 3.0
    assert ((params(changed) - before)[:, :2] == 0).all()


def test_a_transformer_sees_its_memory_and_no_further():
    """Two layers that remember 3 steps each see 6 steps back."""
    model = Network(VECTOR, CORES["gtrxl"])
    obs = torch.randn(10, 1, 3).requires_grad_()
    zeros = torch.zeros(10, 1)
    inputs = Inputs(obs, torch.zeros(10, 1, dtype=torch.bool), zeros.long(), zeros)
    model(inputs, model.initial_state(1))[0][9].square().sum().backward()
    seen = obs.grad.abs().sum((1, 2)) > 0
    assert seen.tolist() == [False] * 3 + [True] * 7


def test_a_core_that_cannot_be_made_is_refused():
    for wrong in (Model(core="rnn"), Model(core="gtrxl", core_size=10)):
        with pytest.raises(ConfigError, match=r"model\.core"):
            Network(VECTOR, wrong)


def test_last_action_and_reward_are_zeroed_where_an_episode_begins():
    model = Network(VECTOR, Model(core="lstm", core_size=8, last_action_reward=True))
    for first in (True, False):
        seen = Inputs(torch.zeros(2, 3), torch.tensor([first] * 2), torch.tensor([2, 1]), torch.tensor([5.0, 0.5]))
        params, _, _ = model(seen, torch.zeros(2, 2, 8))
        assert torch.equal(params[0], params[1]) == first


@pytest.mark.parametrize("clipped", [True, False])
def test_the_last_reward_is_clipped_for_impala_and_as_it_is_for_r2d2(clipped):
    model = Network(VECTOR, Model(core="lstm", core_size=8, last_action_reward=True, clip_last_reward=clipped))
    seen = Inputs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool), torch.tensor([1, 1]), torch.tensor([5.0, 1.0]))
    params, _, _ = model(seen, torch.zeros(2, 2, 8))
    assert torch.equal(params[0], params[1]) == clipped


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_the_forget_gates_bias_is_the_settings_and_the_others_are_zero(bias):
    core = Network(VECTOR, Model(core="lstm", core_size=8, forget_bias=bias)).core
    total = core.lstm.bias_ih_l0 + core.lstm.bias_hh_l0
    assert total.tolist() == [0.0] * 8 + [bias] * 8 + [0.0] * 16


@pytest.mark.parametrize(("core", "share"), [("none", 0.5**0.5), ("lstm", 1.0)])
def test_a_dueling_head_scales_its_gradient_into_the_torso_but_not_for_r2d2(core, share):
    model = Network(VECTOR, Model(core=core, core_size=8), Q(dueling=8))
    whole, scaled = (torch.zeros(2, model.q.advantage[0].in_features, requires_grad=True) for _ in range(2))
    model.q(scaled).square().sum().backward()
    model.q.scaled = False
    model.q(whole).square().sum().backward()
    torch.testing.assert_close(scaled.grad, whole.grad * share)


@pytest.mark.parametrize("torso", ["a3c", "gala", "nature", "impala", "football"])
def test_image_torsos_read_bytes_as_fractions_of_one(torso):
    net = build_torso({"": ObsSpec((4, 84, 84), "uint8")}, Model(torso=torso))
    x = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    first = next(m for m in net.modules() if isinstance(m, torch.nn.Conv2d))
    assert net(x).shape == (2, {"gala": 512, "nature": 512}.get(torso, 256))
    captured = {}
    layer = next(m for m in net.modules() if type(m).__name__ == "Frames")
    layer.register_forward_hook(lambda m, i, o: captured.update(out=o.clone()))
    net(x)
    expected = torch.nn.functional.conv2d(x.float() / 255, first.weight, first.bias, first.stride, first.padding)
    torch.testing.assert_close(captured["out"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("torso", "stages", "map_size"), [("impala", [16, 32, 32], 9 * 12), ("football", [16, 32, 32, 32], 5 * 6)]
)
def test_resnets_halve_the_image_in_every_stage(torso, stages, map_size):
    net = build_torso({"": ObsSpec((72, 96, 16), "uint8")}, Model(torso=torso))
    blocks = [m.a.out_channels for m in net.modules() if isinstance(m, Residual)]
    assert blocks == [channels for channels in stages for _ in range(2)]
    convs = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert (len(convs), convs[0].in_channels) == (5 * len(stages), 16)
    linear = next(m for m in net.modules() if isinstance(m, torch.nn.Linear))
    assert (linear.in_features, linear.out_features) == (32 * map_size, 256)
    assert net(torch.zeros(2, 72, 96, 16, dtype=torch.uint8)).shape == (2, 256)


def test_channels_last_images_give_what_channels_first_do():
    first = build_torso({"": ObsSpec((3, 64, 64), "uint8")}, Model(torso="nature"))
    last = build_torso({"": ObsSpec((64, 64, 3), "uint8")}, Model(torso="nature"))
    last.load_state_dict(first.state_dict())
    x = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(first(x), last(x.permute(0, 2, 3, 1)), atol=1e-4, rtol=1e-4)


def test_unknown_and_unfit_torsos_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^model\.torso: 'resnet' is not one of a3c"):
        build_torso({"": ObsSpec((3,), "float32")}, Model(torso="resnet"))
    with pytest.raises(ConfigError, match=r"^model\.torso: nature needs images of 36 pixels"):
        build_torso({"": ObsSpec((3, 8, 8), "uint8")}, Model(torso="nature"))
    with pytest.raises(ConfigError, match=r"^model\.torso: cannot import"):
        build_torso({"": ObsSpec((3,), "float32")}, Model(torso="nowhere:torso"))


def test_acting_copy_follows_the_weights_only_when_refreshed():
    model = Network(IMAGE, Model(torso="auto"))
    params = FlatParams(model)
    twin, refresh = acting_copy(model, torch.bfloat16)
    rollout = make_rollout(IMAGE, 1, 5)
    seen = Inputs(*(x[0] for x in inputs_of(rollout, 1)))
    with torch.inference_mode():
        before, value, _ = twin(seen)
        torch.testing.assert_close(before, model(seen)[0], atol=0.02, rtol=0.05)
        assert before.dtype == value.dtype == torch.float32
    params.data[params.slices["policy.bias"]] += torch.arange(4.0)
    with torch.inference_mode():
        torch.testing.assert_close(twin(seen)[0], before)
        refresh()
        torch.testing.assert_close(twin(seen)[0], before + torch.arange(4.0), atol=1e-3, rtol=1e-3)


def test_flat_params_are_the_models_weights_and_gradients(small_model):
    params = FlatParams(small_model)
    seen = Inputs(torch.randn(6, 3), torch.zeros(6, dtype=torch.bool), torch.zeros(6).long(), torch.zeros(6))
    for _ in range(2):  # the second pass adds to the first
        out, value, _ = small_model(seen)
        (out.sum() + value.sum()).backward()
    for name, p in small_model.named_parameters():
        assert torch.equal(params.grad[params.slices[name]].view_as(p), p.grad)
        assert p.grad.data_ptr() == params.grad[params.slices[name]].data_ptr()
    assert params.nonfinite(params.grad) is None
    params.grad[params.slices["value.weight"].start] = float("nan")
    assert params.nonfinite(params.grad) == "value.weight"
    params.data.zero_()
    assert not any(bool(p.detach().any()) for p in small_model.parameters())


def test_a_replica_shares_weights_and_buffers_but_not_gradients():
    model = Network(VECTOR, Model(hidden=(8,), normalize_obs=True))
    params = FlatParams(model)
    twin, grad = params.replica(model)
    seen = inputs_of(make_rollout(VECTOR, 4, 3), 4)
    params.data.add_(0.5)
    model.observe(seen.obs, torch.ones(4, 3, dtype=torch.bool))
    assert float(twin.obs_norm["obs_"].count) == 12
    out, value, _ = twin(seen)
    torch.testing.assert_close(out, model(seen)[0])
    (out.sum() + value.sum()).backward()
    assert not params.grad.any()
    out, value, _ = model(seen)
    (out.sum() + value.sum()).backward()
    assert params.grad.any()
    assert torch.equal(params.grad, grad)


def test_tanh_is_torchs_in_value_and_gradient() -> None:
    x = torch.linspace(-12, 12, 999).requires_grad_()
    y = Tanh()(x)
    torch.testing.assert_close(y, torch.tanh(x), atol=3e-7, rtol=0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, 1 - torch.tanh(x.detach()) ** 2, atol=1e-6, rtol=0)
    with torch.no_grad():
        assert torch.equal(Tanh()(x), y)
    assert float(x.detach()[0]) == -12  # the input stays as it is

"""Instructions and grids of codes (MiniGrid's): features, gradients, copies that act, and a run that needs them."""

from __future__ import annotations

import dataclasses

import envpool
import numpy as np
import pytest
import torch
from gymnasium import spaces

import coterie
from coterie import config, presets
from coterie.build.validity import check
from coterie.config import Model
from coterie.envs.make import make_spec
from coterie.envs.spaces import obs_fields
from coterie.envs.text import WORDS, text_rows, text_spec
from coterie.errors import ConfigError
from coterie.models.build import Network, acting_copy
from coterie.models.text import TextTorso
from coterie.models.torsos import GridTorso
from coterie.parallel.params import FlatParams
from coterie.types import ActionSpec, Inputs, ObsSpec, Spec
from coterie.wire.codec import Refused, check_values
from tests.envs.env_harness import make, play

SPEC = Spec(
    "made-up",
    {"image": ObsSpec((7, 7, 3), "uint8"), "speed": ObsSpec((2,), "float32"), "mission": text_spec()},
    ActionSpec("categorical", (4,)),
)
BALL, LONG = "go to the ball", "put the red ball next to the green key in front of you"


def rows(*texts):
    return torch.from_numpy(text_rows(texts))


def inputs(mission):
    n, g = len(mission), torch.Generator().manual_seed(0)
    image, speed = torch.randint(0, 9, (7, 7, 3), generator=g).to(torch.uint8), torch.randn(2, generator=g)
    obs = {"image": image.expand(n, -1, -1, -1), "speed": speed.expand(n, -1), "mission": mission}
    return Inputs(obs, torch.zeros(n, dtype=torch.bool), torch.zeros(n).long(), torch.zeros(n))


@pytest.fixture
def torso():
    torch.manual_seed(0)
    return TextTorso(text_spec())


def test_features_are_the_state_after_the_last_word_by_hand(torso):
    x = rows(BALL, LONG, "", BALL, "ball")
    got = torso(x)
    w_ih, w_hh, b_ih, b_hh = torso.lstm.parameters()
    for row, features in zip(x.tolist(), got, strict=True):
        h = c = torch.zeros(64)
        for word in row[: row.index(0)]:
            i, f, g, o = (w_ih @ torso.embedding.weight[word] + b_ih + w_hh @ h + b_hh).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        torch.testing.assert_close(features, h, atol=1e-6, rtol=1e-5)
    assert not got[2].any()  # nothing was said


def test_neither_padding_nor_the_batch_changes_an_instructions_features(torso):
    alone = torso(rows(BALL))[0]
    for x in (rows(LONG, BALL), rows(BALL, BALL, "", LONG)):
        at = (x == rows(BALL)).all(1)
        torch.testing.assert_close(torso(x)[at], alone.expand(int(at.sum()), -1))
    full = rows(" ".join(["go"] * 40))
    torch.testing.assert_close(torso(torch.cat([full, rows(BALL)]))[1], alone)
    assert (torso(rows("the ball go to"))[0] - alone).abs().max() > 1e-3


def test_gradients_reach_the_words_that_were_read_and_add_up_over_rows(torso):
    weights = torch.randn(64)
    (torso(rows(BALL, LONG, BALL)) @ weights).sum().backward()
    grad = torso.embedding.weight.grad.clone()
    read = set(rows(BALL, LONG).flatten().tolist()) - {0}
    assert set(grad.abs().sum(1).nonzero().flatten().tolist()) == read
    torso.zero_grad()
    for text in (BALL, LONG, BALL):
        (torso(rows(text)) @ weights).sum().backward()
    torch.testing.assert_close(torso.embedding.weight.grad, grad)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_policy_reads_its_mission_in_every_precision(core):
    model = Network(SPEC, Model(core=core, core_size=8, normalize_obs=True))
    assert list(model.obs_norm) == ["obs_speed"]
    FlatParams(model)
    seen = inputs(rows(BALL, LONG, "ball the to go", BALL))
    model.observe(seen.obs, torch.ones(4, dtype=torch.bool))
    state = model.initial_state(4)
    params, _, _ = model(seen, state)
    torch.testing.assert_close(params[3], params[0])
    assert all((params[0] - params[i]).abs().max() > 1e-5 for i in (1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, judged, _ = model(seen, state)
    assert mixed.dtype == judged.dtype == torch.float32
    torch.testing.assert_close(mixed, params, atol=0.01, rtol=0.05)
    (mixed.sum() + judged.sum()).backward()
    text = next(m for m in model.modules() if isinstance(m, TextTorso))
    assert text.embedding.weight.grad.any()
    twin, refresh = acting_copy(model, torch.bfloat16)
    with torch.no_grad():
        text.embedding.weight.mul_(2)
    refresh()
    with torch.inference_mode():
        torch.testing.assert_close(twin(seen, state)[0], model(seen, state)[0], atol=0.01, rtol=0.05)
        twin_text = next(m for m in twin.modules() if isinstance(m, TextTorso))
        assert torch.equal(twin_text(seen.obs["mission"]), text(seen.obs["mission"]))  # not rounded


def test_text_alone_is_an_observation_and_has_nothing_to_normalize():
    spec = Spec("made-up", {"": text_spec()}, ActionSpec("categorical", (3,)))
    assert spec.to_json()["obs"] == {"": [[WORDS], "int16", "text"]}
    model = Network(spec, Model())
    x = rows(BALL, LONG)
    seen = Inputs(x, torch.zeros(2, dtype=torch.bool), torch.zeros(2).long(), torch.zeros(2))
    assert model(seen)[0].shape == (2, 3)
    with pytest.raises(ConfigError, match=r"^model\.normalize_obs: True needs numeric observations"):
        check(config.ResolvedConfig(model=Model(normalize_obs=True)), spec)


def test_ppo_trains_on_babyai_and_its_checkpoint_takes_envpools_observations(tmp_path):
    out = tmp_path / "run"
    small = {"steps": 256, "env.num_envs": 4, "algo.unroll_length": 32, "env.threads": 1, "log.tensorboard": False}
    made = presets.make("ppo", "BabyAI-GoToObj-v0", out=str(out), device="cpu", **small)
    assert (made.model.torso, made.model.normalize_obs) == ("auto", True)
    coterie.train(made, quiet=True)
    policy = coterie.load(out)
    env = envpool.make("BabyAI-GoToObj-v0", "gymnasium", num_envs=3, seed=1)
    obs, _ = env.reset()
    assert obs["mission"].shape == (3, 512)
    action = policy(obs)
    assert (action.shape, action.dtype.kind) == ((3,), "i")
    env.step(action)


def test_ppo_does_as_it_is_told_and_cannot_where_nothing_is_said(tmp_path):
    """By chance a third; a bag of words gets half at best, for each mission names the wrong action, too."""
    options = {
        **{"env.num_envs": 32, "env.threads": 1, "log.tensorboard": False, "device": "cpu"},
        **{"algo.unroll_length": 16, "algo.gamma": 0.9, "ppo.minibatch_size": 256, "optim.lr": 3e-3},
    }

    def score(blank, steps):
        told = {"env.kwargs": f'{{"blank": {blank}}}', "out": str(tmp_path / blank)}
        made = presets.make("ppo", "coterie.envs.testing:Mission", steps=steps, **options, **told)
        return coterie.train(made, quiet=True)["mean_return"]

    assert score("false", 6000) > 0.9
    assert score("true", 3000) < 0.55  # a third, and more than four standard errors of 100 games that repeat an action


# --- grids ---

CODES = (11, 6, 4)
GRID = Spec(
    "made-up",
    {"image": ObsSpec((7, 7, 3), "uint8", codes=CODES), "mission": text_spec()},
    ActionSpec("categorical", (4,)),
)


def params_of(model: Network, image: torch.Tensor, *missions: str) -> torch.Tensor:
    n = len(missions)
    obs = {"image": image.expand(n, -1, -1, -1), "mission": torch.from_numpy(text_rows(missions))}
    state = model.initial_state(n)
    return model(Inputs(obs, torch.zeros(n, dtype=torch.bool), torch.zeros(n).long(), torch.zeros(n)), state)[0]


def test_minigrids_image_is_a_grid_of_codes_within_their_ranges():
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


def test_only_minigrids_image_of_three_channels_is_a_grid_of_codes():
    grid, stack = (spaces.Box(0, 255, shape, np.uint8) for shape in ((7, 7, 3), (7, 7, 4)))
    codes = {f.name: f.spec.codes for f in obs_fields("MiniGrid-X-v0", spaces.Dict({"image": grid, "other": grid}))}
    assert codes == {"image": CODES, "other": ()}
    assert obs_fields("MiniGrid-X-v0", spaces.Dict({"image": stack}))[0].spec.codes == ()
    assert obs_fields("Other-v0", spaces.Dict({"image": grid}))[0].spec.codes == ()


@pytest.mark.parametrize("size", [3, 25])
def test_every_code_of_every_cell_is_told_apart(size):
    """By the first layer, to which each code of each channel is a channel of its own."""
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
    image = torch.stack([torch.randint(0, n, (2, 7, 7)) for n in CODES], -1).to(torch.uint8)
    for core in ("none", "lstm"):
        model = Network(GRID, Model(core=core))
        assert (model.torso.joint is None) == (core == "lstm")
        told = [params_of(model, x, "get the red ball", "get the blue key") for x in image]
        first, second = (x[0] - x[1] for x in told)
        assert not torch.allclose(first, second, rtol=0.05)
    alone = dataclasses.replace(GRID, obs={"mission": text_spec()})
    assert Network(alone, Model()).torso.joint is None  # one entry needs no layer over it
    additive = Network(GRID, Model())
    additive.torso.joint.bias.data.fill_(100.0)  # nothing is cut off
    told = [params_of(additive, x, "get the red ball", "get the blue key") for x in image]
    assert not torch.allclose(told[0][0], told[0][1])
    torch.testing.assert_close(told[0][0] - told[0][1], told[1][0] - told[1][1], atol=1e-4, rtol=1e-3)


def test_a_code_out_of_range_is_refused_on_the_wire():
    zeros = {"reward": np.zeros(1), "episode_return": np.full(1, np.nan), "episode_length": np.full(1, np.nan)}
    arrays = {"obs/image": np.zeros((1, 7, 7, 3), np.uint8), "obs/mission": text_rows(["go"]), **zeros}
    check_values(GRID, arrays)
    for channel, count in enumerate(CODES):
        arrays["obs/image"][:] = 0
        arrays["obs/image"][0, 3, 3, channel] = count - 1
        check_values(GRID, arrays)
        arrays["obs/image"][0, 3, 3, channel] = count
        with pytest.raises(Refused, match="'image' has a code out of its range"):
            check_values(GRID, arrays)

"""SAC's density, loss and target against their definitions; it learns; a custom algorithm has settings and presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as td

import coterie
from coterie import presets
from coterie.algorithms.base import Compute
from coterie.algorithms.ppo import PPO
from coterie.algorithms.sac import SAC, Critics, SACNetwork, squashed
from coterie.build.evaluate import Player
from coterie.build.factory import make_algorithm, make_model
from coterie.build.resources import resolve_config
from coterie.build.warm_start import first_model
from coterie.cli.main import main
from coterie.cli.options import config_of
from coterie.config import Config
from coterie.errors import ConfigError, CoterieError
from coterie.models.build import acting_copy
from coterie.parallel.threads import Team
from coterie.runs import checkpoint
from coterie.types import ActionSpec, Inputs, ObsSpec, Spec
from tests.conftest import make_config, make_rollout

SPEC = Spec("made-up", {"": ObsSpec((3,), "float32")}, ActionSpec("continuous", low=(-1.0, -2.0), high=(1.0, 2.0)))
SMALL = {"q.learn_start": 0, "q.batch_size": 16, "q.intensity": 2.0, "replay.capacity": 800, "model.hidden": (8, 8)}


def test_the_squashed_density_is_torchs() -> None:
    rng = torch.Generator().manual_seed(0)
    params, noise = (torch.randn(500, n, generator=rng) for n in (4, 2))
    action, log_prob = squashed(params, noise)
    mean, log_std = params.double().chunk(2, -1)
    normal = td.Independent(td.Normal(mean, log_std.exp()), 1)
    oracle = td.TransformedDistribution(normal, td.TanhTransform(cache_size=1))
    x = mean + log_std.exp() * noise.double()
    torch.testing.assert_close(action, x.tanh().float())
    torch.testing.assert_close(log_prob, oracle.log_prob(oracle.transforms[0](x)).float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("hidden", [(8, 8), ()])
def test_both_critics_are_mlps_and_frozen_ones_pass_gradients_to_their_input_only(hidden: tuple[int, ...]) -> None:
    critics, x = Critics(5, hidden), torch.randn(7, 5, requires_grad=True)
    layers = list(critics.parameters())
    for k in (0, 1):
        y = x
        for weight, bias in zip(layers[::2], layers[1::2], strict=True):
            y = y @ weight[k] + bias[k]
            y = y if weight.shape[-1] == 1 else y.relu()
        torch.testing.assert_close(critics(x)[k], y[:, 0])
    critics(x, frozen=True).sum().backward()
    assert all(p.grad is None for p in layers)
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("given", "nats", "hidden"), [("auto", -2.0, (8, 8)), (0.0, 0.0, (8, 8)), (-3.5, -3.5, (8, 8)), ("auto", -2.0, ())]
)
def test_the_loss_is_the_papers_and_the_target_follows(given: Any, nats: float, hidden: tuple[int, ...]) -> None:
    assert config_of(["sac", "--env", "Pendulum-v1", f"--sac.target-entropy={given}"]).sac.target_entropy == given
    sizes = {"env.num_envs": 8, "algo.unroll_length": 6, "algo.gamma": 0.9, "model.hidden": hidden}
    config = make_config(algorithm="sac", **{**SMALL, **sizes, "sac.target_entropy": given})
    algorithm, model = make_algorithm(config, SPEC), make_model(config, SPEC)  # type: ignore[arg-type]
    assert isinstance(algorithm, SAC)
    assert isinstance(model, SACNetwork)
    batch = list(algorithm.batches(model, make_rollout(SPEC, 6, 8)))[-1]
    with torch.no_grad():
        for p in model.critics.parameters():  # so that target and critics differ
            p.add_(0.1)
    loss, rows = algorithm.loss(model, batch), batch.rows
    alpha = model.log_alpha.exp()
    critics, before = model.critics, [p.clone() for p in algorithm.target.parameters()]  # type: ignore[union-attr]

    def policy(obs: torch.Tensor, noise: torch.Tensor) -> Any:
        return squashed(model.policy(model.torso(obs)), noise)

    after, log_after = policy(rows.next_obs, batch.ahead[:, 0])
    q_after = algorithm.target(torch.cat((rows.next_obs, after), -1)).min(0).values  # type: ignore[misc]
    wanted = (rows.n_step + rows.discount * (q_after - alpha * log_after)).detach()
    q = critics(torch.cat((rows.obs, rows.action), -1))
    action, log_prob = policy(rows.obs, batch.ahead[:, 1])
    best = critics(torch.cat((rows.obs, action), -1)).min(0).values
    torch.testing.assert_close(loss.metrics["critic_loss"], (q - wanted).square().sum(0).mean().detach())
    torch.testing.assert_close(loss.metrics["policy_loss"], (alpha * log_prob - best).mean().detach())
    torch.testing.assert_close(loss.metrics["alpha_loss"], -(model.log_alpha * (log_prob + nats)).mean().detach())
    names = [name for name, _ in model.named_parameters() if not name.startswith("critics")]
    parameters = dict(model.named_parameters())
    policy_part = (alpha.detach() * log_prob - best).mean() - (model.log_alpha * (log_prob.detach() + nats)).mean()
    used = [parameters[name] for name in names]
    expected = torch.autograd.grad(policy_part, used, allow_unused=True)
    found = torch.autograd.grad(loss.total, used, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    algorithm.after_step(model, batch)
    for old, new, trained in zip(before, algorithm.target.parameters(), critics.parameters(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(new, old + 0.005 * (trained - old))


def test_the_noise_of_a_team_is_that_of_one_thread() -> None:
    config = make_config(algorithm="sac", **SMALL, **{"env.num_envs": 8, "algo.unroll_length": 6})
    found = []
    for threads in (1, 4):
        algorithm, model = make_algorithm(config, SPEC, Compute(team=Team(threads))), make_model(config, SPEC)  # type: ignore[arg-type]
        found.append([batch.ahead for batch in algorithm.batches(model, make_rollout(SPEC, 6, 8))])
    assert len(found[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("learned", [True, False])
def test_a_temperature_that_is_not_learned_is_the_settings_also_after_init_from(tmp_path, learned) -> None:
    warm, new = ({"sac.alpha": alpha, "algorithm": "sac", **SMALL} for alpha in (0.5, 0.2))
    draft = checkpoint.open_draft(root := tmp_path / "checkpoints", "draft")
    checkpoint.write(draft, {"learner_0/model": make_model(make_config(**warm), SPEC).state_dict()})  # type: ignore[arg-type]
    checkpoint.seal(root, draft, 0, {})
    config = make_config(**new, **{"sac.learn_alpha": learned, "init_from": str(tmp_path)})  # type: ignore[arg-type]
    assert float(first_model(config, SPEC).log_alpha.detach().exp()) == pytest.approx(0.5 if learned else 0.2)


def test_bytes_are_scaled_as_in_every_network() -> None:
    spec = replace(SPEC, obs={"": ObsSpec((3,), "uint8", 0, 255)})
    model = make_model(make_config(algorithm="sac", **SMALL), spec)  # type: ignore[arg-type]
    torch.testing.assert_close(model.features(torch.full((2, 3), 51, dtype=torch.uint8)), torch.full((2, 3), 0.2))


def test_a_copy_for_acting_in_bf16_has_nearly_the_same_policy() -> None:
    model = make_model(make_config(algorithm="sac", **SMALL), SPEC)  # type: ignore[arg-type]
    torch.nn.init.normal_(model.policy.weight)  # type: ignore[arg-type]
    first = torch.ones(5, dtype=torch.bool)
    inputs = Inputs(torch.randn(5, 3), first, first, first)
    found, wanted = acting_copy(model, torch.bfloat16)[0](inputs)[0], model(inputs)[0]
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
    assert not torch.equal(found, wanted)
    with torch.autocast("cpu", torch.bfloat16):  # as in training: a density has no digits to spare
        assert torch.equal(model(inputs)[0], found)


def test_an_evaluation_that_samples_draws_from_the_policy() -> None:
    config = make_config(algorithm="sac", **SMALL)
    player = Player(make_algorithm(config, SPEC), make_model(config, SPEC), SPEC, 500, seed=0)
    torch.nn.init.constant_(player.model.policy.bias, -2.0)  # mean -2, deviation 0.14
    action = player.act(np.zeros((500, 3), "float32"), np.ones(500, bool), np.zeros(500), sampled=True)
    assert np.arctanh(action).mean() == pytest.approx(-2, abs=0.1)
    assert np.arctanh(action).std() == pytest.approx(math.exp(-2), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"acting": "decoupled", "actors": 2}], ids=["inline", "decoupled"])
def test_sac_learns_the_pendulum(options: dict[str, Any], tmp_path: Any) -> None:
    """A random policy has a mean return of -1,200; swinging it up and keeping it there has -150."""
    small = {"q.learn_start": 1_000, "optim.lr": 1e-3, "env.num_envs": 4, "model.hidden": (64, 64)}
    config = presets.make("sac", "Pendulum-v1", steps=12_000, out=tmp_path / "run", **small, **options)
    assert coterie.train(config, quiet=True)["status"] == "finished"
    assert coterie.evaluate_run(tmp_path / "run", episodes=20)["mean_return"] > -400


@dataclass
class Settings:
    bonus: float = 0.5
    name: str = "none"
    steps: int | None = None
    sizes: tuple[int, ...] = ()
    flag: bool = False


class Mine(PPO):
    Settings = Settings


class Bare(PPO):
    def __init__(self, *args: Any) -> None:
        pass


class Fails(PPO):
    def __init__(self, config: Config) -> None:
        pass


class Layer(PPO):
    @staticmethod
    def make_model(config: Config, spec: Spec) -> Any:
        return torch.nn.Linear(4, 2)


class First(PPO):
    def act(self, *args: Any) -> Any:
        out, core_state = super().act(*args)
        return out._replace(action=out.action[:1]), core_state


class Silent(PPO):
    def act(self, *args: Any) -> Any:
        super().act(*args)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Silent, "algorithm: act must return an AgentOutput and the next core state, not None"),
        (Bare, "algorithm: .*:Bare: its __init__ must call super"),
        (Fails, "algorithm: .*:Fails cannot be made: TypeError: .*takes 2 positional arguments"),
        (Layer, "algorithm: make_model of .*:Layer must return a .*Network or None, not Linear"),
        (First, r"algorithm: act chose actions of shape \(1,\), not \(16,\)"),
    ],
)
def test_a_mistake_in_an_algorithm_is_one_line(kind: type[PPO], says: str, tmp_path: Any) -> None:
    changes = {"algorithm": kind, "steps": 400, "env.num_envs": 16, "learners": 1, "log.tensorboard": False}
    with pytest.raises(CoterieError, match=says):
        coterie.train(env="CartPole-v1", out=tmp_path / "run", quiet=True, **changes)


def mine(env: str = "CartPole-v1", **overrides: Any) -> Config:
    """A preset of this file's own."""
    return presets.ppo(env, **{"algorithm": f"{__name__}:Mine", "settings.bonus": 0.25, **overrides})


def test_an_algorithm_has_settings_and_presets_under_its_own_name(capsys: Any) -> None:
    options = ["--settings.name", "1", "--settings.steps", "1", "--settings.sizes", "64", "--settings.flag", "yes"]
    config = config_of([f"{__name__}:mine", "--env", "CartPole-v1", *options, "--optim.lr", "0.1"])
    assert (config.preset, config.algorithm) == (f"{__name__}:mine", f"{__name__}:Mine")
    found = make_algorithm(resolve_config(config), SPEC).settings  # type: ignore[attr-defined]
    assert repr(found) == "Settings(bonus=0.25, name='1', steps=1, sizes=[64], flag=True)"
    for wrong, says in (
        ({"steps": "abc"}, "steps: 'abc' is not an integer or null"),
        ({"steps": 2.5}, "steps: 2.5 is not an integer or null"),
        ({"flag": 3}, "flag: 3 is not true or false"),
        ({"bonus": "lots"}, "bonus: 'lots' is not a number"),
        ({"bonsu": 1}, "bonsu: the algorithm has no such setting; the nearest is settings.bonus"),
        ({"x": 1}, "x: the algorithm has no such setting; there are bonus, name, steps, sizes, flag"),
    ):
        with pytest.raises(ConfigError, match=rf"^settings\.{says}$"):
            resolve_config(mine(settings=wrong))
    assert main(["train", f"{__name__}:mine", "--help"]) == 0
    assert "NAME: bonus: float = 0.5, name: str = 'none', " in " ".join(capsys.readouterr().out.split())
    again = presets.ppo("CartPole-v1", algorithm=Mine, settings={"bonus": 2, "name": "y"})
    assert Mine.read_settings(again) == Settings(2, "y")
    with pytest.raises(ConfigError, match=r"^settings: .*unexpected keyword argument 'bonsu'"):
        Mine.read_settings(presets.ppo("CartPole-v1", settings={"bonsu": 2}))
    with pytest.raises(ConfigError, match="settings: PPO has no settings of its own, but got bonus"):
        PPO.read_settings(again)

"""Value learning: targets, parts, how much is trained, exploration, what a resume keeps, what is refused."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch

import coterie
from coterie import presets
from coterie.algorithms.base import Compute
from coterie.algorithms.dqn import DQN
from coterie.algorithms.q_base import greedy
from coterie.build.resources import resolve_config
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from coterie.learner import Gradients
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config
from coterie.types import Inputs
from tests.algorithms.harness import SMALL, VARIANTS, build, drawn, move, moved
from tests.conftest import VECTOR, make_config, make_rollout


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("chunk", "ways"), [(5, 1), (0, 2), (16, 3)])
def test_parts_and_threads_add_up_to_the_whole_batch(name, chunk, ways):
    algorithm, model = build(**VARIANTS[name])
    batch = drawn(algorithm, model)[-1]
    model = moved(model)
    params = FlatParams(model)
    found = []
    for parts, members in ((0, 1), (chunk, ways)):
        batch.chunk = parts
        team = Team(members)
        metrics = Gradients(model, params, Compute(team=team)).compute(algorithm, batch)
        team.close()
        found.append((params.grad.clone(), metrics, batch.priority))
        params.grad.zero_()
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-6, rtol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-5)
    torch.testing.assert_close(found[1][2], found[0][2])
    assert found[0][0].abs().sum() > 0


@pytest.mark.parametrize("double", [False, True])
def test_the_target_of_dqn_is_the_definitions(double):
    algorithm, model = build(**{"q.double": double, "q.n_step": 3, "q.huber": 1.0})
    batch = drawn(algorithm, model)[-1]
    target, model = algorithm.target_model, moved(model)
    rows, expected = batch.rows, []
    first = torch.ones(1, dtype=torch.bool)

    def q(net, obs):
        return net(Inputs(obs[None], first, torch.zeros(1, dtype=torch.long), torch.zeros(1)))[0][0].detach()

    for i in range(len(rows.action)):
        after = q(target, rows.next_obs[i])
        best = (q(model, rows.next_obs[i]) if double else after).argmax()
        wanted = rows.n_step[i] + rows.discount[i] * after[best]
        expected.append(float(q(model, rows.obs[i])[rows.action[i]] - wanted))
    (part,) = batch.parts()
    loss = algorithm.loss(model, part)
    size = np.abs(expected)
    np.testing.assert_allclose(loss.priority, size, atol=1e-5)
    each = np.where(size < 1, size**2 / 2, size - 0.5)
    assert float(loss.total.detach()) == pytest.approx(each.mean(), abs=1e-5)


def test_importance_weights_scale_each_rows_loss():
    algorithm, model = build(**{"replay.alpha": 1.0, "replay.beta": 1.0})
    batch = drawn(algorithm, model)[-1]
    assert batch.rows.weight.max() == 1
    (part,) = batch.parts()
    error = algorithm.loss(model, part).priority
    batch.rows.weight = torch.zeros_like(batch.rows.weight)
    batch.rows.weight[3] = 0.5
    (part,) = batch.parts()
    huber = error[3] ** 2 / 2 if error[3] < 1 else error[3] - 0.5
    assert float(algorithm.loss(model, part).total.detach()) == pytest.approx(0.5 * float(huber) / 24, abs=1e-6)


@pytest.mark.parametrize(("intensity", "size"), [(8.0, 32), (0.5, 24), (1.0, 512)])
def test_each_row_is_trained_on_as_often_as_the_intensity_says(intensity, size):
    algorithm, model = build(**{"q.intensity": intensity, "q.batch_size": size, "q.learn_start": 96})
    rows = batches = 0
    for i in range(40):
        made = list(algorithm.batches(model, make_rollout(VECTOR, 6, 8, i)))
        assert rows >= 96 or not made
        batches, rows = batches + len(made), rows + 48
    assert batches == int((rows - 96) * intensity / size)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_team_that_looks_ahead_finds_what_one_thread_finds(name):
    found = []
    for threads in (1, 3, 3):
        algorithm, model = build(Compute(team=Team(threads)), **VARIANTS[name])
        found.append([batch.ahead for batch in drawn(algorithm, model)])
    for one, team, again in zip(*found, strict=True):
        torch.testing.assert_close(one, team)
        assert torch.equal(team, again)


@pytest.mark.parametrize("name", ["plain", "r2d2"])
def test_a_target_network_in_bf16_is_close_to_one_in_float32_and_in_pieces_it_is_the_same(name):
    found = {}
    for means in (Compute(), Compute(torch.bfloat16), Compute(torch.float32, 12, Team(2))):
        algorithm, model = build(means=means, **VARIANTS[name], **{"model.hidden": (64,)})
        found[means] = drawn(algorithm, model)[-1].ahead
    plain, rounded, pieces = found.values()
    assert plain.dtype == rounded.dtype == torch.float32
    torch.testing.assert_close(pieces, plain)
    torch.testing.assert_close(rounded, plain, atol=0.05, rtol=0.05)
    assert not torch.equal(rounded, plain)


def test_the_target_network_is_copied_every_n_rows():
    algorithm, model = build(**{"q.target_every": 144})
    drawn(algorithm, model, 1)
    first = [p.clone() for p in algorithm.target_model.parameters()]
    move(model)
    drawn(algorithm, model, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, algorithm.target_model.parameters(), strict=True))
    drawn(algorithm, model, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), algorithm.target_model.parameters(), strict=True))
    assert not any(p.requires_grad for p in algorithm.target_model.parameters())


def test_epsilon_greedy_explores_as_often_as_it_says_and_each_env_has_its_epsilon():
    rng, values = torch.Generator().manual_seed(0), torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(40_000, 1)
    action, log_prob = greedy(values, torch.full((40_000,), 0.2), rng)
    share = torch.bincount(action, minlength=4) / 40_000
    torch.testing.assert_close(share, torch.tensor([0.05, 0.85, 0.05, 0.05]), atol=0.01, rtol=0)
    torch.testing.assert_close(log_prob.exp(), share[action], atol=0.01, rtol=0)
    assert (greedy(values, None, rng)[0] == 1).all()

    ids = torch.arange(8)
    algorithm, _ = build(**{"q.epsilon_end": 0.1, "q.epsilon_steps": 1000, "learners": 1})
    assert algorithm.explore(ids).tolist() == pytest.approx([1.0] * 8)
    algorithm.clock.env_steps = 500
    assert algorithm.explore(ids).tolist() == pytest.approx([0.55] * 8)
    algorithm.clock.env_steps = 5000
    assert algorithm.explore(ids).tolist() == pytest.approx([0.1] * 8)
    ladder, _ = build(**{"q.epsilon_end": 0.4, "q.ladder": 7.0})
    assert ladder.explore(ids).tolist() == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert ladder.explore(ids + (1 << 20)).tolist() == ladder.explore(ids).tolist()  # hosts from elsewhere
    tasks = {"env.id": "CartPole-v1,CartPole-v0", "acting": "central", "actors": 2, "learners": 1}
    shared, _ = build(**{"q.epsilon_end": 0.4, "q.ladder": 7.0, **tasks})  # the first four envs are of the first task
    assert shared.explore(ids).tolist() == ladder.explore(ids[[0, 2, 4, 6, 1, 3, 5, 7]]).tolist()
    noisy, _ = build(**{"q.noisy": True})
    assert not noisy.explore(ids).any()


def test_an_actor_knows_how_far_the_run_is_from_the_version_of_its_weights():
    algorithm, model = build(**{"q.learn_start": 96, "q.intensity": 2.0, "steps": 10_000, "learners": 1})
    rows = version = 0
    for i in range(30):
        version += len(list(algorithm.batches(model, make_rollout(VECTOR, 6, 8, i))))
        rows += 48
    away, _ = build(**{"q.learn_start": 96, "q.intensity": 2.0, "steps": 10_000, "learners": 1})
    away.acts_at(0)
    assert away.clock.env_steps == 0
    away.acts_at(version)
    assert abs(away.clock.env_steps - rows) <= 48


def test_noise_is_sampled_again_for_each_batch_shared_by_the_threads_and_not_in_greedy_acting():
    algorithm, model = build(**VARIANTS["noisy"])
    layer = model.q.value[0]
    seen = [layer.eps_in.clone() for i in range(3) for _ in algorithm.batches(model, make_rollout(VECTOR, 6, 8, i))]
    assert len(seen) == 6
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    first = torch.ones(5, dtype=torch.bool)
    inputs, rng = Inputs(torch.rand(5, 3), first, torch.zeros(5).long(), torch.zeros(5)), torch.Generator()
    values = [algorithm.act(model, inputs, None, explore, rng)[0].value for explore in (None, first.float(), None)]
    assert torch.equal(values[0], values[2])  # a greedy network has no noise
    assert not torch.equal(values[0], values[1])
    twin, _ = FlatParams(model).replica(model)
    model.resample(torch.Generator().manual_seed(1))
    assert torch.equal(twin.q.value[0].eps_in, layer.eps_in)


@pytest.mark.parametrize("name", ["rainbow", "r2d2"])
def test_a_checkpoint_with_its_replay_goes_on_with_the_same_batches(name):
    algorithm, model = build(**VARIANTS[name], **{"replay.save": True})
    drawn(algorithm, model, 5)
    state = {k: x.clone() for k, x in algorithm.state_dict().items()}
    again, _ = build(**VARIANTS[name], **{"replay.save": True})
    again.load_state_dict(state)
    assert again.state_dict().keys() == state.keys()
    rollout = make_rollout(VECTOR, 6, 8, 5, core_size=8 * model.recurrent)
    ours, theirs = (asdict(next(one.batches(model, rollout)).rows) for one in (algorithm, again))
    assert len(set(ours["picks"]["index"].tolist())) > 3
    torch.testing.assert_close(theirs, ours, atol=0, rtol=0)


def test_a_replay_that_was_not_saved_is_gathered_again_before_it_is_trained_on():
    changes = {"q.learn_start": 144, "q.target_every": 10**6}
    algorithm, model = build(**changes)
    drawn(algorithm, model, 6)
    again, _ = build(**changes)
    state = {k: x.clone() for k, x in algorithm.state_dict().items()}
    state["counts"][-1] = 400.0  # samples that are due: it was saved amid the batches of a rollout
    again.load_state_dict(state)
    model = moved(model)
    assert [len(drawn(again, model, 1, seed=9 + i)) for i in range(4)] == [0, 0, 0, 2]
    assert again.rows == 10 * 48
    # The target network is the checkpoint's, not the weights' of now.
    saved = algorithm.target_model.state_dict()
    assert all(torch.equal(x, saved[k]) for k, x in again.target_model.state_dict().items())


@pytest.mark.parametrize("secondary", [False, True])
def test_the_random_numbers_of_sampling_go_on_without_a_saved_replay(secondary):
    changes = {"q.learn_start": 10**6}
    primary, model = build(**changes)
    drawn(primary, model, 1)

    def begun(state):
        algorithm, _ = build(**changes)
        if secondary:
            algorithm.borrow(primary)
        if state:
            algorithm.load_state_dict(state)
        drawn(algorithm, model, 1)
        return algorithm

    algorithm = begun({})
    fresh = algorithm.sampling.bit_generator.state
    algorithm.sampling.random(3)
    state = {k: x.clone() for k, x in algorithm.state_dict().items()}
    assert begun(state).sampling.bit_generator.state == algorithm.sampling.bit_generator.state != fresh
    del state["sampling"]  # checkpoints of earlier versions have none
    assert begun(state).sampling.bit_generator.state == fresh


def test_the_dqn_of_an_image_keeps_single_frames():
    config = make_config(**{"algorithm": "dqn", **SMALL, "env.id": "Pong-v5"})
    assert DQN.replay_bytes(config, make_spec(config.env, config.atari)) == pytest.approx(800 * 84 * 84, rel=0.01)


def test_a_resumed_run_explores_as_little_as_before(tmp_path):
    """From its first step on, and with its replay weighted as far on."""
    changes = {"steps": 3000, "q.epsilon_steps": 2000, "q.learn_start": 500, "replay.capacity": 4000}
    more = {"replay.alpha": 0.6, "log.tensorboard": False, "replay.save": True}
    coterie.train(presets.dqn(env="CartPole-v1", out=str(tmp_path / "run"), **changes, **more), quiet=True)
    tensors, state = checkpoint.load(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    learner = LearnerProcess(resolve_config(load_config(tmp_path / "run" / "config.json")), life_number=1)
    try:
        learner.load(checkpoint.learner(tensors, 0))
        learner.start(state["learners"][0], state["env_steps"])
        assert learner.algorithm.clock.env_steps == state["env_steps"]
        rollout = next(iter(learner.acting.rollouts(lambda: None)))
        greedy = rollout.behavior_log_prob.exp() > 0.5  # 0.02 of all actions are random, half of them the best
        assert greedy.float().mean() > 0.9
    finally:
        learner.close()


FREE = r"GiB, and there are [\d.]+"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replay.capacity": 10**12}, rf"^replay\.capacity: 1,000,000,000,000 env steps need [\d,.]+ {FREE}"),
        ({"replay.capacity": 50}, r"^replay\.capacity: 50 must be larger"),
        ({"replay.disk": "/nowhere"}, r"^replay\.disk: cannot write to /nowhere"),
        ({"replay.disk": ".", "replay.capacity": 10**12}, rf"^replay\.capacity: .* {FREE} free in \.$"),
    ],
)
@pytest.mark.parametrize("preset", ["dqn", "seed-r2d2"])
def test_a_replay_that_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, preset, changes, says):
    config = presets.make(preset, "CartPole-v1", **changes, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=says):
        coterie.train(config, quiet=True)
    assert list(tmp_path.iterdir()) == []

"""Recorded functions do what the plain ones do: as CUDA graphs on a GPU, as TorchScript on a CPU."""

from __future__ import annotations

import gc
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coterie.algorithms.base import Compute
from coterie.algorithms.ppo import PPO
from coterie.algorithms.table import algorithm_class
from coterie.build import resources
from coterie.build.factory import acting_policy, make_algorithm, make_model
from coterie.errors import CoterieError
from coterie.learner import Gradients
from coterie.parallel.graphs import Graphed, _uncollected, record, recordable
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.parallel.traces import trace
from coterie.types import ActionSpec, Inputs, ObsSpec, Rollout, map_tensors
from tests.algorithms.harness import SMALL, VARIANTS
from tests.conftest import IMAGE, VECTOR, make_config, make_rollout, needs_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def recording(device):
    """A `record` for the device that counts its recordings."""
    counted = SimpleNamespace(recordings=0, plain=0)

    def made(function, tensors, rngs):
        found = (record if device == "cuda" else trace)(function, tensors, rngs)
        counted.recordings += 1
        counted.plain += found[1] is None
        return found

    counted.record = made
    return counted


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_function_follows_its_arguments_and_keeps_its_results(device):
    @recordable
    def function(x, pair, factor, rng):
        noise = torch.empty_like(x).uniform_(generator=rng)
        return {"sum": x * factor + pair[0], "noise": noise}

    counted = recording(device)
    graphed, rngs = Graphed(function, counted.record), [torch.Generator(device).manual_seed(3) for _ in range(2)]
    found, wanted = [], []
    for i in range(8):
        x, y = torch.full((4,), float(i), device=device), torch.ones(4, device=device)
        found.append(graphed(x, (y, "name"), 2.0 if i < 6 else 3.0, rngs[0]))
        wanted.append(function(x, (y, "name"), 2.0 if i < 6 else 3.0, rngs[1]))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not counted.plain
    assert counted.recordings == 1  # with the other factor it was called twice only


def test_what_is_not_marked_or_has_too_many_kinds_is_called_plainly():
    counted = recording("cpu")
    plain = Graphed(lambda x: x + 1, counted.record)
    for _ in range(5):
        plain(torch.zeros(2))
    assert counted.recordings == 0
    marked = Graphed(recordable(lambda x: x + 1), counted.record)
    for n in range(30):
        for _ in range(5):
            assert marked(torch.zeros(n)).tolist() == [1.0] * n
    assert counted.recordings == 8


@pytest.mark.parametrize("times", [1, 2])
def test_without_memory_for_a_recording_the_plain_calls_go_on(times, monkeypatch):
    left = [times]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def failing(function, tensors, rngs):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError
        return trace(function, tensors, rngs)

    graphed = Graphed(recordable(lambda x: x + 1), failing)
    with pytest.warns(match="no memory is left") if times == 2 else nullcontext():
        for _ in range(5):
            assert graphed(torch.zeros(1)).tolist() == [1]
    assert len(graphed.recordings) == 2 - times


def test_what_a_loss_reads_and_changes_is_named():
    recorded = Compute(record=trace)
    ppo = make_algorithm(make_config(**CASES["a clip that shrinks"]), VECTOR, recorded)
    bonus = {"algo.entropy_schedule.kind": "linear", "algo.entropy_target": 0.5, "steps": 1000}
    a2c = make_algorithm(make_config(**CASES["a2c"], **bonus), VECTOR, recorded)
    vtrace = make_algorithm(make_config(**CASES["vtrace, normalized"]), VECTOR, recorded)
    algorithms = (ppo, a2c, vtrace)
    before = [x.changing() for x in algorithms]
    kept = [{name: x.factor(name) for name in x.changing()} for x in algorithms]
    ppo.clock.env_steps = a2c.clock.env_steps = 500
    vtrace.mean_square = 2.0
    assert all(x.changing() != old for x, old in zip(algorithms, before, strict=True))
    now, a2c.entropy_adjustment = a2c.changing(), 1.0
    assert a2c.changing() != now
    for algorithm, factors in zip(algorithms, kept, strict=True):
        algorithm.update_factors()
        assert {name: float(x) for name, x in factors.items()} == algorithm.changing()  # where they were


def test_what_is_not_recorded_reads_the_number_of_now():
    ppo = make_algorithm(make_config(**CASES["a clip that shrinks"]), VECTOR)
    assert ppo.factor("clip") == 0.2
    ppo.clock.env_steps = 500
    assert ppo.factor("clip") == 0.1


def test_no_garbage_is_collected_during_a_recording():
    for on in (False, True):
        (gc.enable if on else gc.disable)()
        with suppress(ValueError), _uncollected():
            collecting = gc.isenabled()
            raise ValueError
        assert (collecting, gc.isenabled()) == (False, on)


def test_a_recording_that_fails_names_the_setting():
    def failing(function, tensors, rngs):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphed, x = Graphed(recordable(lambda x: x + 1), failing), torch.zeros(2)
    graphed(x)
    graphed(x)
    with pytest.raises(CoterieError, match=r"graphs: recording failed \(operation not permitted.*give --graphs False"):
        graphed(x)


def test_overridden_methods_are_not_recorded():
    class Mine(algorithm_class(make_config(algorithm="ppo"))):
        def loss(self, model, batch):
            return super().loss(model, batch)

    mine = Mine(make_config(algorithm="ppo"), VECTOR)
    assert not getattr(Mine.loss, "recordable", False)
    assert Graphed(mine.act, trace).record is None  # it may call what is overridden
    assert Graphed(make_algorithm(make_config(algorithm="ppo"), VECTOR).act, trace).record is trace


def trained(config, device, record=None, rounds=6, threads=1, chunk=0):
    """Gradients and metrics of each batch, weights between them moved along the gradient; and the algorithm."""
    torch.manual_seed(0)
    spec = NUMBERS if config.algorithm == "sac" else VECTOR
    model = make_model(config, spec).to(device)
    params = FlatParams(model)
    compute = Compute(record=record, chunk=chunk, device=torch.device(device), team=Team(threads))
    algorithm, gradients = make_algorithm(config, spec, compute), Gradients(model, params, compute)
    found, last = [], None
    for i in range(rounds):
        rollout = make_rollout(spec, 6, 8, i)
        if last is not None:
            rollout.obs[0] = last
        last = rollout.obs[-1]
        algorithm.clock.env_steps = 100 * i
        rollout = map_tensors(lambda x: x.to(device), rollout)
        for batch in algorithm.batches(model, rollout):
            batch.metrics = gradients.compute(algorithm, batch)
            metrics = torch.tensor(list(batch.metrics.values()))
            found.append((params.grad.cpu().clone(), metrics, None if batch.priority is None else batch.priority.cpu()))
            params.data.sub_(params.grad, alpha=0.01)
            params.grad.zero_()
            algorithm.after_step(model, batch)
        algorithm.after_rollout(model, rollout)
    return found


class Damped(PPO):
    """PPO with a factor of its own, as in docs/guides/custom-algorithm.md."""

    def changing(self):
        return {**super().changing(), "damping": 1.0 / (1 + self.clock.env_steps)}

    @recordable
    def loss(self, model, batch):
        found = super().loss(model, batch)
        return replace(found, total=found.total * self.factor("damping"))


NUMBERS = replace(VECTOR, action=ActionSpec("continuous", low=(-1.0, -2.0), high=(1.0, 2.0)))
ON_POLICY = {"env.num_envs": 8, "algo.unroll_length": 6}
CASES = {
    "a2c": {"algorithm": "a2c", **ON_POLICY},
    "ppo": {"algorithm": "ppo", "ppo.epochs": 2, "ppo.minibatch_size": 20, **ON_POLICY},
    "a clip that shrinks": {"algorithm": "ppo", "ppo.clip_schedule.kind": "linear", "steps": 1000, **ON_POLICY},
    "a class of the user's": {"algorithm": f"{__name__}:Damped", **ON_POLICY},
    "a target entropy": {"algorithm": "a2c", "algo.entropy_target": 0.5, **ON_POLICY},
    "vtrace": {"algorithm": "vtrace", **ON_POLICY},
    "vtrace, normalized": {"algorithm": "vtrace", "algo.normalize_advantage": True, **ON_POLICY},
    **{name: {"algorithm": "dqn", **SMALL, **VARIANTS[name]} for name in ("double", "rainbow", "noisy")},
    "sac": {"algorithm": "sac", **SMALL},
}
FAR = {"cpu": {"rtol": 0, "atol": 0}, "cuda": {"rtol": 1e-4, "atol": 1e-6}}  # kernels of a graph may differ


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_threads_record_their_parts(case, threads):
    """Parts of two threads, or two parts of one."""
    config = make_config(**CASES[case])
    more = {"threads": threads, "chunk": 0 if threads > 1 else 24}
    for a, b in zip(trained(config, "cpu", **more), trained(config, "cpu", trace, **more), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_recorded_learner_steps_are_the_plain_ones(case, device):
    config, counted = make_config(**CASES[case]), recording(device)
    plain, recorded = trained(config, device), trained(config, device, counted.record)
    assert len(plain) == len(recorded) > 3
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(b, a, **FAR[device])
    assert not counted.plain
    assert counted.recordings > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["a2c", "double", "noisy", "lstm", "gru"])
def test_recorded_acting_is_the_plain_one(case, device):
    """Of two copies of a network and batches of two sizes, as in central acting, while the weights change."""
    core = {"model.core": case, "model.core_size": 8} if case not in CASES else {}
    config, counted = make_config(**CASES["a2c" if core else case], **core), recording(device)
    rollout: Rollout = map_tensors(lambda x: x.to(device), make_rollout(VECTOR, 6, 8))
    inputs, outputs = Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward), []
    for taken in (None, counted.record):
        policy, rng = acting_policy(make_algorithm(config, VECTOR), taken), torch.Generator(device).manual_seed(5)
        copies, ids, outs = (
            [make_model(config, VECTOR).to(device) for _ in range(2)],
            torch.arange(8, device=device),
            [],
        )
        states = {width: copies[0].initial_state(width) for width in (8, 5)}
        for i in range(20):
            width, model = (8, 5)[i // 2 % 2], copies[i % 2]
            row = inputs.map(lambda x, i=i, width=width: x[i % 6, :width])
            out, states[width] = policy(model, row, states[width], ids[:width], rng)
            outs.append(out)
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.99)
        outputs.append(outs)
    for a, b in zip(*outputs, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(y, x, **FAR[device])
    assert counted.recordings == 4
    assert not counted.plain


WORDS = replace(VECTOR, obs={"mission": ObsSpec((5,), "int64", text=True)})


@pytest.mark.parametrize(
    ("changes", "spec", "acting", "training"),
    [
        ({}, VECTOR, True, True),
        ({"graphs": False}, VECTOR, False, False),
        ({"model.core": "lstm"}, VECTOR, True, False),
        ({"model.core": "gtrxl"}, VECTOR, False, False),
        ({"acting": "central"}, VECTOR, True, True),
        ({"acting": "central", "deterministic": True}, VECTOR, False, True),
        ({"model.core": "package:Core"}, VECTOR, False, False),
        ({"model.compile": "default"}, VECTOR, False, False),
        ({"model.network": "package:Net"}, VECTOR, False, False),
        ({"algorithm": "sac"}, NUMBERS, True, True),
        ({"device": "cpu"}, VECTOR, True, True),
        ({}, IMAGE, True, True),
        ({"device": "cpu"}, IMAGE, False, False),
        ({}, WORDS, False, False),
    ],
)
def test_networks_that_do_the_same_at_each_call_are_recorded(changes, spec, acting, training, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(resources, "is_recurrent", lambda model: model.core != "none")
    monkeypatch.setattr(resources, "bf16_pays", lambda device: False)
    found = resources.resolve_resources(make_config(**{"device": "cuda", **changes}), spec)
    assert (found.record_acting is not None, found.record is not None) == (acting, training)

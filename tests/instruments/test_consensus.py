"""Distance to consensus and its bounds, the similarity of learners' gradients, norms of layers."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.algorithms.base import Compute, Loss
from coterie.build.resources import resolve_config
from coterie.exchange.solo import Solo
from coterie.exchange.topology import contraction, matrices
from coterie.instruments.consensus import RECENT, Consensus, Cosines, GradientSamples, cosine_memory
from coterie.instruments.norms import Norms
from coterie.learner import Gradients
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.roles import entry
from coterie.roles.learner_process import LearnerProcess
from coterie.runs.metrics import read_metrics
from tests.conftest import after, make_config
from tests.exchange.gossip_harness import changes_of, crowd, distance, step
from tests.exchange.harness import flat, make_setup, together
from tests.support.runs import small_ppo

# --- distance to consensus ---

LOCKSTEP = make_config(**{"gossip.tau": 0})


def test_the_reported_bound_on_the_distance_is_proposition_1s():
    sequence = matrices("ring", 3)
    c = crowd(np.zeros((3, 1)), sequence, tau=0)
    shared, changes = changes_of(c)
    reader, bound = Consensus(c.shared, shared, sequence, LOCKSTEP), 0.0
    for lengths in ((3.0, 0.0, 4.0), (0.0, 0.0, 2.0), (1.0, 1.0, 1.0)):
        for x, length in zip(c.learners, lengths, strict=True):
            x.params.grad[0] = length
        together([partial(x.step, x.params, 1.0) for x in c.learners])
        assert reader.read() == {}  # the changes are not measured yet
        for one in changes:
            one.step()
        bound = contraction(sequence) * (bound + math.sqrt(sum(n * n for n in lengths)))
        assert reader.read()["consensus/bound"] == pytest.approx(bound, rel=1e-5)


def test_no_bound_after_a_restart_or_where_lengths_were_overwritten_before_they_were_read():
    sequence = matrices("ring", 2)
    c = crowd(np.zeros((2, 1)), sequence, tau=0)
    shared, _ = changes_of(c)
    c.round()
    for mixes, joined, bound in ((1, 0, True), (2, 1, False), (RECENT + 10, 0, False)):
        c.shared.arrays["published"][:] = shared.arrays["mixes"][:] = mixes
        c.shared.arrays["joined"][1] = joined
        found = Consensus(c.shared, shared, sequence, LOCKSTEP).read()
        assert ("consensus/distance" in found, "consensus/bound" in found) == (True, bound)


def test_only_the_distance_is_reported_without_lockstep():
    sequence = matrices("ring", 3)
    start = np.array([[0.0], [1.0], [5.0]])
    for tau in (2, -1):
        c = crowd(start, sequence, tau=tau)
        for x in c.learners:
            x.params.grad[0] = 1.0
            step(x)
        found = Consensus(c.shared, changes_of(c)[0], sequence, make_config(**{"gossip.tau": tau})).read()
        said = c.shared.arrays["message"][:, :1].astype(float)
        assert found == {"consensus/distance": pytest.approx(distance(said))}


def test_nothing_is_reported_of_samples_that_are_written_while_they_are_read(monkeypatch):
    sequence, params, shared = matrices("ring", 2), flat(4), cosine_memory(2, 16)
    c, samples = crowd(np.zeros((2, 4)), sequence), [GradientSamples(params, shared, i, every=1) for i in (0, 1)]
    for x, sample in zip(c.learners, samples, strict=True):
        sample.gradient(0, None, None)
        assert x.publish(x.params)
    distances = Consensus(c.shared, changes_of(c)[0], sequence, make_config(**{"gossip.tau": -1}))
    assert distances.read() == {"consensus/distance": 0}
    for reader, lock in ((distances, x.lock), (Cosines(shared, sequence[0]), sample.lock)):
        # At its first fence: after a look at the counts, before the copy.
        monkeypatch.setattr("coterie.parallel.seqlock.fence", partial(lock.invalidate, 1))
        assert reader.read() == {}


# --- gradients ---


def test_cosines_of_pairs_of_peers_and_of_others():
    shared = cosine_memory(3, 2)
    reader = Cosines(shared, matrices("ring", 3)[0] * [[1, 1, 0], [1, 1, 0], [0, 0, 1]])  # 0 and 1 are peers
    a = shared.arrays
    assert reader.read() == {}
    a["grad"][:] = [[2, 0], [0, -3], [-1, 0]]
    a["writes"][:] = [2, 2, 0]
    assert reader.read() == {}  # one has none yet
    a["writes"][2] = 2
    found = reader.read()
    assert found == pytest.approx(
        {"cosine/0-1": 0, "cosine/0-2": -1, "cosine/1-2": 0, "cosine/peers": 0, "cosine/others": -0.5}
    )
    assert reader.read() == {}  # the same gradients again
    a["grad"][0] = [0, -1]
    a["writes"][:2] = 4
    assert reader.read()["cosine/peers"] == pytest.approx(1)
    shared.close()


def test_gradients_are_sampled_every_n_steps_before_the_exchange():
    params, shared = flat(4), cosine_memory(2, 16)
    inner = Solo(make_setup(params, clip=0.5))
    observer = GradientSamples(params, shared, 1, every=10)
    taken = []
    for k in range(6):
        params.grad[:4] = 8.0 + k
        observer.gradient(4 * k, None, None)  # 0, 4, 8, 12, ...: the first, and the first past 10 and past 20
        inner.step(params, 1.0)
        taken.append(int(shared.arrays["writes"][1]) // 2)
        if k in (3, 4):
            assert shared.arrays["grad"][1, :4].tolist() == [11.0] * 4  # and not clipped
    assert taken == [1, 1, 1, 2, 2, 3]
    assert shared.arrays["writes"][0] == 0
    shared.close()


# --- norms of layers, and the cosine of half a batch ---


class Noise:
    """A batch whose samples' gradients are independent noise, or all the same."""

    def __init__(self, noise, same, chunk=1):
        self.noise, self.same, self.chunk = noise, same, chunk
        self.count = self.valid = len(noise)

    def parts(self, ways=1):
        yield from self.noise.tensor_split(max(ways, len(self.noise) // self.chunk))

    def half(self):
        return Noise(self.noise[: len(self.noise) // 2], self.same, self.chunk)

    def update_factors(self):
        """Nothing changes."""

    def loss(self, model, part):
        wanted = part.sum(0) if not self.same else torch.ones_like(part[0]) * len(part)
        return Loss((model.weight[0] * wanted).sum(), {})


@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize("same", [True, False])
def test_of_white_noise_the_cosine_is_the_root_of_a_half_and_of_one_direction_it_is_one(same, ways):
    model = nn.Linear(20_000, 1, bias=False)
    params, team = FlatParams(model), Team(ways)
    gradients = Gradients(model, params, Compute(team=team))
    norms, batch = Norms(gradients, 10), Noise(torch.randn(24, 20_000), same)
    gradients.compute(batch, batch)
    norms.gradient(0, batch, batch)
    whole = batch.noise.sum(0) if not same else torch.full((20_000,), 24.0)
    torch.testing.assert_close(params.grad, whole, atol=1e-4, rtol=1e-5)  # halved or not, it is the batch's
    params.data.add_(1.0)
    norms.step()
    found = norms.gauges()
    assert found["cosine/half"] == pytest.approx(1 if same else math.sqrt(0.5), abs=0.02)
    assert found["norm/gradient/weight"] == pytest.approx(float(whole.norm()), rel=1e-5)
    assert found["norm/step/weight"] == pytest.approx(math.sqrt(20_000), rel=1e-4)
    for env_steps, due in ((9, False), (10, True)):
        before = norms.gauges()
        norms.gradient(env_steps, batch, batch)
        assert (norms.gauges() is not before) == due
    batch.half = lambda: batch
    norms.gradient(20, batch, batch)
    assert "cosine/half" not in norms.gauges()  # of a batch that has no half, which would be 1
    team.close()


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "vtrace", "dqn"])
def test_any_algorithm_reports_norms_and_learns_the_same(algorithm):
    small = {"q.learn_start": 80, "q.batch_size": 16, "q.intensity": 2.0, "replay.capacity": 4000}
    small |= {"algo.unroll_length": 8, "ppo.minibatch_size": 16}
    found = []
    for every in (0, 40):
        learner = LearnerProcess(resolve_config(make_config(algorithm=algorithm, **small, **{"log.norms": every})))
        learner.run(after(6))
        gauges = learner.gauges()
        learner.close()
        found.append((learner.params.data.clone(), gauges))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-4)
    told = found[1][1]
    assert not any(name.startswith("norm/") for name in found[0][1])
    kinds = {name.split("/")[1] for name in told if name.startswith("norm/")}
    assert kinds == {"gradient", "weights", "step"}
    assert 0 < told["cosine/half"] <= 1.0001


def test_the_cosine_without_the_value_loss_is_of_the_loss_as_it_is_now():
    """V-trace divides its advantages by a running deviation, which the algorithm of the measurement must have, too."""
    more = {"algo.normalize_advantage": True, "algo.unroll_length": 8, "log.norms": 1}
    learner = LearnerProcess(resolve_config(make_config(algorithm="vtrace", **more)))
    learner.run(after(3))
    twin = next(observer.policy for observer in learner.observers if isinstance(observer, Norms))
    learner.close()
    assert twin.mean_square > 0


def test_what_is_measured_now_and_then_is_in_the_lines_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "_GAUGES_S", 0.0)  # read at each report
    coterie.train(small_ppo(tmp_path / "run", **{"log.norms": 10**6}), quiet=True)
    assert any(name.startswith("norm/step/") for name in read_metrics(tmp_path / "run")[-1])

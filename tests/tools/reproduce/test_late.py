"""The acting of the figure `staleness`: its lag is the one asked for, and nothing but late."""

from __future__ import annotations

from itertools import pairwise

import torch

from coterie.cli.options import config_of
from coterie.tools.reproduce.figure import FIGURES
from coterie.types import map_tensors
from tests.conftest import after, make_config
from tests.support.crew import crewed


def test_rollouts_reach_the_learner_late_by_as_many_as_asked_for_whole_and_in_order():
    more = {"ppo.epochs": 2, "ppo.minibatch_size": 16, "algo.unroll_length": 8, "ppo.proximal": True}
    late = {"plugins.acting": "coterie.tools.reproduce.late:late_4", "env.num_envs": 4}
    seen, steps = [], []
    with crewed(make_config(algorithm="ppo", **more, **late)) as learner:

        def keep(rollout):
            seen.append(map_tensors(torch.clone, rollout))
            steps.append(learner.progress.learner_steps)
            return len(seen) == 12

        learner.run(keep)
        counts = learner.acting.counts()
    versions = [rollout.policy_version.unique().tolist() for rollout in seen]
    trained = [0, *steps[:-1]]  # the learner steps before each rollout
    assert trained == list(range(0, 48, 4))  # 2 epochs of 2 minibatches
    assert versions == [[0]] * 5 + [[n - 16] for n in trained[5:]]
    assert learner.progress.policy_lag_max == 16
    for old, new in pairwise(seen):
        assert torch.equal(old.obs[-1], new.obs[0])
        assert not torch.equal(old.obs, new.obs)
    assert counts["produced"] == learner.progress.env_steps + counts["in_flight"]
    assert counts["in_flight"] > 3 * 8 * 4  # four rollouts, less their masked rows


def test_the_two_figures_have_all_lags_from_0_to_256_and_train_with_them():
    seen = dict[str, list[float]]()
    for name in ("staleness", "staleness-1"):
        size = FIGURES[name].sizes["small"]
        for arm in FIGURES[name].arms(size):
            seen.setdefault(arm.label, []).append(arm.x)
            if arm.x > 4:
                continue
            config = config_of([word.replace("{env}", "CartPole-v1") for word in arm.args])
            with crewed(config) as learner:
                learner.run(after(4))
            lags, updates = learner.progress.lags, 4 if name == "staleness" else 1
            assert learner.progress.learner_steps == 4 * updates
            assert max(lags) == arm.x, "in all batches but the first ones"
            assert lags[int(arm.x)] == (4 - arm.x / updates) * 64 * updates
    assert {*map(tuple, seen.values())} == {(0, 4, 16, 64, 256, 0, 1)}

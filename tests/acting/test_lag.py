"""The bound on the policy lag: it holds, costs no rollout that was begun, and starves no env."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.acting.decoupled import worst_lag
from coterie.acting.window import Window
from coterie.algorithms.vtrace import VTrace
from coterie.build.factory import stated_lag
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.errors import ConfigError
from coterie.types import Array
from tests.conftest import VECTOR, make_config
from tests.support.crew import crewed
from tests.support.paced import LENGTHS, PAUSES, TASKS, tallied

ACTORS = {"acting": "decoupled", "actors": 2}
PROCESSES, WIDTH, T, ROWS = 6, 128, 20, 300_000  # WIDTH: envs of each
BOUND = {"decoupled": 3, "central": 4}


@dataclass
class Part:
    """A rollout of one process, as it was trained on: flags `[T, WIDTH]`."""

    ids: Array  # [WIDTH]
    lag: int  # of its oldest action, in learner steps
    valid: Array
    ended: Array  # terminated or truncated
    late: Array  # of an episode that the env does not count


def speed_of(env: int) -> int:
    return env // WIDTH % len(PAUSES)


@dataclass
class Run:
    sampled: Array  # [speeds, lengths]: rows in whole episodes, as the envs have counted them
    parts: list[Part]  # in the order of training

    def trained(self) -> Array:
        """The same from the flags of what is trained on: an episode is as long as the rows between two ends."""
        found = np.zeros_like(self.sampled)
        streams = defaultdict[int, list[Array]](list)  # flags of an env, row after row
        for part in self.parts:
            flags = np.stack([part.valid, part.ended, part.late])
            for column, env in enumerate(part.ids.tolist()):
                streams[env].append(flags[:, :, column])
        for env, stream in streams.items():
            valid, ended, late = np.concatenate(stream, axis=1)
            rows = np.diff(np.cumsum(valid)[ended & ~late], prepend=0)
            np.add.at(found[speed_of(env)], np.searchsorted(LENGTHS, rows).clip(max=len(LENGTHS) - 1), rows)
        return found


def driven(acting: str, folder: Path, rows: int = ROWS, pace: float = 0.5, max_lag: int | None = None) -> Run:
    """Take the batches of real processes, as fast as they come, until there were so many rows, and then until all
    episodes that had begun are whole. `pace`: factor of the envs' pauses.
    """
    max_lag = BOUND[acting] if max_lag is None else max_lag
    kwargs = json.dumps({"tally": str(folder), "pace": pace})
    env = {"id": TASKS, "backend": "vector", "kwargs": kwargs, "num_envs": WIDTH * PROCESSES, "groups": 1}
    how = {"actors": PROCESSES, f"{acting}.batch_size": 2 * WIDTH, "algo.unroll_length": T, "max_lag": max_lag}
    config = make_config(
        algorithm="vtrace", acting=acting, device="cpu", **{f"env.{k}": v for k, v in env.items()}, **how
    )
    at, seen, parts, whole = [0], 0, list[Part](), np.zeros(WIDTH * PROCESSES, bool)
    with crewed(resolve_config(config)) as learner:
        for rollout in learner.acting.rollouts(lambda: learner.acting.publish(at[0])):
            assert isinstance(rollout.obs, torch.Tensor)
            ended, late = rollout.terminated | rollout.truncated, rollout.obs[:-1, :, 0] > 0
            for own in (slice(0, WIDTH), slice(WIDTH, None)):
                lag = at[0] - int(rollout.policy_version[:, own].min())
                flags = (x[:, own].numpy().copy() for x in (rollout.mask, ended, late))
                parts.append(Part(rollout.env_id[own].numpy().copy(), lag, *flags))
                whole[parts[-1].ids] |= parts[-1].late.any(0)
            at[0], seen = at[0] + 1, seen + int(rollout.mask.sum())
            if seen >= rows:
                (folder / "over").touch()
            if whole.all():
                return Run(tallied(folder), parts)
    raise AssertionError("it ended by itself")


@pytest.fixture(scope="module", params=BOUND)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return driven(request.param, tmp_path_factory.mktemp("tally"))


def test_what_is_trained_on_is_what_was_sampled_whatever_the_speed_and_the_length_of_episodes(run):
    trained = run.trained()
    assert trained.sum() >= ROWS
    assert np.array_equal(trained, run.sampled), "an episode was lost, cut, or trained on twice"


def test_the_bound_holds_and_no_env_starves(run, request):
    assert 0 < max(part.lag for part in run.parts) <= BOUND[request.node.callspec.params["run"]]
    for some in np.array_split(np.array(run.parts), 3):
        assert len({env for part in some for env in part.ids.tolist()}) == WIDTH * PROCESSES


def test_env_hosts_would_exceed_the_bound_without_it(tmp_path):
    run = driven("central", tmp_path, rows=200_000, pace=2, max_lag=0)
    assert max(part.lag for part in run.parts) > BOUND["central"]


@pytest.mark.parametrize(("max_lag", "worst"), [(0, 4), (1, 1), (3, 3), (9, 4)])
def test_actors_keep_the_bound_that_is_asked_for(max_lag, worst):
    settings = {"actors": 2, "env.num_envs": 6, "decoupled.batch_size": 3, "algo.unroll_length": 4, "max_lag": max_lag}
    config = resolve_config(make_config(algorithm="vtrace", acting="decoupled", **{**settings, "decoupled.queue": 2}))
    assert worst_lag(config, 1) == worst
    with crewed(config) as learner:
        assert f"policy lag up to {worst} learner step" in learner.describe()
        at, lags = [0], set()
        for rollout in islice(learner.acting.rollouts(lambda: learner.acting.publish(at[0])), 30):
            lags.add(at[0] - int(rollout.policy_version.min()))
            at[0] += 1
            learner.acting.rest()  # a slow learner: the actors fill every slot
    assert max(lags) == worst


def test_a_learner_for_actors_of_other_machines_states_no_bound(tmp_path):
    wire = {"actors": 2, "wire.bind": f"unix:{tmp_path / 'wire'}"}
    with crewed(resolve_config(make_config(algorithm="vtrace", acting="decoupled", **wire))) as learner:
        assert learner.describe().endswith("policy lag without a bound")


def test_no_rollout_begins_while_too_much_is_untrained_or_the_oldest_would_be_overtaken_too_often():
    window = Window(6)
    first = window.begin(2)
    second = window.begin(4)
    assert not window.may_begin(1)  # six columns are not trained
    window.finish(second)
    window.trained(4)
    assert not window.may_begin(1)  # the first one has been overtaken by four
    window.finish(first)
    assert window.may_begin(4)
    assert not window.may_begin(5)
    window.trained(1)  # half of it is in another batch
    assert not window.may_begin(6)
    window.trained(1)
    assert window.may_begin(6)
    window.abandon(window.begin(6))  # its host is gone
    assert window.may_begin(6)
    assert Window(0).may_begin(10**9)


@given(st.randoms(use_true_random=False), st.integers(1, 8), st.integers(1, 12), st.integers(1, 4))
def test_some_rollout_may_always_begin_or_finish_or_be_trained(random, width, batch, lag):
    window, waiting, open_, trained = Window(max(width + batch - 1, lag * batch)), 0, list[tuple[int, int]](), 0
    for _ in range(200):
        begins = len(open_) < 5 and window.may_begin(width)
        if open_ and (random.random() < 0.5 or not begins):
            ticket, before = open_.pop(random.randrange(len(open_)))  # in any order
            window.finish(ticket)
            waiting += width
            assert trained + waiting - width - before <= 2 * (window.columns - width)
        elif begins:
            open_.append((window.begin(width), trained))
        else:
            raise AssertionError("nothing can go on")
        while waiting >= batch:
            window.trained(batch)
            waiting, trained = waiting - batch, trained + batch


@pytest.mark.parametrize("max_lag", [1, 8])
def test_env_hosts_train_with_a_bound_and_in_lockstep(max_lag):
    how = {"central.lockstep": True} if max_lag < 4 else {"central.batch_size": 2}
    settings = {"actors": 2, "env.num_envs": 4, "algo.unroll_length": 4, "max_lag": max_lag}
    config = resolve_config(make_config(algorithm="vtrace", acting="central", **{**settings, **how}))
    check(config, VECTOR)
    with crewed(config) as learner:
        at, lags = [0], set()
        for rollout in islice(learner.acting.rollouts(lambda: learner.acting.publish(at[0])), 60):
            lags.add(at[0] - int(rollout.policy_version.min()))
            at[0] += 1
    assert max(lags) <= (max_lag if max_lag > 4 else 0)


@pytest.mark.parametrize(
    ("least", "settings"),
    [(5, {"acting": "central", "actors": 1}), (8, {"acting": "decoupled", "actors": 2, "decoupled.publish_every": 9})],
)
def test_a_bound_that_cannot_be_kept_is_refused_with_the_least_that_can(least, settings):
    less, more = {**settings, "max_lag": least - 1}, {**settings, "max_lag": least}
    config = resolve_config(make_config(algorithm="vtrace", **{"env.num_envs": 4, **less}))
    with pytest.raises(ConfigError, match=rf"^max_lag: {least - 1} must be at least {least} for this layout, or 0"):
        check(config, VECTOR)
    check(resolve_config(make_config(algorithm="vtrace", **{"env.num_envs": 4, **more})), VECTOR)


@pytest.mark.parametrize("exchange", ["hogwild", "store"])
def test_shared_weights_have_no_bound_and_refuse_one(exchange):
    how = {"exchange": exchange, "learners": 2, "acting": "decoupled", "actors": 2}
    with pytest.raises(ConfigError, match=r"^max_lag: 4 must be 0 with hogwild and store: it cannot bound"):
        check(resolve_config(make_config(algorithm="vtrace", max_lag=4, **how)), VECTOR)


class OwnVTrace(VTrace):
    """A user's algorithm."""


REPLAY = {"vtrace.replay_capacity": 40, "vtrace.replay_share": 0.5}


@pytest.mark.parametrize(
    ("stated", "settings"),
    [
        ("up to 0 learner steps", {"algorithm": "a2c", "exchange": "gossip", "learners": 2}),
        ("up to 0 learner steps", {"algorithm": "a2c", "exchange": "allreduce", "learners": 2}),
        ("up to 0 learner steps", {"algorithm": "vtrace", "exchange": "hogwild", "learners": 1}),
        *(
            (
                "up to 0 learner steps of its own, without a bound on those of other learners",
                {"algorithm": "a2c", "exchange": exchange, "learners": 2},
            )
            for exchange in ("hogwild", "store")
        ),
        ("without a bound", {"algorithm": "vtrace", "acting": "central", "actors": 2}),
        ("up to 0 learner steps", {"algorithm": "vtrace", "acting": "central", "actors": 2, "central.lockstep": True}),
        ("up to 0 learner steps (and 3 within a batch)", {"algorithm": "vtrace", "vtrace.minibatch": 1}),
        ("up to 0 learner steps (and 1 within a batch), more for replayed rollouts", {"algorithm": "vtrace", **REPLAY}),
        (
            "up to 0 learner steps (and 1 within a batch), more for replayed rollouts",
            {"algorithm": "tests.acting.test_lag:OwnVTrace", **REPLAY},
        ),
        ("up to 0 learner steps, more for replayed samples", {"algorithm": "dqn"}),
    ],
)
def test_the_line_at_the_start_is_true_of_each_layout(stated, settings):
    assert stated_lag(resolve_config(make_config(**settings))) == stated

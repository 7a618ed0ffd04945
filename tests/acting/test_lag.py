"""The bound on the policy lag: it holds, costs no rollout that was begun, and starves no env."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.acting.actor import ActorMemory
from coterie.acting.base import MemorySetup
from coterie.acting.decoupled import Decoupled, worst_lag
from coterie.acting.window import Window, window_of
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.parallel.board import Board
from coterie.parallel.stages import Stages
from coterie.types import ConfigError, Rollout
from tests.acting.central_harness import Rig, time_step
from tests.conftest import VECTOR, make_config
from tests.support.crew import crewed

PAUSES = (0.0, 0.0, 3e-4, 1e-3)  # of the producers, in turn: seconds for a step
LENGTHS = (3, 7, 20, 50)  # of the episodes of neighboring envs
ROWS, T = 1_000_000, 20


@dataclass
class Account:
    """Rows by the speed of their producer and the length of their episodes."""

    sampled: Counter[tuple[int, int]] = field(default_factory=Counter)
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    lags: list[int] = field(default_factory=list)

    def train(self, rollout: Rollout, speed: np.ndarray, step: int) -> None:
        """`speed` `[B]`: of the producer of each column; `step`: the learner steps so far."""
        self.lags.append(step - int(rollout.policy_version.min()))
        for s, env in zip(speed.tolist(), rollout.env_id.tolist(), strict=True):
            self.trained[s, LENGTHS[env % len(LENGTHS)]] += T

    def check(self, bound: int) -> None:
        assert 0 < max(self.lags) <= bound
        assert len(self.trained) == len({*PAUSES}) * len(LENGTHS), "an env starves"
        assert chance(self.trained, self.sampled) > 0.01
        slowest = max(self.trained)[0]
        biased = Counter({kind: n * 19 // 20 if kind[0] == slowest else n for kind, n in self.trained.items()})
        assert chance(biased, self.sampled) < 1e-6, "it would not be noticed if every 20th row of the slowest were lost"


def chance(found: Counter[tuple[int, int]], of: Counter[tuple[int, int]]) -> float:
    """The probability that rows drawn at random from `of` differ from it as `found` does, or more (chi-square)."""
    share = found.total() / of.total()
    statistic = sum((found[kind] - rows * share) ** 2 / (rows * share) for kind, rows in of.items())
    return float(torch.special.gammaincc(torch.tensor((len(of) - 1) / 2), torch.tensor(statistic / 2)))


def speed_of(producer: int) -> int:
    return sorted({*PAUSES}).index(PAUSES[producer % len(PAUSES)])


def test_actors_of_any_speed_are_trained_on_in_proportion_and_within_the_bound():
    width, actors, account = 32, 8, Account()
    settings = {"actors": actors, "env.num_envs": width * actors, "decoupled.batch_size": 4 * width}
    made = make_config(algorithm="vtrace", acting="decoupled", **{"algo.unroll_length": T, **settings})
    config = resolve_config(made)
    memory = ActorMemory(MemorySetup(config, VECTOR, T, (), 1, 0))
    params, moments = SimpleNamespace(data=torch.zeros(1)), SimpleNamespace(read=lambda: torch.zeros(0))
    agent: Any = SimpleNamespace(params=params, moments=moments)
    acting = Decoupled(memory, agent, Board(1), 0, Stages(), torch.device("cpu"), config.decoupled, 60.0)
    taking, over = threading.Lock(), threading.Event()

    def act(number: int) -> None:
        ids = torch.arange(number * width, (number + 1) * width)
        while not over.is_set():
            with taking:  # the lock of the slots is between processes
                slot = memory.slots.take(number)
            if slot is None or memory.weights.version < memory.slots.need[slot]:
                time.sleep(1e-4)
                continue
            fields = memory.slots.columns(*slot)
            fields["version"].fill_(memory.weights.version)
            fields["env_id"].copy_(ids)
            time.sleep(T * PAUSES[number % len(PAUSES)])
            for length in LENGTHS:
                account.sampled[speed_of(number), length] += T * width // len(LENGTHS)
            memory.slots.fill(slot, (number, 0, 0))

    threads = [threading.Thread(target=act, args=(k,), daemon=True) for k in range(actors)]
    at, rows = [0], 0
    try:
        for thread in threads:
            thread.start()
        for rollout in acting.rollouts(lambda: acting.publish(at[0])):
            speed = np.array([speed_of(producer) for producer, _, _ in rollout.origins]).repeat(width)
            account.train(rollout, speed, at[0])
            at[0], rows = at[0] + 1, rows + rollout.reward.numel()
            if rows >= ROWS:
                break
    finally:
        over.set()
        for thread in threads:
            thread.join(10)
        acting.close()
        memory.close()
    account.check(worst_lag(config, 1))


def hosted(window: int, least: int) -> Account:
    """Central acting for eight hosts, until this number of rows was trained."""
    width, hosts, account, over = 64, 8, Account(), threading.Event()
    rig = Rig(envs=width * hosts, batch_size=BATCH, unroll_length=T, batches=8, timeout=60.0, window=window)

    def act(number: int) -> None:
        stream = rig.central.open_stream(number, 0, number * width, width)
        answers = queue.SimpleQueue[int]()
        seen = time_step(np.zeros((width, 3), np.float32), is_first=np.ones(width, bool))
        while not over.is_set():
            stream.ask(dict(seen), lambda arrays, version: answers.put(version))
            seen["is_first"] = np.zeros(width, bool)
            while not over.is_set():
                with suppress(queue.Empty):
                    answers.get(timeout=0.2)
                    break
            for length in LENGTHS:
                account.sampled[speed_of(number), length] += width // len(LENGTHS)
            time.sleep(PAUSES[number % len(PAUSES)] * SLOWER)

    threads = [threading.Thread(target=act, args=(k,), daemon=True) for k in range(hosts)]
    at, rows = [0], 0
    try:
        for thread in threads:
            thread.start()
        for rollout in rig.rollouts(at):
            speed = np.array([speed_of(env // width) for env in rollout.env_id.tolist()])
            account.train(rollout, speed, at[0])
            rows += rollout.reward.numel()
            if rows >= least:
                return account
    finally:
        over.set()
        rig.close()
        for thread in threads:
            thread.join(10)
    raise AssertionError("it ended by itself")


BATCH, SLOWER, BOUND = 128, 4, 4


def test_env_hosts_of_any_speed_are_trained_on_in_proportion_and_within_the_bound():
    hosted(window_of(BOUND, BATCH, 1), ROWS).check(BOUND)
    assert max(hosted(0, ROWS // 8).lags) > BOUND  # which it would not be otherwise


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
            time.sleep(0.005)  # a slow learner: the actors fill every slot
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
    "settings",
    [
        {"acting": "central", "actors": 1, "max_lag": 4},
        {"acting": "decoupled", "actors": 2, "decoupled.publish_every": 9, "max_lag": 7},
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(settings):
    config = resolve_config(make_config(algorithm="vtrace", **{"env.num_envs": 4, **settings}))
    with pytest.raises(ConfigError, match=r"^max_lag: \d must be higher for this layout"):
        check(config, VECTOR)
    more = {**settings, "max_lag": 8}
    check(resolve_config(make_config(algorithm="vtrace", **{"env.num_envs": 4, **more})), VECTOR)

"""Runs envs for whole rollouts and keeps what was seen, for tests that check by arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie import config
from coterie.envs.group import Envs
from coterie.envs.make import make_envs
from coterie.envs.spaces import random_actions
from coterie.types import Array, Obs, TimeStep, entries, from_entries

COUNTING, FLAKY = "coterie.envs.testing:CountingEnv", "tests.support.flaky:FlakyEnv"


def make(
    env_id: str, num_envs: int = 4, *, atari: config.Atari | None = None, kwargs: Any = None, **options: Any
) -> Envs:
    made = {k: options.pop(k) for k in ("first_env_id", "threads", "groups", "training") if k in options}
    seed = options.pop("seed", 1)
    env = config.Env(id=env_id, num_envs=num_envs, kwargs=json.dumps(kwargs or {}), **options)
    return make_envs(env, atari or config.Atari(), seed=seed, **made)


class Seen(NamedTuple):
    """Time first: rows 0..T of everything in a TimeStep, and the T actions between."""

    obs: Obs
    reward: Array
    terminated: Array
    truncated: Array
    is_first: Array
    episode_return: Array
    episode_length: Array
    env_id: Array
    action: Array

    @property
    def done(self) -> Array:
        return self.terminated | self.truncated

    @property
    def real(self) -> Array:
        """`[T, B]`: False on fake steps."""
        return ~self.is_first[1:]


def _combine(call: Callable[[list[Array]], Array], parts: Sequence[TimeStep]) -> TimeStep:
    seen = [entries(p.obs) for p in parts]
    obs = from_entries({k: call([x[k] for x in seen]) for k in seen[0]})
    return TimeStep(obs, *(call(list(x)) for x in list(zip(*parts, strict=True))[1:]))


def _arrays(ts: TimeStep) -> list[Array]:
    return [*entries(ts.obs).values(), *ts[1:]]


def merge(parts: list[TimeStep]) -> TimeStep:
    """The groups' TimeSteps side by side, copied."""
    return _combine(np.concatenate, parts)


class Player:
    """Takes random actions; `rollout(T)` returns rows 0..T."""

    def __init__(self, envs: Envs) -> None:
        self.envs, self.rng = envs, np.random.default_rng(7)
        self.now = [envs.recv(g) for g in range(len(envs.groups))]

    def step(self) -> Array:
        action = random_actions(self.envs.spec.action, self.rng, self.envs.num_envs)
        for g, cols in enumerate(self.envs.groups):
            self.envs.send(g, action[cols])
        self.now = [self.envs.recv(g) for g in range(len(self.envs.groups))]
        return action

    def rollout(self, steps: int) -> Seen:
        received, rows, actions = [self.now], [merge(self.now)], []
        for _ in range(steps):
            actions.append(self.step())
            received.append(self.now)
            rows.append(merge(self.now))
        for kept, row in zip(received, rows, strict=True):  # a TimeStep is not overwritten later
            again = merge(kept)
            for x, y in zip(_arrays(again), _arrays(row), strict=True):
                np.testing.assert_array_equal(x, y)
        return Seen(*_combine(np.stack, rows), np.stack(actions))


def worker_pids(envs: Envs) -> list[int]:
    return [w.popen.pid for backend in envs._backends for w in backend._workers if w is not None]  # type: ignore[attr-defined]


def play(envs: Envs, steps: int) -> Seen:
    return Player(envs).rollout(steps)


def pattern(seen: Seen, env: int) -> str:
    """One letter for each row: F is_first, D terminated, T truncated, . otherwise."""
    rows = zip(seen.is_first[:, env], seen.terminated[:, env], seen.truncated[:, env], strict=True)
    return "".join("F" if f else "D" if d else "T" if t else "." for f, d, t in rows)


def check_returns(seen: Seen) -> None:
    """Each reported return and length are those of the rows since the last report."""
    for env in range(seen.reward.shape[1]):
        begin = 1
        for t in np.flatnonzero(~np.isnan(seen.episode_return[:, env])):
            total = seen.reward[begin : t + 1, env].astype(np.float64).sum()
            np.testing.assert_allclose(seen.episode_return[t, env], total, rtol=1e-6)
            assert seen.episode_length[t, env] == (~seen.is_first[begin : t + 1, env]).sum()
            begin = t + 1


def check_counting(seen: Seen, vector: Array, effect: Array, length: int) -> None:
    """Check by CountingEnv's arithmetic that all rows are aligned; no env may have been replaced."""
    count, episode = vector[..., 0], vector[..., 1]
    before, after = seen.is_first[:-1], seen.is_first[1:]
    # is_first is the done of the row before, and nothing else.
    np.testing.assert_array_equal(after, seen.done[:-1])
    real = ~after
    np.testing.assert_allclose(seen.reward[1:][real], (16 * count[:-1] + effect)[real], rtol=1e-6)
    np.testing.assert_array_equal(count[1:][real], count[:-1][real] + 1)
    np.testing.assert_array_equal(episode[1:], episode[:-1] + after)
    for field in (seen.reward, seen.terminated, seen.truncated):
        assert not field[1:][after].any()
    assert not (before & after).any()
    even = episode % 2 == 0
    assert (seen.terminated <= even).all()
    assert (seen.truncated <= ~even).all()
    assert seen.terminated.any()
    assert seen.truncated.any()
    np.testing.assert_array_equal(~np.isnan(seen.episode_return), seen.done)
    assert (seen.episode_length[seen.done] == length).all()
    check_returns(seen)

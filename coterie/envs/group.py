"""One synchronous group of environments: the bookkeeping between a backend's instances and what acting sees.

A slot is a column of the rollout; it holds one instance. With `swap` there are more instances than slots (the reserve).
This is the one place that decides `is_first`, ends of games, episode statistics and what happens to a broken instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from coterie.envs.backend import Backend, Batch
from coterie.envs.spaces import random_actions
from coterie.types import Array, Obs, TimeStep

_DECORRELATE, _REPLACED = 3, 2  # spawn keys below an env's own


def env_seed(seed: int, *key: int) -> int:
    """A 31-bit seed that depends on the run's seed and a key: (global env id,) or what derives from one."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] & 0x7FFFFFFF)


def each(fn: Callable[..., Any], *obs: Obs) -> Obs:
    """`fn` on every array of one or several observations."""
    if isinstance(obs[0], dict):
        return {k: fn(*(o[k] for o in obs)) for k in obs[0]}
    return fn(*obs)


def _arrays(obs: Obs) -> list[Array]:
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def _finite(x: Array) -> Array:
    """`[B]`: which rows hold finite numbers only."""
    return cast(Array, np.isfinite(x).reshape(len(x), -1).all(1))


class Group:
    """`env_id` are the slots' global ids, `keys` every instance's seed key; `report` counts instances replaced."""

    def __init__(
        self,
        backend: Backend,
        env_id: Array,
        keys: Sequence[tuple[int, ...]],
        seed: int,
        reset: Literal["in_place", "wait", "swap"],
        time_limit: Literal["truncate", "terminate"],
        report: Callable[[Sequence[str]], None],
    ) -> None:
        n = len(env_id)
        self.backend, self.env_id, self._report = backend, env_id, report
        self._to_env = backend.action_map.to_env
        self._keys, self._seed, self._lives = keys, seed, Counter[int]()
        self._hold, self._limit_ends_task = reset != "in_place", time_limit == "terminate"
        self._instance = np.arange(n, dtype=np.int32)  # slot -> instance
        self._first = np.ones(n, bool)  # is_first of the next TimeStep
        self._idle = np.zeros(n, bool)  # finished, and not stepped before its reset
        self._reserve: dict[int, Obs] = {}  # instance -> its first observation; the oldest is taken first
        self._retired: list[int] = []  # swapped out, to be reset
        self._return, self._length = np.zeros(n), np.zeros(n, np.int64)
        self._excluded = np.zeros(n, bool)  # the game began before the run did: its return is not reported
        self._asked = np.arange(backend.num_instances, dtype=np.int32)  # whom the request in flight is for
        self._running: Array | None = None  # slots that were stepped; None: all
        self._swapped: dict[int, Obs] = {}  # slot -> first observation of the instance that it switched to
        self._resetting = False
        self._last: TimeStep
        self._ready = True  # the first observations were not given out yet
        backend.reset(self._asked)

    def start(self, decorrelate: int) -> None:
        """Wait for the first observations, and take each env's random number of random steps."""
        n = len(self.env_id)
        batch, fresh = self._collect()
        for i in range(n, self.backend.num_instances):
            self._reserve[i] = fresh.get(i, each(lambda x, i=i: x[i].copy(), batch.obs))
        obs = each(lambda x: x[:n].copy(), batch.obs)
        self._renew(obs, fresh)
        if decorrelate:
            self._decorrelate(obs, decorrelate)
        zeros, nan = np.zeros(n, bool), np.full(n, np.nan)
        first = np.ones(n, bool)
        self._last = TimeStep(obs, np.zeros(n, np.float32), zeros, zeros.copy(), first, nan, nan.copy(), self.env_id)
        self._first = np.zeros(n, bool)

    def recv(self) -> TimeStep:
        """The consequence of the actions sent last (at first: of the reset)."""
        if self._ready:
            self._ready = False
            return self._last
        first = self._first
        if self._running is None:
            batch, fresh = self._collect()
        else:
            asked = len(self._running) > 0
            answer, fresh = self._collect() if asked else (None, {})
            batch = self._spread(answer, self._running)
        if fresh:
            first = first.copy()
            first[self._renew(batch.obs, fresh)] = True
        if first.any():
            for x in batch[1:5]:
                x[first] = 0
        self._last = self._time_step(batch, first)
        return self._last

    def _time_step(self, batch: Batch, first: Array) -> TimeStep:
        """Statistics, time limits, and who restarts at the next step."""
        terminated, truncated = batch.terminated, batch.truncated
        self._return += batch.reward
        self._length += ~first
        episode_return, episode_length = np.full((2, len(first)), np.nan)
        done = terminated | truncated
        if done.any() and batch.game_over.any():
            over = batch.game_over
            told = over & ~self._excluded
            episode_return[told], episode_length[told] = self._return[told], self._length[told]
            self._forget(over)
            if self._hold:
                self._idle |= over
        if self._limit_ends_task:
            terminated, truncated = done, np.zeros_like(done)
        self._first = done | self._idle if self._hold else done
        return TimeStep(
            batch.obs, batch.reward, terminated, truncated, first, episode_return, episode_length, self.env_id
        )

    def _forget(self, slots: Array) -> None:
        """These slots begin a new game."""
        self._return[slots], self._length[slots], self._excluded[slots] = 0, 0, False

    def send(self, action: Array) -> None:
        """Step every slot that is not waiting for its reset."""
        if not (self._hold and self._idle.any()):
            self._running = None
            self._step(self._instance, action)
            return
        self._running = run = np.flatnonzero(~self._idle)
        self._swapped = {}
        for slot in np.flatnonzero(self._idle):
            if not self._reserve:
                break
            self._retired.append(int(self._instance[slot]))
            self._instance[slot] = instance = next(iter(self._reserve))
            self._swapped[int(slot)] = self._reserve.pop(instance)
            self._idle[slot] = False
        if len(run):
            self._step(self._instance[run], action[run])

    def _step(self, ids: Array, action: Array) -> None:
        self._asked = ids
        self.backend.step(ids, self._to_env(action))

    def _spread(self, batch: Batch | None, run: Array) -> Batch:
        """A whole group's batch from that of the slots that ran; the others show what they showed."""
        n = len(self.env_id)
        obs = each(np.copy, self._last.obs)
        fields = np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        if batch is not None:
            for whole, part in zip([*_arrays(obs), *fields], [*_arrays(batch.obs), *batch[1:5]], strict=True):
                whole[run] = part
        for slot, row in self._swapped.items():
            _put(obs, slot, row)
        return Batch(obs, *fields)

    def end_rollout(self) -> None:
        """Start the resets that were held back; they run until `begin_rollout` asks for them."""
        ids = [*self._retired, *self._instance[self._idle].tolist()]
        if ids:
            self._asked = np.array(ids, np.int32)
            self.backend.reset(self._asked)
            self._resetting = True

    def begin_rollout(self) -> TimeStep:
        """What was seen last, with the rows of those that were reset since (or broke) replaced."""
        if not self._resetting:
            return self._last
        self._resetting = False
        batch, fresh = self._collect()
        for row, i in enumerate(self._asked.tolist()):
            fresh.setdefault(i, each(lambda x, row=row: x[row].copy(), batch.obs))
        for i in self._retired:
            self._reserve[i] = fresh[i]
        self._retired = []
        obs = each(np.copy, self._last.obs)
        slots = self._renew(obs, fresh)
        if len(slots) == 0:
            return self._last
        self._idle[slots], self._first[slots] = False, False
        last = TimeStep(obs, *(x.copy() for x in self._last[1:]))
        last.is_first[slots] = True
        for x, value in zip(last[1:4] + last[5:7], (0, False, False, np.nan, np.nan), strict=True):
            x[slots] = value
        self._last = last
        return last

    def _collect(self) -> tuple[Batch, dict[int, Obs]]:
        """The backend's answer, and the first observations of instances that had to be made anew."""
        batch = self.backend.recv()
        bad = self._bad(batch)
        return batch, self._replace(bad) if bad else {}

    def _bad(self, batch: Batch) -> dict[int, str]:
        """Instances that failed or gave numbers that are not finite, and why."""
        bad = dict(batch.failed)
        for what, x in [("reward", batch.reward), ("observation", batch.obs)]:
            for y in _arrays(x):
                if y.dtype.kind == "f" and not np.isfinite(y).all():
                    for i in self._asked[~_finite(y)].tolist():
                        bad.setdefault(i, f"{what} is not finite")
        return bad

    def _replace(self, bad: Mapping[int, str]) -> dict[int, Obs]:
        """Make instances anew until all of them answer; returns their first observations."""
        fresh: dict[int, Obs] = {}
        asked = self._asked
        while bad:
            self._report([f"{self._name(i)}: {reason}" for i, reason in sorted(bad.items())])
            ids = sorted(bad)
            self._lives.update(ids)
            seeds = [env_seed(self._seed, *self._keys[i], _REPLACED, self._lives[i]) for i in ids]
            self.backend.replace(ids, seeds)
            self._asked = np.array(ids, np.int32)
            self.backend.reset(self._asked)
            batch = self.backend.recv()
            bad = self._bad(batch)
            fresh |= {i: each(lambda x, row=row: x[row].copy(), batch.obs) for row, i in enumerate(ids)}
            fresh = {i: row for i, row in fresh.items() if i not in bad}
        self._asked = asked
        for i in self._reserve.keys() & fresh.keys():
            self._reserve[i] = fresh[i]
        return fresh

    def _name(self, instance: int) -> str:
        slots = np.flatnonzero(self._instance == instance)
        return f"env {self.env_id[slots[0]]}" if len(slots) else "an env in reserve"

    def _renew(self, obs: Obs, fresh: Mapping[int, Obs]) -> Array:
        """Write fresh first observations into their slots' rows; returns those slots, which begin a new game."""
        slots = np.array([s for s in range(len(self.env_id)) if int(self._instance[s]) in fresh], np.int64)
        for slot in slots:
            _put(obs, int(slot), fresh[int(self._instance[slot])])
        self._forget(slots)
        return slots

    def _decorrelate(self, obs: Obs, most: int) -> None:
        """Every env takes k ~ U{0..most} uniform-random actions, seeded by its id, and one more where that ended it."""
        spec, n = self.backend.spec.action, len(self.env_id)
        rngs = [np.random.default_rng(env_seed(self._seed, *self._keys[i], _DECORRELATE)) for i in range(n)]
        left = np.array([rng.integers(0, most + 1) for rng in rngs])
        played, done, over = np.zeros(n, np.int64), np.zeros(n, bool), np.zeros(n, bool)
        while (run := np.flatnonzero((left > 0) | done)).size:
            self._step(self._instance[run], np.concatenate([random_actions(spec, rngs[s], 1) for s in run]))
            batch, fresh = self._collect()
            for whole, part in zip(_arrays(obs), _arrays(batch.obs), strict=True):
                whole[run] = part
            played[run] = np.where(over[run], 0, played[run] + 1)
            # What a fake step says is not true of any episode.
            real = ~done[run]
            done[run] = real & (batch.terminated | batch.truncated)
            over[run] = real & batch.game_over
            left[run] -= 1
            new = self._renew(obs, fresh)
            played[new], done[new], over[new] = 0, False, False
        self._excluded = played > 0


def _put(obs: Obs, slot: int, row: Obs) -> None:
    for whole, part in zip(_arrays(obs), _arrays(row), strict=True):
        whole[slot] = part

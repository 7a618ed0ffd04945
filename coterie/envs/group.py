"""`Envs`: a learner's environments, in one `Group` or in two that step independently (alternating sampling).

Accelerated Methods 3.1 (two groups), 4.1 (start decorrelation). `Group` is the one place that decides `is_first`, the
ends of episodes, episode statistics and what happens to a broken instance.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from coterie import config
from coterie.envs.backend import Backend, CannotReplace, MakeBackend, StepResults
from coterie.envs.events import EnvEvents
from coterie.envs.gym import numbers
from coterie.envs.news import Reports
from coterie.envs.spaces import on_host, random_actions
from coterie.envs.vector import action_adapter, check_results, not_finite, receive
from coterie.errors import CoterieError
from coterie.parallel.board import Board
from coterie.types import MASK, Array, Obs, TimeStep, entries, map_obs

_REPLACED, _DECORRELATE = 2, 3  # spawn keys below an env's own


def env_seed(seed: int, *key: int) -> int:
    """A 31-bit seed that depends on the run's seed and a key: (global env id,) or what derives from one."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] & 0x7FFFFFFF)


class Group:
    """Environments that step together. `env_id`: their global ids; `reports`: collects what they have to report."""

    def __init__(
        self,
        backend: Backend,
        env_id: Array,
        seed: int,
        limit_is_terminal: bool,
        reports: Reports,
        events: EnvEvents,
    ) -> None:
        n = len(env_id)
        self.backend, self.env_id, self._reports = backend, env_id, reports
        self._seed, self._replacements = seed, Counter[int]()
        self._limit_is_terminal, self._agents = limit_is_terminal, backend.spec.agents
        self._all = np.arange(n, dtype=np.int32)
        self._asked = self._all  # the instances of the request in flight
        self._first = np.ones(n, bool)  # is_first of the next TimeStep
        self._return, self._length = np.zeros(n), np.zeros(n, np.int64)
        self._excluded = np.zeros(n, bool)  # the episode began before the run did: its return is not reported
        self._start: TimeStep | None = None  # the first observations, until they are received
        self._version = 0  # of the attributes that callbacks set
        self._events, self._answers = events, 0  # answers: from the backend, those to the first reset included
        backend.reset(self._all)

    def start(self, decorrelate: int) -> Iterator[None]:
        """Wait for the first observations, and take each env's random number of random steps. Yields during each step,
        so that groups can start by turns.
        """
        n = len(self.env_id)
        batch, fresh = self._collect()
        obs, self._to_env = batch.obs, action_adapter(self.backend, batch)
        self._renew(obs, fresh)
        self._first[:] = False
        if decorrelate:
            yield from self._decorrelate(obs, decorrelate)
        zeros, nan = np.zeros(n, bool), np.full(n, np.nan)
        first = np.ones(n, bool)
        self._start = TimeStep(obs, np.zeros(n, np.float32), zeros, zeros.copy(), first, nan, nan.copy(), self.env_id)

    def send(self, action: Any, board: Board | None = None) -> None:
        attributes = self._events.take("set", *self._now)
        if board is not None and (news := board.attributes(self._version)):
            self._version, attributes = news
            self._events.note("set", *self._now, attributes)
        if attributes is not None:
            self.backend.set_attributes(attributes)
        self._step(self._all, action)

    def recv(self) -> TimeStep:
        """The consequence of the actions sent last (at first: of the reset)."""
        if self._start is not None:
            start, self._start = self._start, None
            return start
        batch, fresh = self._collect()
        first = self._first | batch.first
        if fresh:
            renewed = self._renew(batch.obs, fresh)
            for x in batch[1:5]:
                x[renewed] = 0
        return self._time_step(batch, first)

    @property
    def _now(self) -> tuple[int, int]:
        """Where it is, for its events."""
        return int(self.env_id[0]), self._answers

    def _time_step(self, batch: StepResults, first: Array) -> TimeStep:
        """Statistics, time limits, and which envs restart at the next step."""
        terminated, truncated = batch.terminated, batch.truncated
        again = first & (terminated | truncated)  # a time limit at the no-op after a lost life: it restarts once more
        self._return += batch.reward
        self._length += ~first
        if first.any():
            for x in (batch.reward, terminated, truncated):
                x[first] = 0
        episode_return, episode_length = np.full((2, len(first)), np.nan)
        done = terminated | truncated
        self._first = done | again
        if batch.info:
            self._reports.inform(numbers(batch.info, len(first)), ~first, batch.game_over & ~self._excluded)
        if self._first.any() and batch.game_over.any():
            reported = batch.game_over & ~self._excluded
            episode_return[reported], episode_length[reported] = self._return[reported], self._length[reported]
            self._clear(batch.game_over)
        if self._limit_is_terminal:
            terminated, truncated = done, np.zeros_like(done)
        return TimeStep(
            batch.obs, batch.reward, terminated, truncated, first, episode_return, episode_length, self.env_id
        )

    def _clear(self, slots: Array) -> None:
        """Statistics of a new episode."""
        self._return[slots], self._length[slots], self._excluded[slots] = 0, 0, False

    def _step(self, ids: Array, action: Any) -> None:
        self._asked = ids
        self.backend.step(ids, self._to_env(action))

    def _collect(self) -> tuple[StepResults, dict[int, Obs]]:
        """The backend's answer, and the first observations of instances that had to be replaced."""
        batch, fresh = receive(self.backend), dict[int, Obs]()
        if self._answers < 2:  # to the first reset and the first step; later ones are alike
            check_results(self.backend.spec, batch, len(self._asked))
        bad = self._bad(batch)
        self._check_legal(batch, bad)
        while bad:
            ids = sorted(bad)
            reasons = [f"env {self.env_id[i]}: {bad[i]}" for i in ids[:: self._agents]]
            self._replacements.update(ids)
            keys = [(int(self.env_id[i]), _REPLACED, self._replacements[i]) for i in ids]
            try:
                self.backend.replace(ids, [env_seed(self._seed, *key) for key in keys])
            except CannotReplace as error:
                raise CoterieError(f"{reasons[-1]}, and {error}") from None
            self._reports.replace(reasons)
            self._asked, self._first[ids] = np.array(ids, np.int32), True
            self.backend.reset(self._asked)
            answer = receive(self.backend)
            for row, i in enumerate(ids):
                fresh[i] = map_obs(itemgetter(row), answer.obs)
            bad = self._bad(answer)
            self._check_legal(answer, bad)
        return batch, fresh

    def _check_legal(self, batch: StepResults, bad: Mapping[int, str]) -> None:
        """Raise where a mask allows no action within an episode. After a termination it is made to allow all; after a
        truncation it stays if it allows any, because the value of the best legal action is bootstrapped.
        """
        if not self.backend.spec.masked:
            return
        mask, spec = batch.obs[MASK], self.backend.spec
        none = ~spec.legal_rows(mask)
        mask[batch.terminated | (batch.truncated & none)] = True
        first = self._first[self._asked] | batch.first
        for row in np.flatnonzero(none & ~batch.terminated & ~batch.truncated):
            if (i := int(self._asked[row])) not in bad:
                step = 0 if first[row] else self._length[i] + 1
                raise CoterieError(
                    f"env {self.env_id[i]} of {spec.env_id!r}: its {MASK} allows no action at step {step} of an episode"
                )

    def _bad(self, batch: StepResults) -> dict[int, str]:
        """Instances that failed or gave numbers that are not finite, with the other agents of their envs, and why."""
        self._answers += 1
        bad = dict.fromkeys(self._events.take("replaced", *self._now) or (), "replaced as recorded") | dict(
            batch.failed
        )
        for what, x in [("reward", batch.reward), ("observation", batch.obs)]:
            for y in entries(x).values():
                for i in self._asked[not_finite(y)].tolist():
                    bad.setdefault(i, f"{what} is not finite")
        bad = {i - i % self._agents + k: reason for i, reason in bad.items() for k in range(self._agents)}
        if bad:
            self._events.note("replaced", *self._now, sorted(map(int, bad)))
        return bad

    def _renew(self, obs: Obs, fresh: Mapping[int, Obs]) -> Array:
        """Write first observations into their rows of `obs`; returns these rows."""
        for i, row in fresh.items():
            for key, x in entries(row).items():
                entries(obs)[key][i] = x
        slots = np.array(list(fresh), np.int64)
        self._clear(slots)
        return slots

    def _decorrelate(self, obs: Obs, most: int) -> Iterator[None]:
        """Every env takes k ~ U{0..most} uniform-random actions, seeded by its id, and one more where that ended it."""
        spec, agents = self.backend.spec.action, self._agents
        rngs = [np.random.default_rng(env_seed(self._seed, int(i), _DECORRELATE)) for i in self.env_id]
        left = np.array([rng.integers(0, most + 1) for rng in rngs])[::agents].repeat(agents)
        while (run := np.flatnonzero(((left > 0) | self._first).reshape(-1, agents).any(1).repeat(agents))).size:
            of_each = [random_actions(spec, rngs[s], 1, map_obs(itemgetter(slice(s, s + 1)), obs)) for s in run]
            self._step(self._all[run], np.concatenate(of_each))
            yield
            batch, fresh = self._collect()
            for key, x in entries(batch.obs).items():
                entries(obs)[key][run] = x
            self._length[run] += ~(self._first[run] | batch.first)
            self._first[run] = batch.terminated | batch.truncated
            self._clear(run[batch.game_over])
            left[run] -= 1
            self._first[self._renew(obs, fresh)] = False
        self._excluded = self._length > 0


class Envs:
    """Environments with global ids `first_env_id` and up, seeded by (seed, id) whatever the groups. `union`: an action
    that this env does not have is taken as its first.
    """

    def __init__(
        self,
        make: MakeBackend,
        env: config.Env,
        *,
        seed: int,
        first_env_id: int = 0,
        groups: int = 1,
        union: bool = False,
        events: EnvEvents | None = None,
    ) -> None:
        self.num_envs = env.num_envs
        size = env.num_envs // groups
        self.groups = [slice(g * size, (g + 1) * size) for g in range(groups)]
        self.reports = Reports(env)
        self._groups: list[Group] = []
        self._backends: list[Backend] = []
        try:
            for cols in self.groups:
                ids = np.arange(cols.start, cols.stop, dtype=np.int64) + first_env_id
                self._backends.append(make([env_seed(seed, int(i)) for i in ids]))
                terminal = env.time_limit == "terminate"
                self._groups.append(Group(self._backends[-1], ids, seed, terminal, self.reports, events or EnvEvents()))
            for _ in zip_longest(*(group.start(env.decorrelate) for group in self._groups)):
                pass  # both groups step at once
        except BaseException:
            self.close()
            raise
        self.spec = self._backends[0].spec
        self._legal = self.spec.action.sizes[0] if union and self.spec.action.kind == "categorical" else 0
        delayed = env.delay_learner in (-1, first_env_id // env.num_envs)
        self._delay = env.delay * delayed
        self.board: Board | None = None  # from which the envs take attributes
        self._to_host = True  # whether observations are copied to the host

    def recv(self, group: int) -> TimeStep:
        """Wait for a group's TimeStep; the first one holds the first observations."""
        seen = self._groups[group].recv()
        if self._delay:  # after the step: before it, the envs would step meanwhile
            time.sleep(self._delay)
        return seen._replace(obs=map_obs(on_host, seen.obs)) if self._to_host else seen

    def send(self, group: int, action: Any) -> None:
        """Start a step of a group: int64 `[B]` or `[B, A]`, or float32 `[B, A]`; with tensors, recv may give such."""
        self._to_host = isinstance(action, np.ndarray)
        self._groups[group].send(np.where(action < self._legal, action, 0) if self._legal else action, self.board)

    def close(self) -> None:
        for backend in self._backends:
            with suppress(Exception, SystemExit):  # the work is done, or has failed for another reason
                backend.close()

    def __enter__(self) -> Envs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

"""Action repeat: a step of the run is `times` steps of the env with the same action, whose rewards add up.
Agents of one env step together until none goes on; those that have left by then keep their last row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from coterie.envs.backend import Backend, Declared, StepResults
from coterie.types import Array


class Repeat(Backend):
    """A backend around another. An episode's end cuts the repetition short; the fake step of a restart is made once."""

    def __init__(self, inner: Backend, times: int) -> None:
        self.inner, self.times = inner, times
        spec = replace(inner.spec, action_repeat=inner.spec.action_repeat * times)
        super().__init__(Declared(spec, inner.fields, inner.action_map, inner.mask), inner.num_instances)
        self._done = np.zeros(inner.num_instances, bool)
        self._ids: Array | None = None
        self._actions: Array = np.zeros(0)

    def step(self, ids: Array, actions: Array) -> None:
        self._ids, self._actions = ids.copy(), actions.copy()
        self.inner.step(ids, actions)

    def reset(self, ids: Array) -> None:
        self._ids = None
        self._done[ids] = False
        self.inner.reset(ids)

    def recv(self) -> StepResults:
        batch = self.inner.recv()
        if self._ids is None:
            return batch
        ids, failed, info = self._ids, dict(batch.failed), dict(batch.info)
        going, first = ~self._done[ids], np.broadcast_to(batch.first, len(ids)).copy()
        for _ in range(self.times - 1):
            going &= ~(batch.terminated | batch.truncated) & ~np.isin(ids, list(failed))
            acting = (going & ~first).reshape(-1, self.spec.agents).any(1)
            run = np.flatnonzero(acting.repeat(self.spec.agents))
            if not len(run):
                break
            self.inner.step(ids[run], self._actions[run])
            part = self.inner.recv()
            failed |= part.failed
            part.reward[:] += batch.reward[run]
            kept, at = going[run], run[going[run]]
            for whole, rows in zip(batch.rows(), part.rows(), strict=True):
                whole[at] = rows[kept]
            for name, values in part.info.items():
                info.setdefault(name, np.full(len(ids), np.nan))[at] = values[kept]
            first[run] |= part.first & kept
        for x in (batch.reward, batch.game_over):
            x[first] = 0  # of an agent that came in between, and has chosen no action
        self._done[ids] = batch.terminated | batch.truncated
        return batch._replace(failed=failed, info=info, first=first)

    def replace(self, ids: Sequence[int], seeds: Sequence[int]) -> None:
        self._done[list(ids)] = False
        self.inner.replace(ids, seeds)

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        self.inner.set_attributes(attributes)

    def close(self) -> None:
        self.inner.close()

"""Acting whose rollouts reach the learner late by a set number of them, for the figure `staleness`.

The envs are stepped as in `Inline`, with the newest weights; each rollout is learned from when `late` others have been
recorded after it, and the learner has made the steps of as many since it acted. So the lag is exact, and the same for
every row. Not for training: the delay gains nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from coterie.acting.inline import Inline
from coterie.types import Rollout, map_tensors


class Late(Inline):
    def __init__(self, late: int, *parts: Any) -> None:
        super().__init__(*parts)
        self.late, self.waiting = late, deque[Rollout]()

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "in_flight": sum(int(rollout.mask.sum()) for rollout in self.waiting)}

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        for rollout in super().rollouts(refresh):
            self.waiting.append(map_tensors(torch.clone, rollout))
            if len(self.waiting) > self.late:
                yield self.waiting.popleft()


# Names for `plugins.acting`.
late_0, late_1, late_4, late_16, late_64 = (partial(Late, late) for late in (0, 1, 4, 16, 64))

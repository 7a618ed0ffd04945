"""The door: what a host must say of itself before it may take a seat, and what it is told."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from coterie.acting.central import REMOTE, Central
from coterie.acting.central_stream import Seat
from coterie.algorithms.table import unroll_length
from coterie.build.factory import actor_env
from coterie.config import ResolvedConfig
from coterie.envs.tasks import tasks
from coterie.types import Spec
from coterie.wire.codec import Layout, Refused, layout_from, timestep_layout
from coterie.wire.server import Answer

_REMEMBERED = 10_000  # clients that came by themselves
ENV_SETTINGS = ("action_repeat", "max_episode_steps", "time_limit")  # of the run's that its clients' envs have


class Visitor:
    """Asks only for the welcome."""

    reads = writes = Layout(())
    alive = True

    def __init__(self, welcome: dict[str, Any]) -> None:
        self._welcome = welcome

    def welcome(self) -> dict[str, Any]:
        return self._welcome

    def ask(self, arrays: dict[str, Any], answer: Answer) -> None:
        raise Refused("a stream of 0 envs has nothing to show")

    def leave(self) -> None:
        pass


class Numbers:
    """Which client is which: numbers and env ids for those that come by themselves, the same when they come again."""

    def __init__(self, rank: int) -> None:
        self.numbers = OrderedDict[int, int]()  # of each run_id
        self.first_envs = OrderedDict[tuple[int, int, int], int]()  # of each of its groups, and their envs
        self.next_number, self.next_env = 0, REMOTE * (rank + 1)

    def of(self, run_id: int) -> int:
        if run_id not in self.numbers:
            self.numbers[run_id] = self.next_number
            self.next_number += 1
            if len(self.numbers) > _REMEMBERED:
                self.numbers.popitem(last=False)
        return self.numbers[run_id]

    def first_env(self, run_id: int, group: int, envs: int) -> int:
        key = run_id, group, envs
        if key not in self.first_envs:
            self.first_envs[key] = self.next_env
            self.next_env += envs
            if len(self.first_envs) > _REMEMBERED:
                self.first_envs.popitem(last=False)
        return self.first_envs[key]


def _finite(x: Any) -> Any:
    """JSON has no infinity: a bound that is none is null."""
    return [None if y in (math.inf, -math.inf) else y for y in x] if isinstance(x, list) else x


def settings_of(config: ResolvedConfig, spec: Spec) -> dict[str, Any]:
    """What a client must know before it makes its envs."""
    return {
        "env_id": config.env.id,
        "action": [_finite(x) for x in spec.to_json()["action"]],
        "unroll_length": unroll_length(config),
        "newest_frame": config.central.newest_frame,
        "atari": asdict(config.atari),
        "env": {k: getattr(config.env, k) for k in ENV_SETTINGS},
    }


class Hosts:
    """A desk for env hosts. `ours`: they are the run's own children, and say themselves which."""

    def __init__(self, config: ResolvedConfig, spec: Spec, rank: int, central: Central, ours: bool) -> None:
        self.config, self.spec, self.rank, self.central, self.ours = config, spec, rank, central, ours
        self.numbers = Numbers(rank)
        self.settings = json.dumps(settings_of(config, spec), allow_nan=False)

    def __call__(self, hello: Any) -> Seat | Visitor:
        number = hello.number if self.ours else self.numbers.of(hello.run_id)
        said = {"number": number, "learners": self.config.learners, "settings": self.settings}
        if hello.envs == 0:
            return Visitor(said)
        if hello.env_id not in tasks(self.config.env.id):
            raise Refused(f"the run's envs are {self.config.env.id}, not {hello.env_id[:100]!r}")
        if hello.envs > self.config.central.max_envs:
            raise Refused(f"{hello.envs} envs are more than central.max_envs {self.config.central.max_envs}")
        if self.ours:
            first = actor_env(self.config, number, self.rank)[1] + hello.group * hello.envs
            key = number, hello.group
        else:
            first = self.numbers.first_env(hello.run_id, hello.group, hello.envs)
            key = REMOTE + number, hello.group
        expected = timestep_layout(self.spec, hello.envs, self.config.central.newest_frame)
        declared = layout_from(hello.sends, expected.most)
        if declared.tensors != expected.tensors:
            raise Refused(f"its frames hold {_shown(declared)}; the run's hold {_shown(expected)}")
        seat = self.central.sit(*key, first, hello.envs)
        seat.said = said
        return seat


def _shown(layout: Layout) -> str:
    shown = ", ".join(f"{t.name}: {t.dtype}{list(t.shape)}" for t in layout.tensors[:12])
    return shown[:400]

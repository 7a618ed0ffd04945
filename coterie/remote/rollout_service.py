"""Actors on other machines, seen from the learner: rollouts that come over the wire take the way of all others."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from coterie.acting.decoupled import Decoupled
from coterie.acting.recorder import rollout_layout
from coterie.algorithms.table import unroll_length
from coterie.build.validity import room_of
from coterie.config import ResolvedConfig
from coterie.remote.admission import Numbers, Visitor, settings_of
from coterie.runs.config_io import to_dict
from coterie.types import Array, CoterieError, Spec
from coterie.wire.codec import Layout, Refused, Tensor, check_values, layout_from
from coterie.wire.server import Answer

_FIRST = 1 << 16  # of the producers of slots that are guests
_NAP_S = 1e-3
_ROUNDING = 1e-4  # by which the logarithm of a certain action's probability may be above 0


def rollout_tensors(spec: Spec, unroll_length: int, width: int, core: tuple[int, ...]) -> Layout:
    """A rollout's arrays as the tensors of a frame, but for the ids, which the learner gives."""
    layout = rollout_layout(spec, unroll_length, width, core)
    return Layout([Tensor(k, dtype, shape) for k, (shape, dtype) in layout.items() if k != "env_id"])


def weights_tensors(size: int, moments: int) -> Layout:
    """What an actor acts with; `moments` of 0: the network has no normalizers."""
    sums = [Tensor("moments", "float64", (moments,))] if moments else []  # a frame has no empty tensors
    return Layout([Tensor("params", "float32", (size,)), *sums])


class Guests:
    """A learner's guests: desks for their two streams, and a thread that puts their rollouts into slots."""

    def __init__(self, config: ResolvedConfig, spec: Spec, rank: int, acting: Decoupled, core: tuple[int, ...]) -> None:
        self.spec, self.acting, self.slots, self.weights = spec, acting, acting.slots, acting.weights
        self.numbers = Numbers(rank)
        more = {"envs": self.slots.width, "core": core, "config": to_dict(config)}
        self.settings = json.dumps(settings_of(config, spec) | more)
        self.reads = rollout_tensors(spec, unroll_length(config), self.slots.width, core)
        self.learners = config.learners
        self.env_id = config.env.id
        self.room = room_of(config) - (config.env.num_envs if config.actors else 0)  # beside the run's own
        self.here = Counter[int]()  # streams of rollouts, by their first env
        self.produced = 0
        self.told: Callable[[], None] = lambda: None  # hears of every change of `produced`
        self.arrived: dict[_Push, tuple[dict[str, Array], Answer]] = {}  # the first to come first, one of each
        self.news = threading.Condition()
        self.newest: tuple[int, dict[str, Array]] = (-1, {})  # weights as they are sent, once for all who pull
        self.pulling = threading.Lock()
        self.closed = False
        self._thread = threading.Thread(target=self._work, name="coterie-guests", daemon=True)
        self._thread.start()

    def push(self, hello: Any) -> _Push | Visitor:
        number = self.numbers.of(hello.run_id)
        said = {"number": number, "learners": self.learners, "settings": self.settings}
        if hello.envs == 0:
            return Visitor(said)
        self._admit(hello, self.reads, "its rollouts are not the run's")
        first = self.numbers.first_env(hello.run_id, hello.group, hello.envs)
        if first not in self.here and (len(self.here) + 1) * hello.envs > self.room:
            raise Refused(
                f"{hello.envs} envs beside {len(self.here)} actors': there is room for {self.room}: replay.envs"
            )
        self.here[first] += 1
        return _Push(self, number, first, said)

    def pull(self, hello: Any) -> _Pull | Visitor:
        said = {"number": self.numbers.of(hello.run_id), "learners": self.learners, "settings": self.settings}
        if hello.envs == 0:
            return Visitor(said)
        self._admit(hello, _Pull.reads, "a question for weights is the version that one has")
        return _Pull(self, said)

    def _admit(self, hello: Any, reads: Layout, why: str) -> None:
        if hello.env_id != self.env_id or hello.envs != self.slots.width:
            raise Refused(f"the run's actors have {self.slots.width} envs of {self.env_id} each")
        if layout_from(hello.sends, reads.most).tensors != reads.tensors:
            raise Refused(why)

    def check(self, arrays: dict[str, Array]) -> None:
        """What a learner's tensors may not hold must not reach them, nor what no recorder writes."""
        check_values(self.spec, arrays)
        if np.isnan(arrays["episode_return"]).any():
            raise Refused("episode_return is no number")
        kind, sizes, action = self.spec.action.kind, np.array(self.spec.action.sizes), arrays["action"]
        chosen = kind != "continuous"
        if chosen and not ((action >= 0) & (action < (sizes if kind == "multi" else sizes[0]))).all():
            raise Refused("an action is none of the env's")
        if chosen and (arrays["log_prob"] > _ROUNDING).any():
            raise Refused("an action has a probability above 1")
        if (arrays["version"] < 0).any():
            raise Refused("it acted with weights that there have not been")
        told = (
            arrays["terminated"] | arrays["truncated"] | (arrays["episode_length"] != 0) | (arrays["reward"][1:] != 0)
        )
        if (told & arrays["is_first"][1:]).any():
            raise Refused("the fake step to the first row of an episode has a reward or an end")

    def arrive(self, seat: _Push, arrays: dict[str, Array], answer: Answer) -> None:
        with self.news:
            self.arrived[seat] = arrays, answer
            self.news.notify()

    def forget(self, seat: _Push) -> None:
        """What it has sent and nobody has taken yet goes with it."""
        with self.news:
            self.arrived.pop(seat, None)

    def pulled(self) -> tuple[int, dict[str, Array]]:
        """The newest weights and their version: shared by everybody, never written again."""
        with self.pulling:
            if self.weights.version != self.newest[0]:
                params = torch.empty(self.acting.params.data.numel())
                moments = torch.empty(self.acting.moments.size, dtype=torch.float64)
                version = self.weights.read(params, moments)
                self.newest = version, {"params": params.numpy(), "moments": moments.numpy()}
            return self.newest

    def close(self) -> None:
        self.closed = True
        with self.news:
            self.news.notify()
        self._thread.join(2.0)

    def _next(self) -> tuple[_Push, dict[str, Array], Answer] | None:
        with self.news:
            self.news.wait_for(lambda: self.closed or self.arrived)
            if self.closed:
                return None
            seat = next(iter(self.arrived))
            return seat, *self.arrived.pop(seat)

    def _slot(self, producer: int) -> tuple[int, int] | None:
        with suppress(CoterieError):  # an actor that was stopped holds the lock: it may go on
            return self.slots.take(producer)
        return None

    def _work(self) -> None:
        while (item := self._next()) is not None:
            seat, arrays, answer = item
            producer = _FIRST + seat.number
            while (at := self._slot(producer)) is None:
                if self.closed:
                    return
                time.sleep(_NAP_S)
            if not seat.alive:  # it is gone, and so may its rollout be
                self.slots.abandon(producer)
                continue
            into = self.slots.columns(*at)
            for name, x in arrays.items():
                into[name].numpy()[...] = x
            into["env_id"].numpy()[:] = np.arange(seat.first_env_id, seat.first_env_id + self.slots.width)
            self.produced += int(np.count_nonzero(~arrays["is_first"][1:]))
            self.told()
            self.slots.fill(at)
            answer({}, self.weights.version)


class _Push:
    """Takes rollouts; each answer is leave to send the next."""

    writes = Layout(())

    def __init__(self, guests: Guests, number: int, first_env_id: int, said: dict[str, Any]) -> None:
        self.guests, self.number, self.first_env_id, self.said = guests, number, first_env_id, said
        self.reads, self.alive = guests.reads, True
        self.asked, self.version = False, 0  # the newest of the weights that its rollouts were acted with

    def welcome(self) -> dict[str, Any]:
        return {**self.said, "first_env_id": self.first_env_id}

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        self.guests.check(arrays)
        oldest, newest, published = arrays["version"].min(), arrays["version"].max(), self.guests.weights.version
        first, self.asked = not self.asked, True
        if newest > max(0, published):
            if not first:
                raise Refused("it acted with weights that there have not been")
            answer({}, published)  # the run has gone back meanwhile: this is of the time after
            return
        if oldest < self.version:  # for as long as a stream lasts they only become newer
            raise Refused("it acted with older weights than before")
        self.version = int(newest)
        self.guests.arrive(self, arrays, answer)

    def leave(self) -> None:
        self.alive = False
        self.guests.here[self.first_env_id] -= 1
        self.guests.here += Counter()  # without those that are 0
        self.guests.forget(self)


class _Pull:
    """Gives weights that are newer than those that a guest has."""

    reads = Layout([Tensor("version", "int64", (1,))])
    alive = True

    def __init__(self, guests: Guests, said: dict[str, Any]) -> None:
        self.guests, self.said = guests, said
        self.writes = weights_tensors(guests.acting.params.data.numel(), guests.acting.moments.size)

    def welcome(self) -> dict[str, Any]:
        return self.said

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        version = self.guests.weights.version
        newest: dict[str, Array] = {}
        if version > int(arrays["version"][0]):
            version, newest = self.guests.pulled()
        answer(newest, version)

    def leave(self) -> None:
        pass

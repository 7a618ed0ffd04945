"""Remote actors, on the learner's side: their rollouts go into the same slots as those of local actors."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from coterie.config import Ray, ResolvedConfig
from coterie.errors import counted
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.remote.admission import ClientIds, check_hello, settings_of
from coterie.runs.config_io import to_dict
from coterie.types import MASK, Array, Spec
from coterie.wire.codec import FrameLayout, Refused, TensorSpec, check_values
from coterie.wire.service import Answer, ServiceStream

REMOTE_PRODUCER = 1 << 16  # remote actors are the slots' producers from here on
_POLL_S = 1e-3
_ROUNDING = 1e-4  # by which the logarithm of a certain action's probability may be above 0
VERSION = FrameLayout([TensorSpec("version", "int64", (1,))])  # a request for weights: the version that the client has


def rollout_tensors(fields: Mapping[str, torch.Tensor]) -> FrameLayout:
    """A rollout's arrays as the tensors of a frame, without the env ids, which the learner assigns."""
    found = {k: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for k, x in fields.items() if k != "env_id"}
    return FrameLayout([TensorSpec(k, dtype, shape) for k, (dtype, shape) in found.items()])


def weights_tensors(size: int, moments: int) -> FrameLayout:
    """What an actor acts with; `moments` of 0: the network has no normalizers."""
    sums = [TensorSpec("moments", "float64", (moments,))] if moments else []  # a frame has no empty tensors
    return FrameLayout([TensorSpec("params", "float32", (size,)), *sums])


def check_rollout(spec: Spec, arrays: dict[str, Array]) -> None:
    """Raise `Refused` for a rollout that no recorder writes, or that would harm the learner."""
    check_values(spec, arrays)
    if np.isnan(arrays["episode_return"]).any():
        raise Refused("episode_return is NaN")
    sizes, action = np.array(spec.action.sizes, np.int64), arrays["action"]
    choice = action[..., None] if spec.action.kind == "categorical" else action[..., : len(sizes)]
    if not ((choice >= 0) & (choice < sizes)).all():
        raise Refused(f"an action is not in the env's range: {sizes.tolist()} actions")
    if spec.masked:
        column = choice[1:].astype(np.int64) + np.cumsum([0, *sizes[:-1]])
        if not np.take_along_axis(arrays[f"obs/{MASK}"][:-1], column, -1).all():
            raise Refused(f"an action is not legal by {MASK}")
    if not spec.action.low and (arrays["log_prob"] > _ROUNDING).any():
        raise Refused("the probability of an action is above 1")
    if (arrays["version"] < 0).any():
        raise Refused("a version of the weights is negative")
    ended = arrays["terminated"] | arrays["truncated"] | (arrays["episode_length"] != 0)
    if ((ended | (arrays["reward"][1:] != 0)) & arrays["is_first"][1:]).any():
        raise Refused("the masked step before an episode's first row has a reward or an end")


class RolloutService:
    """The two services for a learner's remote actors, and a thread that puts their rollouts into slots.

    `sizes`: of what is in `weights`, parameters and moments; `max_envs`: that the learner has room for, those of local
    actors included.
    """

    def __init__(
        self, config: ResolvedConfig, spec: Spec, rank: int, slots: Slots, weights: Weights, sizes: tuple[int, int],
        max_envs: int,
    ) -> None:  # fmt: skip
        self.spec, self.slots, self.weights, self.sizes = spec, slots, weights, sizes
        self.ids = ClientIds(config, rank)
        fields = self.slots.columns(0, 0)
        # An actor gives its envs' arguments itself; those of the run may be secret, as may Ray's variables.
        sent = to_dict(replace(config, env=replace(config.env, kwargs="{}"), ray=Ray()))
        more = {"envs": self.slots.width, "config": sent}
        self.settings = json.dumps(settings_of(config, spec, len(fields["log_prob"])) | more)
        self.reads = rollout_tensors(fields)
        self.learners = config.learners
        self.env_id = config.env.id
        self.room = max_envs - (config.env.num_envs if config.actors else 0)  # for envs of remote actors
        self.streams = Counter[int]()  # of rollouts, by their first env
        self.produced = 0
        self.on_produced: Callable[[], None] = lambda: None
        self.waiting: dict[_PushStream, tuple[dict[str, Array], Answer]] = {}  # in order of arrival, one of each stream
        self._changed = threading.Condition()
        self._newest: tuple[int, dict[str, Array]] = (-1, {})  # weights as they are sent, read once for all clients
        self._closed = False
        self.error: BaseException | None = None  # what has ended the thread
        self._thread = threading.Thread(target=self._run, name="coterie-rollouts", daemon=True)
        self._thread.start()

    def push(self, hello: Any) -> ServiceStream:
        """Service `PushRollouts`."""
        return self._admit(hello, self.reads) or self._push_stream(hello)

    def pull(self, hello: Any) -> ServiceStream:
        """Service `PullParameters`."""
        return self._admit(hello, VERSION) or _PullStream(self, self._welcome(hello))

    def _welcome(self, hello: Any) -> dict[str, Any]:
        return {"number": self.ids.number(hello.run_id), "learners": self.learners, "settings": self.settings}

    def _admit(self, hello: Any, reads: FrameLayout) -> ServiceStream | None:
        if hello.envs == 0:
            return ServiceStream(self._welcome(hello))
        if hello.envs != self.slots.width:
            raise Refused(f"the run's actors have {self.slots.width} envs each, not {hello.envs}")
        check_hello(hello, [self.env_id], reads)
        return None

    def _push_stream(self, hello: Any) -> _PushStream:
        first = self.ids.first_env(hello.run_id, hello.group, hello.envs)
        taken = len(self.streams) * hello.envs
        if first not in self.streams and taken + hello.envs > self.room:
            raise Refused(f"no room for {hello.envs} more envs of remote actors: {taken} of {self.room} (replay.envs)")
        self.streams[first] += 1
        stream = _PushStream(self, {**self._welcome(hello), "first_env_id": first})
        stream.about = f"{counted(hello.envs, 'env')} of an actor"
        return stream

    def arrive(self, stream: _PushStream, arrays: dict[str, Array], answer: Answer) -> None:
        with self._changed:
            self.waiting[stream] = arrays, answer
            self._changed.notify()

    def forget(self, stream: _PushStream) -> None:
        """Drop a closed stream's rollout that is not in a slot yet."""
        self.streams[stream.first_env_id] -= 1
        self.streams += Counter()  # without those that are 0
        with self._changed:
            self.waiting.pop(stream, None)

    def newest_weights(self) -> tuple[int, dict[str, Array]]:
        """The newest weights and their version. The arrays are shared by all streams and never written again."""
        if self.weights.version != self._newest[0]:
            params, moments = torch.empty(self.sizes[0]), torch.empty(self.sizes[1], dtype=torch.float64)
            version = self.weights.read(params, moments)
            self._newest = version, {"params": params.numpy(), "moments": moments.numpy()}
        return self._newest

    @property
    def envs(self) -> int:
        """Envs of the remote actors that are connected."""
        return self.streams.total() * self.slots.width

    def close(self) -> None:
        self._closed = True
        with self._changed:
            self._changed.notify()
        self._thread.join(2.0)

    def _next(self) -> tuple[_PushStream, dict[str, Array], Answer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.waiting)
            if self._closed:
                return None
            stream = next(iter(self.waiting))
            return stream, *self.waiting.pop(stream)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def _work(self) -> None:
        while (item := self._next()) is not None:
            stream, arrays, answer = item
            producer = REMOTE_PRODUCER + stream.welcome["number"]
            while (at := self.slots.take(producer)) is None:
                if self._closed:
                    return
                time.sleep(_POLL_S)
            if not stream.alive:
                self.slots.abandon(producer)
                continue
            into = self.slots.columns(*at)
            for name, x in arrays.items():
                into[name].numpy()[...] = x
            into["env_id"].numpy()[:] = np.arange(stream.first_env_id, stream.first_env_id + self.slots.width)
            self.produced += int(np.count_nonzero(~arrays["is_first"][1:]))
            self.on_produced()
            self.slots.fill(at, (producer, 0, 0))
            answer({}, self.weights.version)


class _PushStream(ServiceStream):
    """Takes rollouts. Each answer allows the client to send the next one."""

    def __init__(self, service: RolloutService, welcome: dict[str, Any]) -> None:
        super().__init__(welcome)
        self.service, self.reads, self.first_env_id = service, service.reads, welcome["first_env_id"]
        self.version, self._first = 0, True  # version: the newest weights that its rollouts were acted with

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        check_rollout(self.service.spec, arrays)
        oldest, newest = int(arrays["version"].min()), int(arrays["version"].max())
        published, first = self.service.weights.version, self._first
        self._first = False
        if newest > max(0, published):
            if not first:
                raise Refused(f"version {newest} of the weights is above {published}, the newest")
            answer({}, published)  # dropped: the learner was restarted from a checkpoint before that version
            return
        if oldest < self.version:
            raise Refused(f"version {oldest} of the weights is below {self.version}, that of an earlier rollout")
        self.version = newest
        self.service.arrive(self, arrays, answer)

    def leave(self) -> None:
        self.alive = False
        self.service.forget(self)


class _PullStream(ServiceStream):
    """Sends weights that are newer than the client's."""

    reads = VERSION

    def __init__(self, service: RolloutService, welcome: dict[str, Any]) -> None:
        super().__init__(welcome)
        self.service = service
        self.writes = weights_tensors(*service.sizes)

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        version = self.service.weights.version
        newest: dict[str, Array] = {}
        if version > int(arrays["version"][0]):
            version, newest = self.service.newest_weights()
        answer(newest, version)

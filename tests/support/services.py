"""The services of a learner behind a real server, without a learner, and what a good client sends them."""

from __future__ import annotations

import sys
from typing import Any

import grpc
import numpy as np
import torch
from grpc import StatusCode
from torch import Tensor as Floats

from coterie.acting.central import Central
from coterie.acting.central_stream import EnvHostService
from coterie.acting.recorder import rollout_layout
from coterie.build.resources import resolve_config
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.remote.admission import FIRST_REMOTE_ID
from coterie.remote.rollout_service import VERSION, RolloutService
from coterie.types import AgentOutput, Array, Inputs, Spec
from coterie.wire.codec import FrameLayout, Newest, layout_from, timestep_layout
from coterie.wire.server import SERVICE, Server
from coterie.wire.service import Limits
from tests.conftest import VECTOR, make_config
from tests.support.central import OneWeight, learner_setup, time_step
from tests.support.waiting import wait_until
from tests.support.wire import Raw, channel_to, data_frame, hello_frame

INFER, PUSH, PULL = "Infer", "PushRollouts", "PullParameters"
UNROLL, WIDTH, SIZE, MOMENTS = 5, 2, 7, 3
MOST = 1 << 17  # bytes of a message; more than any frame here has
MOST_ENVS = 8
Rollout = dict[str, Array]


def shown(spec: Spec, envs: int = WIDTH, number: int = 0) -> Rollout:
    """What a host sends when no episode ends."""
    return time_step(np.full((envs, *spec.obs[""].shape), number, spec.obs[""].dtype))


def recorded(spec: Spec, core: tuple[int, ...] = (), version: int = 0) -> Rollout:
    """What a recorder may write: env 0 ends an episode in row 1, whose row 2 is masked; env 1 goes on."""
    layout = rollout_layout(spec, UNROLL, WIDTH, core)
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items() if name != "env_id"}
    for name, x in arrays.items():
        if x.dtype.kind == "f" and not name.startswith("episode_"):
            x[...] = np.arange(x.size).reshape(x.shape) / x.size - 1
    arrays["is_first"][3, 0] = arrays["terminated"][1, 0] = True
    arrays["reward"][3, 0] = 0
    arrays["episode_length"][1, 0], arrays["episode_return"][1, 0] = 2, -1.5
    arrays["version"][...] = version
    return arrays


class Services:
    """A server of some services. Subclasses have `hello`, `questions` and `works`."""

    server: Server

    def serve(self, address: str, services: dict[str, Any]) -> None:
        self.lines = list[str]()
        self.server = Server(address, services, limits=Limits(message_bytes=MOST), on_client=self._log)

    def _log(self, line: str, refused: bool) -> None:
        if not refused:
            self.lines.append(line)

    def raw(self, channel: grpc.Channel, *frames: bytes, method: str) -> Raw:
        return Raw(channel, *frames, method=f"/{SERVICE}/{method}")

    def ends(self, *frames: bytes, method: str = PUSH) -> tuple[StatusCode, str]:
        """How a stream of these frames ends."""
        with channel_to(self.server.address) as channel:
            return self.raw(channel, *frames, method=method).end()

    def close(self) -> None:
        wait_until(lambda: not self.server._streams, what="all streams are closed")
        self.server.close()


class InferenceServices(Services):
    """Central acting without a learner. No stream here sends a whole rollout."""

    def __init__(self, address: str, spec: Spec = VECTOR, newest: bool = False) -> None:
        self.spec, self.newest = spec, newest
        options = {"actors": 0, "central.max_envs": MOST_ENVS, "central.newest_frame": newest}

        def policy(model: Any, inputs: Inputs, state: Floats, *_: Any) -> tuple[AgentOutput, Floats]:
            rows = len(inputs.is_first)
            assert all(torch.isfinite(x).all() for x in (inputs.obs, inputs.prev_reward))
            return AgentOutput(torch.full((rows,), 3), torch.zeros(rows), torch.zeros(rows)), state

        self.central = Central(learner_setup(policy, OneWeight(), options, spec))
        self.central.publish(0)
        self.serve(address, {INFER: EnvHostService(self.central)})

    def layout(self, envs: int) -> FrameLayout:
        return timestep_layout(self.spec, envs, self.newest)

    def hello(
        self, method: str = INFER, *, envs: int = WIDTH, layout: FrameLayout | None = None, **changes: Any
    ) -> bytes:
        return hello_frame(layout or self.layout(envs or WIDTH), envs=envs, **{"env_id": "CartPole-v1", **changes})

    def questions(self, method: str, count: int, envs: int = WIDTH) -> list[bytes]:
        """The first frames for `hello`'s stream."""
        layout = self.layout(envs)
        newest = Newest(layout)
        return [data_frame(n, layout.pack(newest.split(shown(self.spec, envs, n)))) for n in range(count)]

    def works(self) -> bool:
        """A good host is served. Without `Stream`, which would wait for as long as the server sends heartbeats."""
        with channel_to(self.server.address) as channel:
            frames = self.hello(envs=3, run_id=99), *self.questions(INFER, 2, 3)
            raw = self.raw(channel, *frames, method=INFER)
            for kind in ("welcome", "data", "data"):
                frame = raw.next()
                assert frame.WhichOneof("kind") == kind
            assert np.frombuffer(frame.data.tensors, np.int64).tolist() == [3, 3, 3]
            assert raw.end()[0] == StatusCode.OK
        return True

    def close(self) -> None:
        super().close()
        self.central.close()
        assert (self.central.envs, self.central.streams) == (0, {})


class RolloutServices(Services):
    """Decoupled acting whose learner only takes rollouts."""

    def __init__(self, address: str, core: tuple[int, ...] = ()) -> None:
        changes = {"acting": "decoupled", "learners": 1, "actors": 1, "env.num_envs": WIDTH}
        config = resolve_config(make_config(**changes, **{"algo.unroll_length": UNROLL}))
        self.core = core
        self.slots = Slots(rollout_layout(VECTOR, UNROLL, WIDTH, core), 2, WIDTH, WIDTH)
        self.weights = Weights(SIZE, MOMENTS)
        self.learned: list[Rollout] = []
        self.service = RolloutService(config, VECTOR, 0, self.slots, self.weights, (SIZE, MOMENTS), sys.maxsize)
        self.serve(address, {PUSH: self.service.push, PULL: self.service.pull})
        for batch in range(self.slots.batches):
            self.slots.open(batch, 0)
        self.publish(0)

    def publish(self, version: int) -> None:
        self.weights.publish(torch.full((SIZE,), float(version)), torch.zeros(MOMENTS, dtype=torch.float64), version)

    def learn(self) -> int:
        """Take what is in the slots; returns how many rollouts that were in all."""
        for batch in range(self.slots.batches):
            if self.slots.is_full(batch):
                self.learned.append({k: x.numpy().copy() for k, x in self.slots.fields[batch].items()})
                self.slots.open(batch, 0)
        return len(self.learned)

    def pushed(self, arrays: Rollout, number: int = 0) -> bytes:
        return data_frame(number, self.service.reads.pack(arrays))

    def hello(self, method: str = PUSH, *, layout: FrameLayout | None = None, **changes: Any) -> bytes:
        sends = self.service.reads if method == PUSH else VERSION
        return hello_frame(layout or sends, **{"env_id": "CartPole-v1", "envs": WIDTH, **changes})

    def questions(self, method: str, count: int) -> list[bytes]:
        if method == PUSH:
            return [self.pushed(recorded(VECTOR, self.core), n) for n in range(count)]
        return [data_frame(n, VERSION.pack({"version": np.array([-1])})) for n in range(count)]

    def works(self) -> bool:
        """A good actor receives the weights, and what it records is learned from once, as it is."""
        learned, version = self.learn(), self.weights.version
        with channel_to(self.server.address) as channel:
            pull = self.raw(channel, self.hello(PULL), *self.questions(PULL, 1), method=PULL)
            sends = layout_from(pull.next().welcome.sends, MOST)
            data = pull.next().data
            assert data.version == version
            assert (sends.unpack(data.tensors)["params"] == version).all()
            sent = recorded(VECTOR, self.core, version)
            push = self.raw(channel, self.hello(run_id=99), *(self.pushed(sent, n) for n in range(2)), method=PUSH)
            first = push.next().welcome.first_env_id
            assert first >= FIRST_REMOTE_ID
            for n in range(2):
                data = push.next().data
                assert (data.number, data.version, data.tensors) == (n, version, b"")
            assert self.learn() == learned + 2
            for got in self.learned[-2:]:
                assert got.pop("env_id").tolist() == list(range(first, first + WIDTH))
                assert got.keys() == sent.keys()
                assert all(np.array_equal(got[name], x) for name, x in sent.items())
            assert [one.end()[0] for one in (pull, push)] == [StatusCode.OK] * 2
        return True

    def close(self) -> None:
        super().close()
        assert not self.service.waiting
        self.service.close()
        self.slots.release()
        self.weights.release()

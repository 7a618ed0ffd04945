"""A learner that only takes rollouts, the doors to it for actors that come by themselves, and what a good one sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from grpc import StatusCode

from coterie.acting.central import REMOTE
from coterie.acting.recorder import rollout_layout
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.remote.rollout_service import Guests
from coterie.types import ActionSpec, Array, Spec
from coterie.wire.codec import Layout, Tensor, layout_from
from coterie.wire.server import SERVICE, Limits, Server
from tests.conftest import IMAGE, VECTOR, make_config
from tests.wire.harness import Raw, channel_to, data_frame, hello_frame

TOKEN = "a-token-of-enough-characters"
GIVEN = (("authorization", f"Bearer {TOKEN}"),)
PUSH, PULL = "PushRollouts", "PullParameters"
ASKS = Layout([Tensor("version", "int64", (1,))])  # a question for weights
UNROLL, WIDTH, SIZE, MOMENTS = 5, 2, 7, 3
MOST = 1 << 17  # bytes of a message; more than any rollout here has
SPECS = {
    "vector": VECTOR,
    "image": IMAGE,
    "multi": Spec("made-up", VECTOR.obs, ActionSpec("multi", (4, 2))),
    "continuous": Spec("made-up", VECTOR.obs, ActionSpec("continuous", low=(-1.0, -1.0), high=(1.0, 1.0))),
}
Rollout = dict[str, Array]


class House:
    """A learner that only takes rollouts, and the doors to it."""

    def __init__(self, address: str, spec: Spec, core: tuple[int, ...] = ()) -> None:
        changes = {"acting": "decoupled", "env.num_envs": WIDTH, "algo.unroll_length": UNROLL}
        self.slots = Slots(rollout_layout(spec, UNROLL, WIDTH, core), 2, WIDTH, WIDTH)
        self.weights = Weights(SIZE, MOMENTS)
        self.learned: list[Rollout] = []
        acting: Any = SimpleNamespace(
            slots=self.slots, weights=self.weights, params=SimpleNamespace(data=torch.zeros(SIZE)),
            moments=SimpleNamespace(size=MOMENTS),
        )  # fmt: skip
        self.guests = Guests(make_config(**changes), spec, 0, acting, core)
        self.lines: list[str] = []
        self.server = Server(
            address, {PUSH: self.guests.push, PULL: self.guests.pull}, token=TOKEN, limits=Limits(message_bytes=MOST),
            on_refused=self.lines.append,
        )  # fmt: skip
        for batch in range(self.slots.batches):
            self.slots.open(batch, 0)

    def publish(self, version: int) -> None:
        self.weights.publish(torch.full((SIZE,), float(version)), torch.zeros(MOMENTS, dtype=torch.float64), version)

    def learn(self) -> int:
        """Take what is there; returns how many rollouts that were in all."""
        for batch in range(self.slots.batches):
            if self.slots.is_full(batch):
                self.learned.append({k: x.numpy().copy() for k, x in self.slots.fields[batch].items()})
                self.slots.open(batch, 0)
        return len(self.learned)

    def rollout(self, version: int = 0) -> Rollout:
        """What a recorder may write: env 0 ends a game in row 1, whose row 2 is the fake step; env 1 goes on."""
        arrays = {t.name: np.zeros(t.shape, t.dtype) for t in self.guests.reads.tensors}
        for name, x in arrays.items():
            if x.dtype.kind == "f" and not name.startswith("episode_"):
                x[...] = np.arange(x.size).reshape(x.shape) / x.size - 1
        arrays["is_first"][3, 0] = arrays["terminated"][1, 0] = True
        arrays["reward"][3, 0] = 0
        arrays["episode_length"][1, 0], arrays["episode_return"][1, 0] = 2, -1.5
        arrays["version"][...] = version
        return arrays

    def pack(self, arrays: Rollout) -> bytes:
        return self.guests.reads.pack(arrays)

    def hello(self, method: str = PUSH, layout: Layout | None = None, **changes: Any) -> bytes:
        sends = self.guests.reads if method == PUSH else ASKS
        return hello_frame(layout or sends, **{"env_id": "CartPole-v1", "envs": WIDTH, **changes})

    def question(self, method: str, number: int = 0) -> bytes:
        """A good one."""
        return data_frame(
            number, self.pack(self.rollout()) if method == PUSH else ASKS.pack({"version": np.array([-1])})
        )

    def ends(self, *frames: bytes, method: str = PUSH, metadata: Any = GIVEN) -> tuple[StatusCode, str]:
        """How a stream of these frames ends."""
        with channel_to(self.server.address) as channel:
            return Raw(channel, *frames, method=path(method), metadata=metadata).end()

    def is_refused(self, why: str, *frames: bytes, method: str = PUSH) -> None:
        """It ends these streams with their reason, counts them, and tells of a client once; nobody learns from them."""
        learned = self.learn()
        for _ in range(2):
            before = self.server.refused.total()
            status, said = self.ends(*frames, method=method)
            assert (status, why in said) == (StatusCode.INVALID_ARGUMENT, True), (status, said)
            assert self.server.refused == {"unix": before + 1}
        assert len(self.lines) == 1
        assert self.lines[0].startswith("refused unix: ")
        assert self.learn() == learned

    def works(self) -> bool:
        """A good guest gets the weights, and what it records is learned from, as it is and once."""
        learned, version = self.learn(), self.weights.version
        with channel_to(self.server.address) as channel:
            pull = Raw(channel, self.hello(PULL), self.question(PULL), method=path(PULL), metadata=GIVEN)
            sends = layout_from(pull.next().welcome.sends, MOST)
            data = pull.next().data
            assert data.version == version
            assert (sends.unpack(data.tensors)["params"] == version).all()
            sent = self.rollout(version)
            frames = [data_frame(n, self.pack(sent)) for n in range(2)]
            push = Raw(channel, self.hello(run_id=99), *frames, method=path(PUSH), metadata=GIVEN)
            first = push.next().welcome.first_env_id
            assert first >= REMOTE
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


def path(method: str) -> str:
    return f"/{SERVICE}/{method}"

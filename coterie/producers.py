"""Producers: what a process is made of that steps envs for a learner elsewhere. An actor of decoupled acting, with a
policy of its own, and an env host of central acting, with none.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import torch
from torch import Tensor

from coterie.acting.decoupled import Desk, Stopped
from coterie.acting.inline import Inline
from coterie.actor import Stages, env_loop
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.models.build import acting_copy
from coterie.parallel.affinity import rss_mb
from coterie.parallel.board import COUNTS
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.parts import (
    Links,
    Policy,
    actor_env,
    envs_of,
    make_algorithm,
    make_model,
    normalizers,
    patience,
    policy_of,
    resolve,
    settle,
)
from coterie.types import AgentOutput, Array, CoterieError, Inputs, Spec, TimeStep
from coterie.wire.client import Lost, Over, Stream, back_off, open_channel
from coterie.wire.codec import Newest, timestep_layout

_REPORT_S = 0.5  # between two reports
_SILENCE_S = 30.0  # without a sign of life from the learner


class Actor:
    """An actor of decoupled acting: number `number` of its learner, with the board's row `row`.

    It acts on the CPU, as inline acting does, with weights that it takes and into slots that it is given.
    """

    def __init__(self, config: Config, life: int, links: Links, number: int, row: int) -> None:
        assert links.slots is not None
        assert links.weights is not None
        config = settle(replace(config, learners=links.learners))
        self.spec = make_spec(config.env, config.atari)
        mine, first = actor_env(config, number, links.rank)
        layout = resolve(replace(mine, device="cpu"), self.spec)
        torch.set_num_threads(1)
        self.board, self.row = links.board, row
        self.model = make_model(config, self.spec)
        params = FlatParams(self.model)  # before the copy is made, which follows these tensors
        self.stages = Stages()
        acting, refresh = acting_copy(self.model, layout.dtype)
        self.envs, rngs = envs_of(mine, layout, life, first, union=mine.env.id != config.env.id)
        moments = normalizers(config, self.model)
        self.desk = Desk(
            links.slots, links.weights, params, moments, links.board, row, links.rank, number, self.envs.groups,
            self.stages, patience(config),
        )  # fmt: skip
        algorithm = make_algorithm(config, self.spec)
        policy = policy_of(algorithm, acting, rngs, mine.env.num_envs)
        self.acting = Inline(
            self.envs,
            partial(self._act, policy),
            self.desk.recorders[0, 0],
            self.model.initial_state,
            refresh,
            self.stages,
            Team(1),  # it has one core, and counts without a lock
            config.algo.poll,
            self.desk.next,
        )
        self.calls = [0] * layout.groups
        self._counts = links.board.counts[row]
        self._replaced = int(self._counts[COUNTS.index("replaced")])  # by whoever was this actor before

    def _act(self, policy: Policy, g: int, inputs: Inputs, state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        """Every row after row 0 shows the consequence of a step: it is counted at once, whatever becomes of it."""
        if self.calls[g] % (self.acting.recorder.unroll_length + 1):
            self._counts[COUNTS.index("produced")] += int((~inputs.is_first).sum())
        self.calls[g] += 1
        self.desk.check()
        return policy(g, inputs, state)

    def run(self, post: Callable[[str, Any], None]) -> None:
        """Act until the run is over."""
        reported = 0.0
        with closing(self.acting):
            try:
                for _ in self.acting.rollouts(self._refresh):
                    self._counts[COUNTS.index("delivered")] = self._counts[COUNTS.index("produced")]
                    self._counts[COUNTS.index("replaced")] = self._replaced + self.envs.replaced
                    self.desk.leave()
                    if time.monotonic() - reported > _REPORT_S:
                        reported = time.monotonic()
                        post("acted", self._report())
            except Stopped:
                pass

    def close(self) -> None:
        self.acting.close()

    def _refresh(self) -> None:
        begin = time.perf_counter()
        self.acting.publish(self.desk.pull())
        self.stages.add("pull", begin)

    def _report(self) -> dict[str, Any]:
        return {
            "stages": {f"actor/{k}": v for k, v in self.stages.seconds.items()},
            "rss_mb": rss_mb(),
            "failures": self.acting.failures(),
        }


@dataclass
class Line:
    """One group's stream to the learner."""

    stream: Stream
    newest: Newest


class Dialer:
    """Calls the learner at `address`, and calls again for `patience` seconds when a stream is lost."""

    def __init__(
        self, address: str, env_id: str, spec: Spec, *, number: int = -1, token: str = "", cert: str = "",
        newest: bool = False, patience: float = 600.0,
    ) -> None:  # fmt: skip
        self.address, self.cert, self.token = address, cert, token
        self.env_id, self.spec, self.number, self.newest, self.patience = env_id, spec, number, newest, patience
        self.run_id = random.SystemRandom().getrandbits(64)
        self.channel: grpc.Channel | None = None
        self.lost = 0

    def call(self, group: int, envs: int, check: Callable[[], None]) -> Line:
        """A new stream for a group of envs; `check` may end the trying by raising."""
        begin = time.monotonic()
        for wait in back_off():
            check()
            if self.channel is None:
                self.channel = open_channel(self.address, self.cert)
            layout = timestep_layout(self.spec, envs, self.newest)
            hello = {
                "client": "coterie", "run_id": self.run_id, "env_id": self.env_id, "envs": envs, "group": group,
                "number": self.number,
            }  # fmt: skip
            try:
                stream = Stream(self.channel, "Infer", hello, layout, token=self.token, silence=_SILENCE_S)
            except Lost as error:
                waited = time.monotonic() - begin
                if waited > self.patience:
                    raise CoterieError(f"no learner at {self.address} for {waited:.0f} s: {error}") from None
                time.sleep(wait)
                continue
            return Line(stream, Newest(layout))
        raise AssertionError

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Host:
    """An env host of central acting: env_loop alone, whose actions come over the wire.

    `number`: among its learner's hosts, with the board's row `row`.
    """

    def __init__(self, config: Config, life: int, links: Links, number: int, row: int) -> None:
        config = settle(replace(config, learners=links.learners))
        mine, first = actor_env(config, number, links.rank)
        self.board, self.row, self.learner = links.board, row, links.rank
        several = mine.env.id != config.env.id
        dialer = Dialer(
            links.address, mine.env.id, make_spec(config.env, config.atari), number=number,
            newest=config.central.newest_frame, patience=patience(config),
        )  # fmt: skip
        self.work = HostWork(mine, life, first, dialer, self._check, union=several)
        self._replaced = int(links.board.counts[row][COUNTS.index("replaced")])

    def _check(self) -> None:
        self.board.beat[self.row] = time.monotonic()
        if self.board.closed:
            raise Stopped

    def run(self, post: Callable[[str, Any], None]) -> None:
        def report(content: dict[str, Any]) -> None:
            replaced = self._replaced + self.work.envs.replaced
            self.board.counts[self.row, COUNTS.index("replaced")] = replaced
            post("acted", content)

        try:
            with self.board.waits(self.row):  # an answer may take as long as an evaluation
                self.work.run(report)
        except Over:
            while not self.board.closed:
                time.sleep(0.01)
        except Stopped:
            pass

    def close(self) -> None:
        self.work.close()


class HostWork:
    """Envs, and the streams over which they are acted on. `check` is called at each step, and may end it all."""

    def __init__(
        self, config: Config, life: int, first_env: int, dialer: Dialer, check: Callable[[], None], union: bool = False
    ) -> None:
        torch.set_num_threads(1)
        layout = resolve(replace(config, device="cpu"), dialer.spec)
        self.dialer, self.check = dialer, check
        self.envs, _ = envs_of(config, layout, life, first_env, union=union)
        self.lines: dict[int, Line] = {}
        self.stages = Stages()
        self.latencies = deque[float](maxlen=4096)
        self.env_steps = 0
        self.report: Callable[[dict[str, Any]], None] = lambda content: None
        self.reported = 0.0

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Step until something ends it: `Over`, `Stopped`, an error."""
        self.report = report
        seen = {g: self.envs.recv(g) for g in range(len(self.envs.groups))}
        env_loop(self.envs, self._act, range(sys.maxsize), seen, self.stages)

    def _act(self, g: int, row: int, seen: TimeStep) -> Array:
        arrays = as_arrays(seen)
        while True:
            self.check()
            if g not in self.lines:
                self.lines[g] = self.dialer.call(g, len(seen.reward), self.check)
            line = self.lines[g]
            try:
                begin = time.perf_counter()
                line.stream.send(line.newest.split(arrays))
                answer, _ = line.stream.receive()
                break
            except Lost:
                # Another life begins on a new stream, with what the envs show now.
                self.dialer.lost += 1
                line.stream.close()
                del self.lines[g]
        now = time.perf_counter()
        self.latencies.append(now - begin)
        self.env_steps += len(seen.reward)
        if now - self.reported > _REPORT_S:
            self.reported = now
            self.report(
                {
                    "stages": {f"host/{k}": v for k, v in self.stages.seconds.items()},
                    "rss_mb": rss_mb(),
                    "failures": self.envs.failures(),
                    "latencies": list(self.latencies),
                }
            )
            self.latencies.clear()
        return answer["action"]

    def close(self) -> None:
        for line in self.lines.values():
            line.stream.close()
        self.dialer.close()
        self.envs.close()


def as_arrays(seen: TimeStep) -> dict[str, Array]:
    """A TimeStep as the tensors of a frame; envs know their ids only here."""
    obs = seen.obs if isinstance(seen.obs, dict) else {"": seen.obs}
    small = {k: x for k, x in seen._asdict().items() if k not in ("obs", "env_id")}
    return {**{f"obs/{k}": x for k, x in obs.items()}, **{k: np.asarray(x) for k, x in small.items()}}

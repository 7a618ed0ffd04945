"""Env hosts of central acting: env_loop alone, whose actions come over the wire."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import torch

from coterie.acting.decoupled import Stopped
from coterie.acting.recorder import Stages, env_loop
from coterie.build.factory import Links, actor_env, envs_of, patience
from coterie.build.resources import resolve_resources
from coterie.config import ResolvedConfig
from coterie.envs.make import make_spec
from coterie.parallel.affinity import available_cores, keep_freed_memory, rss_mb
from coterie.parallel.board import COUNTS
from coterie.types import Array, Spec, TimeStep
from coterie.wire.client import Lost, Over, Stream, keep_trying, open_channel
from coterie.wire.codec import Newest, timestep_layout

_REPORT_S = 0.5  # between two reports
_SILENCE_S = 30.0  # without a sign of life from the learner


@dataclass
class Line:
    """One group's stream to the learner."""

    stream: Stream
    newest: Newest
    rows: int = 0  # sent: the first begins a rollout, and every unroll-th after it ends one


class Dialer:
    """Calls the learner at `address`, and calls again for `patience` seconds when a stream is lost."""

    def __init__(
        self, address: str, env_id: str, spec: Spec, *, number: int = -1, token: str = "", cert: str = "",
        newest: bool = False, patience: float = 600.0, leave: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.say = say
        self.leave = leave  # raises where no answer is waited for any longer
        self.address, self.cert, self.token = address, cert, token
        self.env_id, self.spec, self.number, self.newest, self.patience = env_id, spec, number, newest, patience
        self.run_id = random.SystemRandom().getrandbits(64)
        self.channel: grpc.Channel | None = None
        self.lost = 0

    def call(self, group: int, envs: int, check: Callable[[], None]) -> Line:
        """A new stream for a group of envs; `check` may end the trying by raising."""
        layout = timestep_layout(self.spec, envs, self.newest)
        hello = {
            "client": "coterie", "run_id": self.run_id, "env_id": self.env_id, "envs": envs, "group": group,
            "number": self.number,
        }  # fmt: skip

        def dial() -> Line:
            if self.channel is None:
                self.channel = open_channel(self.address, self.cert)
            stream = Stream(
                self.channel, "Infer", hello, layout, token=self.token, silence=_SILENCE_S, check=self.leave
            )
            return Line(stream, Newest(layout))

        return keep_trying(dial, self.address, self.patience, check, self.say)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Host:
    """An env host of central acting: env_loop alone, whose actions come over the wire.

    `number`: among its learner's hosts, with the board's row `row`.
    """

    def __init__(self, config: ResolvedConfig, life: int, links: Links, number: int, row: int) -> None:
        mine, first = actor_env(config, number, links.rank)
        self.board, self.row, self.learner = links.board, row, links.rank
        several = mine.env.id != config.env.id
        dialer = Dialer(
            links.address, mine.env.id, make_spec(config.env, config.atari), number=number,
            newest=config.central.newest_frame, patience=patience(config),
        )  # fmt: skip
        self.work = HostWork(mine, life, first, dialer, self._check, union=several)
        self.work.waits = partial(links.board.blocked, row)  # an answer may take as long as an evaluation
        self._replaced = int(links.board.counts[row][COUNTS.index("replaced")])

    def _check(self) -> None:
        self.board.heartbeat[self.row] = time.monotonic()
        if self.board.closed:
            raise Stopped

    def run(self, post: Callable[[str, Any], None]) -> None:
        def report(content: dict[str, Any]) -> None:
            replaced = self._replaced + self.work.envs.replaced
            self.board.counts[self.row, COUNTS.index("replaced")] = replaced
            post("acted", content)

        try:
            self.work.run(report)
        except Over:
            with self.board.blocked(self.row):  # for learners that have not reached the end
                while not self.board.closed:
                    time.sleep(0.01)
        except Stopped:
            pass

    def close(self) -> None:
        self.work.close()


class HostWork:
    """Envs, and the streams over which they are acted on. `check` is called at each step, and may end it all; so may
    `rest`, where all rollouts of `unroll` rows are whole.
    """

    def __init__(
        self, config: ResolvedConfig, life: int, first_env: int, dialer: Dialer, check: Callable[[], None],
        union: bool = False, unroll: int = 1, rest: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        keep_freed_memory()
        layout = resolve_resources(replace(config, device="cpu"), dialer.spec)
        if not config.env.threads:
            # A group whose actions are awaited leaves its threads idle: each has one for every core.
            layout = replace(layout, env_threads=len(available_cores()) * layout.groups)
        self.dialer, self.check, self.unroll, self.rest = dialer, check, unroll, rest
        self.envs, _ = envs_of(config, layout, life, first_env, union=union)
        self.lines: dict[int, Line] = {}
        self.stages = Stages()
        self.latencies = deque[float](maxlen=4096)
        self.env_steps = 0
        self.report: Callable[[dict[str, Any]], None] = lambda content: None
        self.waits: Callable[[], AbstractContextManager[None]] = nullcontext  # while somebody else has to do something
        self.reported = 0.0

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Step until something ends it: `Over`, `Stopped`, an error."""
        self.report = report
        seen = {g: self.envs.recv(g) for g in range(len(self.envs.groups))}
        for g in seen:  # in lockstep nobody is answered before all are there
            with self.waits():
                self.lines[g] = self.dialer.call(g, len(seen[g].reward), self.check)
                self.check()
        env_loop(self.envs, self._act, range(sys.maxsize), seen, self.stages)

    def _act(self, g: int, row: int, seen: TimeStep) -> Array:
        arrays = as_arrays(seen)
        if all(line.rows == 0 or (line.rows - 1) % self.unroll == 0 for line in self.lines.values()):
            self.rest()
        with self.waits():
            try:
                answer = self._ask(g, arrays)
            finally:
                self.check()  # a sign of life, before it is expected again
        self.env_steps += len(seen.reward)
        if (now := time.perf_counter()) - self.reported > _REPORT_S:
            self._tell(now)
        return answer["action"]

    def _ask(self, g: int, arrays: dict[str, Array]) -> dict[str, Array]:
        """An answer, on a new stream where the old one is lost."""
        while True:
            self.check()
            if g not in self.lines:
                self.lines[g] = self.dialer.call(g, len(arrays["reward"]), self.check)
            line = self.lines[g]
            try:
                begin = time.perf_counter()
                line.stream.send(line.newest.split(arrays))
                line.rows += 1
                answer, _ = line.stream.receive()
            except Lost:
                # Another life begins on a new stream, with what the envs show now.
                self.dialer.lost += 1
                line.stream.close()
                del self.lines[g]
                continue
            self.latencies.append(time.perf_counter() - begin)
            return answer

    def _tell(self, now: float) -> None:
        self.reported = now
        self.report(
            {
                "stages": {f"host/{k}": v for k, v in self.stages.seconds.items()},
                "rss_mb": rss_mb(),
                "failures": [f"replaced {reason}" for reason in self.envs.failures()],
                "latencies": list(self.latencies),
            }
        )
        self.latencies.clear()

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

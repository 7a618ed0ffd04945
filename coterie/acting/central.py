"""Central acting (SEED RL, https://arxiv.org/abs/1910.06591, Figure 3): envs anywhere, one policy at the learner.

Env hosts hold no weights: they send observations and wait for actions. The inference thread answers batches of waiting
streams with the newest weights. It keeps each env's recurrent state and unfinished rollout, whose steps may come from
different policies. The prefetch thread makes batches of finished rollouts; the caller's thread trains. In lockstep all
envs are one batch in a fixed order, and a rollout waits for the weights trained on the one before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import numpy as np
import torch

from coterie.acting.base import Acting, ActingKind, LearnerSetup
from coterie.acting.central_stream import BatchAssembly, EnvHostService, EnvStream, EnvStreams, InferenceRequest
from coterie.acting.child_processes import child_process_refusals
from coterie.acting.double_buffer import DoubleBufferedModel
from coterie.acting.env_host import EnvHost, HostMemory
from coterie.acting.recorder import Fields, as_rollout
from coterie.acting.window import choose_batch, going, has_room, least_lag, worst_lag
from coterie.config import Refusal, ResolvedConfig
from coterie.errors import CoterieError, counted
from coterie.models.build import Network, acting_copy
from coterie.parallel.clock import awake
from coterie.parallel.gpu import Pinned, finish_kernels, urgent_stream
from coterie.plugins import substitute
from coterie.types import AgentOutput, Inputs, Rollout
from coterie.wire.auth import offset

_SETTLE_S = 0.3  # `rest`: acting is idle after this long without a new row
_CHECK_S = 0.5  # between checks for a failed thread and for the end of the run


class Central(EnvStreams, Acting):
    """A source of rollouts of envs in other processes."""

    def __init__(self, setup: LearnerSetup) -> None:
        super().__init__(setup)
        model, dtype = cast(Network, setup.agent.model), setup.envs.dtype
        self.models = DoubleBufferedModel([acting_copy(model, dtype, always_copy=True) for _ in range(2)], self.device)
        self.rng = setup.envs.make_rng(setup.rank)
        self.dropped = self.left = 0  # valid rows: of abandoned rollouts, in memory after `close`
        self.calls = self.rows = 0  # of the policy
        self.finished = self.taken = 0  # columns of rollouts; each is counted by one thread
        self.batches = 1 if self.config.lockstep else 2 + self.config.queue
        batches = [self.make_fields(self.batch_size) for _ in range(self.batches)]
        self.assembly = BatchAssembly(self.batch_size, batches, self.device, lambda: self.inbox.put(None))
        self.completed: dict[tuple[int, int], int] = {}  # finished rollouts by client and group
        self._error: BaseException | None = None
        self.closed = False
        self._gpu_stream = urgent_stream(self.device)  # of its threads, so that no answer waits for a learner step
        self.on_close: Callable[[], None] = lambda: None
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"coterie-{name}", daemon=True)
            for name, work in self._work().items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.inbox.put(None)
            self.assembly.close()
            for thread in self._threads:
                thread.join(5.0)
            while not self.inbox.empty():
                if isinstance(news := self.inbox.get(), EnvStream):
                    self.dropped += news.abandon()
            self.left = self.assembly.left() + sum(stream.valid for stream in self.streams.values())
            self.on_close()

    def _work(self) -> dict[str, Callable[[], None]]:  # of its threads
        return {"inference": self._infer, "prefetch": self.assembly.run}

    # The training thread.

    def publish(self, version: int) -> None:
        self.models.publish(version)
        self.inbox.put(None)

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        while True:
            refresh()
            if (fields := self._wait()) is None:
                return
            self.taken += self.batch_size
            yield as_rollout(fields, self.device)
            finish_kernels(self.device)
            self.window.trained(self.batch_size)
            self.assembly.free.put(fields)

    @property
    def columns(self) -> int:
        """In finished rollouts that the learner has not taken yet."""
        return self.finished - self.taken

    def rest(self) -> int:
        """Wait until every env has reached its recording limit; returns the batches recorded. For measurements."""
        before = -1
        while self.produced != before:
            before = self.produced
            time.sleep(_SETTLE_S)
        begun = sum(stream.width for stream in self.streams.values() if stream.recorder is not None)
        return -(-(self.columns + begun) // self.batch_size)

    def _wait(self) -> Fields | None:
        setup, begin = self.setup, awake()
        setup.stages.start()
        with setup.board.blocked(setup.rank):
            while True:
                if self._error is not None:
                    raise self._error
                try:
                    fields = self.assembly.ready.get(timeout=_CHECK_S)
                    break
                except queue.Empty:
                    if setup.is_over():
                        return None
                    if not self.streams:  # it hangs no more than its hosts that are still to come
                        setup.board.heartbeat(setup.rank)
                    if awake() - begin > setup.timeout:
                        raise CoterieError(
                            f"no batch of rollouts for {setup.timeout:g} s: {len(self.streams)} streams of "
                            f"{self.envs} envs are connected"
                        ) from None
        setup.stages.lap("wait")
        return fields

    # The inference thread.

    def _infer(self) -> None:
        pending: dict[EnvStream, InferenceRequest] = {}
        while not self.closed:
            batch, wait = self._due(pending)
            if batch:
                for request in batch:
                    del pending[request.stream]
                pending |= {request.stream: request for request in self._answer(batch)}
                continue
            try:
                news = self.inbox.get(timeout=wait)
                while True:
                    if isinstance(news, EnvStream):
                        pending.pop(news, None)
                        self.dropped += news.abandon()
                    elif news is not None and news.stream.alive:
                        pending[news.stream] = news
                    news = self.inbox.get_nowait()
            except queue.Empty:
                pass

    def _due(self, pending: dict[EnvStream, InferenceRequest]) -> tuple[list[InferenceRequest], float]:
        """The requests to answer now, the oldest first, or how long to wait for more."""
        if not self.models.published:
            return [], _CHECK_S
        config = self.config
        if config.lockstep:  # all envs, always in the same order; one that is behind catches up
            streams, done = sorted(self.streams.values(), key=lambda x: x.first_env_id), self.completed
            # The others wait for the weights trained on their last rollout.
            due = [x for x in streams if x.recorder is not None or self.models.published > done.get(x.place, 0)]
            ready = sum(x.width for x in streams) == self.own_envs and all(x in pending and x.may_go() for x in due)
            return [pending[x] for x in due] if ready else [], _CHECK_S
        # Finished rollouts of closed streams count against the limit.
        able = going(pending.values(), has_room(self.columns, self.envs, self.batches * self.batch_size))
        least = min(config.batch_min, self.envs)
        picked, wait = choose_batch(able, time.perf_counter(), least, config.batch_max, config.wait)
        return picked, min(wait, _CHECK_S)

    @torch.inference_mode()
    def _answer(self, batch: list[InferenceRequest]) -> list[InferenceRequest]:
        """Choose the actions of a batch; returns the requests that have to wait for newer weights first."""
        inputs = [q.stream.write_step(q.time_step) for q in batch]
        self.setup.on_produced()
        states = [q.stream.state for q in batch if q.stream.state is not None]
        ids = torch.from_numpy(np.concatenate([q.stream.ids for q in batch])).to(self.device)
        with self.models.newest() as (model, version, publication):
            self.setup.note("infer", publication, self.set_exploration_steps(), [q.stream.serial for q in batch])
            state = torch.cat(states) if states else None
            out, after = self.setup.agent.inference_policy(model, join(inputs), state, ids, self.rng)
            action = out.action.cpu().numpy()  # waits for a GPU, which then has read the weights, and the hosts' memory
        at, waiting = 0, list[InferenceRequest]()
        for request in batch:
            stream = request.stream
            mine = slice(at, at + stream.width)
            at = mine.stop
            part = AgentOutput(out.action[mine], out.log_prob[mine], out.value[mine])
            if stream.row == self.unroll_length:
                self.assembly.finished.put((stream, stream.finish(request, part.value)))
                self.finished += stream.width
                self.completed[stream.place] = self.completed.get(stream.place, 0) + 1
                if self.paced:
                    waiting.append(request)
                    continue
                stream.write_step(request.time_step)
            stream.write_output(part, None if after is None else after[mine], version)
            request.answer({"action": action[mine]}, version)
        self.calls, self.rows = self.calls + 1, self.rows + at
        return waiting

    def set_exploration_steps(self) -> int:
        """Explore as of the learner's env steps now; returns them."""
        return self.setup.agent.set_exploration_steps(None)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            with self._gpu_stream():
                work()
        except BaseException as error:
            self._error = error

    # Reports.

    def counts(self) -> dict[str, int]:
        return {"produced": self.produced, "dropped": self.dropped, "in_flight": self.left}

    def gauges(self) -> dict[str, float]:
        return {
            "inference/batch": self.rows / max(1, self.calls),
            "inference/streams": len(self.streams),
            "inference/envs": self.envs,
        }


def join(inputs: Sequence[Inputs]) -> Inputs:
    """The inputs of several streams as one batch."""
    if len(inputs) == 1:
        return inputs[0]
    first = inputs[0].obs
    obs = {k: torch.cat([x.obs[k] for x in inputs]) for k in first} if isinstance(first, dict) else None
    return Inputs(obs or torch.cat([x.obs for x in inputs]), *(torch.cat([x[i] for x in inputs]) for i in range(1, 4)))


def connect(setup: LearnerSetup, memory: HostMemory | None) -> Acting:
    """`memory` is None if the run starts no env hosts."""
    config, serve = setup.config, setup.servers.serve
    central = substitute(config, "acting", Central)(setup)
    with ExitStack() as made:
        made.callback(central.close)
        if memory is not None:
            central.on_close = Pinned(memory.memory, setup.envs.device).close
            serve(memory.address, {"Infer": EnvHostService(central, memory.obs)})
        if config.wire.bind:
            serve(offset(config.wire.bind, setup.rank), {"Infer": EnvHostService(central)}, "wire.bind")
        made.pop_all()
    return central


def describe(config: ResolvedConfig, groups: int, threads: int) -> str:
    envs, hosts = config.env.num_envs if config.actors else 0, counted(config.actors // config.learners, "host")
    return f"{envs} envs in {hosts}, batches of {KIND.batch_size(config)} rollouts"


KIND = ActingKind(
    connect,
    describe,
    HostMemory,
    EnvHost,
    child="host",
    section=lambda config: config.central,
    batch_settings=lambda lockstep, size: {"central.lockstep": lockstep, "central.batch_size": size},
    max_envs=lambda config: config.central.max_envs,
    batch_max=lambda config: config.central.batch_max,
    one_group=lambda config: config.central.lockstep,
    worst_lag=worst_lag,
    least_lag=least_lag,
    refusals=(
        *child_process_refusals(lambda config: config.central, optional=True),
        Refusal(
            lambda c, s: c.central.lockstep and c.env.groups == 2,
            "env.groups",
            "must be 0 or 1 in lockstep: the policy acts for all envs of a host at once",
        ),
        Refusal(lambda c, s: c.env.num_envs > c.central.max_envs, "central.max_envs", "must not be below env.num_envs"),
        Refusal(
            lambda c, s: 0 < c.central.batch_max < c.central.batch_min,
            "central.batch_max",
            "must not be below central.batch_min",
        ),
    ),
    needs=lambda config: {
        "central.queue central.batch_min central.batch_max": (not config.central.lockstep, "central.lockstep False"),
        "central.wait": (config.central.batch_min and not config.central.lockstep, "central.batch_min"),
        "central.newest_frame": (config.wire.bind, "wire.bind"),
    },
    replay="coterie.acting.recorded_central:RecordedCentral",
    simulation="coterie.tools.plan.acting:SimCentral",
)

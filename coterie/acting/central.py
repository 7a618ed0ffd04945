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
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from coterie.acting.base import Acting, ActingKind, Lag, LearnerSetup, core_shape
from coterie.acting.batching import choose_batch, has_room
from coterie.acting.central_stream import (
    REFUSALS,
    BatchAssembly,
    CentralConfig,
    EnvStream,
    EnvStreams,
    InferenceRequest,
    join,
)
from coterie.acting.env_host import EnvHost, HostMemory
from coterie.acting.recorder import Fields, as_rollout, local_fields
from coterie.acting.twin_models import Twin, TwinModels
from coterie.acting.window import going, least_lag, worst_lag
from coterie.config import ResolvedConfig
from coterie.models.base import Model
from coterie.models.build import Network, acting_copy
from coterie.parallel.board import Board
from coterie.parallel.clock import awake
from coterie.parallel.stages import Stages
from coterie.parallel.upload import Pinned, finish_kernels, urgent_stream
from coterie.plugins import substitute
from coterie.remote.admission import EnvHostService
from coterie.types import AgentOutput, CoterieError, Inputs, Rollout, counted
from coterie.wire.auth import offset

# (network, inputs, core state, global ids of the envs) -> output and the next core state
CentralPolicy = Callable[[Model, Inputs, Tensor | None, Tensor], tuple[AgentOutput, Tensor | None]]

_SETTLE_S = 0.3  # `rest`: acting is idle after this long without a new row
_CHECK_S = 0.5  # between checks for a failed thread and for the end of the run


class Central(EnvStreams, Acting):
    """A source of rollouts of envs in other processes. `make_fields(width)`: a rollout's arrays for `width` envs."""

    def __init__(
        self, config: CentralConfig, twins: Sequence[Twin], policy: CentralPolicy, make_fields: Callable[[int], Fields],
        board: Board, rank: int, stages: Stages, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(config, twins[0][0].initial_state, make_fields, device)
        self.models, self.policy = TwinModels(twins, device), policy
        self.board, self.rank, self.stages = board, rank, stages
        # Valid rows: received, of abandoned rollouts, in memory after `close`.
        self.produced = self.dropped = self.left = 0
        self.calls = self.rows = 0  # of the policy
        self.columns = 0  # in finished rollouts that the learner has not taken yet
        batches = [make_fields(config.batch_size) for _ in range(config.batches)]
        self.assembly = BatchAssembly(config.batch_size, batches, device, lambda: self.inbox.put(None))
        self.on_produced: Callable[[], None] = lambda: None  # called after each change of `produced`
        self.look: Callable[[int | None], int] = lambda env_steps: 0  # `Agent.look`
        self.is_over: Callable[[], bool] = lambda: False  # whether to end instead of waiting for rollouts
        self.completed: dict[tuple[int, int], int] = {}  # finished rollouts by client and group
        self.patience = config.timeout / 3 if config.window else 0.0  # with a window all wait for a host that hangs
        self._error: BaseException | None = None
        self.closed = False
        self._gpu_stream = urgent_stream(device)  # of its threads, so that no answer waits for a learner step
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
            self.columns -= self.config.batch_size
            yield as_rollout(fields, self.device)
            finish_kernels(self.device)
            self.window.trained(self.config.batch_size)
            self.assembly.free.put(fields)

    def rest(self) -> int:
        """Wait until every env has reached its recording limit; returns the batches recorded. For measurements."""
        before = -1
        while self.produced != before:
            before = self.produced
            time.sleep(_SETTLE_S)
        begun = sum(stream.width for stream in self.streams.values() if stream.recorder is not None)
        return -(-(self.columns + begun) // self.config.batch_size)

    def _wait(self) -> Fields | None:
        begin = awake()
        self.stages.start()
        with self.board.blocked(self.rank):
            while True:
                if self._error is not None:
                    raise self._error
                try:
                    fields = self.assembly.ready.get(timeout=_CHECK_S)
                    break
                except queue.Empty:
                    if self.is_over():
                        return None
                    if not self.streams:  # it hangs no more than its hosts that are still to come
                        self.board.heartbeat(self.rank)
                    if awake() - begin > self.config.timeout:
                        raise CoterieError(
                            f"no batch of rollouts for {self.config.timeout:g} s: {len(self.streams)} streams of "
                            f"{self.envs} envs are connected"
                        ) from None
        self.stages.lap("wait")
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
            ready = sum(x.width for x in streams) == config.envs and all(x in pending and x.may_go() for x in due)
            return [pending[x] for x in due] if ready else [], _CHECK_S
        # Finished rollouts of closed streams count against the limit.
        able = going(pending.values(), has_room(self.columns, self.envs, config.batches * config.batch_size))
        least = min(config.batch_min, self.envs)
        picked, wait = choose_batch(able, time.perf_counter(), least, config.batch_max, config.wait)
        return picked, min(wait, _CHECK_S)

    @torch.inference_mode()
    def _answer(self, batch: list[InferenceRequest]) -> list[InferenceRequest]:
        """Choose the actions of a batch; returns the requests that have to wait for newer weights first."""
        inputs = [q.stream.see(q.seen) for q in batch]
        for request in batch:
            if request.stream.counted:
                self.produced += request.stream.seen
            request.stream.seen = 0
        self.on_produced()
        states = [q.stream.state for q in batch if q.stream.state is not None]
        ids = torch.from_numpy(np.concatenate([q.stream.ids for q in batch])).to(self.device)
        with self.models.newest() as (model, version, publication):
            self.note("infer", publication, self.look(None), [q.stream.serial for q in batch])
            out, after = self.policy(model, join(inputs), torch.cat(states) if states else None, ids)
            action = out.action.cpu().numpy()  # waits for a GPU, which then has read the weights, and the hosts' memory
        at, waiting = 0, list[InferenceRequest]()
        for request in batch:
            stream = request.stream
            mine = slice(at, at + stream.width)
            at = mine.stop
            part = AgentOutput(out.action[mine], out.log_prob[mine], out.value[mine])
            if stream.row == self.config.unroll_length:
                self.assembly.finished.put((stream, stream.finish(request, part.value)))
                self.columns += stream.width
                self.completed[stream.place] = self.completed.get(stream.place, 0) + 1
                if self.config.lockstep or self.config.window:  # the next one begins with weights of that time
                    waiting.append(request)
                    continue
                stream.see(request.seen)
            stream.act(part, None if after is None else after[mine], version)
            request.answer({"action": action[mine]}, version)
        self.calls, self.rows = self.calls + 1, self.rows + at
        return waiting

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


def make_central(setup: LearnerSetup, kind: Callable[..., Central]) -> Central:
    config, share, agent, unroll = setup.config, setup.envs, setup.agent, setup.unroll_length
    rng = share.make_rng(setup.rank)
    settings = CentralConfig.of(setup, KIND.batch_size(config))
    twins = [acting_copy(cast(Network, agent.model), share.dtype, apart=True) for _ in range(2)]
    make_fields = partial(local_fields, share.spec, unroll, device=share.device, core=core_shape(agent.model))
    policy: CentralPolicy = lambda model, inputs, state, ids: agent.apart(model, inputs, state, ids, rng)  # noqa: E731
    central = kind(settings, twins, policy, make_fields, setup.board, setup.rank, setup.stages, share.device)
    central.is_over, central.on_produced = setup.is_over, setup.on_produced
    central.note, central.look = setup.note, agent.look
    return central


def connect(setup: LearnerSetup, memory: HostMemory | None) -> Acting:
    """`memory` is None if the run starts no env hosts."""
    config, share = setup.config, setup.envs
    central = make_central(setup, substitute(config, "acting", Central))
    serve = partial(EnvHostService, config, share.spec, setup.rank, central)
    with ExitStack() as made:
        made.callback(central.close)
        if memory is not None:
            central.on_close = Pinned(memory.memory, share.device).close
            setup.servers.serve(memory.address, {"Infer": serve(local=memory.obs)})
        if config.wire.bind:
            setup.servers.serve(offset(config.wire.bind, setup.rank), {"Infer": serve()}, "wire.bind")
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
    lag=Lag(worst_lag, least_lag),
    refusals=REFUSALS,
    replay="coterie.acting.central_again:replay",
    simulation="coterie.tools.plan.acting:SimCentral",
)

"""Central acting (SEED RL, https://arxiv.org/abs/1910.06591, Figure 3): environments anywhere, one policy here.

Env hosts hold no weights: they send what they see and wait for actions. One thread answers, a batch of whoever waits
at a time, with the newest weights; it keeps each env's recurrent state and unfinished rollout, whose steps may be of
different policies. A second puts finished rollouts together into batches, the third (the caller's) trains. In lockstep
all envs are one batch in a fixed order, and a rollout waits for the weights that came of the one before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.acting.base import ActingKind, apart_refusals
from coterie.acting.batching import choose_batch, choose_turn, has_room
from coterie.acting.central_stream import Question, Seat, Shape
from coterie.acting.recorder import ON_HOST, Fields, Recorder, Stages, as_rollout
from coterie.config import Central as CentralConfig
from coterie.config import Config, Refusal
from coterie.models.build import Network
from coterie.parallel.board import Board
from coterie.parallel.slots import columns_of
from coterie.types import AgentOutput, CoterieError, Inputs, Rollout
from coterie.wire.codec import Refused

# (model, inputs, core state, global ids of the envs)
Policy = Callable[[Network, Inputs, Tensor | None, Tensor], tuple[AgentOutput, Tensor | None]]
Twin = tuple[Network, Callable[[], None]]  # a copy of the model that only acts, and what brings it up to date

REMOTE = 1 << 20  # env ids from here on are of hosts that came by themselves
_REST_S = 0.3
_LOOK_S = 0.5  # between two looks at whether everybody is still there


class Central:
    """A source of rollouts of envs elsewhere. `make_fields(width, device)`: a rollout's arrays for so many envs.
    `device` is where actions are chosen, `trains_on` where rollouts are learned from.
    """

    def __init__(
        self, shape: Shape, twins: Sequence[Twin], policy: Policy, initial_state: Callable[[int], Tensor | None],
        make_fields: Callable[[int, torch.device], Fields], board: Board, rank: int, stages: Stages,
        device: torch.device, trains_on: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.twins, self.policy, self.initial_state = shape, twins, policy, initial_state
        self.make_fields, self.board, self.rank, self.stages, self.device = make_fields, board, rank, stages, device
        self.trains_on = trains_on
        self.seats: dict[tuple[int, int], Seat] = {}  # by client and group
        self.envs = 0  # of all seats
        self.produced = self.dropped = 0  # valid rows received; of rollouts that will never be whole
        self.calls = self.rows = 0  # of the policy
        self.inbox = queue.SimpleQueue[Question | Seat | None]()  # a question, a seat that was left, or a wake-up
        self.finished = queue.SimpleQueue[tuple[Seat, Recorder] | None]()
        self.free, self.ready = queue.SimpleQueue[Fields | None](), queue.SimpleQueue[Fields]()
        for _ in range(shape.batches):
            self.free.put(make_fields(shape.batch_size, trains_on))
        self.told: Callable[[], None] = lambda: None  # hears of every change of `produced`
        self.is_over: Callable[[], bool] = lambda: False  # nothing more is due to come, if nothing comes
        self.columns = 0  # of rollouts that are whole and have not been learned from
        self.published = 0
        self.made: dict[tuple[int, int], int] = {}  # in lockstep: whole rollouts of each place, whoever had it
        self._newest, self._in_use, self._version = 0, -1, 0
        self._lock = threading.Lock()  # of which twin is in use
        self._seating = threading.Lock()  # there is a server for the run's own hosts, and one for others
        self._error: BaseException | None = None
        self.closed = False
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"coterie-{name}", daemon=True)
            for name, work in (("inference", self._infer), ("prefetch", self._prefetch))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.inbox.put(None)
            self.finished.put(None)
            self.free.put(None)
            for thread in self._threads:
                thread.join(5.0)

    # The training thread.

    def publish(self, version: int) -> None:
        """Bring the copy up to date that nobody acts with, and have it act from the next batch on."""
        with self._lock:
            idle = 1 - self._in_use if self._in_use >= 0 else 1 - self._newest
            self.twins[idle][1]()
            self._newest, self._version = idle, version
        self.published += 1
        self.inbox.put(None)

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        while True:
            refresh()
            if (fields := self._wait()) is None:
                return
            self.columns -= self.shape.batch_size
            yield as_rollout(fields, self.trains_on)
            self.free.put(fields)

    def rest(self) -> int:
        """Wait until nobody is acted for, since all that may be recorded is; returns how many batches that makes. For
        measurements.
        """
        before = -1
        while self.produced != before:
            before = self.produced
            time.sleep(_REST_S)
        begun = sum(seat.width for seat in self.seats.values() if seat.recorder is not None)
        return -(-(self.columns + begun) // self.shape.batch_size)

    def _wait(self) -> Fields | None:
        begin = time.perf_counter()
        with self.board.blocked(self.rank):
            while True:
                if self._error is not None:
                    raise self._error
                try:
                    fields = self.ready.get(timeout=_LOOK_S)
                    break
                except queue.Empty:
                    if self.is_over():
                        return None
                    if time.perf_counter() - begin > self.shape.timeout:
                        raise CoterieError(
                            f"no batch of rollouts for {self.shape.timeout:g} s: {len(self.seats)} streams of "
                            f"{self.envs} envs are connected"
                        ) from None
        self.stages.add("wait", begin)
        return fields

    # The inference thread.

    def _infer(self) -> None:
        pending: dict[Seat, Question] = {}
        while not self.closed:
            batch, wait = self._due(pending)
            if batch:
                for question in batch:
                    del pending[question.seat]
                for question in self._answer(batch):
                    pending[question.seat] = question
                continue
            try:
                news = self.inbox.get(timeout=wait)
                while True:
                    if isinstance(news, Seat):
                        pending.pop(news, None)
                        self._forget(news)
                    elif news is not None and news.seat.alive:
                        pending[news.seat] = news
                    news = self.inbox.get_nowait()
            except queue.Empty:
                pass

    def _due(self, pending: dict[Seat, Question]) -> tuple[list[Question], float]:
        """Who is answered now, or how long to wait for more. The first to ask come first."""
        if not self.published:
            return [], _LOOK_S
        if self.shape.lockstep:
            return self._turn(pending), _LOOK_S
        # Rollouts of streams that have ended wait, too: new ones are not begun beside any number of them.
        room = has_room(self.columns, self.envs, self.shape.batches * self.shape.batch_size)
        ready = [q for q in pending.values() if q.seat.may_go(room)]
        least = min(self.shape.batch_min, self.envs)
        picked, wait = choose_batch(ready, time.perf_counter(), least, self.shape.batch_max, self.shape.wait)
        return picked, min(wait, _LOOK_S)

    def _turn(self, pending: dict[Seat, Question]) -> list[Question]:
        """In lockstep: all envs, always in the same order. A rollout that is behind catches up while others rest."""
        due = choose_turn(
            self.seats.values(), self.shape.envs, self._rests, lambda seat: seat in pending and seat.may_go()
        )
        return [pending[seat] for seat in sorted(due, key=lambda seat: seat.first_env_id)]

    def _rests(self, seat: Seat) -> bool:
        """It waits for the weights that come of its last rollout."""
        return seat.recorder is None and self.published <= self.made.get(seat.place, 0)

    @torch.inference_mode()
    def _answer(self, batch: list[Question]) -> list[Question]:
        """Act for everybody in the batch; returns those who have to wait for newer weights first."""
        with self._lock:
            self._in_use, version = self._newest, self._version
        model = self.twins[self._in_use][0]
        inputs = [q.seat.see(q.seen) for q in batch]
        for question in batch:
            if question.seat.counted:
                self.produced += question.seat.seen
            question.seat.seen = 0
        self.told()
        states = [q.seat.state for q in batch]
        ids = _cat([torch.from_numpy(q.seat.ids) for q in batch])
        out, after = self.policy(model, _join(inputs), None if states[0] is None else _cat(states), ids)
        with self._lock:
            self._in_use = -1
        action, at, waiting = out.action.cpu().numpy(), 0, list[Question]()
        for question in batch:
            seat = question.seat
            mine = slice(at, at + seat.width)
            at = mine.stop
            part = AgentOutput(out.action[mine], out.log_prob[mine], out.value[mine])
            if seat.row == self.shape.unroll_length:
                self.finished.put((seat, seat.finish(part.value)))
                self.columns += seat.width
                if self.shape.lockstep:
                    self.made[seat.place] = self.made.get(seat.place, 0) + 1
                if self.shape.lockstep:
                    waiting.append(question)
                    continue
                seat.see(question.seen)
            seat.act(part, None if after is None else after[mine], version)
            question.answer({"action": action[mine]}, version)
        self.calls, self.rows = self.calls + 1, self.rows + at
        return waiting

    def _forget(self, seat: Seat) -> None:
        """Its stream is gone: what it had begun will never be whole."""
        if seat.counted:
            self.dropped += seat.valid
            seat.valid, seat.counted = 0, False

    # The prefetch thread.

    def _prefetch(self) -> None:
        """Finished rollouts, in the order in which they ended, side by side in batches."""
        filling, at = None, 0
        while (item := self.finished.get()) is not None:
            seat, recorder = item
            done = 0
            while done < seat.width:
                if filling is None:
                    filling, at = self.free.get(), 0
                    if filling is None:
                        return
                n = min(seat.width - done, self.shape.batch_size - at)
                mine, theirs = columns_of(filling, at, n), columns_of(recorder.fields, done, n)
                for name, x in mine.items():
                    x.copy_(theirs[name], non_blocking=name not in ON_HOST)
                done, at = done + n, at + n
                if at == self.shape.batch_size:
                    if self.device.type == "cuda":
                        torch.cuda.current_stream(self.device).synchronize()
                    self.ready.put(filling)
                    filling = None
            seat.buffers.append(recorder)
            self.inbox.put(None)

    # The servers' threads.

    def sit(self, number: int, group: int, first_env: int, width: int) -> Seat:
        """A stream begins: its envs' lives do, too."""
        with self._seating:
            return self._sit(number, group, first_env, width)

    def _sit(self, number: int, group: int, first_env: int, width: int) -> Seat:
        shape = self.shape
        old = self.seats.get((number, group))  # its host has started again, and will not come back to it
        beside = self.envs - (old.width if old else 0)
        kept = 0  # for the run's own hosts, which may be away for a while
        if number >= REMOTE:
            kept = max(0, shape.envs - sum(s.width for s in self.seats.values() if s.place[0] < REMOTE))
        if width < 1 or beside + width > shape.max_envs - kept:
            own = f" ({kept} of them kept for the run's own)" if kept else ""
            room = f"there is room for {shape.max_envs}{own}: central.max_envs, replay.envs"
            raise Refused(f"{width} envs beside {beside}: {room}")
        if old is not None:
            self._leave(old)
        # One to write while the other waits to be taken over.
        buffers = [Recorder(self.make_fields(width, self.device), [slice(0, width)], self.device) for _ in range(2)]
        state = self.initial_state(width)
        seat = Seat(shape, (number, group), first_env, width, buffers, state, self.inbox.put, self.leave)
        self.seats = {**self.seats, seat.place: seat}  # another thread may go through them
        self.envs += width
        return seat

    def leave(self, seat: Seat) -> None:
        with self._seating:
            self._leave(seat)

    def _leave(self, seat: Seat) -> None:
        if seat.alive:
            seat.alive = False
            self.envs -= seat.width
            self.seats = {key: one for key, one in self.seats.items() if one is not seat}
            self.inbox.put(seat)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    # What it tells.

    def counts(self) -> dict[str, int]:
        return {"produced": self.produced, "dropped": self.dropped}

    def failures(self) -> list[str]:
        """The hosts tell for themselves."""
        return []

    def gauges(self) -> dict[str, float]:
        return {
            "inference/batch": self.rows / max(1, self.calls),
            "inference/streams": len(self.seats),
            "inference/envs": self.envs,
        }


def _cat(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _join(inputs: Sequence[Inputs]) -> Inputs:
    if isinstance(inputs[0].obs, Mapping):
        obs: Any = {k: _cat([x.obs[k] for x in inputs]) for k in inputs[0].obs}
    else:
        obs = _cat([x.obs for x in inputs])
    return Inputs(obs, *(_cat([x[i] for x in inputs]) for i in range(1, 4)))


def _section(config: Config) -> CentralConfig:
    return config.central


KIND = ActingKind(
    "host",
    section=_section,
    refusals=(
        *apart_refusals(_section, optional=True),
        Refusal(
            lambda c, s: c.central.lockstep and c.env.groups == 2,
            "env.groups",
            "must be 0 in lockstep: all envs of a host are acted on at once",
        ),
        Refusal(lambda c, s: c.env.num_envs > c.central.max_envs, "central.max_envs", "must not be below env.num_envs"),
        Refusal(
            lambda c, s: 0 < c.central.batch_max < c.central.batch_min,
            "central.batch_max",
            "must not be below central.batch_min",
        ),
    ),
)

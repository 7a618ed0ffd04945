"""Central acting along a flight record: the env hosts' envs are stepped in the learner's process, and the policy
answers the same streams together, with the same weights.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from coterie.acting.base import LearnerSetup
from coterie.acting.central import Central
from coterie.acting.central_stream import EnvStream, InferenceRequest
from coterie.acting.env_host import as_arrays, host_envs
from coterie.acting.recorded_actors import History
from coterie.acting.recorder import as_rollout
from coterie.flight.life import RecordedLife, RecordEnds
from coterie.models.base import Model
from coterie.models.build import acting_copy
from coterie.types import Array, Rollout
from coterie.wire.codec import Newest

_PATIENCE_S = 60.0  # for the thread that copies rollouts into batches


class RecordedStream:
    """One group of envs of a host, and its stream. `recv` and `send` are those of the envs."""

    def __init__(self, host: Any, group: int, stream: EnvStream) -> None:
        self.host, self.group, self.stream = host, group, stream
        self.sends = Newest(stream.reads)

    def ask(self) -> None:
        """Send the observations to the learner's end."""
        frame = self.stream.reads.pack(self.sends.split(as_arrays(self.host.recv(self.group))))
        self.stream.ask(self.stream.reads.unpack(frame), self._step)

    def _step(self, answer: Mapping[str, Array], version: int) -> None:
        frame = self.stream.writes.pack(answer)
        self.host.send(self.group, self.stream.writes.unpack(frame)["action"])


class HistoricModel:
    """In place of `DoubleBufferedModel`: each `newest` gives the weights that answered the next recorded batch."""

    def __init__(self, setup: LearnerSetup, publications: list[int]) -> None:
        self.learner, self.agent = setup.agent, setup.worker(0, 0).make_agent(setup.envs.device)
        self.model, self.refresh = acting_copy(self.agent.model, setup.envs.dtype, always_copy=True)  # type: ignore[arg-type]
        self.history, self.next = History(Counter(publications)), deque(publications)
        self.versions, self.published = dict[int, int](), 0  # versions by publication

    def publish(self, version: int) -> None:
        self.published += 1
        self.versions[self.published] = version
        self.history.publish(self.published, self.learner)

    @contextmanager
    def newest(self) -> Iterator[tuple[Model, int, int]]:
        self.history.load(number := self.next.popleft(), self.agent)
        self.refresh()
        yield self.model, self.versions[number], number


class RecordedCentral(Central):
    """Answers the recorded batches whenever the learner has no rollouts left."""

    def __init__(self, setup: LearnerSetup, memory: None) -> None:
        super().__init__(setup)
        life = cast(RecordedLife, setup.recorded_life)
        self.answers = deque(life.of("infer"))
        self.models = HistoricModel(setup, [number for number, _, _ in self.answers])  # type: ignore[assignment]
        self.env_steps = 0
        self.opening = {event[0]: event[1:] for event in life.of("open")}
        self.hosts: dict[tuple[int, int], Any] = {}  # by number and life
        self.streams_by_serial: dict[int, RecordedStream] = {}
        self.waiting: dict[int, InferenceRequest] = {}  # that have to be answered with newer weights

    def set_exploration_steps(self) -> int:
        return self.setup.agent.set_exploration_steps(self.env_steps)

    def _work(self) -> dict[str, Callable[[], None]]:
        return {"prefetch": self.assembly.run}

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        while True:
            refresh()
            while self.columns < self.batch_size:
                if not self.answers:
                    return
                _, self.env_steps, serials = self.answers.popleft()
                batch = [self._request(serial) for serial in serials]
                self.waiting = {q.stream.serial: q for q in self._answer(batch)} | self.waiting
            fields = self.assembly.ready.get(timeout=_PATIENCE_S)
            self.taken += self.batch_size
            yield as_rollout(fields, self.device)
            self.assembly.free.put(fields)

    def _request(self, serial: int) -> InferenceRequest:
        if serial in self.waiting:
            return self.waiting.pop(serial)
        if serial not in self.streams_by_serial:
            self.streams_by_serial[serial] = self._open(serial)
        self.streams_by_serial[serial].ask()
        while not isinstance(request := self.inbox.get(timeout=_PATIENCE_S), InferenceRequest):
            """A stream was replaced, or a recorder is free again."""
        while not request.stream.may_go():  # until the prefetch thread has copied a rollout
            self.inbox.get(timeout=_PATIENCE_S)
        return request

    def _open(self, serial: int) -> RecordedStream:
        number, group, life, first_env, width = self.opening[serial]
        if life < 0:
            raise RecordEnds("no further: the next actions are for a remote env host, and those hosts have no record")
        if (number, life) not in self.hosts:
            self.hosts[number, life] = host_envs(self.setup.worker(number, life).envs)
        stream = self.open_stream(number, group, first_env, width, life)
        stream.serial = serial
        return RecordedStream(self.hosts[number, life], group, stream)

    def close(self) -> None:
        super().close()
        for envs in self.hosts.values():
            envs.close()

"""Runs that gossip through a hub: the real hub and the relays of its clients, with a wire of which each frame, each
answer and each end may be late or missing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coterie.exchange.gossip import gossip_memory
from coterie.exchange.mailboxes import Mailboxes, Net, Relay
from coterie.remote.gossip_link import GossipHub, GossipStream
from coterie.types import Array
from tests.conftest import make_config

CLIENTS, LEARNERS = 3, 2  # learners of the hub's run
WEIGHTS = 2  # the learner that wrote them, and how many times it had written


class Run:
    """A client's side. Learners have numbers that are unique among all runs and lives."""

    def __init__(self, number: int, learners: int) -> None:
        self.run_id, self.learners = number, learners
        self.names = [100.0 * number + i for i in range(learners)]
        self.memory = gossip_memory(learners, WEIGHTS, 0, linked=True)
        self.mailboxes, self.writes = Mailboxes(self.memory, learners), 0
        self.relay: Relay | None = None
        self.stream: GossipStream | None = None

    def write(self) -> None:
        self.writes += 1
        for row, name in enumerate(self.names):
            self.mailboxes.write(row, np.array([name, self.writes], np.float32), np.zeros(1))

    def read(self) -> dict[float, float]:
        """The newest message of each remote learner that takes part."""
        found = [message for row in self.mailboxes.peers() if (message := self.mailboxes.read(row)) is not None]
        return {float(message.weights[0]): float(message.weights[1]) for message in found}

    def cut(self) -> GossipStream | None:
        """As the client does once its stream has broken; returns the hub's end, which may not have noticed."""
        if self.relay is not None:
            self.relay.close()
        stream, self.relay, self.stream = self.stream, None, None
        return stream


class GossipLinks(RuleBasedStateMachine):
    @initialize(learners=st.lists(st.integers(1, 3), min_size=CLIENTS, max_size=CLIENTS))
    def begin(self, learners: list[int]) -> None:
        self.made = list[Run]()
        self.ended: list[GossipStream] = []  # streams whose end the hub has not noticed
        self.late: list[tuple[GossipStream, dict[str, Array]]] = []  # frames on them
        self.open_hub()
        self.runs = [self.make(count) for count in learners]

    def open_hub(self) -> None:
        self.own = self.make(LEARNERS)
        self.hub = GossipHub(make_config(**{"gossip.bind": "unix:nowhere"}), LEARNERS, Net("net", WEIGHTS, 1))
        self.hub.mailboxes = self.own.mailboxes

    def make(self, learners: int) -> Run:
        self.made.append(Run(len(self.made) + 1, learners))
        return self.made[-1]

    @rule(who=st.integers(0, CLIENTS - 1))
    def connect(self, who: int) -> None:
        """Perhaps again, before the hub has noticed the end of the stream before."""
        run = self.runs[who]
        self.end(run.cut())
        hello: Any = SimpleNamespace(
            env_id=self.hub.env_id, envs=run.learners, run_id=run.run_id, sends=self.hub.layout.message()
        )
        run.stream = self.hub.admit(hello)
        run.relay = Relay(run.mailboxes, range(run.learners), run.mailboxes.remote)

    def end(self, stream: GossipStream | None) -> None:
        if stream is not None:
            self.ended.append(stream)

    @rule(who=st.integers(0, CLIENTS - 1), lost=st.booleans())
    def swap(self, who: int, lost: bool = False) -> None:
        """A frame and its answer. `lost`: the stream breaks in between, and the frame may arrive much later."""
        run = self.runs[who]
        if run.relay is None:
            self.connect(who)
        assert run.relay is not None
        assert run.stream is not None
        frame = run.relay.send()
        if lost:
            self.late.append((run.stream, frame))
            self.end(run.cut())
            return
        answers = list[dict[str, Array]]()
        run.stream.ask(frame, lambda arrays, version: answers.append({k: x.copy() for k, x in arrays.items()}))
        for answer in answers:
            run.relay.receive(answer)

    @precondition(lambda self: self.late)
    @rule()
    def arrive_late(self) -> None:
        stream, frame = self.late.pop(0)
        if any(stream is ended for ended in self.ended):  # else the hub has closed it
            stream.ask(frame, lambda arrays, version: None)

    @precondition(lambda self: self.ended)
    @rule()
    def notice_an_end(self) -> None:
        self.ended.pop(0).leave()

    @rule(who=st.integers(0, CLIENTS - 1))
    def write(self, who: int) -> None:
        self.runs[who].write()
        self.own.write()

    @rule(who=st.integers(0, CLIENTS - 1), learners=st.integers(1, 3))
    def replace(self, who: int, learners: int) -> None:
        """A machine is lost, and another takes its place."""
        self.end(self.runs[who].cut())
        self.runs[who] = self.make(learners)

    @rule()
    def restart_the_hub(self) -> None:
        for run in self.runs:
            run.cut()
        self.ended.clear()
        self.late.clear()
        self.open_hub()

    @invariant()
    def each_row_is_of_one_learner(self) -> None:
        if not hasattr(self, "runs"):
            return
        taken = [row for stream in self.hub.clients.values() for row in stream.relay.receives]
        assert len(taken) == len(set(taken)), f"two learners have the same mailbox: {sorted(taken)}"
        assert set(self.own.mailboxes.peers()) <= set(taken), "a learner that is gone takes part"
        for stream in self.hub.clients.values():
            for row in stream.relay.receives:
                if (message := self.own.mailboxes.read(row)) is not None:
                    assert message.weights[0] // 100 == stream.run_id, "a mailbox has another learner's weights"

    def teardown(self) -> None:
        try:
            if hasattr(self, "runs"):
                self.finish()
        finally:
            for run in getattr(self, "made", []):
                run.memory.close()

    def finish(self) -> None:
        """Once nothing is lost any more, each learner has the newest weights of all others."""
        while self.ended:
            self.notice_an_end()
        for who in range(CLIENTS):
            self.connect(who)
            self.write(who)
        while self.ended:
            self.notice_an_end()
        for _ in range(3 * MAX_LEARNERS):
            for who in range(CLIENTS):
                self.swap(who)
        everyone = {name: float(run.writes) for run in (self.own, *self.runs) for name in run.names}
        for run in (self.own, *self.runs):
            others = {name: writes for name, writes in everyone.items() if name not in run.names}
            assert run.read() == others, f"run {run.run_id} does not have the newest weights of all others"


MAX_LEARNERS = LEARNERS + 3 * CLIENTS

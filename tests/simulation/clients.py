"""The clients of a learner, which are killed, hang, and lose their streams; the other end may notice it much later, or
another client first. Env hosts are in env_hosts.py, remote actors in remote_actors.py. What they and the learner run is
real, but for the network (wire.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from coterie.acting import central, central_stream, double_buffer
from coterie.errors import CoterieError
from coterie.remote import rollout_service
from coterie.remote.admission import FIRST_REMOTE_ID
from coterie.wire.service import Service
from tests.simulation.scheduler import Simulation
from tests.simulation.threads import queues, threads
from tests.simulation.wire import SILENCE_S, Link, Peer

UNROLL, WIDTH = 3, 2
HOSTS, REMOTE = 2, 3  # env hosts of the run's own; remote clients
AGAIN_S = 5.0  # after which the user of a client that was refused tries again
PACE_S = 0.3  # of a client, from an answer to its next question
END_S = 6 * SILENCE_S  # within which all clients are served that nothing disturbs any more


class Client(Peer):
    """It begins its work with `begin`, and repeats `step`. `number`: of a local host; `life`: unique."""

    def __init__(self, simulation: Clients, number: int, life: int) -> None:
        super().__init__(simulation.scheduler, f"client {number}")
        self.simulation, self.number, self.life = simulation, number, life
        self.refused = ""
        local = number < HOSTS
        self.link = Link(
            self, lambda: simulation.serving(local), env_id="CartPole-v1", envs=WIDTH, run_id=life, number=number
        )
        self.start("main", self._work)

    def _work(self) -> None:
        try:
            self.begin()
            while True:
                self.step()
                self.scheduler.pause(PACE_S)
        except CoterieError as error:
            self.cut(0.0)
            self.scheduler.pause(AGAIN_S)
            self.refused = str(error)

    def begin(self) -> None: ...
    def step(self) -> None: ...


class Learner(Peer):
    """`check` counts what is learned, by client."""

    def __init__(self, simulation: Clients) -> None:
        super().__init__(simulation.scheduler, "learner")
        self.simulation, self.over, self.rows = simulation, False, 0
        self.owners: dict[int, int] = {}  # by env: the life of the client that has it
        self.services: Mapping[str, Service] = {}
        self.start("main", self.work)

    def work(self) -> None: ...

    def learn(self, life: int, first: int, env: int) -> None:
        """One column of a rollout. `first`: the number of its first step, or of the rollout; unique in a life."""
        learned = self.simulation.learned.setdefault(life, set())
        assert (first, env) not in learned, f"a rollout of client {life} is learned twice"
        learned.add((first, env))
        if env >= FIRST_REMOTE_ID:  # others belong to a place
            assert self.owners.setdefault(env, life) == life, f"two clients have env {env}"


class Clients(Simulation):
    client: Any = Client
    learner_kind: Any = Learner
    clients: list[Client]

    def begin(self) -> None:
        self.learned: dict[int, set[tuple[int, int]]] = {}  # by client's life
        self.lives = 0
        fake = threads(self.scheduler, lambda name, work: self.learner.start(name, work))
        for module in (central, central_stream, double_buffer, rollout_service):
            self.patch.setattr(module, "threading", fake)
        for module in (central, central_stream):
            self.patch.setattr(module, "queue", queues(self.scheduler))
        self.patch.setattr(central.time, "perf_counter", lambda: self.scheduler.now)
        self.learner: Learner = self.learner_kind(self)
        self.clients = [self.made(number) for number in self.numbers]

    numbers: range

    def made(self, number: int) -> Client:
        self.lives += 1
        made: Client = self.client(self, number, self.lives)
        return made

    def serving(self, local: bool) -> tuple[Peer | None, Mapping[str, Service]]:
        learner = self.learner
        return (learner, learner.services) if learner.services else (None, {})

    @rule(who=st.integers(0, 4), late=st.sampled_from([0.0, 1.0, 6.0]))
    def cut(self, who: int, late: float) -> None:
        self.clients[who % len(self.clients)].cut(late)

    @rule(who=st.integers(0, 4), late=st.sampled_from([0.0, 1.0, 6.0]))
    def kill(self, who: int, late: float) -> None:
        """Another one takes its place."""
        client = self.clients[who % len(self.clients)]
        client.kill()
        client.cut(late)
        self.clients[who % len(self.clients)] = self.made(client.number)

    @rule(who=st.integers(0, 4), hangs=st.booleans(), seconds=st.sampled_from([0.0, 4.0, 11.0]))
    def hang(self, who: int, hangs: bool, seconds: float) -> None:
        self.clients[who % len(self.clients)].freeze(hangs)
        self.scheduler.wait(seconds)

    @rule()
    def restart_the_learner(self) -> None:
        self.learner.kill()
        self.learner = self.learner_kind(self)

    @rule(hangs=st.booleans(), seconds=st.sampled_from([0.0, 4.0]))
    def hang_the_learner(self, hangs: bool, seconds: float) -> None:
        self.learner.freeze(hangs)
        self.scheduler.wait(seconds)

    @invariant()
    def nothing_fails(self) -> None:
        for process in self.scheduler.processes:
            if process.error is not None:
                raise AssertionError(f"{process.name}: {process.error!r}") from process.error
        for place, client in enumerate(getattr(self, "clients", [])):
            if client.refused:
                full = client.number >= HOSTS and client.refused.startswith(("cannot add", "no room"))
                assert full, f"client {client.number} is refused: {client.refused}"
                self.clients[place] = self.made(client.number)  # its user tries again

    def finish(self) -> None:
        self.learner.freeze(False)
        for client in self.clients:
            client.freeze(False)

        def served() -> bool:
            self.nothing_fails()
            return all(
                len(self.learned.get(client.life, ())) > before.get(client.life, 0) + 3 for client in self.clients
            )

        self.scheduler.wait(SILENCE_S)  # until all ends are noticed
        before = {client.life: len(self.learned.get(client.life, ())) for client in self.clients}
        assert self.scheduler.wait(END_S, served), "not all are served: " + "; ".join(
            f"client {client.number} {len(self.learned.get(client.life, ()))}" for client in self.clients
        )
        self.learner.over = True
        assert self.scheduler.wait(END_S, lambda: not self.learner.alive), "the learner does not end"
        self.nothing_fails()
        self.account()

    def account(self) -> None: ...

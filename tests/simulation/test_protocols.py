"""The protocols of runs under a scheduler that stops, kills and delays their processes at every step.

A test is a batch of seeds: `pytest tests/simulation -k "Gossiping-7"` repeats the one that failed, and hypothesis
prints the shortest steps that fail.
"""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from coterie.acting.central_stream import EnvStream, EnvStreams
from coterie.exchange import elastic
from coterie.exchange.mailboxes import Relay
from coterie.exchange.rendezvous import GroupMembership, RendezvousClient
from coterie.exchange.signed_store import SignedStore
from coterie.launch.coordinator import Coordinator
from coterie.launch.ledger import Ledger
from coterie.launch.rescue import Rescue
from coterie.parallel import clock
from coterie.parallel.board import EVALUATE, Board
from coterie.parallel.clock import Budget
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.remote.gossip_link import GossipHub, GossipStream
from coterie.remote.rollout_service import RolloutService
from coterie.roles import entry
from coterie.roles.remote_worker import RemoteSink
from tests.simulation.env_hosts import EnvHosts
from tests.simulation.links import GossipLinks
from tests.simulation.remote_actors import RemoteActors
from tests.simulation.rings import Rings
from tests.simulation.runs import GoingBack, Gossiping, Lone, OneProcess, RunSimulation
from tests.simulation.scheduler import Simulation

SEEDS = 25  # of a batch
BATCHES = {  # in `make test`, and in `make test-all`: 10,000 seeds of runs, and of each other
    OneProcess: (2, 50), Lone: (2, 50), Gossiping: (3, 150), GoingBack: (3, 150),
    GossipLinks: (8, 400), Rings: (8, 400),
    EnvHosts: (8, 400), RemoteActors: (8, 400),
}  # fmt: skip


def batches() -> list[Any]:
    return [
        pytest.param(kind, number, id=f"{kind.__name__}-{number}", marks=[pytest.mark.slow] * (number >= few))
        for kind, (few, many) in BATCHES.items()
        for number in range(many)
    ]


def simulate(kind: type[Simulation], number: int, *phases: Phase) -> None:
    once = settings(
        max_examples=SEEDS, stateful_step_count=20, database=None, print_blob=True,
        phases=[Phase.generate, *phases], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(seed(number)(lambda: kind()), settings=once)


@pytest.mark.parametrize(("kind", "number"), batches())
def test_a_protocol_holds(kind: type[Simulation], number: int) -> None:
    simulate(kind, number, Phase.shrink)


def test_the_last_rollout_of_an_actor_that_is_killed_as_it_leaves_is_counted_once() -> None:
    """It was handed over, and the actor had not counted that."""
    run = GoingBack()
    try:
        run.scheduler.wait(0.5)
        actor, board = run.world.children["actor-0"], run.run.board

        def has_only_filled_a_slot() -> bool:
            counts = board.read(actor.row)
            return counts["produced"] > counts["delivered"] and not run.world.unfilled[actor.row]

        assert run.scheduler.wait(5.0, has_only_filled_a_slot)
        actor.thread.frozen = True
        assert run.scheduler.wait(10.0, lambda: board.closed)  # an evaluation, of 3 s, precedes the last order
        actor.thread.kill()
    finally:
        run.teardown()


def test_a_learner_that_died_after_its_last_part_is_not_waited_for() -> None:
    """Another one hangs, so that all must write that part again."""
    run = Gossiping()
    try:
        assert run.scheduler.wait(30.0, lambda: run.run.ending)
        run.world.children["learner-1"].thread.frozen = True
        assert run.scheduler.wait(5.0, lambda: 2 in run.run.saved)
        run.world.children["learner-2"].thread.kill()
    finally:
        run.teardown()
    assert run.over is not None
    assert run.run.members == {0}


def test_a_checkpoint_without_any_learner_is_not_sealed() -> None:
    """All are gone while what they have is to be saved. One of 10,000 seeds (GoingBack-36) found it."""
    run = GoingBack()
    try:
        run.wait(0.1)
        run.hang(0, False)
        run.kill(3, 2)
        run.pause_the_machine(60.0)
        run.wait(1.0)
        run.kill(0, 1)
    finally:
        run.teardown()


@pytest.mark.parametrize("kind", [GoingBack, Gossiping])
def test_a_run_whose_learners_all_die_after_a_signal_is_interrupted(kind: type[RunSimulation]) -> None:
    run = kind()
    try:
        assert run.scheduler.wait(5.0, lambda: run.run.board.sealed and run.run.ledger.env_steps)
        run.run._on_signal(signal.SIGTERM)
        for name in [name for name in run.world.children if name.startswith("learner")]:
            run.world.children[name].thread.kill()
    finally:
        run.teardown()
    assert run.over is not None
    assert run.over["status"] == "interrupted"


def the_first_has_the_weights(**place: int) -> GroupMembership:
    return GroupMembership(**{**place, "source": 0})


def evaluate_for_ever(self: Coordinator, follow: Any = Coordinator._follow_order) -> None:
    if self.members <= self.saved.keys() or not self.board.order[1] & EVALUATE:
        follow(self)


def the_newest(self: Weights, version: int, *into: Tensor) -> bool:
    return self.read(*into) >= 0


def all_that_are_silent(self: Board, silent: dict[int, float], limit: float) -> list[int]:
    return [row for row, seconds in silent.items() if seconds > limit]


def nobody_leaves(self: GossipHub, stream: GossipStream) -> None:
    self.clients.pop(stream.run_id, None)


def sent_again(self: RemoteSink) -> None:
    self._push.ask(lambda: {k: x.numpy() for k, x in self._fields.items()})


def keeps_its_version(self: RemoteSink, method: str, sends: Any, check: Any) -> Any:
    return self._connection.stream(method, sends, check)


SLOW = pytest.mark.slow  # it takes more than 100 seeds


@pytest.mark.parametrize(
    ("kind", "where", "name", "bug"),
    [
        pytest.param(OneProcess, entry, "_REPORT_S", math.inf, id="a lone learner says only once that it is idle"),
        pytest.param(OneProcess, Coordinator, "give_up_order", lambda *_: None, id="an order is never given up"),
        pytest.param(Gossiping, Coordinator, "_follow_order", Coordinator._seal, id="a part is missing"),
        pytest.param(Gossiping, clock, "_HOUR_S", math.inf, id="a budget does not recover", marks=SLOW),
        pytest.param(Lone, Coordinator, "_follow_order", evaluate_for_ever, id="an evaluation may hang", marks=SLOW),
        pytest.param(Lone, Rescue, "_save", lambda *_: False, id="what a learner has left is not taken"),
        pytest.param(Lone, Weights, "read_version", the_newest, id="weights of other counts are taken", marks=SLOW),
        pytest.param(GoingBack, Board, "stale", all_that_are_silent, id="one that waits is killed as one that hangs"),
        pytest.param(GoingBack, Budget, "spend", lambda *_: True, id="a budget is not kept"),
        pytest.param(GoingBack, Slots, "delivered", lambda *_: 0, id="an actor's last rollout is lost", marks=SLOW),
        pytest.param(Gossiping, Ledger, "lose", lambda *_: None, id="a dead learner's rows are lost", marks=SLOW),
        pytest.param(GossipLinks, GossipHub, "leave", nobody_leaves, id="a client that is gone takes part"),
        pytest.param(GossipLinks, Relay, "close", lambda *_: None, id="learners that are gone take part"),
        pytest.param(EnvHosts, EnvStreams, "leave", lambda *_: None, id="an env host that is gone has a place"),
        pytest.param(EnvHosts, EnvStream, "abandon", lambda _: 0, id="an unfinished rollout is not counted"),
        pytest.param(
            EnvHosts,
            EnvStream,
            "alive",
            property(lambda _: True, lambda *_: None),
            id="a stream that was replaced goes on",
        ),
        pytest.param(RemoteActors, RolloutService, "forget", lambda *_: None, id="an actor that is gone has a place"),
        pytest.param(RemoteActors, RemoteSink, "deliver", sent_again, id="a rollout is sent again after a loss"),
        pytest.param(RemoteActors, RemoteSink, "_connect", keeps_its_version, id="weights of a lost learner are kept"),
        pytest.param(
            Rings, elastic, "GroupMembership", the_first_has_the_weights, id="machines go back to old weights"
        ),
        pytest.param(Rings, SignedStore, "get", lambda self, key: self.store.get(key)[32:], id="values are not signed"),
        pytest.param(Rings, RendezvousClient, "silent", "", id="a lost listening machine is waited for"),
    ],
)
def test_a_simulation_sees_a_bug(
    kind: type[Simulation], where: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(AssertionError):  # noqa: PT012
        for number in range(20):
            simulate(kind, number)

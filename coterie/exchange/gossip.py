"""Learners that gossip (GALA, Algorithm 1): update alone, tell the out-peers, average with what the in-peers said.

    x_i <- update(x_i);   tell x_i unless the last message is still unread;
    once there is a message from every in-peer:   x_i <- p_ii x_i + sum_j p_ij m_j

Nobody waits for anybody, unless a learner's last mix is more than `tau` updates old (0: all go in lockstep). Messages
are numbered: learner i's k-th goes to those who hear it in the k-th matrix, and its m-th mix takes its in-peers' m-th
messages. A learner that has left, or died, is no longer waited for; one that comes back starts at a number that nobody
has reached, with a peer's weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy as np
import torch

from coterie.config import Config, Refusal
from coterie.exchange.base import Circle, Exchange, ExchangeKind, Guard, NonFinite, Rule, Setup, Steps
from coterie.exchange.solo import Solo
from coterie.exchange.topology import matrices
from coterie.models.heads import Moments
from coterie.parallel.board import Board, BoardSteps, OwnSteps
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays, fence
from coterie.types import Array, CoterieError

RECENT = 4096  # mixes for which the lengths of the updates before them are kept, for the bound of Proposition 1
AHEAD = 3  # mixes between a peer's coming and its first message: the others go on meanwhile
_BEHIND = 100  # mixes: who is so far behind its in-peers was not waited for
_REMOTE = 8  # learners of other runs that there is room for by default
LEAD = 1 << 20  # messages that a peer may be ahead of all others


def gossip_memory(learners: int, weights: int, moments: int) -> SharedArrays:
    """A message of every learner, and how far each has come."""
    return SharedArrays(
        {
            "message": ((learners, weights), "float32"),
            "moments": ((learners, max(1, moments)), "float64"),
            "begun": ((learners,), "int64"),  # messages that a learner has begun to write
            "told": ((learners,), "int64"),  # and those that are complete: the last has the number told - 1
            "mixed": ((learners,), "int64"),
            "joined": ((learners,), "int64"),  # the number of its first message
            "here": ((learners,), "int64"),  # 1 while it takes part
            "moved": ((learners, RECENT), "float64"),  # squared length of the updates before each mix
        },
        name="coterie-gossip",
    )


def next_number(arrays: Mapping[str, Array], seats: Sequence[int]) -> int:
    """A number that nobody has reached, for the first message of those who come now to these seats."""
    numbers = np.maximum(arrays["told"], arrays["mixed"])
    there = int(numbers[arrays["here"] == 1].max(initial=0))  # who has left may have been anywhere
    before = int(numbers[list(seats)].max(initial=0))  # but of these seats: numbers do not go back
    return AHEAD + (max(there, before) if before < there + LEAD else there)


def begin_at(arrays: Mapping[str, Array], seats: Sequence[int], number: int) -> None:
    """The first message from these seats has this number."""
    own = list(seats)
    arrays["joined"][own] = number  # before `told`: what was said there before is no new message
    fence()
    arrays["told"][own] = arrays["mixed"][own] = number


class Gossip(Solo):
    """The exchange of the run's learner `rank`. `shared` has a place for everyone in the circle; who is on another
    machine is heard there, too (peers.py). `mix_every` updates between mixes, or one mix for each rollout (0).
    """

    def __init__(
        self, params: FlatParams, rule: Rule, guard: Guard, moments: Moments, shared: SharedArrays, board: Board,
        steps: Steps, rank: int, circle: Circle, *, tau: int, mix_every: int, timeout: float, rejoin: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, rule, guard, steps)
        self.params, self.moments, self.board = params, moments, board
        self.rank, self.sequence, self.timeout, self.rejoin = rank, circle.sequence, timeout, rejoin
        self.seat = circle.first + rank
        self.tau, self.mix_every = tau, mix_every
        self.message = torch.from_numpy(shared.arrays["message"])
        self.sums = torch.from_numpy(shared.arrays["moments"])
        self.begun, self.told, self.mixed, self.joined, self.here = (
            shared.arrays[k] for k in ("begun", "told", "mixed", "joined", "here")
        )
        self.arrays, self.moved = shared.arrays, shared.arrays["moved"]
        self.hears = [[np.flatnonzero(m[i]) for i in range(len(m))] for m in self.sequence]
        self.heard_by = [[np.flatnonzero(m[:, i]) for i in range(len(m))] for m in self.sequence]
        self.due = 0  # times that a mix was due since the last one
        self.made, self.skipped_messages, self.waited = 0, 0, 0.0
        self.anchor = params.data.clone()  # the weights after the last mix
        self.scratch = torch.empty_like(params.data)

    def __enter__(self) -> Gossip:
        if self.rejoin:
            self._rejoin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.here[self.seat] = 0  # what it said stays; nobody waits for more

    def step(self, params: FlatParams, lr: float) -> float:
        """Update alone; mix when it is time."""
        norm = super().step(params, lr)
        self.made += 1
        if self.mix_every and self.made % self.mix_every == 0:
            self.mix(params)
        return norm

    def after_rollout(self, params: FlatParams) -> None:
        if not self.mix_every:
            self.mix(params)

    @torch.no_grad()
    def mix(self, params: FlatParams) -> None:
        """Algorithm 1, lines 5 to 8. Past the bound `tau`, wait for what would otherwise be skipped."""
        self.due += 1
        begin = time.monotonic()
        if self._left_behind():
            begin_at(self.arrays, [self.seat], next_number(self.arrays, [self.seat]))
        if self.tau == 0:  # lockstep: tell what has not been mixed yet, then mix
            self._wait(lambda: self._tell(params), "an out-peer has not read", begin)
            self._wait(lambda: self._hear(params), "no message from an in-peer", begin)
        else:
            self.skipped_messages += not self._tell(params)
            if not self._hear(params) and 0 < self.tau < self.due:
                self._wait(lambda: self._tell_and_hear(params), "no message from an in-peer", begin)
        self.waited += time.monotonic() - begin

    def _left_behind(self) -> bool:
        """Whether the others have gone on without this learner, as they do when it says nothing for long: they must not
        average with its messages of long ago, nor it with theirs, until it has caught up.
        """
        peers = self.hears[int(self.mixed[self.seat]) % len(self.sequence)][self.seat]
        reached = self.mixed[[j for j in peers if self.here[j]]]
        return bool((reached > self.mixed[self.seat] + _BEHIND).any())

    def _tell_and_hear(self, params: FlatParams) -> bool:
        self._tell(params)  # a peer may be waiting for this very message
        return self._hear(params)

    def _wait(self, done: Callable[[], bool], what: str, begin: float) -> None:
        with self.board.blocked(self.rank):
            while not done() and not self.board.stopping:
                if time.monotonic() - begin > self.timeout:
                    raise CoterieError(f"gossip: {what} for {self.timeout:g} s: it hangs")
                time.sleep(5e-5)

    def _tell(self, params: FlatParams) -> bool:
        """Leave a message where the out-peers find it, if all of them have read the last one."""
        i, number = self.seat, int(self.told[self.seat])
        if number > self.joined[i]:
            for j in self.heard_by[(number - 1) % len(self.sequence)][i]:
                if j != i and self.here[j] and self.joined[j] < number and self.mixed[j] < number:
                    return False
        norm = float(params.data.dot(params.data))
        if norm - norm != 0:
            raise NonFinite(f"the weights of {params.nonfinite(params.data) or 'the whole net'} are not finite")
        torch.sub(params.data, self.anchor, out=self.scratch)
        self.moved[i, number % RECENT] = float(self.scratch.dot(self.scratch))
        self.begun[i] = number + 1
        self.message[i].copy_(params.data)
        if self.moments.size:
            self.sums[i].copy_(self.moments.read())
        self.told[i] = number + 1
        return True

    def _hear(self, params: FlatParams) -> bool:
        """Average with the in-peers' messages of this mix's number, if all are there."""
        i, number = self.seat, int(self.mixed[self.seat])
        expected = []
        for j in self.hears[number % len(self.sequence)][i]:
            if j == i or self.joined[j] > number:
                continue
            if self.told[j] <= number:
                if self.here[j]:
                    return False
                if self.told[j] <= number:  # it may have spoken just before it left
                    continue
            expected.append(j)
        if expected:
            row = self.sequence[number % len(self.sequence)][i]
            total = float(row[i] + row[expected].sum())
            own = self.moments.read().mul_(row[i] / total)
            params.data.mul_(row[i] / total)
            for j in expected:
                params.data.add_(self.message[j].to(params.data.device), alpha=row[j] / total)
                if self.moments.size:
                    own.add_(self.sums[j], alpha=row[j] / total)
            if self.moments.size:
                self.moments.write(own)
        self.anchor.copy_(params.data)
        self.mixed[i] = number + 1
        self.due = 0
        return True

    def _rejoin(self) -> None:
        """Come back with the weights of a peer that is there, and a number that nobody has reached."""
        # Where nobody is there, what they said last still is.
        ranks = sorted(range(len(self.told)), key=lambda j: (-self.here[j], -self.told[j]))
        any(self._copy(j) for j in ranks)
        first = next_number(self.arrays, [self.seat])
        if self.begun[self.seat]:  # else it has never said anything, and there is nothing to take over
            self.begun[self.seat] = first
        begin_at(self.arrays, [self.seat], first)
        self.anchor.copy_(self.params.data)
        self.here[self.seat] = 1

    def _copy(self, j: int) -> bool:
        """Take over the last message of learner `j`, unless it has said nothing or overwrites it all the time."""
        for _ in range(1000):
            seen = int(self.told[j])
            if seen == 0 or self.begun[j] == 0:
                return False
            weights, sums = self.message[j].clone(), self.sums[j].clone()
            if int(self.begun[j]) == seen == int(self.told[j]):
                self.params.data.copy_(weights)
                self.moments.write(sums)
                return True
            time.sleep(1e-3)
        return False

    def gauges(self) -> dict[str, float]:
        """How often peers were slow, and how far behind the in-peers this learner's mixes are."""
        behind = int(self.mixed[self.here == 1].max(initial=self.mixed[self.seat]) - self.mixed[self.seat])
        return {
            "gossip/mixes": int(self.mixed[self.seat]),
            "gossip/messages_skipped": self.skipped_messages,
            "gossip/waited_s": self.waited,
            "gossip/mixes_behind": behind,
            "gossip/updates_since_mix": self.due,
        }


def circle_of(config: Config, learners: int) -> Circle:
    """The run's learners, and seats for those of other runs behind them."""
    gossip = config.gossip
    seats = (gossip.seats or learners + _REMOTE) if gossip.bind else learners
    topology = ("complete" if gossip.bind else "ring") if gossip.topology == "auto" else gossip.topology
    return Circle(0, matrices(topology, seats, gossip.peers))


def memory(setup: Setup) -> SharedArrays:
    learners = setup.peers.learners
    circle = setup.peers.circle or circle_of(setup.config, learners)
    shared = gossip_memory(circle.seats, len(setup.params.data), setup.moments.size)
    shared.arrays["here"][circle.first : circle.first + learners] = 1
    return shared


def connect(setup: Setup) -> Exchange:
    config, peers = setup.config, setup.peers
    make, gossip = setup.substitute(Gossip), config.gossip
    return make(
        setup.params, setup.rule(), setup.guard(), setup.moments, peers.memory or memory(setup), peers.board,
        BoardSteps(peers.board, peers.rank) if gossip.tau else OwnSteps(peers.learners), peers.rank,
        peers.circle or circle_of(config, peers.learners),
        tau=gossip.tau, mix_every=gossip.mix_every, timeout=setup.timeout, rejoin=peers.rejoin,
    )  # fmt: skip


KIND = ExchangeKind(
    connect,
    memory,
    circle=circle_of,
    rejoins=True,
    refusals=(
        Refusal(
            lambda c, s: bool(c.gossip.bind) and bool(c.gossip.connect),
            "gossip.connect",
            "and gossip.bind exclude each other: a run listens or connects",
        ),
        Refusal(
            lambda c, s: bool(c.gossip.bind) and 0 < c.gossip.seats <= c.learners,
            "gossip.seats",
            "must exceed learners: it counts the learners of all runs",
        ),
        Refusal(
            lambda c, s: bool(c.gossip.bind or c.gossip.connect) and c.gossip.topology not in ("auto", "complete"),
            "gossip.topology",
            "must be auto or complete between machines, since runs join and leave",
        ),
    ),
)

"""Gossiping learners (GALA, Algorithm 1): update alone, publish to the out-peers, average with the in-peers' messages.

    x_i <- update(x_i);   publish x_i unless an out-peer has not read the last message
    once there is a message from every in-peer:   x_i <- p_ii x_i + sum_j p_ij m_j

A learner waits only after it has missed `tau` mixes in a row (0: lockstep; -1: no limit). Messages are numbered:
learner i's k-th goes to its out-peers in the k-th matrix, and its m-th mix takes its in-peers' m-th messages. Learners
that have left or died are not waited for. A restarted learner takes a peer's weights and starts at a number that no
learner has reached.

Learners of other runs (`gossip.bind`, `gossip.connect`) have no numbers: after each mix a learner averages its weights
with the newest message of each, unless it has averaged that already (mailboxes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coterie.config import Config
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.base import ExchangeKind, Setup, check_finite
from coterie.exchange.mailboxes import MAX_REMOTE_LEARNERS, Mailboxes, Message, mailbox_arrays
from coterie.exchange.solo import Solo
from coterie.exchange.topology import matrices
from coterie.parallel.clock import awake
from coterie.parallel.params import FlatParams
from coterie.parallel.seqlock import Seqlock
from coterie.parallel.shm import SharedArrays, fence
from coterie.types import Array
from coterie.wire.auth import both_ends, without_keys

_AHEAD = 3  # mixes between a learner's return and its first message: the others go on meanwhile
_READS = 100  # attempts, a millisecond apart, to read a message that its writer overwrites


def gossip_memory(learners: int, weights: int, moments: int, linked: bool = False) -> SharedArrays:
    """A message and the counts of every learner; mailboxes, too, where the run is `linked` with others."""
    moments, remote = max(1, moments), MAX_REMOTE_LEARNERS if linked else 0
    shared = SharedArrays(
        {
            "message": ((learners, weights), "float32"),
            "moments": ((learners, moments), "float64"),
            "writes": ((learners,), "int64"),  # of the message, its moments and its number
            "published": ((learners,), "int64"),  # messages: the last has number published - 1
            "mixed": ((learners,), "int64"),
            "joined": ((learners,), "int64"),  # the number of its first message
            "present": ((learners + remote,), "int64"),  # 1 while a learner takes part
            **mailbox_arrays(learners + remote if linked else 0, weights, moments),
        },
        name="coterie-gossip",
    )
    shared.arrays["present"][:learners] = 1
    return shared


class Gossip(Solo):
    """The exchange of one of the run's learners over `gossip_memory`."""

    def __init__(self, setup: Setup) -> None:
        peers, gossip = setup.peers, setup.config.gossip
        super().__init__(setup)
        self.params, self.moments, self.timeout = setup.params, setup.moments, setup.timeout
        self.sequence = peers.mixing or mixing_matrices(setup.config, peers.learners)
        self.rejoin, self.tau, self.mix_every = peers.rejoin, gossip.tau, gossip.mix_every
        shared = peers.memory or memory(setup)
        self.message = torch.from_numpy(shared.arrays["message"])
        self.sums = torch.from_numpy(shared.arrays["moments"])
        self.lock = Seqlock(shared.arrays["writes"])
        self.published, self.mixed, self.joined = (shared.arrays[k] for k in ("published", "mixed", "joined"))
        self.present = shared.arrays["present"][: peers.learners]
        self.mailboxes = Mailboxes(shared, peers.learners)
        self.in_peers = [[np.flatnonzero(m[i]) for i in range(len(m))] for m in self.sequence]
        self.out_peers = [[np.flatnonzero(m[:, i]) for i in range(len(m))] for m in self.sequence]
        self.due = 0  # times that a mix was due since the last one
        self.updates, self.skipped_messages, self.remote_messages, self.waited = 0, 0, 0, 0.0
        self.averaged: dict[int, int] = {}  # version of the last message from each mailbox that was averaged
        self.note, self.flush = setup.note, setup.flush
        self.sent = list[int]()  # messages published in the present mix
        self.taken: tuple[int, list[int]] | None = None  # its number, and the in-peers averaged with

    @property
    def env_steps(self) -> int:
        """In lockstep as many of each learner as of this one, so that the number does not depend on their timing."""
        own = self.board.read(self.rank)["started"]
        return own * len(self.present) if self.tau == 0 else super().env_steps

    def __enter__(self) -> Gossip:
        if self.rejoin:
            self._take_weights()
        if not self.present[self.rank]:
            self._join()
        if self.mailboxes.remote:  # another run may be waiting for weights to start with
            self._write_mailbox()
        return self

    def __exit__(self, *error: object) -> None:
        self.present[self.rank] = 0  # its last message stays; no learner waits for more

    def step(self, params: FlatParams, lr: float) -> float:
        """Update alone; mix when it is time."""
        norm = super().step(params, lr)
        self.updates += 1
        if self.mix_every and self.updates % self.mix_every == 0:
            self.mix(params)
        return norm

    def after_rollout(self, params: FlatParams) -> None:
        if not self.mix_every:
            self.mix(params)

    @torch.no_grad()
    def mix(self, params: FlatParams) -> None:
        """Algorithm 1, lines 5 to 8. Past the bound `tau`, wait for what would otherwise be skipped."""
        self.due += 1
        self.sent, self.taken = [], None
        begin = awake()
        if self.tau == 0:  # lockstep: publish what has not been mixed yet, then mix
            self._wait(lambda: self.publish(params), "an out-peer has not read the last message", begin)
            self._wait(self.receive, "no message from an in-peer", begin)
        else:
            self.skipped_messages += not self.publish(params)
            if not self.receive() and 0 < self.tau < self.due:
                self._wait(lambda: self._publish_and_receive(params), "no message from an in-peer", begin)
        self.waited += awake() - begin
        self.note("mix", self.sent, self.taken)
        if self.mailboxes.remote:
            self._mix_with_other_runs(params)

    def _publish_and_receive(self, params: FlatParams) -> bool:
        self.publish(params)  # a peer may be waiting for this very message
        return self.receive()

    def _wait(self, done: Callable[[], bool], what: str, begin: float) -> None:
        with self.board.blocked(self.rank):
            while not done() and not self.board.stopping:
                # All may wait, through others, for a learner that evaluates, which shows in its heartbeat.
                silent = time.monotonic() - float(self.board.heartbeats[: len(self.present)].max())
                if min(awake() - begin, silent) > self.timeout:
                    raise CoterieError(f"gossip: {what} for {self.timeout:g} s: a peer hangs")
                time.sleep(5e-5)

    def publish(self, params: FlatParams) -> bool:
        """Write a message for the out-peers, if all have read the last one."""
        i, number = self.rank, int(self.published[self.rank])
        if number > self.joined[i]:
            for j in self.out_peers[(number - 1) % len(self.sequence)][i]:
                if j != i and self.present[j] and self.joined[j] < number and self.mixed[j] < number:
                    return False
        check_finite(params)
        self.flush()  # before a peer can average the message: a replay must be able to make it
        with self.lock.writing(i):
            self.message[i].copy_(params.data)
            if self.moments.size:
                self.sums[i].copy_(self.moments.read())
            fence()
            self.published[i] = number + 1
        self.sent.append(number)
        return True

    def receive(self) -> bool:
        """Average with the in-peers' messages for this mix, if all have arrived."""
        i, number = self.rank, int(self.mixed[self.rank])
        expected = list[int]()
        for j in self.in_peers[number % len(self.sequence)][i]:
            if j == i or self.joined[j] > number:
                continue
            if self.published[j] <= number:
                if self.present[j]:
                    return False
                if self.published[j] <= number:  # it may have published just before it left
                    continue
            expected.append(int(j))
        fence()
        self._mix_in(number, expected, lambda j: (self.message[j], self.sums[j]))
        fence()
        self.mixed[i] = number + 1
        self.due, self.taken = 0, (number, expected)
        return True

    def _mix_in(self, number: int, peers: list[int], message: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Mix number `number`, with the messages of these in-peers."""
        if peers:
            row = self.sequence[number % len(self.sequence)][self.rank]
            total = float(row[self.rank] + row[peers].sum())
            self._average(row[self.rank] / total, [(row[j] / total, *message(j)) for j in peers])

    def _mix_with_other_runs(self, params: FlatParams) -> None:
        """Write the weights to this learner's mailbox; average with remote learners' new messages, equally weighted."""
        check_finite(params)
        self._write_mailbox()
        boxes = self.mailboxes
        new = {row: found for row in boxes.peers() if (found := boxes.read(row, self.averaged.get(row, 0)))}
        share = 1 / (1 + len(new))
        if new:
            self._average(share, [(share, *message.tensors) for message in new.values()])
        self.averaged |= {row: message.version for row, message in new.items()}
        self.remote_messages += len(new)

    def _write_mailbox(self) -> None:
        self.mailboxes.write(self.rank, self.params.data.cpu().numpy(), self.moments.read().numpy())

    def _average(self, own: float, messages: list[tuple[float, Tensor, Tensor]]) -> None:
        """The weighted sum of this learner's weights and moments and those of `messages`."""
        data = self.params.data.mul_(own)
        for weight, message, _ in messages:
            data.add_(message.to(data.device), alpha=weight)
        if self.moments.size:
            sums = self.moments.read().mul_(own)
            for weight, _, moments in messages:
                sums.add_(moments[: len(sums)], alpha=weight)
            self.moments.write(sums)

    def _take_weights(self) -> None:
        """Copy a peer's weights: from a present learner of this run, else another run, else a learner that has left."""
        ranks = sorted((j for j in range(len(self.present)) if j != self.rank), key=lambda j: -self.published[j])
        groups = (
            [partial(self._read, j) for j in ranks if self.present[j]],
            [partial(self.mailboxes.read, row) for row in self.mailboxes.peers()],
            [partial(self._read, j) for j in (*ranks, self.rank) if not self.present[j]],
        )
        for reads in groups:
            for _ in range(_READS if reads else 0):
                if found := next((message for read in reads if (message := read())), None):
                    weights, moments = found.tensors
                    self.note("took", found.sender, found.version - 1)
                    self.params.data.copy_(weights)
                    self.moments.write(moments)
                    return
                time.sleep(1e-3)

    def _read(self, j: int) -> Message | None:
        """Learner j's last message, unless it has none or is writing one."""
        message, sums = self.message[j].numpy(), self.sums[j].numpy()
        return self.lock.read(j, lambda: Message(int(self.published[j]), message.copy(), sums.copy(), j))

    def _join(self) -> None:
        """Take part again, from a number that no learner has reached."""
        i, numbers = self.rank, np.maximum(self.published, self.mixed)
        number = _AHEAD + int(numbers[self.present == 1].max(initial=numbers[i]))
        self.joined[i] = number  # before `published`: the old message is no new one
        fence()
        self.published[i] = self.mixed[i] = number
        fence()
        self.present[i] = 1
        self.note("joined", number)

    def gauges(self) -> dict[str, float]:
        """How often peers were slow, and how many mixes this learner is behind the most advanced one."""
        behind = int(self.mixed[self.present == 1].max(initial=self.mixed[self.rank]) - self.mixed[self.rank])
        return {
            "gossip/mixes": int(self.mixed[self.rank]),
            "gossip/messages_skipped": self.skipped_messages,
            "gossip/waited_s": self.waited,
            "gossip/mixes_behind": behind,
            "gossip/updates_since_mix": self.due,
            **({"gossip/remote_messages": self.remote_messages} if self.mailboxes.remote else {}),
        }


def mixing_matrices(config: Config, learners: int) -> list[Array]:
    """The matrices of this run's learners. Raises `ConfigError` where there are none."""
    if config.gossip.bind and learners >= MAX_REMOTE_LEARNERS:
        raise ConfigError(
            f"gossip.bind: {learners} learners are too many: all runs together may have {MAX_REMOTE_LEARNERS}"
        )
    return matrices(config.gossip.topology, learners, config.gossip.peers)


def memory(setup: Setup) -> SharedArrays:
    linked = bool(KIND.address(setup.config))
    return gossip_memory(setup.peers.learners, len(setup.params.data), setup.moments.size, linked)


KIND = ExchangeKind(
    Gossip,
    memory,
    mixing=mixing_matrices,
    leave=lambda memory, rank: memory.arrays["present"].put(rank, 0),
    rejoins=True,
    gpu_learners=4,  # GALA stacks its learners on one GPU; 4 are its code's example
    link="coterie.remote.gossip_link:link",
    address=lambda config: config.gossip.bind or config.gossip.connect,
    link_settings=lambda bind, connect, machines: {"gossip.bind": bind, "gossip.connect": connect},
    refusals=(without_keys("gossip.bind"), both_ends("gossip")),
    replay="coterie.exchange.recorded_gossip:RecordedGossip",
    shared_in_replay="coterie.exchange.recorded_gossip:Messages",
    simulation="coterie.tools.plan.learners:SimGossip",
)

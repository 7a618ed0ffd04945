"""Synchronous learners: every gradient is the mean of all learners' gradients, so their weights stay equal.

A2C and PPO on several devices (Accelerated Methods; GALA's baseline, its footnote 2): L learners of b simulators
learn as one learner of L x b, where the loss is a mean over rows and nothing is normalized within a learner. The
message with the gradient also carries everything else that they decide together: whether a gradient is unusable, rows
begun, an order to save, the end. Left out: overlap with the backward pass, which would save a part of a tenth.

The learners of a machine add up in shared memory (shared_sum.py), and where each has a GPU, with NCCL. Between machines
their sums add up (elastic.py). Counts, checkpoints and the end are each machine's own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from coterie.config import Config, Refusal, Schedule
from coterie.errors import first_line
from coterie.exchange.base import ExchangeKind, Setup
from coterie.exchange.elastic import MachineGroup, interface
from coterie.exchange.rendezvous import Machine
from coterie.exchange.shared_sum import SharedSum, leave, memory_for_sums
from coterie.exchange.solo import Solo
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import PeerLost
from coterie.parallel.shm import SharedArrays
from coterie.wire.auth import both_ends, is_local, read_token, split
from coterie.wire.tokens import own_token, scoped

# NCCL gets no time-out of its own, which would also pass while the whole run is suspended. The parent ends a learner
# that hangs, or that waits for a dead one.
_FOREVER = timedelta(days=365)
_BAD, _ROWS, _ORDER, _STOP, _LEARNERS, _LR, _JOIN, _BROKEN = range(_FLAGS := 8)  # places in the tail


class AllReduce(Solo):
    """The exchange of one of a machine's learners. `across`: the group with other machines, if any."""

    counts_alike = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        peers = setup.peers
        self.params, self.moments, self.budget = setup.params, setup.moments, setup.config.steps
        self.learners = peers.learners
        self.memory, self.rendezvous = peers.memory, peers.rendezvous
        self.sums = SharedSum(peers.memory, self.rank) if peers.memory is not None else None
        # NCCL refuses two ranks on one GPU.
        self.nccl = setup.params.data.is_cuda and torch.cuda.device_count() >= self.learners > 1
        self.across = _between_machines(setup)
        self._env_steps, self.rows = 0, 0  # of all as of the last message; rows that the next one reports
        self.sent = False  # a message was sent since the last rollout
        self.order = self.stop = False  # this learner's requests; `agree` returns the group's decision
        self.agreed = (False, False)
        self.all_learners, self.lr = self.learners, 0.0  # of all machines at the last message, and their mean rate
        self.broken = self.joins = False  # the group of machines is broken; it forms again after this rollout
        self.lost_updates = 0
        self.base = self.moments.read()

    def __enter__(self) -> AllReduce:
        if self.nccl:
            os.environ["NCCL_SOCKET_IFNAME"] = interface("127.0.0.1")  # or it takes the address of the host's name
            with self.waiting():
                file, size = f"file://{self.rendezvous}", self.learners
                dist.init_process_group("nccl", file, _FOREVER, size, self.rank)
        if self.across is not None:
            self._join()
        return self

    def __exit__(self, *error: object) -> None:
        if self.across is not None and self.rank == 0:
            self.across.close(over=error[0] is None)
        if self.nccl and dist.is_initialized():
            dist.destroy_process_group()
        if self.memory is not None:
            leave(self.memory, self.rank)

    def count(self, rows: int) -> None:
        self.rows += rows

    @property
    def env_steps(self) -> int:
        """All learners have the same number: it travels with the gradients."""
        return self._env_steps

    def start(self, own: int, total: int) -> None:
        self._env_steps = total
        self.base = self.moments.read()

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Average the gradients, clip, update. All learners take the step, or none does."""
        bad = params.nonfinite(params.grad) if not bool(torch.isfinite(params.grad.sum())) else None
        if bad is not None:
            params.grad.zero_()
        several = self._message(params, params.bucket, bad is not None, lr)
        if several and (bad is not None or self.guard.skip or self.across is None):
            if bad is None and self.guard.raises and self.across is None:  # the other's error is the reason
                raise PeerLost("allreduce: the gradient of another learner is not finite")
            self.guard.refuse(bad or "another learner", params)
            return float("nan")
        if several or self.broken:  # another machine's gradient is not finite, or is missing
            self.lost_updates += 1
            params.grad.zero_()
            return float("nan")
        params.grad.div_(self.all_learners)
        return super().step(params, self.lr if self.across is not None else lr)  # all have the same mean

    def _message(self, params: FlatParams, what: Tensor, bad: bool, lr: float = 0.0) -> bool:
        """Add up `what`, which ends with the flags; returns whether any learner's gradient is not finite."""
        flags = [bad, self.rows, self.order, self.stop, 1, lr, 0, 0]
        params.tail[: len(flags)] = torch.tensor(flags, dtype=torch.float32)
        self.rows, self.sent = 0, True
        self.add_up(what)
        _, rows, order, stop = params.tail[:_LEARNERS].tolist()
        self._env_steps += int(rows)
        self.agreed = (order > 0, stop > 0)
        if self.across is not None:
            self._sum_across(self.across, what, params.tail)
            self.all_learners = round(float(params.tail[_LEARNERS]))
            self.lr = float(params.tail[_LR]) / self.all_learners
            self.broken = bool(params.tail[_BROKEN] > 0)
            self.joins = self.broken or bool(params.tail[_JOIN] > 0)
        return bool(params.tail[_BAD] > 0)

    @torch.no_grad()
    def after_rollout(self, params: FlatParams) -> None:
        """Add all learners' new rows to the normalizers. A rollout without a learner step (replay that is being
        filled, on all learners alike) has its message, too: orders and the end travel with it.
        """
        if not self.sent:
            self._message(params, params.tail, False)
        self.sent = False
        if self.moments.size:
            new = _with_flags(self.moments.read() - self.base)
            flags = new[-_FLAGS:]
            self.add_up(new)
            if self.across is not None and not self.broken:
                self._sum_across(self.across, new, flags)
                self.broken = bool(flags[_BROKEN] > 0)
                self.joins = self.joins or self.broken or bool(flags[_JOIN] > 0)
            self.base += new[:-_FLAGS]
            self.moments.write(self.base)
        if self.joins and not self._leaves():
            self._join()

    def agree(self, order: bool, stop: bool) -> tuple[bool, bool]:
        """Return the group's decision from the last message; this learner's requests travel with the next one."""
        self.order, self.stop = order and not self.agreed[0], stop
        return self.agreed

    def _leaves(self) -> bool:
        """Whether this machine's learners end after this rollout."""
        return self.agreed[1] or self._env_steps >= self.budget

    def _join(self) -> None:
        """The first learner of each machine joins the group, and sends the state to the others of its machine."""
        assert self.across is not None
        state = [self.params.data, *self.state.values()]
        if self.moments.size:
            state.append(self.moments.read())
        if self.rank == 0:
            with self.waiting():
                self.across.join(state)
        for tensor, first in zip(state, [self._spread(x) for x in state], strict=True):  # all of it, or nothing
            tensor.copy_(first)
        if self.moments.size:
            self.moments.write(state[-1])
            self.base = self.moments.read()
        self.joins = False

    def add_up(self, tensor: Tensor) -> None:
        """Sum over the learners of this machine."""
        with self.waiting():
            if self.nccl and tensor.is_cuda:
                dist.all_reduce(tensor)
                tensor[-1:].tolist()  # NCCL has only been asked: the host waits for the others here
            elif self.sums is not None:
                self.sums.add_up(tensor)

    def _spread(self, tensor: Tensor) -> Tensor:
        """The first learner's tensor, on all learners of this machine. The others' stay as they are: this may fail."""
        given = torch.zeros_like(tensor) if self.rank else tensor
        self.add_up(given)
        return given

    def _sum_across(self, across: MachineGroup, what: Tensor, tail: Tensor) -> None:
        """Sum over the machines. `tail` carries the flags for a failure and for a machine that joins or leaves."""
        if self.rank == 0:
            with self.waiting():
                tail[_JOIN] = float(across.requested() or self._leaves())
                if not across.sum(what):
                    tail[_BROKEN] = 1
        what.copy_(self._spread(what))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wrap a collective: mark this learner as blocked, not hanging; report a lost learner as the reason."""
        try:
            with self.board.blocked(self.rank):
                yield
        except (RuntimeError, PeerLost) as error:
            raise PeerLost(f"allreduce: another learner is gone or hangs: {first_line(error)}") from error

    def report_to(self, log: Callable[[str], None]) -> None:
        if self.across is not None:
            self.across.report = log

    def gauges(self) -> dict[str, float]:
        """How many machines train together, and updates that were not made because one was lost."""
        if self.across is None or self.rank:
            return {}
        return {"allreduce/machines": self.across.size, "allreduce/updates_lost": self.lost_updates}


def _with_flags(moments: Tensor) -> Tensor:
    return torch.cat((moments, moments.new_zeros(_FLAGS)))


def memory(setup: Setup) -> SharedArrays | None:
    """For the sums of a machine's learners: of gradients, and of what they take from another machine."""
    if setup.peers.learners == 1:
        return None
    state = setup.rule.state(setup.params.data).values()
    return memory_for_sums(setup.peers.learners, [setup.params.bucket, _with_flags(setup.moments.read()), *state])


def address(config: Config) -> str:
    """HOST:PORT of the rendezvous between machines; empty on a single machine."""
    return config.allreduce.bind or config.allreduce.connect


def _between_machines(setup: Setup) -> MachineGroup | None:
    """The group of this learner with those of other machines, which must train the same in every respect."""
    config, peers, allreduce = setup.config, setup.peers, setup.config.allreduce
    if not (at := address(config)):
        return None
    # Learning rates may differ: the mean is applied. Schedules go by a machine's env steps, of which some have more.
    optim = replace(config.optim, lr=0.0, schedule=Schedule(), sqrt_scaling_from=0, chunk=0)
    parts = [
        4, replace(config.algo, poll=0, entropy_schedule=Schedule()), config.settings, config.plugins.exchange, optim,
        setup.params.slices, setup.moments.size, *setup.lockstep_settings, replace(config.model, compile="none"),
        config.reward, config.atari, config.env.action_repeat, config.env.max_episode_steps, config.env.time_limit,
    ]  # fmt: skip
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    kind = f"{config.algorithm} on {config.env.id} (weights and settings {digest})"

    def ended() -> bool:
        peers.board.heartbeat(peers.rank)  # a learner that waits for other machines does not hang
        return peers.board.stopping

    machines = allreduce.machines if allreduce.bind else 0
    token = scoped(read_token(file) if (file := config.wire.token_file) else own_token(at), "peer")
    return MachineGroup(Machine(split(at), machines, kind, config.seed, setup.timeout, token=token), ended)


KIND = ExchangeKind(
    AllReduce,
    memory,
    leave=leave,
    in_lockstep=True,
    spans_machines=True,
    trusts_network=lambda config: config.allreduce.trusted_network,
    address=address,
    link_settings=lambda bind, connect, machines: {
        "allreduce.bind": bind,
        "allreduce.connect": connect,
        "allreduce.machines": machines,
    },
    refusals=(
        both_ends("allreduce"),
        Refusal(
            lambda c, s: bool(c.allreduce.bind) and split(c.allreduce.bind)[0] in ("0.0.0.0", "::"),
            "allreduce.bind",
            "must be the address that the other machines connect to, not 0.0.0.0 or ::",
        ),
        Refusal(
            lambda c, s: bool(address(c)) and not c.allreduce.trusted_network and not is_local(address(c)),
            "allreduce.trusted_network",
            "must be True at an address that is not loopback: torch.distributed has no TLS, so the network must be "
            "private",
        ),
        Refusal(
            lambda c, s: bool(address(c)) and not c.wire.token_file and not is_local(address(c)),
            "wire.token_file",
            "must be a file with the run's token: other machines can reach allreduce.bind or allreduce.connect",
        ),
    ),
    replay="coterie.exchange.recorded_allreduce:RecordedAllReduce",
    shared_in_replay="coterie.exchange.recorded_allreduce:Meeting",
    simulation="coterie.tools.plan.learners:SimAllReduce",
)

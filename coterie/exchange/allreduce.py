"""Synchronous learners: every gradient is the mean of all learners' gradients, so their weights stay equal.

A2C and PPO on several devices (Accelerated Methods 4.3; GALA's baseline, its footnote 2): L learners of b simulators
learn as one learner of L x b. What else must be decided together travels behind the gradient in the same message:
whether a gradient is unusable, rows begun, an order to save, the end. Left out: overlap with the backward pass, which
on one machine would save a part of a cost that is below a tenth already.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from coterie.exchange.solo import Guard, Rule, Solo, Steps
from coterie.models.heads import Moments
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import PeerLost

_BAD, _ROWS, _ORDER, _STOP = range(4)  # places in the tail


class AllReduce:
    """The exchange of learner `rank` of `learners`; `store` is a file for their rendezvous."""

    def __init__(
        self, params: FlatParams, rule: Rule, guard: Guard, moments: Moments, board: Board, rank: int,
        store: Path, timeout: float,
    ) -> None:  # fmt: skip
        self.alone = alone = Solo(params, rule, guard)
        self.state_dict, self.load_state_dict = alone.state_dict, alone.load_state_dict
        self.guard, self.moments, self.board = guard, moments, board
        self.rank, self.learners, self.store, self.timeout = rank, len(board.here), store, timeout
        self._total, self.rows = 0, 0  # rows that the next message will tell the others of
        self.told = False  # a message was sent since the last rollout
        self.order = self.stop = False  # this learner's wishes; the group's are answered by `agree`
        self.agreed = (False, False)
        self.base = moments.read()

    def __enter__(self) -> AllReduce:
        # By itself Gloo listens on the address of the host's name, which may be a public one.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
        backend = "gloo"
        if torch.cuda.is_available() and torch.cuda.device_count() >= self.learners:
            backend = "cpu:gloo,cuda:nccl"  # NCCL refuses two ranks on one GPU
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{self.store}",
                rank=self.rank,
                world_size=self.learners,
                timeout=timedelta(seconds=self.timeout),
            )
        except RuntimeError as error:
            raise PeerLost(f"allreduce: the learners do not meet: {str(error).splitlines()[0]}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def steps(self) -> Steps:
        """The run's env steps travel with the gradients: this exchange counts them itself."""
        return self

    def add(self, rows: int) -> None:
        self.rows += rows

    @property
    def total(self) -> int:
        return self._total

    def start(self, own: int, total: int) -> None:
        self._total = total
        self.base = self.moments.read()

    def pull(self, params: FlatParams) -> None:
        """Equal weights and equal updates: nothing to fetch."""

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Average the gradients, clip, update. All learners take the step, or none does."""
        bad = params.nonfinite(params.grad) if not bool(torch.isfinite(params.grad.sum())) else None
        if bad is not None:
            params.grad.zero_()
        if self._message(params, params.bucket, bad is not None):
            if bad is None and not self.guard.skip:
                raise PeerLost("allreduce: the gradient of another learner is not finite")
            self.guard.refuse(bad or "another learner", params)
            return float("nan")
        params.grad.div_(self.learners)
        return self.alone.step(params, lr)  # all have the same mean: they decide alike

    def _message(self, params: FlatParams, what: Tensor, bad: bool) -> bool:
        """Add up `what`, whose last numbers are the flags; returns whether any learner's gradient is not finite."""
        params.tail[:4] = torch.tensor([bad, self.rows, self.order, self.stop], dtype=torch.float32)
        self.rows, self.told = 0, True
        self._sum(what)
        several, rows, order, stop = params.tail[:4].tolist()
        self._total += int(rows)
        self.agreed = (order > 0, stop > 0)
        return bool(several > 0)

    @torch.no_grad()
    def after_rollout(self, params: FlatParams) -> None:
        """All learners' new rows count in everybody's normalizers. A rollout of which nothing was learned (replay that
        is being filled; all learners' are, then) has its message, too: orders and the end travel with it.
        """
        if not self.told:
            self._message(params, params.tail, False)
        self.told = False
        if self.moments.size:
            new = self.moments.read() - self.base
            self._sum(new)
            self.base += new
            self.moments.write(self.base)

    def agree(self, order: bool, stop: bool) -> tuple[bool, bool]:
        """What the last message said; this learner's own wishes go with the next."""
        self.order, self.stop = order and not self.agreed[0], stop
        return self.agreed

    def _sum(self, tensor: Tensor) -> None:
        try:
            with self.board.waits(self.rank):
                dist.all_reduce(tensor)
        except RuntimeError as error:
            raise PeerLost(f"allreduce: another learner is gone or hangs: {str(error).splitlines()[0]}") from error

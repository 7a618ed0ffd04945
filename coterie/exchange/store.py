"""A central store of weights and rule state, in chunks under locks (Accelerated Methods 4.3 and Appendix B).

A learner takes its gradient locally, then goes through the chunks in whatever order they are free: under a chunk's lock
it applies the rule to the central weights and statistics, and takes the new values over. With `local_steps` n > 1 it
makes n steps of Adam on its own before that (multi-step asynchronous Adam): what it changed since the last meeting is
its pending sum, which goes to the centre along with the decayed moments. One learner is plain Adam, whatever n.
"""

from __future__ import annotations

import time
from types import TracebackType

import torch
from torch import Tensor

from coterie.config import Refusal
from coterie.exchange.base import Exchange, ExchangeKind, Guard, Rule, Setup
from coterie.exchange.shared_weights import Central, central_memory, fill
from coterie.exchange.solo import Solo
from coterie.parallel.board import Board, BoardSteps, OwnSteps, Staleness
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from coterie.types import CoterieError


class Turns:
    """Fixed turns for runs that must come out the same twice: learner r goes after learner r - 1. On the board."""

    def __init__(self, board: Board, rank: int, timeout: float) -> None:
        self.board, self.rank, self.timeout = board, rank, timeout

    def wait(self) -> None:
        end = time.monotonic() + self.timeout
        with self.board.blocked(self.rank):
            while not self.board.my_turn(self.rank):
                if time.monotonic() > end:
                    raise CoterieError(f"store: no turn for {self.timeout:g} s: another learner hangs")
                time.sleep(5e-5)

    def done(self) -> None:
        self.board.turns[self.rank] += 1


class Store(Solo):
    """The exchange of one learner with the centre. `blocked` and `updating`: seconds at locks and under them."""

    def __init__(
        self, params: FlatParams, rule: Rule, guard: Guard, central: Central,
        steps: OwnSteps | BoardSteps,
        local_steps: int = 1, betas: tuple[float, float] = (0.0, 0.0), turns: Turns | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, rule, guard, steps)
        self.central, self.turns, self.staleness = central, turns, Staleness(steps)
        self.local_steps, self.betas = local_steps, betas
        self.blocked = self.updating = 0.0
        self.made = 0  # local steps since the last meeting
        if local_steps > 1:
            self.pending = torch.zeros_like(params.data)  # what the local steps changed
            self.local = [rule.state(params.data[at]) for at in central.slices]
            self.before = [{k: x.clone() for k, x in state.items()} for state in self.local]
            for k in range(len(central.slices)):
                self._take_state(k)

    def __enter__(self) -> Store:
        self.staleness.snapshot()  # a resumed learner's steps are known by now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.turns is not None:
            self.turns.board.active[self.turns.rank] = 0  # who has left is passed over
        self.central.close()

    def pull(self, params: FlatParams) -> None:
        """The central weights, with what is pending here. Where turns are fixed, those of this learner's last turn."""
        if self.turns is not None:
            return
        self.staleness.snapshot()
        params.data.copy_(self.central.data)
        if self.local_steps > 1:
            params.data.add_(self.pending)

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Update the centre from the local gradient, at once or at every `local_steps`-th step."""
        norm, fine = self.guard.clip(params)
        if not fine:
            return norm
        if self.local_steps == 1:
            self._meet(params, lr)
        else:
            for k, at in enumerate(self.central.slices):
                moved = self.pending[at]
                params.data[at].sub_(moved)
                self.rule.update(moved, params.grad[at], self.local[k], lr)
                params.data[at].add_(moved)
            self.made += 1
            if self.made == self.local_steps:
                self._meet(params, lr)
                self.made = 0
        params.grad.zero_()
        return norm

    def _meet(self, params: FlatParams, lr: float) -> None:
        """Every chunk once, in whatever order they are free."""
        self.staleness.update()
        if self.turns is not None:
            self.turns.wait()
        todo, begin = list(range(len(self.central.slices))), time.perf_counter()
        while todo:
            k = next((k for k in todo if self.central.locks.take(k, wait=False)), None)
            if k is None:
                k = todo[0]
                self.central.locks.take(k)
            todo.remove(k)
            taken = time.perf_counter()
            self.blocked += taken - begin
            try:
                self._update(k, self.central.slices[k], params, lr)
            finally:
                self.central.locks.free(k)
            begin = time.perf_counter()
            self.updating += begin - taken
        self.staleness.snapshot()
        if self.turns is not None:
            self.turns.done()

    def _update(self, k: int, at: slice, params: FlatParams, lr: float) -> None:
        """Chunk `k`, under its lock. On a GPU the rule runs there, on a copy of the central values."""
        centre, state = self.central.data[at], self.central.states[k]
        local = params.data[at]
        if self.local_steps == 1:
            if local.is_cuda:
                moved = {name: x.to(local.device) for name, x in state.items()}
                local.copy_(centre)
                self.rule.update(local, params.grad[at], moved, lr)
                centre.copy_(local)
                for name, x in moved.items():
                    state[name].copy_(x)
            else:
                self.rule.update(centre, params.grad[at], state, lr)
                local.copy_(centre)
            return
        b1, b2 = (beta**self.made for beta in self.betas)
        centre.add_(self.pending[at].to(centre.device))
        for name, decay in (("mean", b1), ("square", b2)):
            # What the local steps added is the local moment without what it began with, decayed.
            added = self.local[k][name] - decay * self.before[k][name]
            state[name].mul_(decay).add_(added.to(centre.device))
        state["count"].add_(self.made)
        local.copy_(centre)
        self.pending[at].zero_()
        self._take_state(k)

    def _take_state(self, k: int) -> None:
        for name, x in self.central.states[k].items():
            self.local[k][name].copy_(x)
            self.before[k][name].copy_(x)

    def after_rollout(self, params: FlatParams) -> None:
        if self.turns is None:
            self.central.share_moments()
        elif self.central.moments.size:
            self.turns.wait()
            self.central.share_moments()
            self.turns.done()

    def gauges(self) -> dict[str, float]:
        return {"store/blocked_s": self.blocked, "store/updating_s": self.updating, **self.staleness.gauges()}

    def state_dict(self) -> dict[str, Tensor]:
        """The centre's state, chunks joined; a learner's pending steps are given up when a run is resumed."""
        states = self.central.states
        return {
            name: torch.cat([s[name] for s in states]) if x.dim() else torch.stack([s[name] for s in states])
            for name, x in states[0].items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The centre was filled in before any learner began."""
        self.central.rebase()
        if self.local_steps > 1:
            for k in range(len(self.central.slices)):
                self._take_state(k)


def memory(setup: Setup) -> SharedArrays:
    return central_memory(setup.params.data.cpu(), setup.rule(), setup.config.store.chunks, setup.moments.read())


def connect(setup: Setup) -> Exchange:
    config, peers = setup.config, setup.peers
    central = Central(peers.memory or memory(setup), setup.moments, config.store.chunks, setup.timeout)
    turns = Turns(peers.board, peers.rank, setup.timeout) if config.store.fixed_turns else None
    steps = OwnSteps(peers.learners) if turns else BoardSteps(peers.board, peers.rank)
    betas = (config.optim.beta1, config.optim.beta2)
    make = setup.substitute(Store)
    return make(setup.params, setup.rule(), setup.guard(), central, steps, config.store.local_steps, betas, turns)


KIND = ExchangeKind(
    connect,
    memory,
    fill,
    shared_weights=True,
    refusals=(
        Refusal(
            lambda c, s: c.store.local_steps > 1 and not c.optim.rule.startswith("adam"),
            "store.local_steps",
            "above 1 needs an Adam rule: set optim.rule to adam or adam_eps_hat",
        ),
    ),
)

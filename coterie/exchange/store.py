"""A central store of weights and rule state, in chunks under locks (Accelerated Methods, with Appendix B).

A learner computes its gradient locally, then goes through the chunks in whatever order they are free: under a chunk's
lock it applies the rule to the central weights and statistics, and adopts the new values. With `local_steps` n > 1 it
makes n local Adam steps before each synchronization (multi-step asynchronous Adam). Their sum, the pending change, goes
to the center along with the decayed moments. With one learner this is plain Adam, for any n.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from coterie.config import Refusal
from coterie.exchange.base import ExchangeKind, Setup
from coterie.exchange.shared_weights import OTHERS, SharedWeights, Staleness, restore, shared_memory_for
from coterie.exchange.solo import Solo
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays


class Store(Solo):
    """One learner's exchange with the center. `blocked`, `updating`: seconds waiting for locks and holding them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        config, peers = setup.config, setup.peers
        self.shared = SharedWeights(peers.memory or memory(setup), setup.moments, config.store.chunks, setup.timeout)
        self.staleness = Staleness(self.board, self.rank)
        self.local_steps, self.betas = config.store.local_steps, (config.optim.beta1, config.optim.beta2)
        self.blocked = self.updating = 0.0
        self.steps_since_sync = 0
        if self.local_steps > 1:
            self.pending = torch.zeros_like(setup.params.data)  # what the local steps changed
            self.local = [setup.rule.state(setup.params.data[at]) for at in self.shared.slices]
            self.before = [{k: x.clone() for k, x in state.items()} for state in self.local]
            self._take_states()

    def __exit__(self, *error: object) -> None:
        self.shared.close()

    def pull(self, params: FlatParams) -> None:
        """Take the central weights plus the pending change. No chunk is read while another learner writes it."""
        self.staleness.snapshot()
        for k in self.shared.locked_chunks():
            at = self.shared.slices[k]
            params.data[at].copy_(self.shared.data[at])
        if self.local_steps > 1:
            params.data.add_(self.pending)

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Update the center from the local gradient, at once or at every `local_steps`-th step."""
        norm, fine = self.guard.clip(params)
        if not fine:
            return norm
        if self.local_steps == 1:
            self._synchronize(params, lr)
        else:
            for k, at in enumerate(self.shared.slices):
                moved = self.pending[at]
                params.data[at].sub_(moved)
                self.rule.update(moved, params.grad[at], self.local[k], lr)
                params.data[at].add_(moved)
            self.steps_since_sync += 1
            if self.steps_since_sync == self.local_steps:
                self._synchronize(params, lr)
                self.steps_since_sync = 0
        params.grad.zero_()
        return norm

    def _synchronize(self, params: FlatParams, lr: float) -> None:
        """Update every chunk, in whatever order they are free."""
        self.staleness.update()
        begin = time.perf_counter()
        for k in self.shared.locked_chunks():
            locked = time.perf_counter()
            self.blocked += locked - begin
            self._update(k, self.shared.slices[k], params, lr)
            begin = time.perf_counter()
            self.updating += begin - locked
        self.staleness.snapshot()

    def _update(self, k: int, at: slice, params: FlatParams, lr: float) -> None:
        """Chunk `k`, under its lock. On a GPU the rule runs there, on a copy of the central values."""
        center, state = self.shared.data[at], self.shared.states[k]
        local = params.data[at]
        if self.local_steps == 1:
            if local.is_cuda:
                moved = {name: x.to(local.device) for name, x in state.items()}
                local.copy_(center)
                self.rule.update(local, params.grad[at], moved, lr)
                center.copy_(local)
                for name, x in moved.items():
                    state[name].copy_(x)
            else:
                self.rule.update(center, params.grad[at], state, lr)
                local.copy_(center)
            return
        b1, b2 = (beta**self.steps_since_sync for beta in self.betas)
        center.add_(self.pending[at].to(center.device))
        for name, decay in (("mean", b1), ("square", b2)):
            # The local steps' contribution: the local moment minus the decayed moment that they started from.
            added = self.local[k][name] - decay * self.before[k][name]
            if name == "square":
                added.clamp_(min=0)  # rounding may leave less, and then the root of a center near 0 is NaN
            state[name].mul_(decay).add_(added.to(center.device))
        state["count"].add_(self.steps_since_sync)
        local.copy_(center)
        self.pending[at].zero_()
        self._take_state(k)

    def _take_states(self) -> None:
        for k in self.shared.locked_chunks():
            self._take_state(k)

    def _take_state(self, k: int) -> None:
        """Start local steps from the central state of chunk `k`, under its lock."""
        for name, x in self.shared.states[k].items():
            self.local[k][name].copy_(x)
            self.before[k][name].copy_(x)

    def after_rollout(self, params: FlatParams) -> None:
        self.shared.share_moments()

    def gauges(self) -> dict[str, float]:
        return {"store/blocked_s": self.blocked, "store/updating_s": self.updating, **self.staleness.gauges()}

    def state_dict(self) -> dict[str, Tensor]:
        """The center's state, chunks joined; a learner's pending steps are lost when a run is resumed."""
        states = {
            k: {name: x.clone() for name, x in self.shared.states[k].items()} for k in self.shared.locked_chunks()
        }
        ordered = [states[k] for k in sorted(states)]
        return {
            name: torch.cat([s[name] for s in ordered]) if x.dim() else torch.stack([s[name] for s in ordered])
            for name, x in ordered[0].items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The center was restored before any learner started."""
        self.shared.rebase()
        if self.local_steps > 1:
            self._take_states()


def memory(setup: Setup) -> SharedArrays:
    return shared_memory_for(setup.params.data.cpu(), setup.rule, setup.config.store.chunks, setup.moments.read())


KIND = ExchangeKind(
    Store,
    memory,
    restore,
    shared_weights=True,
    refusals=(
        OTHERS,
        Refusal(
            lambda c, s: c.store.local_steps > 1 and not c.optim.rule.startswith("adam"),
            "store.local_steps",
            "must be 1, unless optim.rule is adam or adam_eps_hat",
        ),
    ),
    simulation="coterie.tools.plan.learners:SimStore",
)

"""How far the data of a batch is from the policy that learns from it, by its importance weights."""

from __future__ import annotations

import math

from torch import Tensor

from coterie.algorithms.base import AnyBatch

_RATE = 0.01  # of the running means
_MIN_STEPS = 100  # before a warning
_MIN_ESS = 0.25  # below this few samples decide alone; our choice


class OffPolicy:
    """The effective sample size of the importance weights, as a fraction of a batch: (sum w)^2 / (n sum w^2), which is
    1 where data and policy agree. `diagnostics` go into a loss's metrics, of which `measure` makes `ess`.
    """

    def __init__(self, replayed: bool) -> None:
        self.replayed, self.ess, self.clipped, self.steps, self.warned = replayed, 1.0, 0.0, 0, False

    def diagnostics(self, log_ratio: Tensor, clip: float) -> dict[str, Tensor]:
        """For log ratios `[..]`; `clip`: the largest ratio that is not clipped, 0: none is."""
        rho = log_ratio.clamp(max=math.log(1e3)).exp()
        clipped = log_ratio > math.log(clip or math.inf)
        return {"rho": rho, "rho_square": rho**2, "rho_clipped": clipped.float()}

    def measure(self, batch: AnyBatch) -> None:
        """After a learner step: replace the second moment of the ratios by the effective sample size."""
        square = batch.metrics.pop("rho_square", 0.0)
        if not (square > 0 and math.isfinite(square)):
            return
        batch.metrics["ess"] = ess = batch.metrics["rho"] ** 2 / square
        self.steps += 1
        rate = max(_RATE, 1 / self.steps)
        self.ess += rate * (ess - self.ess)
        self.clipped += rate * (batch.metrics["rho_clipped"] - self.clipped)

    def warning(self) -> str:
        """One line, once, where most of the data no longer counts."""
        if self.warned or self.steps < _MIN_STEPS or self.ess >= _MIN_ESS:
            return ""
        self.warned = True
        return (
            f"off-policy: the samples of a batch count as {100 * self.ess:.0f}% of their number (ess), and "
            f"{100 * self.clipped:.0f}% of the importance weights are clipped. Set optim.lr lower, or "
            + ("vtrace.replay_share" if self.replayed else "set max_lag (0: no limit; not with hogwild or store)")
        )

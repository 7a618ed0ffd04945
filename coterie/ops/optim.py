"""Update rules on flat tensors, learning-rate schedules, and the clip of a flat gradient.

A rule works on any slice: what `state(param[at])` made belongs to that slice. The dialects, with ms, m and v the
moving averages: `rmsprop` g / (sqrt(ms) + eps) and `adam` (eps added after bias correction,
https://arxiv.org/abs/1412.6980) are PyTorch's; `rmsprop_tf` g / sqrt(ms + eps) and `adam_eps_hat` (eps added to the
uncorrected sqrt(v), the "epsilon hat" of that paper's section 2) are TensorFlow's and Lasagne's. With the large
eps of IMPALA or the value methods they differ much. Left out: momentum and weight decay, which no paper here
uses, and centered RMSProp, which only Ape-X does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from coterie.config import Optim, Schedule
from coterie.parallel.params import pieces
from coterie.parallel.threads import Team

State = dict[str, Tensor]
# The kernel of torch.optim.Adam(fused=True): 2 to 5 times faster than public calls, but a private name.
fused_adam: Callable[..., None] | None = None
if hasattr(torch, "_fused_adam_"):
    fused_adam = partial(torch._fused_adam_, weight_decay=0.0, amsgrad=False, maximize=False)


class _Scratch(threading.local):
    """Memory for one flat temporary of each thread, kept between updates: a large allocation costs page faults every
    time.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def like(self, x: Tensor) -> Tensor:
        if self._buffer.numel() < x.numel() or self._buffer.device != x.device:
            self._buffer = torch.empty_like(x)
        return self._buffer[: x.numel()]


@dataclass(frozen=True)
class RMSProp:
    """Gradients divided by the root of their moving mean square; `inside`: eps is added under the root."""

    alpha: float
    eps: float
    inside: bool = False
    _scratch: _Scratch = field(default_factory=_Scratch, repr=False, compare=False)

    def state(self, param: Tensor) -> State:
        return {"square": torch.full_like(param, float(self.inside))}  # TF1 starts at 1, PyTorch at 0

    @torch.no_grad()
    def update(self, param: Tensor, grad: Tensor, state: State, lr: float) -> None:
        """One step in place on `param` and `state`; all `[n]`."""
        assert param.dim() == 1, param.shape
        assert param.shape == grad.shape == state["square"].shape
        square, root = state["square"], self._scratch.like(param)
        square.mul_(self.alpha).addcmul_(grad, grad, value=1 - self.alpha)
        if self.inside:
            torch.add(square, self.eps, out=root).sqrt_()
        else:
            torch.sqrt(square, out=root).add_(self.eps)
        param.addcdiv_(grad, root, value=-lr)


@dataclass(frozen=True)
class Adam:
    """Adam. `state["count"]`, a float32 scalar, is the number of updates; each slice counts separately."""

    beta1: float
    beta2: float
    eps: float
    eps_hat: bool = False
    _scratch: _Scratch = field(default_factory=_Scratch, repr=False, compare=False)

    def state(self, param: Tensor) -> State:
        zeros = torch.zeros_like
        return {"mean": zeros(param), "square": zeros(param), "count": torch.zeros((), device=param.device)}

    @torch.no_grad()
    def update(self, param: Tensor, grad: Tensor, state: State, lr: float) -> None:
        """One step in place on `param` and `state`, `[n]`."""
        assert param.dim() == 1, param.shape
        assert param.shape == grad.shape == state["mean"].shape == state["square"].shape
        mean, square, count = state["mean"], state["square"], state["count"].add_(1)
        b1, b2 = self.beta1, self.beta2
        if not self.eps_hat and fused_adam is not None:
            fused_adam([param], [grad], [mean], [square], [], [count], lr=lr, beta1=b1, beta2=b2, eps=self.eps)
            return
        t = count.item()  # float32 is too coarse for 1 - beta2^t
        correction = (1 - b2**t) ** 0.5
        mean.lerp_(grad, 1 - b1)
        square.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        root = torch.sqrt(square, out=self._scratch.like(param))
        root.add_(self.eps if self.eps_hat else self.eps * correction)
        param.addcdiv_(mean, root, value=-lr * correction / (1 - b1**t))


@dataclass(frozen=True)
class Divided:
    """A rule whose updates a team shares: each thread takes a piece of the weights, which limit an update's speed."""

    rule: RMSProp | Adam
    team: Team

    def state(self, param: Tensor) -> State:
        return self.rule.state(param)

    def update(self, param: Tensor, grad: Tensor, state: State, lr: float) -> None:
        calls = []
        for k, at in enumerate(pieces(len(param), self.team.size)):
            # The first piece counts the update for all.
            own = {name: x[at] if x.dim() else x if k == 0 else x.clone() for name, x in state.items()}
            calls.append(partial(self.rule.update, param[at], grad[at], own, lr))
        self.team.run(calls)


Rule = RMSProp | Adam | Divided


def make_rule(config: Optim) -> RMSProp | Adam:
    """The rule that `config` names."""
    if config.rule in ("adam", "adam_eps_hat"):
        return Adam(config.beta1, config.beta2, config.eps, config.rule == "adam_eps_hat")
    return RMSProp(config.alpha, config.eps, config.rule == "rmsprop_tf")


@torch.no_grad()
def flat_norm_clip(grad: Tensor, max_norm: float) -> float:
    """Scale `grad` `[n]` in place to at most `max_norm` (0: no clipping) in l2; returns the norm before.

    A norm that is not finite (a NaN, or an overflow) leaves `grad` as it is: the caller must check the norm.
    """
    assert grad.dim() == 1, grad.shape
    norm = grad.dot(grad).sqrt().item()  # on the CPU faster than vector_norm, and several times more exact
    if 0 < max_norm < norm < math.inf:
        grad.mul_(max_norm / norm)
    return norm


def schedule_value(schedule: Schedule, env_steps: int, total: int, episodes: int = 0) -> float:
    """The factor at `env_steps` of a run of `total` env steps; `steps` may go by `episodes` of the run instead.

    Warm-up multiplies by env_steps / warmup, and by 1 / warmup at env step 0, so that no update is exactly nothing.
    """
    factor = 1.0
    if schedule.kind == "linear":
        factor += (schedule.end - 1) * min(env_steps / max(total, 1), 1.0)
    elif schedule.kind == "steps":
        for at, value in zip(schedule.at, schedule.factors, strict=True):
            factor = value if (episodes if schedule.by == "episodes" else env_steps) >= at else factor
    if schedule.warmup > 0:
        factor *= min(max(env_steps, 1) / schedule.warmup, 1.0)
    return factor


def scaled_lr(config: Optim, total_envs: int) -> float:
    """lr sqrt(n / n0) for `total_envs` simulators of all learners (https://arxiv.org/abs/1803.02811); n0 0 is off."""
    base = config.sqrt_scaling_from
    return config.lr * math.sqrt(total_envs / base) if base > 0 else config.lr

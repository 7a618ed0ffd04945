"""Action distributions as pure functions of a parameter tensor `[.., n]`, made from an `ActionSpec`.

Actions are `[..]` int64 (categorical), `[.., A]` int64 (multi), `[.., A]` float32 (continuous, not squashed or clipped:
the env edge does that) or choices and numbers side by side (mixed, float32). Log-probs and entropies are `[..]`
float32, in nats, joint over components. Logits must be finite; that of an illegal choice is `ILLEGAL`. Left out:
torch.distributions and torch.multinomial, several times slower on acting's batches.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from coterie.types import ActionSpec

ILLEGAL = -1e30  # logit of no action: probability 0, and 0 times its log-probability is still 0
_LOG_2PI = math.log(2 * math.pi)
_TINY = torch.finfo(torch.float32).tiny


def _race(log_probs: Tensor, rng: Generator | None) -> Tensor:
    """An index of the last axis (kept, size 1): the first of exponential clocks with rates `exp(log_probs)` to ring."""
    # -log(uniform) rather than exponential_: twice as fast on the CPU, and never 0. Nor infinite, which would be later
    # than an illegal choice.
    arrival = torch.empty_like(log_probs).uniform_(_TINY, 1.0, generator=rng).log_().neg_()
    return arrival.log_().sub_(log_probs).argmin(-1, True)


class _Discrete(ABC):
    """Choices by logits. `_log_probs` `[.., n]` (or `[.., A, n]`); `_joint` sums over components, if there are any."""

    @property
    @abstractmethod
    def head_size(self) -> int: ...

    @abstractmethod
    def _log_probs(self, params: Tensor) -> Tensor: ...

    def _joint(self, x: Tensor) -> Tensor:
        return x

    def _of(self, log_probs: Tensor, index: Tensor) -> Tensor:
        return self._joint(log_probs.gather(-1, index).squeeze(-1))

    def sample_with_log_prob(self, params: Tensor, rng: Generator | None = None) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(params)
        index = _race(log_probs.detach(), rng)
        return index.squeeze(-1), self._of(log_probs, index)

    def mode(self, params: Tensor) -> Tensor:
        return self._log_probs(params).argmax(-1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """(log_prob, entropy) from one log-softmax."""
        log_probs = self._log_probs(params)
        return self._of(log_probs, action.unsqueeze(-1)), self._joint(-(log_probs.exp() * log_probs).sum(-1))

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return self._of(self._log_probs(params), action.unsqueeze(-1))


@dataclass(frozen=True)
class Categorical(_Discrete):
    """One choice of `size`; the parameters are logits `[.., size]`."""

    size: int

    @property
    def head_size(self) -> int:
        return self.size

    def _log_probs(self, params: Tensor) -> Tensor:
        assert params.shape[-1] == self.size, (params.shape, self.size)
        return params.float().log_softmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)


@functools.cache
def _padding(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each logit of a padded `[A, max(sizes)]` table stands in the flat vector; one past its end is the pad."""
    widest, total = max(sizes), sum(sizes)
    index, start = [], 0
    for n in sizes:
        index += [*range(start, start + n), *[total] * (widest - n)]
        start += n
    with torch.inference_mode(False):  # it is kept, and training saves it for the backward pass
        return torch.tensor(index, device=device)


@dataclass(frozen=True)
class MultiCategorical(_Discrete):
    """Independent choices of `sizes`; the parameters are their logits side by side, `[.., sum(sizes)]`."""

    sizes: tuple[int, ...]

    @property
    def head_size(self) -> int:
        return sum(self.sizes)

    def _joint(self, x: Tensor) -> Tensor:
        return x.sum(-1)

    def _log_probs(self, params: Tensor) -> Tensor:
        """`[.., A, max(sizes)]`."""
        assert params.shape[-1] == self.head_size, (params.shape, self.sizes)
        logits = params.float()
        if len(set(self.sizes)) > 1:
            padded = torch.nn.functional.pad(logits, (0, 1), value=ILLEGAL)
            logits = padded.index_select(-1, _padding(self.sizes, params.device))
        return logits.reshape(*logits.shape[:-1], len(self.sizes), -1).log_softmax(-1)


@dataclass(frozen=True)
class DiagGaussian:
    """`size` independent normals; the parameters are means, then log standard deviations, `[.., 2 * size]`.

    The head gives the means (`head_size`); the model appends its state-independent log deviations.
    """

    size: int

    @property
    def head_size(self) -> int:
        return self.size

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        assert params.shape[-1] == 2 * self.size, (params.shape, self.size)
        params = params.float()
        return params[..., : self.size], params[..., self.size :]

    def sample_with_log_prob(self, params: Tensor, rng: Generator | None = None) -> tuple[Tensor, Tensor]:
        mean, log_std = self._split(params.detach())
        noise = torch.empty_like(mean).normal_(generator=rng)
        action = noise.mul_(log_std.exp()).add_(mean)
        return action, self.log_prob(params, action)  # of the action as rounded, as training will see it

    def mode(self, params: Tensor) -> Tensor:
        return self._split(params)[0]

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        entropy = self._split(params)[1].sum(-1) + 0.5 * (1 + _LOG_2PI) * self.size
        return self.log_prob(params, action), entropy

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._split(params)
        z = (action.float() - mean) * (-log_std).exp()
        return -torch.addcmul(log_std, z, z, value=0.5).sum(-1) - 0.5 * _LOG_2PI * self.size


@dataclass(frozen=True)
class Mixed:
    """Independent choices and normals; parameters and actions are those of the choices, then those of the normals."""

    choices: MultiCategorical
    normals: DiagGaussian

    @property
    def head_size(self) -> int:
        return self.choices.head_size + self.normals.head_size

    def _params(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return params[..., : self.choices.head_size], params[..., self.choices.head_size :]

    def _parts(self, action: Tensor) -> tuple[Tensor, Tensor]:
        k = len(self.choices.sizes)
        return action[..., :k].long(), action[..., k:]

    def sample_with_log_prob(self, params: Tensor, rng: Generator | None = None) -> tuple[Tensor, Tensor]:
        logits, normals = self._params(params)
        choice, p = self.choices.sample_with_log_prob(logits, rng)
        number, q = self.normals.sample_with_log_prob(normals, rng)
        return torch.cat((choice, number), -1), p + q

    def mode(self, params: Tensor) -> Tensor:
        logits, normals = self._params(params)
        return torch.cat((self.choices.mode(logits), self.normals.mode(normals)), -1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        (logits, normals), (choice, number) = self._params(params), self._parts(action)
        (p, h), (q, g) = self.choices.evaluate(logits, choice), self.normals.evaluate(normals, number)
        return p + q, h + g

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return self.evaluate(params, action)[0]


Distribution = Categorical | MultiCategorical | DiagGaussian | Mixed


def make_distribution(action: ActionSpec) -> Distribution:
    """The distribution over the actions that `action` describes."""
    if action.kind == "categorical":
        return Categorical(action.sizes[0])
    if action.kind == "multi":
        return MultiCategorical(action.sizes)
    normals = DiagGaussian(len(action.low))
    return Mixed(MultiCategorical(action.sizes), normals) if action.kind == "mixed" else normals

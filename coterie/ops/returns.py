"""Returns and advantages. `[T, B]` float32 unless noted, masks and flags bool; nothing here builds a graph.

`mask[t]` False marks a step that has no meaning (the fake step of an autoreset, the step of a replaced env): its delta
and its trace are 0, so what came before it bootstraps from `value[t]`, the value of the last true observation.
Units: rewards, values and returns are in (scaled) reward; `gamma` is per env step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(reward: Tensor, longer: Tensor, *flags: Tensor) -> None:
    """`reward` `[T, B]`, `longer` one row more, `flags` as `reward` and bool."""
    assert reward.dim() == 2, reward.shape
    assert longer.shape == (reward.shape[0] + 1, reward.shape[1]), (reward.shape, longer.shape)
    assert all(f.shape == reward.shape and f.dtype == torch.bool for f in flags), "flags are [T, B] bool"


@torch.no_grad()
def gae(
    reward: Tensor, value: Tensor, terminated: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16) and its value target, A + V.

    delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t;  A_t = delta_t + gamma lam (1 - terminated_t) A_{t+1}.
    `value` is `[T+1, B]`, row T the bootstrap. `lam` 1 gives the n-step returns of A3C, n to the rollout's end.
    Masked rows: advantage 0, target `value[t]`.
    """
    check_shapes(reward, value, terminated, mask)
    before = value[:-1]
    discount = torch.gt(mask, terminated) * gamma  # bools: mask > terminated is mask and not terminated
    delta = torch.addcmul(reward, discount, value[1:]).sub_(before)
    advantage = torch.where(mask, delta, 0.0)
    rows, trace = advantage.unbind(), discount.mul_(lam).unbind()
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(trace[t], rows[t + 1])
    return advantage, advantage + before


@torch.no_grad()
def running_return(reward: Tensor, is_first: Tensor, carry: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted return so far, R_t = r_t + gamma R_{t-1}, whose deviation return normalization divides rewards by.

    `is_first` `[T+1, B]` as in `Rollout`, `carry` `[B]` from the rollout before (zeros at first). Returns R `[T, B]`
    and the new carry. R restarts with an episode; rows masked by `is_first[1:]` are 0 and are not samples of
    the statistic.
    """
    assert is_first.dtype == torch.bool
    check_shapes(reward, is_first)
    assert carry.shape == reward.shape[1:], carry.shape
    masked, first = is_first[1:], is_first[:-1]
    out = reward.masked_fill(masked, 0.0)
    rows, trace = out.unbind(), (torch.logical_or(masked, first).logical_not_() * gamma).unbind()
    for t, row in enumerate(rows):
        row.addcmul_(trace[t], rows[t - 1] if t else carry)
    return out, rows[-1].clone()


def turns(ids: list[int]) -> list[list[int]]:
    """Split the columns of a batch so that no turn has an env twice; an env's first rollout is in the first turn."""
    found, seen = list[list[int]](), dict.fromkeys(ids, 0)
    for column, env in enumerate(ids):
        if seen[env] == len(found):
            found.append([])
        found[seen[env]].append(column)
        seen[env] += 1
    return found


_MOST_ENVS = 1 << 16  # ids that `RunningReturns` keeps


class RunningReturns:
    """`running_return` of each env by its id, in whatever columns and batches its rollouts arrive."""

    def __init__(self) -> None:
        self.carry: dict[int, float] = {}

    def update(self, reward: Tensor, is_first: Tensor, env_id: Tensor, gamma: float) -> Tensor:
        """R `[T, B]`; an env's second rollout in a batch goes on from its first."""
        ids, out = env_id.tolist(), torch.empty_like(reward)
        for columns in turns(ids):
            carry = reward.new_tensor([self.carry.pop(ids[c], 0.0) for c in columns])
            out[:, columns], after = running_return(reward[:, columns], is_first[:, columns], carry, gamma)
            self.carry.update(zip((ids[c] for c in columns), after.tolist(), strict=True))
        while len(self.carry) > _MOST_ENVS:
            del self.carry[next(iter(self.carry))]  # the least recently used
        return out

    def state_dict(self) -> dict[str, Tensor]:
        return {"running_env": torch.tensor(list(self.carry)), "running": torch.tensor(list(self.carry.values()))}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.carry = dict(zip(state["running_env"].tolist(), state["running"].tolist(), strict=True))


@torch.no_grad()
def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """1 - Var[target - value] / Var[target] over the valid rows, a scalar; 0 where the targets do not vary."""
    assert value.shape == target.shape == mask.shape, (value.shape, target.shape, mask.shape)
    count = mask.sum().clamp_(min=1)

    def variance(x: Tensor) -> Tensor:
        x = torch.where(mask, x, 0.0)
        centered = torch.where(mask, x - x.sum() / count, 0.0)
        return centered.square().sum() / count

    spread = variance(target)
    return torch.where(spread > 0, 1 - variance(target - value) / spread.clamp(min=1e-30), 0.0)

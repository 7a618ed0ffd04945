"""V-trace: targets and advantages of a policy from the steps of an older one (IMPALA, section 4.1).

Pure functions of `[T, B]` tensors; nothing here builds a graph. Left out: other corrections, and none at all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.ops.policy import MAX_LOG_RATIO
from coterie.ops.returns import check_shapes


class VTrace(NamedTuple):
    """Both `[T, B]` float32, in (scaled) reward, without a graph."""

    value_target: Tensor  # v_s; on a masked row value[s]
    advantage: Tensor  # rho_pg (q_s - V(x_s)), the factor of grad log pi(a_s|x_s); 0 on a masked row


class Clips(NamedTuple):
    """How importance ratios are clipped, `lam` of the traces, and what q_s is made of."""

    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0
    lam: float = 1.0
    q_from: Literal["target", "value"] = "target"


CLIPS = Clips()  # the paper's


@torch.no_grad()
def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    mask: Tensor,
    gamma: float,
    clips: Clips = CLIPS,
) -> VTrace:
    """V-trace targets and policy gradient advantages (https://arxiv.org/abs/1802.01561, eq. 1, remarks 1 and 2).

    v_s = V_s + sum_{t>=s} (prod_{s<=i<t} gamma_i c_i) rho_t (r_t + gamma_t V_{t+1} - V_t), to the rollout's end, with
    gamma_t = gamma (1 - terminated_t), rho_t = min(rho_bar, pi/mu), c_t = lam min(c_bar, pi/mu), summed by remark 1:
    v_s - V_s = delta_s + gamma_s c_s (v_{s+1} - V_{s+1}), v_T = V_T.
    The advantage is min(pg_rho_bar, pi/mu) (q_s - V_s), where q_s = r_s + gamma_s v_{s+1}, or r_s + gamma_s V_{s+1}
    with `q_from` "value".

    `log_ratio` is log pi(a|x) - log mu(a|x) in nats, clamped to +-20; it, `reward`, `terminated` and `mask` are
    `[T, B]`, `value` is `[T+1, B]`, row T the bootstrap. `gamma` is per env step. A row with `mask` False has no
    meaning: its delta and trace are 0, whatever its reward, ratio and flag, so what came before it bootstraps from its
    value, that of the last true observation. That is all a truncation needs.

    A bar of `math.inf` does not clip. The values of a table converge to those of the policy in proportion to
    min(rho_bar mu, pi); `c_bar` and `lam` change the speed only. With a `c_bar` above 1 nothing bounds the product of
    the c: where log ratios are huge it overflows, as the paper's does, to inf or NaN.

    """
    rho_bar, c_bar, pg_rho_bar, lam, q_from = clips
    check_shapes(reward, value, terminated, mask)
    assert log_ratio.shape == reward.shape, (log_ratio.shape, reward.shape)

    before = value[:-1]
    discount = torch.gt(mask, terminated) * gamma  # bools: mask > terminated is mask and not terminated
    ratio = torch.where(mask, log_ratio, 0.0).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
    excess = torch.where(mask, torch.addcmul(reward, discount, value[1:]).sub_(before), 0.0)  # q - V, of "value"

    correction = excess * ratio.clamp(max=rho_bar)  # delta; below, from the last row up, v - V
    rows, trace = correction.unbind(), ratio.clamp(max=c_bar).mul_(discount).mul_(lam).unbind()
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(trace[t], rows[t + 1])

    if q_from == "target":  # v_{s+1} - V_{s+1} is 0 at s = T - 1
        excess[:-1].addcmul_(discount[:-1], correction[1:])
    return VTrace(correction.add_(before), excess.mul_(ratio.clamp_(max=pg_rho_bar)))

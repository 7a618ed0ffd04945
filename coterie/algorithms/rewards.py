"""What a loss gets as reward."""

from __future__ import annotations

from torch import Tensor

from coterie.config import Algo, Reward
from coterie.models.base import Model
from coterie.ops.returns import RunningReturns
from coterie.types import Rollout, map_obs


class Rewards:
    """Clipping, scaling and normalization of rewards, and the running normalizers of observations and returns."""

    def __init__(self, config: Reward, algo: Algo) -> None:
        self.config, self.gamma = config, algo.gamma
        self.running = RunningReturns()  # for the deviation of the return

    def clipped(self, reward: Tensor) -> Tensor:
        """Rewards, clipped and scaled."""
        r, how = reward, self.config
        if how.clip == "sign":
            r = r.sign()
        elif how.clip == "clamp":
            r = r.clamp(-1, 1)
        elif how.clip == "tanh":
            r = r.tanh()
        elif how.clip == "asymmetric":  # IMPALA, Figure D.1 (its code: 5 tanh(r / 5), and 0.3 of that below 0)
            r = r.tanh()
            r = 0.3 * r.clamp(max=0) + 5 * r.clamp(min=0)
        return r * how.scale if how.scale != 1 else r

    def normalized(self, model: Model, rollout: Rollout) -> Tensor:
        """Clipped rewards, divided by the running deviation of the return if `reward.normalize` is set."""
        reward = self.clipped(rollout.reward)
        return (reward / model.return_norm.deviation).clamp(-10, 10) if self.config.normalize else reward

    def update(self, model: Model, rollout: Rollout) -> None:
        """Update the running normalizers, once the last batch has used the old ones."""
        mask = rollout.mask
        model.observe(map_obs(lambda x: x[: len(mask)], rollout.obs), mask)
        if self.config.normalize:
            returns = self.running.update(self.clipped(rollout.reward), rollout.is_first, rollout.env_id, self.gamma)
            model.return_norm.update(returns[mask])

    def state_dict(self) -> dict[str, Tensor]:
        return self.running.state_dict() if self.running.carry else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if "running_env" in state:
            self.running.load_state_dict(state)

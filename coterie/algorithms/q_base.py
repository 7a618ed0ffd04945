"""What value methods share: how they explore, the target network, how much training is due, and room for replay.

How often a row is trained on is held by construction: each rollout adds `intensity` times its rows to what is due, and
batches are drawn while a batch's worth is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.a2c import A2C, slices
from coterie.config import Config
from coterie.envs.pool import is_atari
from coterie.models.build import Network, acting_copy
from coterie.parallel.threads import Team
from coterie.replay.priority import Picks
from coterie.types import AgentOutput, Array, Inputs, Rollout, Spec


def greedy(values: Tensor, explore: Tensor | None, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The best of `values` `[B, A]`, or with probability `explore` `[B]` any; and its log-probability `[B]`."""
    best = values.argmax(-1)
    if explore is None:
        return best, torch.zeros(len(best), device=best.device)
    n = values.shape[-1]
    drawn = torch.rand(2, len(best), generator=rng, device=best.device)
    action = torch.where(drawn[0] < explore, (drawn[1] * n).long().clamp_(max=n - 1), best)
    probability = explore / n + (1 - explore) * (action == best)
    return action, probability.clamp_(min=1e-12).log_()


class Kept(Protocol):
    """A replay: what was kept of rollouts, and is drawn from."""

    @property
    def size(self) -> int: ...
    def add(self, rollout: Rollout, reward: Array) -> None: ...
    def draw(self, count: int, beta: float = 0.0, rng: np.random.Generator | None = None) -> Picks: ...
    def gather(self, picks: Picks) -> Any: ...
    def update(self, picks: Picks, priority: Array) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Means:
    """How a target network computes: the dtype of its torso, the most rows at once (0: all), threads for the pieces."""

    dtype: torch.dtype = torch.float32
    chunk: int = 0
    threads: int = 1


class Values:
    """A value method's parts but for its loss. `batch_rows`: env steps that a batch trains on; `make_replay` is told of
    the first rollout; `judge`: the target network's say on some of what was drawn, and `axis` along which that is cut
    into pieces; `means`: how it computes.
    """

    def __init__(
        self,
        config: Config,
        spec: Spec,
        seed: int,
        batch_rows: int,
        make_replay: Callable[[Rollout], Kept],
        judge: Callable[[Network, Any, slice], Tensor],
        axis: int,
        means: Means,
    ) -> None:
        self.base = base = A2C(config, spec)
        self.clock, self.rewards, self.after_rollout = base.clock, base.rewards, base.after_rollout
        self.config, self.own, self.batch_rows, self.means = config, config.q, batch_rows, means
        self.make_replay, self.judge, self.axis = make_replay, judge, axis
        self.judges = Team(means.threads)
        self.draws: np.random.Generator | None = None  # of its own, where the replay is another's
        self.sampled = config.q.eval_epsilon  # share of random actions of an evaluation that samples
        self.replay: Kept | None = None
        self.lender: Values | None = None  # whose replay this one draws from
        self.target: Network | None = None
        self.refresh: Callable[[], None] = _nothing
        self.saved: dict[str, Tensor] = {}  # of a checkpoint, until replay and target network are there
        # Env steps so far, those that the replay was given, samples to train on, env steps at the last copy.
        self.rows, self.kept, self.copied = 0, 0, -1
        self.due = 0.0
        self.seed, self.rng = seed, torch.Generator().manual_seed(seed)
        self.ahead = ThreadPoolExecutor(1, "coterie-replay")  # puts the next batch together meanwhile

    def borrow(self, lender: Values) -> None:
        """Draw from another's replay, by numbers of its own, and neither fill nor reprioritise it."""
        self.lender, self.clock, self.draws = lender, lender.clock, np.random.default_rng(lender.seed + 1)

    def acts_at(self, version: int) -> None:
        """Somewhere else than with the learner: how far the run is, from the learner step of the weights."""
        learners = self.config.learners if isinstance(self.config.learners, int) else 1
        trained = version * self.batch_rows / self.own.intensity
        self.clock.env_steps = int(min(self.config.steps, (trained + self.own.learn_start * (version > 0)) * learners))

    def explore(self, env_id: Tensor) -> Tensor:
        """Share of random actions of each env `[B]`."""
        own = self.own
        if own.noisy:
            return torch.zeros(len(env_id), device=env_id.device)
        if own.ladder:
            learners = self.config.learners if isinstance(self.config.learners, int) else 1
            envs = self.config.env.num_envs * learners
            place = (env_id % envs).float() / max(1, envs - 1)
            return own.epsilon_end ** (1 + own.ladder * place)
        left = max(0.0, 1 - self.clock.env_steps / max(1, own.epsilon_steps))
        epsilon = own.epsilon_end + (own.epsilon - own.epsilon_end) * left
        return torch.full((len(env_id),), epsilon, device=env_id.device)

    def act(
        self, model: Network, inputs: Inputs, core_state: Tensor | None, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]:
        """The best action, or with probability `explore` any. The value is that of the action. Builds no graph."""
        with torch.inference_mode():
            if self.own.noisy:
                model.resample(None if explore is None else rng)
            params, _, core_state = model(inputs, core_state)
            values = model.expected(params)
            action, log_prob = greedy(values, explore, rng)
            return AgentOutput(action, log_prob, values.gather(-1, action[..., None])[..., 0]), core_state

    def drawn(self, model: Network, rollout: Rollout) -> Iterator[tuple[Any, Tensor]]:
        """Keep the rollout; then what is due, as the replay gathers it, on the rollout's device, and what `judge` says
        of it. How much that is depends only on how many rows there were: all learners that see as many train as often.
        """
        if self.target is None:
            self.target, self.refresh = acting_copy(model, self.means.dtype, apart=True)
            if target := {k.removeprefix("target/"): x for k, x in self.saved.items() if k.startswith("target/")}:
                self.target.load_state_dict(target)
        if self.lender is not None:
            self.replay, self.kept = self.lender.replay, self.lender.kept - rollout.reward.numel()
        elif self.replay is None:
            self.replay = self.make_replay(rollout)
            if kept := {k: x for k, x in self.saved.items() if k.startswith("replay/")}:
                self.replay.load_state_dict(kept)
            else:
                self.kept = 0  # what was not saved is gathered anew
        self.saved = {}
        rows, device = rollout.reward.numel(), rollout.reward.device
        assert self.replay is not None
        if self.lender is None:
            self.replay.add(rollout, self.rewards(rollout).cpu().numpy())
        if self.kept >= self.own.learn_start:
            if self.copied < 0:
                self._copy()  # whose normalizers have seen something by now
            self.due += rows * self.own.intensity
        self.rows, self.kept = self.rows + rows, self.kept + rows
        ahead = None
        while self.due >= self.batch_rows and self.replay.size:
            self.due -= self.batch_rows
            found = (ahead or self._fetch(device)).result()
            ahead = self._fetch(device) if self.due >= self.batch_rows else None
            if self.own.noisy:
                model.resample(self.rng)
            yield found
        if self.rows - self.copied >= self.own.target_every:
            self._copy()

    def _copy(self) -> None:
        self.copied = self.rows
        self.refresh()

    def _fetch(self, device: torch.device) -> Future[tuple[Any, Tensor]]:
        """Draw a batch; it is put together and judged while the last one trains."""
        assert self.replay is not None and self.target is not None  # noqa: PT018
        own, share = self.config.replay, min(1.0, self.clock.env_steps / self.config.steps)
        beta = own.beta + (own.beta_end - own.beta) * share if own.alpha else 0.0
        picks = self.replay.draw(self.own.batch_size, beta, self.draws)
        if self.own.noisy:  # here, for its numbers must come in a fixed order
            self.target.resample(self.rng)
        return self.ahead.submit(self._prepare, self.replay, self.target, picks, device)

    def _prepare(self, replay: Kept, target: Network, picks: Picks, device: torch.device) -> tuple[Any, Tensor]:
        rows = replay.gather(picks).to(device)
        size = max(1, self.means.chunk * self.own.batch_size // self.batch_rows)  # of R2D2: sequences
        pieces = slices(self.own.batch_size, size if self.means.chunk else 0, 1)
        ways = self.judges.size

        def work(k: int) -> list[Tensor]:
            with torch.no_grad():
                return [self.judge(target, rows, at) for at in pieces[k::ways]]

        done = self.judges.run([partial(work, k) for k in range(min(ways, len(pieces)))])
        return rows, torch.cat([done[i % ways][i // ways] for i in range(len(pieces))], self.axis)

    def after_step(self, model: Network, batch: Any) -> None:
        """Give what was drawn the priority of its error."""
        assert self.replay is not None
        if self.config.replay.alpha:
            self.replay.update(batch.rows.picks, batch.priority.double().cpu().numpy())

    def gauges(self) -> dict[str, float]:
        size = 0 if self.replay is None else self.replay.size
        return {"replay/size": size, "epsilon": float(self.explore(torch.arange(self.config.env.num_envs)).mean())}

    def state_dict(self) -> dict[str, Tensor]:
        if self.saved:  # nothing was done since
            return self.saved
        target = {} if self.target is None else {f"target/{k}": x for k, x in self.target.state_dict().items()}
        saves = self.config.replay.save and self.lender is None
        kept = self.replay.state_dict() if self.replay is not None and saves else {}
        counts = torch.tensor([self.rows, self.kept, self.copied, self.due], dtype=torch.float64)
        return {**self.base.state_dict(), **target, **kept, "counts": counts, "rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.base.load_state_dict(state)
        *counts, self.due = state["counts"].tolist()
        self.rows, self.kept, self.copied = (int(x) for x in counts)
        self.rng.set_state(state["rng"])
        self.saved = state


def _nothing() -> None:
    pass


def stack_of(config: Config) -> int:
    """Frames of a stack of which replay keeps the newest only; 0: observations are kept as they are."""
    return config.atari.stack if is_atari(config.env.id) and config.atari.stack > 1 else 0


def size_of(config: Config) -> tuple[int, int]:
    """Envs and rows of one learner's replay."""
    learners = config.learners if isinstance(config.learners, int) else 1
    return config.replay.envs or config.env.num_envs, config.replay.capacity // learners

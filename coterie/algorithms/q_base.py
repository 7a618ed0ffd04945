"""The base of value methods: exploration, the target network, the replay ratio, and prefetching of batches.

Each rollout adds `q.intensity` times its rows to the samples due; batches are sampled while a whole batch is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.base import ON_CPU, Batch, Clock, Compute, Loss, Part, Rewards, slices
from coterie.config import Config, Refusal, ResolvedConfig
from coterie.envs.pool import is_atari
from coterie.models.base import Model
from coterie.models.build import Network, acting_copy
from coterie.parallel.threads import Team
from coterie.replay.priority import Picks
from coterie.replay.storage import Capacity
from coterie.types import AgentOutput, Array, Inputs, Rollout, Spec


def greedy(values: Tensor, explore: Tensor | None, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The argmax of `values` `[B, A]`, or with probability `explore` a random action; and its log-probability."""
    best = values.argmax(-1)
    if explore is None:
        return best, torch.zeros(len(best), device=best.device)
    n = values.shape[-1]
    uniform = torch.rand(2, len(best), generator=rng, device=best.device)
    action = torch.where(uniform[0] < explore, (uniform[1] * n).long().clamp_(max=n - 1), best)
    probability = explore / n + (1 - explore) * (action == best)
    return action, probability.clamp_(min=1e-12).log_()


class Replay(Protocol):
    """Stores rollouts, and samples batches of them by priority."""

    @property
    def size(self) -> int: ...
    def add(self, rollout: Rollout, reward: Array) -> None: ...
    def draw(self, count: int, beta: float = 0.0, rng: np.random.Generator | None = None) -> Picks: ...
    def gather(self, picks: Picks) -> Any: ...
    def update(self, picks: Picks, priority: Array) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class QLearning(ABC):
    """The base of DQN and R2D2. They add `make_replay`, `evaluate_target`, `batches` and `loss`."""

    on_policy: ClassVar[bool] = False
    value_based: ClassVar[bool] = True
    running_advantage: ClassVar[bool] = False
    refusals: ClassVar[tuple[Refusal, ...]]
    batch_axis: ClassVar[int] = 0  # of the target network's output

    def __init__(self, config: ResolvedConfig, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        self.config, self.spec, self.q, self.compute, self.chunk = config, spec, config.q, compute, compute.chunk
        self.rewards = Rewards(config.reward, config.algo)
        self.clock = Clock()
        self.sampled = config.q.eval_epsilon  # share of random actions
        self.batch_rows = config.q.batch_size * self.rows_per_sample(config)  # env steps that a batch trains on
        self.team = Team(compute.threads)  # evaluates the target network
        self.sampling: np.random.Generator | None = None  # a secondary learner's; else the replay has its own
        self.replay: Replay | None = None
        self.lender: QLearning | None = None  # a secondary learner samples from this one's replay
        self.target_model: Network | None = None
        self.copy_weights: Callable[[], None] = _nothing  # into the target network
        self.saved: dict[str, Tensor] = {}  # a checkpoint's, until replay and target network exist
        # Env steps so far, those stored in the replay, samples to train on, env steps at the last target copy.
        self.rows, self.stored, self.copied = 0, 0, -1
        self.due = 0.0
        self.seed, self.rng = seed, torch.Generator().manual_seed(seed)
        self.prefetcher = ThreadPoolExecutor(1, "coterie-replay")

    @staticmethod
    def unroll_length(config: Config) -> int:
        """Steps of each env in a rollout."""
        return config.algo.unroll_length

    @staticmethod
    def training_threads(config: Config, most: int) -> int:
        """Threads that share a batch, at most `most`."""
        return most

    @staticmethod
    def steps_kind(config: Config) -> tuple[object, ...]:
        """Settings that all-reduce needs equal in all learners."""
        return ()

    @staticmethod
    @abstractmethod
    def replay_bytes(config: ResolvedConfig, spec: Spec) -> int:
        """Bytes of one learner's full replay."""

    @staticmethod
    def rows_per_sample(config: Config) -> int:
        """Env steps that one sample of the replay trains on."""
        return 1

    @staticmethod
    def first_rows(config: Config) -> int:
        """Env steps of a learner after which the replay can be sampled."""
        return 2 * config.env.num_envs * (config.algo.unroll_length + config.q.n_step)

    @abstractmethod
    def make_replay(self, rollout: Rollout) -> Replay:
        """An empty replay for rollouts like this one."""

    @abstractmethod
    def evaluate_target(self, target: Model, rows: Any, at: slice) -> Tensor:
        """The target network's output for the samples `at` of a batch, which lie along `batch_axis` of it."""

    @abstractmethod
    def batches(self, model: Model, rollout: Rollout) -> Iterator[Batch]:
        """The batches that are due after this rollout."""

    @abstractmethod
    def loss(self, model: Model, batch: Part) -> Loss:
        """The loss of one part of a batch."""

    def borrow(self, lender: QLearning) -> None:
        """Sample from another learner's replay, with separate random numbers, and without writing priorities."""
        self.lender, self.clock, self.sampling = lender, lender.clock, np.random.default_rng(lender.seed + 1)

    def acts_at(self, version: int) -> None:
        """In an actor: estimate the run's env steps from the learner step of the weights."""
        of_one = version * self.batch_rows / self.q.intensity + self.q.learn_start * (version > 0)
        self.clock.env_steps = int(min(self.config.steps, of_one * self.config.learners))

    def explore(self, env_id: Tensor) -> Tensor:
        """Share of random actions of each env `[B]`."""
        if self.q.noisy:
            return torch.zeros(len(env_id), device=env_id.device)
        if self.q.ladder:
            envs = self.config.env.num_envs * self.config.learners
            place = (env_id % envs).float() / max(1, envs - 1)
            return self.q.epsilon_end ** (1 + self.q.ladder * place)
        left = max(0.0, 1 - self.clock.env_steps / max(1, self.q.epsilon_steps))
        epsilon = self.q.epsilon_end + (self.q.epsilon - self.q.epsilon_end) * left
        return torch.full((len(env_id),), epsilon, device=env_id.device)

    def act(
        self, model: Model, inputs: Inputs, core_state: Tensor | None, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]:
        """Epsilon-greedy actions; the value is that of the chosen action. Builds no graph."""
        with torch.inference_mode():
            if self.q.noisy:
                model.resample(None if explore is None else rng)
            params, _, core_state = model(inputs, core_state)
            values = model.expected(params)
            action, log_prob = greedy(values, explore, rng)
            return AgentOutput(action, log_prob, values.gather(-1, action[..., None])[..., 0]), core_state

    def due_batches(self, model: Model, rollout: Rollout) -> Iterator[tuple[Any, Tensor]]:
        """Store the rollout, then sample the batches that are due: as gathered by the replay, on the rollout's device,
        with the output of the target network. Their number depends only on the number of rows, so learners with equal
        numbers of rows make equal numbers of steps.
        """
        self._begin(model, rollout)
        rows, device, replay = rollout.reward.numel(), rollout.reward.device, self.replay
        assert replay is not None
        if self.lender is None:
            replay.add(rollout, self.rewards.clipped(rollout).cpu().numpy())
        if self.stored >= self.q.learn_start:
            if self.copied < 0:
                self._copy()  # its normalizers have seen observations by now
            self.due += rows * self.q.intensity
        self.rows, self.stored = self.rows + rows, self.stored + rows
        prefetched = None
        while self.due >= self.batch_rows and replay.size:
            self.due -= self.batch_rows
            batch = (prefetched or self._fetch(device)).result()
            prefetched = self._fetch(device) if self.due >= self.batch_rows else None
            if self.q.noisy:
                model.resample(self.rng)
            yield batch
        if self.rows - self.copied >= self.q.target_every:
            self._copy()

    def _begin(self, model: Model, rollout: Rollout) -> None:
        """Make the target network and the replay at the first rollout, with a checkpoint's state if there is one."""
        if self.target_model is None:
            self.target_model, self.copy_weights = acting_copy(cast(Network, model), self.compute.dtype, apart=True)
            if target := {k.removeprefix("target/"): x for k, x in self.saved.items() if k.startswith("target/")}:
                self.target_model.load_state_dict(target)
        if self.lender is not None:
            self.replay, self.stored = self.lender.replay, self.lender.stored - rollout.reward.numel()
        elif self.replay is None:
            self.replay = self.make_replay(rollout)
            if state := {k: x for k, x in self.saved.items() if k.startswith("replay/")}:
                self.replay.load_state_dict(state)
            else:
                self.stored = 0  # the replay was not saved and is refilled
        self.saved = {}

    def _copy(self) -> None:
        self.copied = self.rows
        self.copy_weights()

    def _fetch(self, device: torch.device) -> Future[tuple[Any, Tensor]]:
        """Sample a batch. It is gathered and evaluated in a thread, while the previous one trains."""
        assert self.replay is not None and self.target_model is not None  # noqa: PT018
        replay, share = self.config.replay, min(1.0, self.clock.env_steps / self.config.steps)
        beta = replay.beta + (replay.beta_end - replay.beta) * share if replay.alpha else 0.0
        picks = self.replay.draw(self.q.batch_size, beta, self.sampling)
        if self.q.noisy:  # here and not in the thread: random numbers are drawn in a fixed order
            self.target_model.resample(self.rng)
        return self.prefetcher.submit(self._prepare, self.replay, self.target_model, picks, device)

    def _prepare(self, replay: Replay, target: Network, picks: Picks, device: torch.device) -> tuple[Any, Tensor]:
        rows = replay.gather(picks).to(device)
        size = max(1, self.chunk * self.q.batch_size // self.batch_rows)  # samples; sequences for R2D2
        pieces = slices(self.q.batch_size, size if self.chunk else 0, 1)
        ways = self.team.size

        def work(k: int) -> list[Tensor]:
            with torch.no_grad():
                return [self.evaluate_target(target, rows, at) for at in pieces[k::ways]]

        done = self.team.run([partial(work, k) for k in range(min(ways, len(pieces)))])
        return rows, torch.cat([done[i % ways][i // ways] for i in range(len(pieces))], self.batch_axis)

    def after_step(self, model: Model, batch: Any) -> None:
        """Write the errors of the batch as the priorities of its samples."""
        assert self.replay is not None
        if self.config.replay.alpha:
            self.replay.update(batch.rows.picks, batch.priority.double().cpu().numpy())

    def after_rollout(self, model: Model, rollout: Rollout) -> None:
        """Update the running normalizers."""
        self.rewards.update(model, rollout)

    def gauges(self) -> dict[str, float]:
        size = 0 if self.replay is None else self.replay.size
        return {"replay/size": size, "epsilon": float(self.explore(torch.arange(self.config.env.num_envs)).mean())}

    def state_dict(self) -> dict[str, Tensor]:
        if self.saved:  # loaded, and unchanged since
            return self.saved
        target = {} if self.target_model is None else self.target_model.state_dict()
        saves = self.config.replay.save and self.lender is None
        replay = self.replay.state_dict() if self.replay is not None and saves else {}
        return {
            "entropy_adjustment": torch.zeros(1, dtype=torch.float64),  # part of the format of checkpoints
            **self.rewards.state_dict(),
            **{f"target/{k}": x for k, x in target.items()},
            **replay,
            "counts": torch.tensor([self.rows, self.stored, self.copied, self.due], dtype=torch.float64),
            "rng": self.rng.get_state(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rewards.load_state_dict(state)
        *counts, self.due = state["counts"].tolist()
        self.rows, self.stored, self.copied = (int(x) for x in counts)
        self.rng.set_state(state["rng"])
        self.saved = state


def _nothing() -> None:
    pass


def stacked_frames(config: Config) -> int:
    """Frames of a stack, of which the replay stores the newest only; 0: observations are stored whole."""
    return config.atari.stack if is_atari(config.env.id) and config.atari.stack > 1 else 0


def replay_size(config: ResolvedConfig) -> tuple[int, int]:
    """Envs and rows of one learner's replay."""
    return config.replay.envs or config.env.num_envs, config.replay.capacity // config.learners


def replay_capacity(config: ResolvedConfig, spec: Spec) -> Capacity:
    """Room in one learner's replay."""
    return Capacity(spec, *replay_size(config), stacked_frames(config), config.replay.disk)


def value_refusals(
    rows: Callable[[ResolvedConfig], int], needed: Callable[[Config], int], first_rows: Callable[[Config], int]
) -> tuple[Refusal, ...]:
    """Refusals of all value methods. `rows`: rows that the replay stores per env, which must be more than `needed`.
    `first_rows`: env steps after which the replay can be sampled.
    """
    return (
        Refusal(
            lambda c, s: s.action.kind != "categorical",
            "algorithm",
            "must be a2c, ppo or vtrace: dqn and r2d2 need a Discrete action space, which this env does not have",
        ),
        Refusal(
            lambda c, s: c.reward.normalize,
            "reward.normalize",
            "must be False with dqn and r2d2, whose replay stores old rewards; use reward.clip or reward.scale",
        ),
        Refusal(
            lambda c, s: c.q.learn_start < first_rows(c),
            "q.learn_start",
            "must be at least 2 x env.num_envs x (algo.unroll_length + q.n_step), for r2d2 env.num_envs x "
            "(r2d2.burn_in + length + stride + algo.unroll_length): before that the replay cannot be sampled",
        ),
        Refusal(
            lambda c, s: rows(c) <= needed(c),
            "replay.capacity",
            "must be larger: each env of a learner needs more than algo.unroll_length + q.n_step + atari.stack rows, "
            "for r2d2 more than r2d2.burn_in + r2d2.length, rounded down to whole rollouts",
        ),
        Refusal(lambda c, s: 0 < c.replay.envs < c.env.num_envs, "replay.envs", "must not be below env.num_envs"),
        Refusal(lambda c, s: c.q.atoms > 0 and c.q.v_min >= c.q.v_max, "q.v_min", "must be below q.v_max"),
        Refusal(
            lambda c, s: c.q.atoms > 0 and c.replay.initial == "acting",
            "replay.initial",
            "must be highest with q.atoms, whose priorities are divergences of distributions",
        ),
        Refusal(
            lambda c, s: bool(c.allreduce.address),
            "algorithm",
            "must not be dqn or r2d2 with allreduce between machines: the replay of a machine that joins is empty; "
            "use exchange gossip",
        ),
    )

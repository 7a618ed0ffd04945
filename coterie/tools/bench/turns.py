"""What `coterie bench` measures in turns: the envs alone, the learner's own loop, and the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import cast

import psutil
import torch
from numpy.random import default_rng

from coterie.acting.base import Acting
from coterie.acting.table import acting_kind
from coterie.algorithms.base import AnyBatch
from coterie.build.factory import acting_policy
from coterie.build.resources import resolve_resources
from coterie.envs.make import make_envs
from coterie.envs.spaces import random_actions
from coterie.envs.tasks import child_env, envs_per_child
from coterie.exchange.table import exchange_kind
from coterie.learner import Gradients
from coterie.learner import learn as train
from coterie.parallel.threads import ALONE
from coterie.roles.learner_process import LearnerProcess
from coterie.types import Rollout

_LEAD = 3  # rollouts


@dataclass
class Turn:
    """A period in which env steps are counted. `ahead`: rollouts that were acted before it; the clock and the count
    start again after the last of them. `burst`: rollouts that end together, none of which is counted alone.
    """

    seconds: float
    ahead: int = 0
    burst: int = 1
    steps: int = 0
    ends: list[float] = field(default_factory=lambda: [time.perf_counter()])  # of its bursts, after its beginning
    begun: list[int] = field(default_factory=list)  # env steps of the rollouts of an unfinished burst

    @property
    def over(self) -> bool:
        return self.ahead <= 0 and len(self.ends) > 1 and time.perf_counter() >= self.ends[0] + self.seconds

    @property
    def rate(self) -> float:
        """Env steps/s up to the end of the last burst."""
        return self.steps / (self.ends[-1] - self.ends[0]) if self.steps else 0.0

    def count(self, steps: int) -> None:
        self.begun.append(steps)
        if len(self.begun) < self.burst:
            return
        self.steps, self.begun = self.steps + sum(self.begun), []
        self.ends.append(time.perf_counter())
        if self.ahead > 0:
            self.ahead -= self.burst
            self.steps, self.ends = 0, self.ends[-1:]


class ProcessorClock:
    """Processor time of this process and of the worker processes that it has when the clock is made."""

    def __init__(self) -> None:
        self.workers = psutil.Process().children(recursive=True)

    def seconds(self) -> float:
        """Since these processes began."""
        used = time.process_time()
        for worker in self.workers:
            with suppress(psutil.NoSuchProcess):  # replaced
                times = worker.cpu_times()
                used += float(times.user + times.system)
        return used


class EnvOnly:
    """The learner's envs in one group, in as many threads as step them in a run, with precomputed actions."""

    def __init__(self, learner: LearnerProcess) -> None:
        config, own, processes = learner.config, learner.resources, 1
        if (kind := acting_kind(config)).has_children:
            mine, processes = child_env(config, 0, 0)[0], config.actors // config.learners
            own = resolve_resources(replace(mine, device="cpu"), learner.spec, cores=int(kind.own_policy))
        # As an env host has it, each group of a child has one for each of its cores.
        each = -(-own.env_threads // (1 if kind.hosted and not config.env.threads else own.groups))
        self.threads = threads = processes * own.groups * each
        env = replace(config.env, delay=0.0)
        self.envs = make_envs(env, config.atari, seed=config.seed, threads=threads, groups=1)
        self.choose = partial(random_actions, learner.spec.action, default_rng(config.seed), config.env.num_envs)
        self.actions = cycle([self.choose() for _ in range(64)])
        self.masked, self.seen = learner.spec.masked, self.envs.recv(0)
        self.clock = ProcessorClock()

    def turn(self, seconds: float) -> tuple[float, float]:
        """Env steps/s, and the processor's seconds for each, of all threads and worker processes."""
        before = self.clock.seconds()
        turn = Turn(seconds)
        while not turn.over:
            self.envs.send(0, self.choose(self.seen.obs) if self.masked else next(self.actions))
            self.seen = self.envs.recv(0)
            turn.count(int((~self.seen.is_first).sum()))
        return turn.rate, (self.clock.seconds() - before) / max(1, turn.steps)


class Training:
    """The learner's own loop, paused after each turn; `learn=False` discards its rollouts untrained."""

    def __init__(self, learner: LearnerProcess) -> None:
        self.learner = learner
        self.last: Rollout | None = None
        self.source = learner.acting.rollouts(learner.parts.refresh)
        self.now = Turn(0.0)

    def rest(self) -> None:
        """Wait until nothing acts, because actors have filled all slots."""
        self.now.ahead = self.learner.acting.rest()

    @property
    def burst(self) -> int:
        """Rollouts that end at about the same time, because each has some of the envs only. Known after a turn."""
        return 1 if self.last is None else max(1, self.learner.config.env.num_envs // len(self.last.env_id))

    def turn(self, seconds: float, learn: bool = True) -> float:
        """Env steps/s."""
        learner = self.learner
        # Actors that have waited for nothing run ahead of a learner that begins to train.
        lead = _LEAD if learn and acting_kind(learner.config).has_children else 0
        self.now = Turn(seconds, max(self.now.ahead, lead), self.burst)
        if learn:
            learner.exchange.agree(False, False)
            # All that it asks of its acting are rollouts; `source` publishes before each.
            train(replace(learner.parts, acting=cast(Acting, self), observers=[]), self._over)
        else:
            while not self.now.over:
                self.last = next(self.source)
                if exchange_kind(learner.config).shared_weights:  # others may wait for this learner's core
                    learner.exchange.after_rollout(learner.params)
                self.now.count(int(self.last.mask.sum()))
        return self.now.rate

    def _over(self, rollout: Rollout) -> bool:
        self.now.count(int(rollout.mask.sum()))
        return self.learner.exchange.agree(False, self.now.over)[1]

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        for rollout in self.source:
            self.last = rollout
            yield rollout

    def close(self) -> None:
        self.learner.close()


class StepTimer:
    """The acting forward and the training of an env step, each alone on one torch thread."""

    def __init__(self, learner: LearnerProcess, rollout: Rollout) -> None:
        self.learner, self.rollout = learner, rollout
        self.device = learner.resources.device
        self.width = self._most_at_once()
        columns = torch.arange(self.width, device=self.device) % len(rollout.env_id)
        self.inputs = rollout.inputs.map(lambda x: x[0, columns])
        self.ids, self.rng = torch.arange(self.width, device=self.device), torch.Generator(self.device)
        self.state = learner.model.initial_state(self.width)
        self.alone = Gradients(learner.model, learner.params, replace(learner.resources, team=ALONE))
        self.policy = acting_policy(learner.algorithm, learner.resources.record_acting)
        self.batch: AnyBatch | None = None  # the last
        self.warmed = set[str]()  # what has been recorded, where it is, and has run some times

    def _most_at_once(self) -> int:
        """Envs in one forward pass, the most where that varies."""
        config = self.learner.config
        kind = acting_kind(config)
        if kind.own_policy:
            return envs_per_child(config)
        if kind.hosted:
            return kind.batch_max(config) or config.env.num_envs
        return config.env.num_envs // self.learner.resources.groups

    def _act(self, width: int) -> None:
        inputs, state = self.inputs.map(lambda x: x[:width]), None if self.state is None else self.state[:width]
        self.policy(self.learner.actor, inputs, state, self.ids[:width], self.rng)

    def _train(self) -> None:
        for batch in self.learner.algorithm.batches(self.learner.model, self.rollout):
            self._step(batch)
            self.batch = batch

    def _step(self, batch: AnyBatch) -> None:
        batch.metrics, batch.priority = {}, None  # as a new one
        batch.metrics = self.alone.compute(self.learner.algorithm, batch)
        self.learner.params.grad.zero_()

    def turn(self, seconds: float) -> dict[str, float]:
        """Seconds of a core for each env step, of both."""
        act = self._mean("act", partial(self._act, self.width), seconds / 2) / self.width
        return {"act": act, "train": self._mean("train", self._train, seconds / 2) / self.rollout.mask.numel()}

    def calls(self, seconds: float) -> dict[str, float]:
        """Seconds of a core for the policy's forward pass and for the gradient of a learner step, and the part of each
        that does not depend on the size of the batch, by batches of half the size: Python, and calls of operators.
        """
        pairs = {}
        if self.width > 1:
            pairs["forward"] = partial(self._act, self.width), partial(self._act, self.width // 2)
        if self.batch is not None and (fewer := self.batch.half()).valid < self.batch.valid:
            pairs["step"] = partial(self._step, self.batch), partial(self._step, fewer)
        found = dict[str, float]()
        for name, calls in pairs.items():
            whole, half = (self._mean(f"{name} {k}", calls[k], seconds / len(pairs) / 2) for k in (0, 1))
            found |= {name: whole, f"{name}_fixed": max(0.0, 2 * half - whole)}
        return found

    def _mean(self, name: str, call: Callable[[], object], seconds: float) -> float:
        """Seconds of processor time that a call takes: other learners may share the core, and a value method prepares
        its next batch meanwhile.
        """
        clock = self._done if self.device.type == "cuda" else time.process_time
        if self.learner.resources.record and name not in self.warmed:
            self.warmed.add(name)
            for _ in range(5):  # until it is recorded and TorchScript has settled
                call()
        calls, begin, end = 0, clock(), time.perf_counter() + seconds
        while not calls or time.perf_counter() < end:
            call()
            calls += 1
        return (clock() - begin) / calls

    def _done(self) -> float:
        """The time when the GPU has done what it was given."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

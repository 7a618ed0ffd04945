"""Roles: what one process of a run is made of. A learner, which may act itself, and an actor of decoupled acting.

A role is built from a config and its links to the others: a bench, a test and every launch place the same parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coterie.acting.decoupled import Decoupled, Desk, Stopped
from coterie.acting.inline import Inline, Policy
from coterie.actor import Recorder, Stages, local_fields
from coterie.algorithms.ppo import horizon
from coterie.config import Config
from coterie.envs.make import make_envs, make_spec
from coterie.envs.owner import Envs
from coterie.exchange.diagnostics import Sampled
from coterie.learner import Gradients, LearnSettings, Progress, autocast, learn
from coterie.matrix import check
from coterie.models.build import ActorCritic, acting_copy
from coterie.ops.optim import scaled_lr, schedule_value
from coterie.parallel.affinity import rss_mb
from coterie.parallel.board import COUNTS
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.parts import (
    ENV_SEED,
    POLICY_SEED,
    AnyAlgorithm,
    Layout,
    Links,
    actor_env,
    make_algorithm,
    make_exchange,
    make_model,
    normalizers,
    patience,
    resolve,
    seed_for,
    settle,
)
from coterie.types import AgentOutput, Inputs, Rollout

_REPORT_S = 0.5  # between two reports of an actor


def _envs(
    config: Config, layout: Layout, life: int, first: int, union: bool = False
) -> tuple[Envs, list[torch.Generator]]:
    """Envs with global ids from `first` on, and random numbers for each group: their threads must not race for them."""
    envs = make_envs(
        config.env,
        config.atari,
        seed=seed_for(config.seed, ENV_SEED, life),
        first_env_id=first,
        threads=layout.env_threads,
        groups=layout.groups,
        union=union,
    )
    rngs = [
        torch.Generator(layout.device).manual_seed(seed_for(config.seed, POLICY_SEED, life, first + cols.start))
        for cols in envs.groups
    ]
    return envs, rngs


def _policy(algorithm: AnyAlgorithm, model: ActorCritic, rngs: list[torch.Generator], envs: int) -> Policy:
    everyone = torch.ones(envs, device=rngs[0].device)

    def policy(g: int, inputs: Inputs, core_state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        return algorithm.act(model, inputs, core_state, everyone, rngs[g])

    return policy


class Learner:
    """A learner with its acting: builds the parts and runs the loop.

    `life` counts the starts of this run (0, then one more at each resume), so that a resumed run does not see the
    episodes of its first minutes again.
    """

    def __init__(self, config: Config, life: int = 0, links: Links | None = None) -> None:
        self.links = links = links or Links()
        self.config = config = settle(replace(config, learners=links.learners))
        self.spec = make_spec(config.env, config.atari)
        check(config, self.spec)
        self.layout = layout = resolve(config, self.spec, links.gpu)
        if layout.device.type == "cuda":
            torch.cuda.set_device(layout.device)
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.model = make_model(config, self.spec).to(layout.device)
        self.params = FlatParams(self.model)
        self.algorithm = make_algorithm(config, self.spec, layout.chunk, links.rank)
        self.progress, self.stages = Progress(), Stages()
        self.before: dict[str, int] = {}  # this learner's counts when it was started
        moments = normalizers(config, self.model)
        self.exchange = make_exchange(config, self.params, moments, links)
        if links.gradients is not None:
            self.exchange = Sampled(self.exchange, links.gradients, links.rank, config.log.cosines)
        self.actor, self.refresh_actor = acting_copy(self.model, layout.dtype)
        self.rngs: list[torch.Generator] = []
        self.acting: Inline | Decoupled
        if config.acting == "inline":
            self.acting = self._inline(life)
        else:
            assert links.slots is not None
            assert links.weights is not None
            assert isinstance(config.actors, int)
            self.acting = Decoupled(
                links.slots, links.weights, self.params, moments, links.board, links.rank,
                config.actors // links.learners, self.stages, layout.device,
                publish_every=config.decoupled.publish_every, lockstep=config.decoupled.lockstep,
                timeout=patience(config),
            )  # fmt: skip
        self.trainers = Team(layout.torch_threads if config.model.compile == "none" else 1)
        self.gradients = Gradients(self.model, self.params, self.trainers, autocast(layout.device, layout.dtype))
        if config.model.compile != "none":  # acting has other shapes, and stays as it is
            compiled = torch.compile(self.model, mode=config.model.compile, dynamic=False)
            self.gradients.models[0] = cast(ActorCritic, compiled)

    def _inline(self, life: int) -> Inline:
        config, layout = self.config, self.layout
        envs, self.rngs = _envs(config, layout, life, self.links.rank * config.env.num_envs)
        state = self.model.initial_state(1)
        core = () if state is None else state.shape[1:]
        fields = local_fields(self.spec, horizon(config), config.env.num_envs, layout.device, core)
        return Inline(
            envs,
            _policy(self.algorithm, self.actor, self.rngs, config.env.num_envs),
            Recorder(fields, envs.groups, layout.device),
            self.model.initial_state,
            self.refresh_actor,
            self.stages,
            Team(min(layout.groups, layout.torch_threads)),
            config.algo.poll,
        )

    def lr(self, env_steps: int) -> float:
        optim, alone = self.config.optim, self.config.exchange in ("hogwild", "store")
        envs = self.config.env.num_envs * (1 if alone else self.links.learners)
        return scaled_lr(optim, envs) * schedule_value(optim.schedule, env_steps, self.config.steps)

    def describe(self) -> str:
        """What `auto` came to, for the person who started the run."""
        lay, count, config = self.layout, sum(p.numel() for p in self.model.parameters()), self.config
        kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[lay.dtype]
        if isinstance(self.acting, Decoupled):
            slots = self.acting.slots
            acting = (
                f"{config.env.num_envs} envs in {self.acting.actors} actor(s), batches of {slots.per_batch} x "
                f"{slots.width} rollouts"
            )
        else:
            acting = f"{config.env.num_envs} envs in {lay.groups} group(s) on {lay.env_threads} thread(s)"
        return f"{acting}, {lay.torch_threads} training thread(s), {lay.device}, {kind}; {count:,} weights"

    def start(self, counts: dict[str, int], total: int) -> None:
        """Go on from what this learner had counted before, and from the env steps of the whole run."""
        for name in ("learner_steps", "samples_trained", "masked", "policy_lag_max", "episodes"):
            setattr(self.progress, name, counts.get(name, 0))
        self.progress.env_steps = counts.get("learned", 0)
        self.before = counts
        self.exchange.guard.skipped = counts.get("skipped", 0)
        self.exchange.steps.start(self.progress.env_steps, total)

    def counts(self) -> dict[str, int]:
        """What the board tells of this learner."""
        p, acted = self.progress, self.acting.counts()
        return {
            "produced": self.before.get("learned", 0) + acted.get("produced", 0),
            "learned": p.env_steps,
            "masked": p.masked,
            "learner_steps": p.learner_steps,
            "samples_trained": p.samples_trained,
            "policy_lag_max": p.policy_lag_max,
            "episodes": p.episodes,
            "skipped": self.exchange.guard.skipped,
            "replaced": self.before.get("replaced", 0) + acted.get("replaced", 0),
        }

    def gauges(self) -> dict[str, float]:
        """What the algorithm, the acting and the exchange can tell about themselves, for the metrics."""
        tell = getattr(self.exchange, "gauges", None)
        return self.algorithm.gauges() | self.acting.gauges() | (tell() if tell is not None else {})

    def run(self, on_rollout: Callable[[Rollout], bool]) -> None:
        """Train until `on_rollout` returns True."""
        settings = LearnSettings(self.lr, self.stages, on_rollout, self.links.learners)
        with self.exchange, closing(self.acting):
            learn(
                self.model,
                self.params,
                self.algorithm,
                self.acting,
                self.exchange,
                self.gradients,
                self.progress,
                settings,
            )

    def close(self) -> None:
        self.trainers.close()
        self.acting.close()
        torch.set_num_threads(self._torch_threads)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint must hold besides counters."""
        return {
            "model": dict(self.model.state_dict()),
            "exchange": self.exchange.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "rng": {f"policy_{g}": rng.get_state() for g, rng in enumerate(self.rngs)},
        }

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.model.load_state_dict(tensors["model"])  # copies into the flat views
        self.exchange.load_state_dict(tensors["exchange"])
        self.algorithm.load_state_dict(tensors["algorithm"])
        for g, rng in enumerate(self.rngs):
            if (saved := tensors["rng"].get(f"policy_{g}")) is not None:  # another machine may have fewer groups
                rng.set_state(saved)


class Actor:
    """An actor of decoupled acting: number `number` of its learner, with the board's row `row`.

    It acts on the CPU, as inline acting does, with weights that it takes and into slots that it is given.
    """

    def __init__(self, config: Config, life: int, links: Links, number: int, row: int) -> None:
        assert links.slots is not None
        assert links.weights is not None
        config = settle(replace(config, learners=links.learners))
        self.spec = make_spec(config.env, config.atari)
        mine, first = actor_env(config, number, links.rank)
        layout = resolve(replace(mine, device="cpu"), self.spec)
        torch.set_num_threads(1)
        self.board, self.row = links.board, row
        self.model = make_model(config, self.spec)
        params = FlatParams(self.model)  # before the copy is made, which follows these tensors
        self.stages = Stages()
        acting, refresh = acting_copy(self.model, layout.dtype)
        self.envs, rngs = _envs(mine, layout, life, first, union=mine.env.id != config.env.id)
        moments = normalizers(config, self.model)
        self.desk = Desk(
            links.slots, links.weights, params, moments, links.board, row, links.rank, number, self.envs.groups,
            self.stages, patience(config),
        )  # fmt: skip
        algorithm = make_algorithm(config, self.spec)
        policy = _policy(algorithm, acting, rngs, mine.env.num_envs)
        self.acting = Inline(
            self.envs,
            partial(self._act, policy),
            self.desk.recorders[0, 0],
            self.model.initial_state,
            refresh,
            self.stages,
            Team(1),  # it has one core, and counts without a lock
            config.algo.poll,
            self.desk.next,
        )
        self.calls = [0] * layout.groups
        self._counts = links.board.counts[row]
        self._replaced = int(self._counts[COUNTS.index("replaced")])  # by whoever was this actor before

    def _act(self, policy: Policy, g: int, inputs: Inputs, state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        """Every row after row 0 shows the consequence of a step: it is counted at once, whatever becomes of it."""
        if self.calls[g] % (self.acting.recorder.unroll_length + 1):
            self._counts[COUNTS.index("produced")] += int((~inputs.is_first).sum())
        self.calls[g] += 1
        self.desk.check()
        return policy(g, inputs, state)

    def run(self, post: Callable[[str, Any], None]) -> None:
        """Act until the run is over."""
        reported = 0.0
        with closing(self.acting):
            try:
                for _ in self.acting.rollouts(self._refresh):
                    self._counts[COUNTS.index("delivered")] = self._counts[COUNTS.index("produced")]
                    self._counts[COUNTS.index("replaced")] = self._replaced + self.envs.replaced
                    self.desk.leave()
                    if time.monotonic() - reported > _REPORT_S:
                        reported = time.monotonic()
                        post("acted", self._report())
            except Stopped:
                pass

    def _refresh(self) -> None:
        begin = time.perf_counter()
        self.acting.publish(self.desk.pull())
        self.stages.add("pull", begin)

    def _report(self) -> dict[str, Any]:
        return {
            "stages": {f"actor/{k}": v for k, v in self.stages.seconds.items()},
            "rss_mb": rss_mb(),
            "failures": self.acting.failures(),
        }

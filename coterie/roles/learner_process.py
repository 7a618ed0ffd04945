"""The parts of a learner's process, built from a config and the process's place in the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coterie.acting.base import Acting, LearnerSetup
from coterie.acting.table import acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.build.factory import (
    ProcessContext,
    agent_of,
    env_share,
    exchange_setup,
    make_algorithm,
    normalizers,
    patience,
    seed_globals,
    stated_lag,
    updates_of,
    worker_setup,
)
from coterie.build.resources import resolve_resources
from coterie.build.validity import check, room_of
from coterie.build.warm_start import first_model
from coterie.config import ResolvedConfig
from coterie.envs.events import EnvEvents
from coterie.envs.make import make_spec
from coterie.envs.news import EnvNews
from coterie.errors import counted, one_line
from coterie.exchange.table import exchange_kind
from coterie.flight.life import unrecorded
from coterie.instruments.consensus import Changes, GradientSamples
from coterie.instruments.norms import Norms
from coterie.instruments.secondary import Secondary
from coterie.learner import Gradients, LearnerParts, Observer, Progress, learn
from coterie.models.build import Network, acting_copy
from coterie.models.heads import Normalizer
from coterie.ops.optim import scaled_lr, schedule_value
from coterie.parallel.hardware import keep_freed_memory
from coterie.parallel.params import FlatParams
from coterie.parallel.stages import Stages
from coterie.parallel.threads import Team, set_torch
from coterie.remote.admission import Servers
from coterie.roles.life import FlightNotes, LifeRecorder, not_restored
from coterie.runs.checkpoint import CheckpointPart
from coterie.types import Rollout


class LearnerProcess:
    """A learner with its acting: builds the parts and runs the loop. `life_number`: another number at each start, so
    that a resumed run does not see the episodes of its first minutes again.
    """

    def __init__(self, config: ResolvedConfig, life_number: int = 0, context: ProcessContext | None = None) -> None:
        self.config, self.context = config, (context := context or ProcessContext())
        self.spec = make_spec(config.env, config.atari)
        check(config, self.spec)
        self.resources = resolve_resources(config, self.spec, context.gpu)
        if self.resources.device.type == "cuda":
            torch.cuda.set_device(self.resources.device)
        keep_freed_memory()
        seed_globals(config, life_number, context.rank)
        with ExitStack() as made:  # closed where a part cannot be made
            # In a replay, learners are threads of one process, and `Replay.run` sets it for all.
            made.callback(set_torch(config.deterministic and context.recorded_life is None))
            self._make(life_number, made)
            self._made = made.pop_all()

    def _make(self, life_number: int, made: ExitStack) -> None:
        """Make the parts; `made` closes them."""
        config, context = self.config, self.context
        size = self.resources.torch_threads if config.model.compile == "none" else 1
        resources = self.resources = replace(self.resources, team=made.enter_context(closing(Team(size))))
        self.model = first_model(config, self.spec).to(resources.device)
        self.params = FlatParams(self.model)
        self.algorithm = make_algorithm(config, self.spec, resources, context.rank)
        made.callback(self.algorithm.close)
        self.progress, self.stages, self.before = Progress(), Stages(), dict[str, int]()  # counts at its start
        self._counts_lock, self._outliers_said, self._lost = threading.Lock(), False, list[str]()
        self.flight = flight = made.enter_context(closing(LifeRecorder(config, context, life_number)))
        self.moments = moments = normalizers(config, self.model)
        self.exchange = exchange_kind(config).connect(
            exchange_setup(config, self.params, moments, context, resources.team, flight.note, flight.flush)
        )
        self.actor, self.refresh_actor = acting_copy(self.model, resources.dtype)
        self.rngs: list[torch.Generator] = []
        self.servers, self._ended = Servers(config.wire), False
        made.callback(self._close_servers)
        first_env = context.rank * config.env.num_envs
        events = EnvEvents(self.flight.note, context.recorded_life.events if context.recorded_life else ())
        share = env_share(config, config, self.spec, life_number, first_env, context.board, events, resources)
        setup = LearnerSetup(
            config=config,
            unroll_length=algorithm_class(config).unroll_length(config),
            max_envs=room_of(config),
            agent=agent_of(self.algorithm, self.model, self.params, moments, resources.record_acting),
            actor=self.actor,
            refresh_actor=self.refresh_actor,
            envs=replace(share, make_rng=partial(self._make_rng, share.make_rng)),
            threads=resources.torch_threads,
            board=context.board,
            rank=context.rank,
            stages=self.stages,
            servers=self.servers,
            timeout=patience(config),
            on_produced=self.write_counts,
            is_over=self.is_over,
            updates=updates_of(config),
            note=self.flight.note,
            recorded_life=context.recorded_life,
            worker=lambda number, life: worker_setup(config, life, context, number, 0),
        )
        kind = acting_kind(config)
        self.acting: Acting = kind.from_record(setup) if context.recorded_life else kind.connect(setup, context.acting)
        self._opened = made.enter_context(ExitStack())
        self._opened.callback(self.acting.close)
        self._opened.callback(self._close_servers)  # before: env hosts receive the end before their actions stop
        self.gradients = Gradients(self.model, self.params, resources)
        if config.model.compile != "none":  # acting has other shapes, and stays as it is
            compiled = torch.compile(self.model, mode=config.model.compile, dynamic=False)
            self.gradients.models[0] = cast(Network, compiled)
        actors = resolve_resources(replace(config, device="cpu"), self.spec)
        self.flight.describe(self.params.slices, resources, actors)
        self.observers: list[Observer] = []
        self.secondary: Secondary | None = None
        self._observe(setup.unroll_length, made)

    def _observe(self, unroll_length: int, made: ExitStack) -> None:
        """Make the observers that the config asks for; `made` closes them."""
        config, context, resources = self.config, self.context, self.resources
        if (note := self.flight.note) is not unrecorded:
            poll, every = config.algo.poll or unroll_length, config.log.digest_every
            self.observers.append(FlightNotes(self.params, self.moments, self.progress, poll, every, note))
        if context.gradients is not None:
            self.observers.append(GradientSamples(self.params, context.gradients, context.rank, config.log.cosines))
        if context.changes is not None and context.memory is not None:
            self.observers.append(Changes(self.params, context.memory, context.changes, context.rank))
        if config.log.norms:
            policy = replace(config, algo=replace(config.algo, value_coef=0.0))
            twin = None if algorithm_class(config).has_replay else make_algorithm(policy, self.spec, resources)
            self.observers.append(Norms(self.gradients, config.log.norms, twin))
        if config.q.secondary_batch:
            self.secondary = Secondary(config, self.spec, resources, self.model, cast(Any, self.algorithm))
            self.observers.append(self.secondary)
            made.callback(self.secondary.algorithm.close)

    def _make_rng(self, make: Callable[[int], torch.Generator], key: int) -> torch.Generator:
        """Random numbers whose state is saved in checkpoints."""
        self.rngs.append(make(key))
        return self.rngs[-1]

    def is_over(self) -> bool:
        """Whether to wait for no more rollouts. Under allreduce the other learners would wait for this one."""
        ended = self.context.board.stopping or self.exchange.env_steps >= self.config.steps
        return ended and not exchange_kind(self.config).in_lockstep

    def lr(self, env_steps: int) -> float:
        optim, alone = self.config.optim, exchange_kind(self.config).shared_weights
        envs = self.config.env.num_envs * (1 if alone else self.context.learners)
        return scaled_lr(optim, envs) * schedule_value(optim.schedule, env_steps, self.config.steps)

    def describe(self) -> str:
        """The resolved settings, as one line for the user."""
        resources, count, config = self.resources, sum(p.numel() for p in self.model.parameters()), self.config
        acting = acting_kind(config).describe(config, resources.groups, resources.env_threads)
        if need := algorithm_class(config).replay_bytes(config, self.spec) * config.learners:
            where = " on disk" if config.replay.disk else ""
            acting += f", replay of {config.replay.capacity:,} env steps in {need / 2**30:.2f} GiB{where}"
        threads = counted(resources.team.size, "training thread")
        lag = stated_lag(config)
        return f"{acting}, {threads}, {resources.device}, {resources.precision}; {count:,} weights; policy lag {lag}"

    def start(self, counts: dict[str, int], total: int) -> None:
        """Resume from this learner's earlier counts, and from the env steps of the whole run."""
        for name in ("learner_steps", "samples_trained", "masked", "policy_lag_max", "episodes"):
            setattr(self.progress, name, counts.get(name, 0))
        self.progress.env_steps = counts.get("learned", 0)
        self.before = counts
        self.flight.start(counts, total)
        self.exchange.guard.skipped = counts.get("skipped", 0)
        self.exchange.start(self.progress.env_steps, total)
        self.algorithm.clock.env_steps = total  # the first rollout is acted before the loop sets the clock
        self.write_counts()

    def counts(self) -> dict[str, int]:
        """This learner's counts, for the board."""
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
            "dropped": acted.get("dropped", 0),
            "in_flight": acted.get("in_flight", 0),
        }

    def write_counts(self) -> None:
        """Write the counts to the board. The thread that receives rows does so, too: after a kill all are counted."""
        with self._counts_lock:
            self.context.board.write(self.context.rank, self.counts())

    def keep(self) -> dict[str, int]:
        """Leave the weights and normalizers where they outlive this process; returns the counts that belong to them."""
        counts = self.counts()
        if (kept := self.context.kept) is not None:
            kept.publish(self.params.data, self.moments.read(), counts["learned"] + counts["masked"])
        return counts

    def news(self) -> EnvNews:
        """News of its envs, of remote ones and of their clients."""
        (failures, info, _), (clients, remote, _) = self.acting.news(), self.servers.news()
        info.add(remote)
        outliers = []
        if (count := self._outliers) and not self._outliers_said:
            self._outliers_said = True
            outliers = [f"{counted(count, 'observation')} far from the mean: clamped or left out by the normalizer"]
        warnings, self._lost = self._lost + list(filter(None, [self.algorithm.warning()])), []
        return EnvNews(failures + clients + outliers + warnings, info, warnings if self.context.rank == 0 else ())

    @property
    def _outliers(self) -> int:
        """Observations that the normalizers have counted as nearer to the mean than they are."""
        return sum(cast(Normalizer, norm).outliers for norm in self.model.obs_norm.values())

    def gauges(self) -> dict[str, float]:
        """Values of all parts for the metrics."""
        found = self.algorithm.gauges() | self.acting.gauges() | self.exchange.gauges()
        for observer in self.observers:
            found |= observer.gauges()
        if self.config.model.normalize_obs:
            found["normalizer/clamped"] = self._outliers
        return found | self.servers.traffic(self.acting.counts().get("produced", 0))

    @property
    def parts(self) -> LearnerParts:
        """What `learn` trains."""
        return LearnerParts(
            self.model, self.params, self.algorithm, self.acting, self.exchange, self.gradients, self.lr,
            self.context.learners, self.progress, self.stages, self.observers,
        )  # fmt: skip

    def run(self, on_rollout: Callable[[Rollout], bool], on_error: Callable[..., None] = lambda error: None) -> None:
        """Train until `on_rollout` returns True. `on_error`: called before envs are closed, which may take long."""
        with self.exchange, self._opened:
            try:
                learn(self.parts, on_rollout)
                self.flight.note("end", "")
                self._ended = True
            except BaseException as error:
                self.flight.note("end", one_line(error))
                on_error(error)
                raise

    def _close_servers(self) -> None:
        """Where only this learner ends, or the run is to go on after a signal, clients reconnect."""
        self.servers.close(over=self._ended and not self.context.board.resumes)

    def close(self) -> None:
        self._made.close()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint must hold besides counters."""
        return {
            "model": dict(self.model.state_dict()),
            "exchange": self.exchange.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "rng": {f"policy_{g}": rng.get_state() for g, rng in enumerate(self.rngs)},
            **{name: x for observer in self.observers for name, x in observer.tensors().items()},
        }

    def resume(self, part: CheckpointPart) -> None:
        """Go on from a part of a checkpoint."""
        self.load(part.tensors)
        self._lost = not_restored(self.config, part.tensors, self.algorithm, self.exchange)
        self.flight.resume(part, self.rngs)

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.model.load_state_dict(tensors["model"])  # copies into the flat views
        self.exchange.load_state_dict(tensors["exchange"])
        self.algorithm.load_state_dict(tensors["algorithm"])
        for g, rng in enumerate(self.rngs):
            state = tensors["rng"].get(f"policy_{g}")
            if state is not None and len(state) == len(rng.get_state()):  # else of fewer groups, or of another device
                rng.set_state(state)
        for observer in self.observers:
            observer.load(tensors)

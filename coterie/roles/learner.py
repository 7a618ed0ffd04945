"""Roles: what a learner's process is made of, whoever steps its envs (producers.py has those that others do).

A role is built from a config and its links to the others: a bench, a test and every launch place the same parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from torch import Tensor

from coterie.acting.central import Central
from coterie.acting.central_stream import Shape
from coterie.acting.decoupled import Decoupled
from coterie.acting.inline import Inline
from coterie.acting.recorder import Recorder, Stages, local_fields
from coterie.acting.table import acting_kind, batch_size
from coterie.algorithms.q_base import QLearning
from coterie.algorithms.table import replay_bytes, unroll_length
from coterie.build.factory import (
    POLICY_SEED,
    Links,
    envs_of,
    ids_of,
    make_algorithm,
    make_exchange,
    make_model,
    normalizers,
    patience,
    policy_of,
    seed_for,
)
from coterie.build.resources import resolve_resources
from coterie.build.validity import check, room_of
from coterie.config import ResolvedConfig
from coterie.envs.make import make_spec
from coterie.exchange.table import exchange_kind
from coterie.instruments.consensus import GradientSamples
from coterie.instruments.norms import Norms
from coterie.instruments.secondary import Secondary
from coterie.learner import Gradients, Observer, Parts, Progress, autocast, learn
from coterie.models.build import Network, acting_copy
from coterie.ops.optim import scaled_lr, schedule_value
from coterie.parallel.affinity import keep_freed_memory
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.plugins import in_place_of
from coterie.remote.admission import EnvHostService
from coterie.remote.rollout_service import RolloutService
from coterie.remote.servers import Servers
from coterie.types import AgentOutput, ConfigError, Inputs, Rollout
from coterie.wire.auth import offset


class Learner:
    """A learner with its acting: builds the parts and runs the loop.

    `life` counts the starts of this run (0, then one more at each resume), so that a resumed run does not see the
    episodes of its first minutes again.
    """

    def __init__(self, config: ResolvedConfig, life: int = 0, links: Links | None = None) -> None:
        self.links = links = links or Links()
        self.config = config
        self.spec = make_spec(config.env, config.atari)
        check(config, self.spec)
        self.layout = layout = resolve_resources(config, self.spec, links.gpu)
        if layout.device.type == "cuda":
            torch.cuda.set_device(layout.device)
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        self.model = make_model(config, self.spec).to(layout.device)
        self.params = FlatParams(self.model)
        self.algorithm = make_algorithm(config, self.spec, layout.compute, links.rank)
        self.progress, self.stages = Progress(), Stages()
        self._telling = threading.Lock()
        self.before: dict[str, int] = {}  # this learner's counts when it was started
        moments = normalizers(config, self.model)
        self.exchange = make_exchange(config, self.params, moments, links)
        self.actor, self.refresh_actor = acting_copy(self.model, layout.dtype)
        self.rngs: list[torch.Generator] = []
        self.acting: Inline | Decoupled | Central
        self.servers = Servers(config.wire)
        self.guests: RolloutService | None = None
        acting = acting_kind(config)
        if not acting.apart:
            self.acting = self._inline(life)
        elif acting.hosted:
            self.acting = self._central(life)
        else:
            assert links.slots is not None
            assert links.weights is not None
            self.acting = in_place_of(config, "acting", Decoupled)(
                links.slots, links.weights, self.params, moments, links.board, links.rank,
                config.actors // links.learners, self.stages, layout.device,
                publish_every=config.decoupled.publish_every, lockstep=config.decoupled.lockstep,
                timeout=patience(config),
            )  # fmt: skip
            if config.wire.bind:
                self.guests = RolloutService(config, self.spec, links.rank, self.acting, self._core())
                self.guests.on_produced = self.tell
                if (need := self.guests.reads.most) > config.wire.max_message_mb << 20:
                    raise ConfigError(f"wire.max_message_mb: a remote actor's rollout has {-(-need // 2**20)} MB")
                services = {"PushRollouts": self.guests.push, "PullParameters": self.guests.pull}
                self.servers.serve(offset(config.wire.bind, links.rank), services, "wire.bind")
        self.trainers = Team(layout.torch_threads if config.model.compile == "none" else 1)
        self.gradients = Gradients(self.model, self.params, self.trainers, autocast(layout.device, layout.dtype))
        if config.model.compile != "none":  # acting has other shapes, and stays as it is
            compiled = torch.compile(self.model, mode=config.model.compile, dynamic=False)
            self.gradients.models[0] = cast(Network, compiled)

        self.observers: list[Observer] = []
        if links.gradients is not None:
            self.observers.append(GradientSamples(self.params, links.gradients, links.rank, config.log.cosines))
        if config.log.norms:
            self.observers.append(Norms(self.gradients, config.log.norms))
        self.secondary: Secondary | None = None
        if config.q.secondary_batch:
            primary = cast(QLearning, self.algorithm)
            self.secondary = Secondary(config, self.spec, layout, primary, self.trainers)
            self.observers.append(self.secondary)

    def _inline(self, life: int) -> Inline:
        config, layout = self.config, self.layout
        first = self.links.rank * config.env.num_envs
        envs, self.rngs = envs_of(config, layout, life, first)
        fields = local_fields(self.spec, unroll_length(config), config.env.num_envs, layout.device, self._core())
        return in_place_of(config, "acting", Inline)(
            envs,
            policy_of(self.algorithm, self.actor, self.rngs, ids_of(envs, first)),
            Recorder(fields, envs.groups, layout.device),
            self.model.initial_state,
            self.refresh_actor,
            self.stages,
            # Noise is drawn into the network: two groups must not act at once.
            Team(1 if config.q.noisy else min(layout.groups, layout.torch_threads)),
            config.algo.poll,
        )

    def _core(self) -> tuple[int, ...]:
        """Shape of one env's recurrent state."""
        state = self.model.initial_state(1)
        return () if state is None else tuple(state.shape[1:])

    def _central(self, life: int) -> Central:
        config, layout, links = self.config, self.layout, self.links
        device = layout.device
        make_fields = partial(local_fields, self.spec, unroll_length(config), core=self._core())
        rng = torch.Generator(device).manual_seed(seed_for(config.seed, POLICY_SEED, life, links.rank))
        self.rngs = [rng]

        def policy(
            model: Network, inputs: Inputs, state: Tensor | None, env_id: Tensor
        ) -> tuple[AgentOutput, Tensor | None]:
            return self.algorithm.act(model, inputs, state, self.algorithm.explore(env_id.to(device)), rng)

        own = config.central
        most = min(own.max_envs, room_of(config))
        shape = Shape(
            self.spec, config.env.num_envs if config.actors else 0, unroll_length(config), batch_size(config),
            1 if own.lockstep else 2 + own.queue, own.batch_min, own.batch_max, own.wait, own.lockstep,
            own.newest_frame, most, patience(config),
        )  # fmt: skip
        twins = [acting_copy(self.model, layout.dtype, True, device) for _ in range(2)]
        central = in_place_of(config, "acting", Central)(
            shape, twins, policy, twins[0][0].initial_state, make_fields, links.board, links.rank, self.stages, device,
            layout.device,
        )  # fmt: skip
        central.is_over, central.told = self._is_over, self.tell
        try:
            if links.address:
                service = EnvHostService(config, self.spec, links.rank, central, local=True)
                self.servers.serve(links.address, {"Infer": service})
            if config.wire.bind:
                service = EnvHostService(config, self.spec, links.rank, central, local=False)
                self.servers.serve(offset(config.wire.bind, links.rank), {"Infer": service}, "wire.bind")
        except BaseException:
            central.close()
            raise
        return central

    def _is_over(self) -> bool:
        """Whether to leave where no hosts are: the run is to stop, or others have learned all that was left. Under
        allreduce they would wait for this learner.
        """
        ended = self.links.board.stopping or self.exchange.steps.total >= self.config.steps
        return ended and not exchange_kind(self.config).in_lockstep

    def lr(self, env_steps: int) -> float:
        optim, alone = self.config.optim, exchange_kind(self.config).shared_weights
        envs = self.config.env.num_envs * (1 if alone else self.links.learners)
        return scaled_lr(optim, envs) * schedule_value(optim.schedule, env_steps, self.config.steps)

    def describe(self) -> str:
        """What `auto` came to, for the person who started the run."""
        lay, count, config = self.layout, sum(p.numel() for p in self.model.parameters()), self.config
        kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[lay.dtype]
        if isinstance(self.acting, Central):
            shape = self.acting.shape
            acting = f"{shape.envs} envs in hosts of {config.actors}, batches of {shape.batch_size} rollouts"
        elif isinstance(self.acting, Decoupled):
            slots = self.acting.slots
            acting = (
                f"{config.env.num_envs} envs in {self.acting.actors} actor(s), batches of {slots.per_batch} x "
                f"{slots.width} rollouts"
            )
        else:
            acting = f"{config.env.num_envs} envs in {lay.groups} group(s) on {lay.env_threads} thread(s)"
        if need := replay_bytes(config, self.spec):
            where = " on disk" if config.replay.disk else ""
            acting += f", replay of {config.replay.capacity:,} env steps in {need / 2**30:.2f} GiB{where}"
        return f"{acting}, {lay.torch_threads} training thread(s), {lay.device}, {kind}; {count:,} weights"

    def start(self, counts: dict[str, int], total: int) -> None:
        """Go on from what this learner had counted before, and from the env steps of the whole run."""
        for name in ("learner_steps", "samples_trained", "masked", "policy_lag_max", "episodes"):
            setattr(self.progress, name, counts.get(name, 0))
        self.progress.env_steps = counts.get("learned", 0)
        self.before = counts
        self.exchange.guard.skipped = counts.get("skipped", 0)
        self.exchange.steps.start(self.progress.env_steps, total)
        self.algorithm.clock.env_steps = total  # the first rollout is acted before the loop tells

    def counts(self) -> dict[str, int]:
        """What the board tells of this learner."""
        p, acted = self.progress, self.acting.counts()
        came = 0 if self.guests is None else self.guests.produced
        return {
            "produced": self.before.get("learned", 0) + acted.get("produced", 0) + came,
            "learned": p.env_steps,
            "masked": p.masked,
            "learner_steps": p.learner_steps,
            "samples_trained": p.samples_trained,
            "policy_lag_max": p.policy_lag_max,
            "episodes": p.episodes,
            "skipped": self.exchange.guard.skipped,
            "replaced": self.before.get("replaced", 0) + acted.get("replaced", 0),
            "dropped": acted.get("dropped", 0),
        }

    def tell(self) -> None:
        """Write that on the board. Also in the thread that receives rows: who is killed has told of all of them."""
        with self._telling:
            self.links.board.write(self.links.rank, self.counts())

    def failures(self) -> list[str]:
        """What the log should know of: envs that were replaced, clients that were not let in."""
        return [f"replaced {reason}" for reason in self.acting.failures()] + self.servers.refused()

    def gauges(self) -> dict[str, float]:
        """What the algorithm, the acting and the exchange can tell about themselves, for the metrics."""
        came = self.acting.counts().get("produced", 0) if self.guests is None else self.guests.produced
        parts = (*self.observers, self.algorithm, self.acting, self.exchange)
        found = {name: value for part in parts for name, value in part.gauges().items()}
        return found | self.servers.traffic(came)

    @property
    def parts(self) -> Parts:
        """What `learn` trains."""
        return Parts(
            self.model, self.params, self.algorithm, self.acting, self.exchange, self.gradients, self.lr,
            self.links.learners, self.progress, self.stages, self.observers,
        )  # fmt: skip

    def run(self, on_rollout: Callable[[Rollout], bool]) -> None:
        """Train until `on_rollout` returns True."""

        with self.exchange, self._doors() as doors:
            doors.push(self._leave_open)
            learn(self.parts, on_rollout)

    def _leave_open(self, kind: type[BaseException] | None, *_: object) -> None:
        """Where it is this learner that ends, and not the run, clients are to come again."""
        if kind is not None:
            self.servers.close(over=False)

    def _doors(self) -> ExitStack:
        """What ends when training does; hosts are told before their actions stop."""
        doors = ExitStack()
        for part in (self.acting, self.guests, *self.servers.open):
            if part is not None:
                doors.callback(part.close)
        return doors

    def close(self) -> None:
        self.trainers.close()
        self._doors().close()
        torch.set_num_threads(self._torch_threads)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint must hold besides counters."""
        return {
            "model": dict(self.model.state_dict()),
            "exchange": self.exchange.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "rng": {f"policy_{g}": rng.get_state() for g, rng in enumerate(self.rngs)},
            **{name: x for observer in self.observers for name, x in observer.tensors().items()},
        }

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.model.load_state_dict(tensors["model"])  # copies into the flat views
        self.exchange.load_state_dict(tensors["exchange"])
        self.algorithm.load_state_dict(tensors["algorithm"])
        for g, rng in enumerate(self.rngs):
            if (saved := tensors["rng"].get(f"policy_{g}")) is not None:  # another machine may have fewer groups
                rng.set_state(saved)
        for observer in self.observers:
            observer.load(tensors)

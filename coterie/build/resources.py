"""What `auto` becomes on this machine: learners, envs, actors and exchange; then device, threads and groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from coterie.acting.table import acting_kind
from coterie.algorithms.base import Compute
from coterie.algorithms.table import algorithm_class
from coterie.build.precision import bf16_pays
from coterie.choices import resolve_exchange, with_modules
from coterie.config import Config, ResolvedConfig
from coterie.envs.gym import PLAY
from coterie.envs.make import make_spec
from coterie.envs.pool import has_env
from coterie.envs.tasks import tasks
from coterie.envs.vector import APART
from coterie.errors import ConfigError
from coterie.exchange.table import exchange_kind
from coterie.models.cores import is_recurrent
from coterie.parallel.graphs import Record, record
from coterie.parallel.hardware import available_cores
from coterie.parallel.traces import trace
from coterie.runs.config_io import typed_settings
from coterie.types import Spec

# For each core where env.num_envs is auto.
_IMAGE_ENVS, _VECTOR_ENVS = 16, 32
_CPU_CHUNK = 320  # samples of images whose activations still fit the cache (docs/benchmarks/changes.md)


@dataclass(frozen=True, kw_only=True)
class Resources(Compute):
    """What one process computes with; its team is made in that process."""

    env_threads: int
    torch_threads: int  # threads that train parts of a batch side by side, each with torch on one core
    groups: int
    record_acting: Record | None = None

    @property
    def precision(self) -> str:
        return {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]


@contextmanager
def plain_torch(inference: bool = False) -> Iterator[None]:
    """Torch as it is in a new process, in place of what the caller has set. Child processes do not see that, either."""
    with torch.inference_mode(inference), ExitStack() as changed:
        if not inference:  # a run seeds the random numbers of torch and NumPy
            changed.enter_context(torch.random.fork_rng(devices=[]))
            changed.callback(np.random.set_state, np.random.get_state())
        changed.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            changed.enter_context(torch.device("cpu"))  # where it is not needed it would delay each call
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                changed.enter_context(torch.autocast(kind, enabled=False))
        yield


def check_device(config: Config) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here; use cpu or auto")


def resolve_resources(config: Config, spec: Spec, gpu: int = 0, cores: int = 0) -> Resources:
    """Choose device, precision, threads and groups where they are `auto` or 0, by rules that depend on the machine and
    the env, and never on timing, but for the precision of images on a CPU. `cores`: of a hypothetical machine (here
    and below); 0: those that this process may use.
    """
    check_device(config)
    cuda = config.device == "cuda" or (
        config.device == "auto" and torch.cuda.is_available() and exchange_kind(config).on_gpu
    )
    device = torch.device(f"cuda:{gpu}" if cuda else "cpu")
    image = any(s.is_image for s in spec.obs.values())
    measured = config.precision == "auto" and image and not config.model.network  # which has the heads, too
    bf16 = config.precision == "bf16" or (measured and bf16_pays(device.type))
    cores = cores or len(available_cores())
    # On a CPU the operators of image networks take far longer than their calls.
    acting, training = _recordable(config, spec) if config.graphs and (cuda or not image) else (False, False)
    graph = record if cuda else trace
    # A second thread pays where a forward pass takes long; a small net's calls would only wait for the interpreter.
    dtype = torch.bfloat16 if bf16 else torch.float32
    most = algorithm_class(config).training_threads(config, cores if image and not cuda else 1, dtype)
    return Resources(
        device=device,
        dtype=dtype,
        env_threads=config.env.threads or cores,
        torch_threads=config.torch_threads or most,
        groups=config.env.groups or _groups(config, image or cuda, cores == 1 and not cuda, spec.agents),
        chunk=config.optim.chunk or (_CPU_CHUNK if image and not cuda else 0),
        record=graph if training else None,
        record_acting=graph if acting else None,
    )


def _recordable(config: Config, spec: Spec) -> tuple[bool, bool]:
    """Whether acting, and training, run the same operators in each call. With text they do not, since its words are
    counted, and with the user's own parts they need not. Training with a memory looks where episodes begin. A replay of
    central acting would record at other calls, which may round differently.
    """
    model, own = config.model, getattr(algorithm_class(config).make_model, "recordable", False)
    custom = ":" in model.torso + model.network + model.core or not own
    same = not custom and not any(s.text for s in spec.obs.values()) and model.compile == "none"
    again = config.deterministic and acting_kind(config).hosted
    return same and model.core != "gtrxl" and not again, same and not is_recurrent(model)


def _groups(config: Config, threaded: bool, one_core: bool, agents: int) -> int:
    """Groups of envs, none of which splits a team. `threaded`: each group has a thread of its own; otherwise one thread
    acts for them in turn, which pays while a group's step is short beside a thread's wake-up (LunarLander, acting: 32
    envs 51,200 steps/s with two groups and 38,700 with one; 256 envs 86,700 and 93,700). On one core, as every actor
    has, nothing overlaps (Breakout, nature, acting: an actor 2,100 steps/s with one group and 1,800 with two;
    training of two learners: docs/benchmarks/changes.md).
    """
    n = config.env.num_envs
    workers = config.env.backend == "workers" or not has_env(config.env.id)
    together = acting_kind(config).one_group(config) or config.env.backend not in APART
    overlaps = workers or config.env.delay or config.env.threads > 1
    alone = threaded and (one_core or acting_kind(config).own_policy) and not overlaps
    two = (threaded or workers or 32 <= n <= 128) and not (together or alone) and n % (2 * agents) == 0
    return 2 if two else 1


def resolve_config(config: Config, cores: int = 0) -> ResolvedConfig:
    """Choose the learners, envs, actors and exchange that are `auto`: one learner for each GPU (gossip:
    several on a lone one), or else for each core; one actor for each core, as far as the envs can be shared out evenly.
    """
    config = with_modules(config)
    cores, kind, gpus = cores or len(available_cores()), acting_kind(config), gpus_of(config)
    learners = config.learners
    if learners == "auto":
        exchange = exchange_kind(config)
        least = min(exchange.gpu_learners, cores) if gpus else cores
        learners = 1 if exchange.one_learner else least if gpus < 2 else gpus
    config = replace(config, learners=learners)
    if kind.has_children:
        cores = max(1, cores - min(gpus, learners))  # one core drives each GPU, see `assign_cores`
    if not config.env.num_envs:
        config = replace(config, env=replace(config.env, num_envs=simulators(config, learners, cores)))
    actors = config.actors
    if actors == "auto":
        actors = learners * len(tasks(config.env.id)) if kind.has_children else 0  # a host has threads for all cores
        if kind.own_policy:
            actors = learners * largest(fitting_actors(config, learners), cores // learners)
    chosen: dict[str, Any] = {"exchange": resolve_exchange(config), "actors": actors}
    if is_dataclass(own := algorithm_class(config).Settings):
        chosen["settings"] = typed_settings(config, cast(type, own))
    if config.env.id.startswith(PLAY):
        chosen["callbacks"] = tuple(dict.fromkeys([*config.callbacks, "coterie.tools.selfplay:SelfPlay"]))
    return ResolvedConfig(**{f.name: chosen.get(f.name, getattr(config, f.name)) for f in fields(Config)})


def gpus_of(config: Config) -> int:
    """GPUs that the learners use on this machine."""
    return torch.cuda.device_count() if config.device != "cpu" and exchange_kind(config).on_gpu else 0


def fitting_actors(config: Config, learners: int) -> list[int]:
    """The numbers of actors, or of env hosts, among which a learner's envs, the tasks, and (for actors, which record)
    the rollouts of a batch are shared out evenly.
    """
    envs, several, kind = config.env.num_envs, len(tasks(config.env.id)), acting_kind(config)
    step = make_spec(config.env, config.atari).agents * (2 if config.env.groups == 2 else 1)
    return [
        k
        for k in range(1, envs + 1)
        if envs % k == 0
        and (not kind.own_policy or kind.batch_size(config) % (envs // k) == 0)
        and k * learners % several == 0
        and envs // k % step == 0
    ] or [1]


def largest(fitting: list[int], limit: int) -> int:
    """The largest of `fitting` (in rising order) up to `limit`; the smallest where none is."""
    return max([k for k in fitting if k <= limit], default=fitting[0])


def simulators(config: Config, learners: int, cores: int = 0) -> int:
    """Envs of each learner where `env.num_envs` is auto: some for each of its cores, or for each of its actors, so that
    the tasks and the rollouts of a batch are shared out evenly, and learning can begin after `q.learn_start` env steps.
    """
    one = replace(config, env=replace(config.env, num_envs=1))
    spec = make_spec(one.env, config.atari)
    width = _IMAGE_ENVS if any(s.is_image for s in spec.obs.values()) else _VECTOR_ENVS
    cores, several = max(1, (cores or len(available_cores())) // learners), len(tasks(config.env.id))
    kind = acting_kind(config)
    section = kind.section(config)
    batch = 0 if section is None else section.batch_size
    if batch and kind.lockstep(config):
        return batch
    most = kind.max_envs(config)
    if rows := algorithm_class(one).first_rows(one):
        most = min(most, int(config.q.learn_start // rows))
    step = spec.agents * (2 if config.env.groups == 2 else 1)
    if config.actors != "auto":
        actors = max(1, config.actors // learners)
    elif kind.own_policy:
        fair = [k for k in range(1, cores + several) if k * learners % several == 0]
        actors = largest(fair, min(cores, most // step))
    else:
        actors = several if kind.has_children else 1
    if not kind.own_policy:
        width, batch = -(-width * cores // actors), 0
    fitting = [w for w in range(step, width + 1, step) if batch % w == 0 and actors * w <= most]
    return actors * max(fitting, default=step)

"""Which combinations of settings work: one list of refusals, from which README's table and the tests are made."""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from coterie.acting.table import ACTING, acting_kind
from coterie.algorithms.replay_size import replay_size
from coterie.algorithms.table import ALGORITHMS, algorithm_class
from coterie.build.factory import make_model, updates_of
from coterie.config import PPO, Config, Refusal, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.envs.tasks import envs_per_child, tasks
from coterie.errors import ConfigError, CoterieError, counted, reason_of
from coterie.exchange.table import EXCHANGES, exchange_kind
from coterie.models.heads import NoisyLinear
from coterie.models.mlp import scale_of
from coterie.models.torsos import FOR_IMAGES
from coterie.models.tryout import try_out
from coterie.plugins import FIELDS, check_own, in_one_line, label
from coterie.runs import config_io
from coterie.runs.config_io import TYPES, get, shown
from coterie.types import ActionSpec, ObsSpec, Spec
from coterie.wire.auth import without_keys

_NEAR = 100  # for numbers in place of a refused one
LAUNCHES: tuple[str, ...] = get_args(TYPES["launch"])


def _learn_alike(config: ResolvedConfig) -> bool:
    """Whether several learners learn as one."""
    kind = exchange_kind(config)
    return kind.in_lockstep and (config.learners > 1 or bool(kind.address(config)))


def _replays_values(config: Config) -> bool:
    kind = algorithm_class(config)
    return kind.has_replay and kind.value_based


def _not_the_choice(field: str) -> Refusal:
    """Refuse an address of an exchange that is not the run's."""
    name = field.partition(".")[0]
    return Refusal(
        lambda c, s: bool(get(c, field)) and exchange_kind(c).address is not EXCHANGES[name].address,
        field,
        f"needs exchange {name}",
    )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c, s: c.q.secondary_batch > 0 and not (_replays_values(c) and exchange_kind(c).one_learner),
        "q.secondary_batch",
        "needs one learner with a replay: dqn or r2d2 with exchange solo",
    ),
    Refusal(
        lambda c, s: not algorithm_class(c).corrects(c) and not acting_kind(c).lockstep(c),
        "acting",
        "needs --ACTING.lockstep True, --algorithm vtrace, or --algorithm ppo --ppo.proximal True: it acts with older "
        "weights, which ALGORITHM does not correct for",
    ),
    Refusal(
        lambda c, s: not algorithm_class(c).corrects(c) and acting_kind(c).publish_every(c) > 1,
        "ACTING.publish_every",
        "must be 1 where the algorithm does not correct for an older policy: use vtrace, or ppo with ppo.proximal",
    ),
    Refusal(
        lambda c, s: c.algo.entropy_target != 0 and c.algo.entropy_coef == 0,
        "algo.entropy_target",
        "needs an algo.entropy_coef above 0 to adapt",
    ),
    Refusal(
        lambda c, s: _learn_alike(c) and c.algo.entropy_target != 0,
        "algo.entropy_target",
        "must be 0 with several learners and allreduce, which learn alike: it reads each learner's own batches",
    ),
    Refusal(
        lambda c, s: bool(c.wire.bind) and (acting_kind(c).lockstep(c) or len(tasks(c.env.id)) > 1),
        "wire.bind",
        "needs decoupled or central acting, a single task, and no lockstep",
    ),
    without_keys("wire.bind"),
    Refusal(
        lambda c, s: c.chaos.every > 0 and not acting_kind(c).has_children and exchange_kind(c).one_learner,
        "chaos.every",
        "needs child processes: several learners, actors, or env hosts",
    ),
    *(_not_the_choice(f) for n in EXCHANGES for f in (f"{n}.bind", f"{n}.connect") if f in TYPES),
    Refusal(
        lambda c, s: (
            c.model.torso in FOR_IMAGES and not c.model.network and not any(o.is_image for o in s.obs.values())
        ),
        "model.torso",
        "must be auto, mlp or package.module:callable for an env without images",
    ),
    Refusal(
        lambda c, s: c.model.last_action_reward and c.model.core == "none" and not c.model.network,
        "model.last_action_reward",
        "needs a recurrent core: set model.core to lstm, gru or gtrxl",
    ),
    Refusal(
        lambda c, s: c.model.share == "no" and c.model.core != "none",
        "model.share",
        "must be yes or auto with a recurrent core, which policy and value share",
    ),
    Refusal(
        lambda c, s: c.env.groups == 2 and (envs_per_child(c) if c.actors else c.env.num_envs) % 2 == 1,
        "env.groups",
        "needs an even number of envs in each process: env.num_envs, or env.num_envs x learners / actors",
    ),
    Refusal(
        lambda c, s: c.model.normalize_obs and not any(o.is_numeric for o in s.obs.values()),
        "model.normalize_obs",
        "needs numeric observations; this env has bytes or text",
    ),
)


def room_of(config: ResolvedConfig) -> int:
    """Most envs that a learner can learn from. In value learning each has its own ring in the replay."""
    return replay_size(config)[0] if algorithm_class(config).has_replay else sys.maxsize


def _refusals(config: Config) -> tuple[Refusal, ...]:
    choices = exchange_kind(config), acting_kind(config), algorithm_class(config)
    return (*(one for choice in choices for one in choice.refusals), *REFUSALS)


def _nearest(field: str, config: ResolvedConfig, spec: Spec) -> str:
    """Of a refused whole number: the nearest ones that nothing refuses, at least 1, as the end of a line."""
    if type(here := get(config, field)) is not int:
        return ""

    def fits(value: int) -> bool:
        section, _, name = field.rpartition(".")
        part = replace(getattr(config, section), **{name: value}) if section else None
        other = replace(config, **{section: part} if section else {name: value})
        with suppress(Exception):  # of a user's refusal, which does not expect this number
            return not any(one.applies(other, spec) for one in _refusals(other)) and bool(
                config_io.replace(config, {field: value})  # within the field's range
            )
        return False

    below = next((x for x in range(here - 1, max(0, here - _NEAR), -1) if fits(x)), None)
    above = next((x for x in range(here + 1, here + _NEAR) if fits(x)), None)
    if below is above is None and (far := next((2**k for k in range(40) if 2**k > here and fits(2**k)), None)):
        above = bisect_left(range(far), True, here, key=fits)  # a least number
    found = [str(x) for x in (below, above) if x is not None]
    return f"; nearest: {' or '.join(found)}" * bool(found)


def check(config: ResolvedConfig, spec: Spec) -> None:
    """Raise a one-line `ConfigError` for a combination that cannot work."""
    algorithm_class(config).read_settings(config)
    for refusal in _refusals(config):
        if refusal.applies(config, spec):
            memory = "model.network" if config.model.network else "model.core"
            field = refusal.field.replace("ACTING", config.acting).replace("MEMORY", memory)
            reason = refusal.reason.replace("ACTING", config.acting).replace("ALGORITHM", label(config.algorithm))
            value = f"{shown(get(config, field))} " if field in TYPES else ""  # a registered acting has no section
            stated = not value or re.match(r"must be (at least )?\d", reason)
            near = "" if stated else _nearest(field, config, spec)
            raise ConfigError(f"{field}: {value}{reason}{near}")
    if exchange_kind(config).one_learner and config.learners > 1:  # one of a user's
        raise ConfigError(f"learners: {config.learners} must be 1 with exchange {label(config.exchange)}")
    if 0 < config.max_lag < (least := acting_kind(config).least_lag(config, updates_of(config))):
        raise ConfigError(f"max_lag: {config.max_lag} must be at least {least} for this layout, or 0 for no such limit")
    check_own(config)
    if ":" in config.model.torso + config.model.core + config.model.network:
        with in_one_line("model: the network cannot be made or used"):
            model = make_model(config, spec)
            if hasattr(model.body, "initial_state") and not model.recurrent:
                raise ConfigError("model.network: give the class, not a function that makes it: it has initial_state")
            noisy = not model.body or any(isinstance(part, NoisyLinear) for part in model.modules())
            if config.q.noisy and algorithm_class(config).value_based and not noisy:
                raise ConfigError(
                    "q.noisy: model.network has no NoisyLinear of coterie.models.heads, so nothing explores"
                )
            try_out(model, algorithm_class(config).has_replay and not model.recurrent)
    unit, n = spec.agents * max(1, config.env.groups) * max(1, config.actors // config.learners), config.env.num_envs
    if spec.agents > 1 and n % unit:  # the agents of one env would be in two groups or processes
        near = " or ".join(str(m) for m in (n - n % unit, n - n % unit + unit) if m)
        raise ConfigError(f"env.num_envs: {n} must be a multiple of {unit}, as an env has {spec.agents} agents: {near}")


def check_objects(config: Config) -> None:
    """Refuse objects of this machine in a run that has parts on others."""
    elsewhere = config.launch == "ray" or config.wire.bind or exchange_kind(config).address(config)
    for field in FIELDS if elsewhere else ():
        if label(name := get(config, field)) != name:
            raise ConfigError(
                f"{field}: {label(name)} is an object of this machine; others need package.module:callable"
            )


def table() -> str:
    """The valid combinations, as a Markdown table."""
    decoupled = Config(ppo=PPO(proximal=True))
    rows = ["| algorithm | acting | exchange | launch |", "|---|---|---|---|"]
    for algorithm, kind in ALGORITHMS.items():
        for acting in ACTING:
            how = " (lockstep, or `ppo.proximal`)" if kind.corrects(decoupled) else " (lockstep)"
            lockstep = how if ACTING[acting].has_children and kind.on_policy else ""
            rows.append(f"| {algorithm} | {acting}{lockstep} | {', '.join(EXCHANGES)} | {', '.join(LAUNCHES)} |")
    return "\n".join(rows)


def check_spec(folder: Path, config: Config) -> Spec:
    """The env's spec; refuses a run whose env, whatever its name, gives or takes something else than it did."""
    spec, path = make_spec(config.env, config.atari), folder / "spec.json"
    try:
        saved = Spec.from_json(data := json.loads(path.read_text()))
        high = data.get("high", {})  # of bytes, by which the network divides them
        saved = replace(saved, obs={k: replace(x, high=high.get(k, 255.0)) for k, x in saved.obs.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CoterieError(f"{path} cannot be read: {reason_of(error)}") from None
    if found := "; ".join(_differences(saved, spec)):
        raise ConfigError(f"env.id: the spaces differ from the run's: {found}")
    return spec


def _differences(saved: Spec, now: Spec) -> Iterator[str]:
    """What of a run's spaces is another now, in words."""
    for name in dict.fromkeys((*saved.obs, *now.obs)):
        one, other = (_array(spec.obs.get(name)) for spec in (saved, now))
        if one != other:
            yield f"observation {f'{name!r} ' if name else ''}{one} in the run, {other} now"
    if saved.action != now.action:
        yield f"{_choices(saved.action)} in the run, {_choices(now.action)} now"


def _array(obs: ObsSpec | None) -> str:
    if obs is None:
        return "absent"
    scaled = obs.dtype == "uint8" and not obs.codes
    bound = f" up to {1 / scale:g}" if scaled and (scale := scale_of(obs)) != 1 / 255 else ""
    return f"{obs.dtype} {obs.shape}{bound}{' of text' * obs.text}{f' of codes {obs.codes}' if obs.codes else ''}"


def _choices(action: ActionSpec) -> str:
    sizes = counted(action.sizes[0], "action") if action.kind == "categorical" else f"choices of {action.sizes}"
    bounds = f"{counted(len(action.low), 'continuous action')} from {action.low} to {action.high}"
    return " and ".join([sizes] * bool(action.sizes) + [bounds] * bool(action.low))

"""`coterie check-env`: what is wrong with an environment, by gymnasium's checker and by random play."""

from __future__ import annotations

import importlib
import math
import re
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import wraps
from itertools import count, islice, pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import env_checker

from coterie.config import Atari, Env, Model
from coterie.envs.backend import Backend, StepResults
from coterie.envs.gym import Instance
from coterie.envs.local import LocalBackend
from coterie.envs.make import env_adapters, make_spec
from coterie.envs.pool import PoolBackend, has_env
from coterie.envs.spaces import ObsField, leaf_of, leaf_spaces, random_actions
from coterie.envs.tasks import tasks
from coterie.envs.vector import APART, make_together
from coterie.errors import ConfigError, CoterieError, counted, one_line
from coterie.models.torsos import SMALLEST_CONV_IMAGE, torsos_of
from coterie.parallel.guard import StallGuard
from coterie.plugins import NameOrObject, raised
from coterie.presets.common import flat
from coterie.runs.objects import name_of
from coterie.tools.check_backend import CheckingBackend, observation, outside
from coterie.types import MASK, entries

_SAME, _LONGEST_S = 100, 30.0  # steps of two copies; seconds of random play
_HANGS_S = 180.0  # for an answer, or for the constructor
_SLOW, _LARGE = 1000, 10.0  # env steps/s; reward
_SEEDS = "draw from the seeds that it is made with"
_SEED = dict.fromkeys(APART, "call super().reset(seed=seed), use self.np_random") | {"vector": "use the seed of reset"}
# What the checkers say of things that are right here, or that are checked below, entry by entry.
_KNOWN = re.compile(
    "infinity|symmetric and normalized|unwrapped version|creation API|not within|dtype to be|(NaN|inf) value"
)


def check_env(
    env: NameOrObject, *, kwargs: str | dict[str, Any] = "{}", steps: int = 1000, render: bool = False,
    backend: NameOrObject = "auto", num_envs: int = 4,
) -> list[str]:  # fmt: skip
    """What to fix in an env, a line for each finding, after `steps` random steps. `env`, `kwargs` and `backend`: as in
    section env of a run; `num_envs`: of a vector env or the user's own backend. `render`: check the frames, too. Raises
    `ConfigError` where Coterie cannot use the env.
    """
    text = flat({"env.kwargs": kwargs})["env.kwargs"]
    asked = Env(name_of("env.id", env), name_of("env.backend", backend), num_envs, kwargs=text)
    return _check(asked, steps, render)[0]


def command(options: Namespace) -> int:
    asked = Env(options.env, options.backend, options.num_envs, kwargs=options.kwargs)
    if options.steps < 1:
        raise ConfigError(f"--steps: {options.steps} must be at least 1")
    print(f"{options.env}: resets and {options.steps:,} random steps ...", file=sys.stderr)
    says = f": {options.env} does not answer, in its constructor, reset or step, as below"
    with closing(StallGuard(_HANGS_S, says)) as guard:
        mend, facts = _check(asked, options.steps, options.render, guard.alive)
    found = [f"fix: {line}" for line in mend] or ["nothing to fix"]
    print("\n".join([*facts, *found]))
    return int(bool(mend))


def _check(env: Env, steps: int, render: bool, alive: Callable[[], None] = lambda: None) -> tuple[list[str], list[str]]:
    """What to fix, and what else is worth knowing. `alive` is called after each answer of the env."""
    if len(tasks(env.id)) > 1:
        raise ConfigError(f"ID: {env.id} is several tasks; check one at a time")
    spec, mend, edges = make_spec(env, Atari()), dict[str, str](), env_adapters(env, Atari())
    alive()
    together, pool = env.backend not in APART, has_env(env.id) and env.backend in ("auto", "pool")
    if together and render:
        raise ConfigError("--render: only envs that run apart are drawn, with env.backend auto")
    facts = [f"{observation(f.name)}: {f.spec.dtype} {f.spec.shape}, {f.form}{_network(f)}" for f in edges.fields]
    numbers = f" and {counted(len(spec.action.low), 'number')}" if spec.action.kind == "mixed" else ""
    facts.append(f"action: {spec.action.kind}, {spec.action.sizes or spec.action.shape}{numbers}")
    if spec.agents > 1:
        facts.append(f"agents: {spec.agents}, each an env of env.num_envs")

    def copy(rendered: bool = False) -> Any:
        alive()
        if together:
            return CheckingBackend(make_together(env, [*range(1, max(1, env.num_envs) + 1)]), mend)
        if pool:
            return PoolBackend(env, Atari(), [1], 1, False, rendered)
        backend = LocalBackend(env, [1])
        _spy(backend.instance, mend)
        return backend

    try:
        with closing(copy(render)) as played, closing(copy()) as one, closing(copy()) as other:
            facts += _random_steps(played, max(1, steps), spec.max_episode_steps, mend, alive)
            if render:
                try:
                    facts.append(f"render: frames of {played.render().shape}")
                except ConfigError as error:
                    mend["render"] = str(error)
            for k, (a, b) in enumerate(zip(islice(_play(one, alive), _SAME), _play(other, alive), strict=False)):
                if any(x.tobytes() != y.tobytes() for x, y in zip(a.rows(), b.rows(), strict=True)):
                    when = f"differ after {k} equal actions" if k else "begin differently"
                    mend["seed"] = f"two copies with one seed {when}: {_SEED.get(env.backend, _SEEDS)}"
                    break
            if not (pool or together):
                one.env.close()  # its backend's close ignores what it raises
            if together and not other.restarted_alone():
                facts.append("a NaN ends the run: no env can be restarted without the others")
    except CoterieError as error:
        mend["refused"] = str(error)
    except (Exception, SystemExit) as error:
        mend["raised"] = f"it raises {raised(error)}"
    alive()
    if spec.masked and (edges.mask or spec.agents == 1):
        facts.append("gymnasium's or PettingZoo's checker was left out: it does not know this action mask")
    elif not (pool or together):
        return [*mend.values(), *_by_checker(env, alive)], facts
    return [*mend.values()], facts


def _by_checker(env: Env, alive: Callable[[], None]) -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught, closing(LocalBackend(env, [1])) as made:
        warnings.simplefilter("always")
        package = "pettingzoo" if made.spec.agents > 1 else "gymnasium"
        checked = made.env.env if package == "pettingzoo" else made.env
        for name in ("reset", "step"):
            setattr(checked, name, _followed(getattr(checked, name), alive))
        try:
            if package == "pettingzoo":
                importlib.import_module("pettingzoo.test").parallel_api_test(checked, num_cycles=_SAME)
            else:
                env_checker.check_env(checked, skip_render_check=True, skip_close_check=True)
        except (Exception, SystemExit) as error:
            yield f"{package}: {one_line(error).removeprefix('AssertionError: ')}"
    for text in dict.fromkeys(re.sub(r"\x1b\[\d+m|WARN: ", "", str(one.message)) for one in caught):
        if not _KNOWN.search(text):
            yield f"{package}: {text}"


def _followed(call: Callable[..., Any], alive: Callable[[], None]) -> Callable[..., Any]:
    """The call, with `alive` after it."""

    @wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        alive()
        return answer

    return both


def _play(backend: Backend, alive: Callable[[], None]) -> Iterator[StepResults]:
    """What follows a reset, and each random action after it."""
    ids, rng, spec = np.arange(backend.num_instances, dtype=np.int32), np.random.default_rng((1, 0xC0)), backend.spec
    backend.reset(ids)
    for k in count():
        answer = backend.recv()
        alive()
        if spec.masked:
            answer.obs[MASK][answer.terminated | answer.truncated] = True  # the action after it is ignored
        if spec.masked and not spec.legal_rows(answer.obs[MASK]).all():
            raise ConfigError(f"{MASK}: nothing is legal after {k} random actions, and no episode ended")
        yield answer
        backend.step(ids, backend.action_map.to_env(random_actions(spec.action, rng, len(ids), answer.obs)))


def _network(f: ObsField) -> str:
    """What an observation is for the network, if that is not said by its form."""
    kind = torsos_of({f.name: f.spec}, Model())[f.name]
    if f.name == MASK or kind not in ("nature", "mlp"):
        return ""
    if kind == "nature":
        return "; an image, for convolutions"
    large = sum(n >= SMALLEST_CONV_IMAGE for n in f.spec.shape) > 1
    return "; numbers, for an MLP" + " (an image is uint8 [height, width, channels])" * large


def _random_steps(
    backend: Backend, steps: int, limit: int, mend: dict[str, str], alive: Callable[[], None]
) -> list[str]:
    """Facts about episodes, rewards and speed."""
    begin, rewards, ends = time.monotonic(), list[float](), list[tuple[int, bool]]()
    length = np.zeros(backend.num_instances, int)
    for before, answer in pairwise(islice(_play(backend, alive), steps + 1)):
        for name, x in [("reward", answer.reward), *((observation(k), x) for k, x in entries(answer.obs).items())]:
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                then = ", or ends if it cannot be restarted alone" * isinstance(backend, CheckingBackend)
                mend[f"{name} finite"] = f"{name}: {x[~np.isfinite(x)][0]}; a run replaces an env that gives it{then}"
        first = answer.first | before.terminated | before.truncated  # of a reset, or of an absent agent
        length = np.where(first, 0, length + 1)
        rewards += answer.reward[~first].tolist()
        done = (answer.terminated | answer.truncated) & ~first
        ends += zip(length[done].tolist(), answer.terminated[done].tolist(), strict=True)
        if time.monotonic() - begin > _LONGEST_S:
            break
    rate = len(rewards) / (backend.seconds if isinstance(backend, CheckingBackend) else time.monotonic() - begin)
    largest = max((abs(x) for x in rewards if math.isfinite(x)), default=0.0)
    lengths, over = [n for n, _ in ends], sum(terminated for _, terminated in ends)
    if not ends and not limit:
        mend["ends"] = f"no episode ended in {len(rewards)} steps: truncate at a limit, or --env.max-episode-steps"
    alike = over == len(ends) > 2 and len(set(lengths)) == 1 < lengths[0]
    hint = "; is that a time limit? then return truncated" if alike else ""
    which = f"of {min(lengths)} to {max(lengths)} steps, {over} terminated{hint}" if ends else "ended"
    factor = 10.0 ** -math.ceil(math.log10(max(largest, 1.0)))
    scale = f"; try --reward.normalize True, or with a replay --reward.scale {factor:g}" if largest > _LARGE else ""
    one, more = (
        ("one copy", "threads")
        if backend.num_instances == backend.spec.agents
        else (f"{backend.num_instances} envs", "num-envs")
    )
    slow = "" if rate > _SLOW else f"; the policy will wait for the env: more --env.{more}, or a cheaper step"
    return [
        f"episodes: {len(ends)} {which}",
        f"reward: {min(rewards):.3g} to {max(rewards):.3g}{scale if largest else '; random actions find none'}",
        f"speed: {rate:,.0f} env steps/s of {one}{slow}",
    ]


def _spy(instance: Instance, mend: dict[str, str]) -> None:
    """Make it compare each entry of an observation with its space."""

    def write(row: int, obs: Any, info: Any, goes_on: bool) -> None:
        with suppress(LookupError, TypeError):  # for which `as_before` has an error of its own
            for path, space in leaf_spaces(instance.env.observation_space):
                if problem := _problem(leaf_of(obs, path), space):
                    name = observation(".".join(map(str, path)))
                    mend.setdefault(f"{name} {problem.split()[0]}", f"{name}: {problem}")
        as_before(row, obs, info, goes_on)

    as_before, instance.write = instance.write, write  # type: ignore[method-assign]


def _problem(x: Any, space: gymnasium.Space[Any]) -> str:
    if not isinstance(space, Box):
        return "" if space.contains(x) else f"value {x!r:.60} where its space is {space}"
    x = np.asarray(x)
    if x.dtype != space.dtype:
        return f"type {x.dtype} {x.shape} where its space has {space.dtype} {space.shape}: convert it"
    return outside(x, space.low, space.high) if x.shape == space.shape else ""  # `fitting` refuses another shape

"""`coterie check-env`: what is wrong with an environment, by gymnasium's checker and by random play."""

from __future__ import annotations

import importlib
import json
import math
import re
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from itertools import islice, pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import env_checker

from coterie.config import Atari, Env
from coterie.envs.backend import Backend, StepResults
from coterie.envs.gym import open_gym, raised
from coterie.envs.local import LocalBackend
from coterie.envs.make import env_edges, make_spec
from coterie.envs.pool import PoolBackend, has_env
from coterie.envs.spaces import leaf_spaces, random_actions
from coterie.plugins import Part
from coterie.runs.objects import name_of
from coterie.types import ConfigError, entries, one_line

_SAME, _LONGEST_S = 100, 30.0  # steps of two copies; seconds of random play
_SLOW, _LARGE = 1000, 10.0  # env steps/s; reward
# What the checkers say of things that are right here, or that are checked below, entry by entry.
_KNOWN = re.compile(
    "infinity|symmetric and normalized|unwrapped version|creation API|not within|dtype to be|(NaN|inf) value"
)


def check_env(env: Part, *, kwargs: str = "{}", steps: int = 1000, render: bool = False) -> list[str]:
    """What to mend in an env, a line for each finding, after `steps` random steps. `env` and `kwargs`: as `env.id` and
    `env.kwargs` of a run. `render`: check the frames, too. Raises `ConfigError` where Coterie cannot use the env.
    """
    return _check(Env(name_of("env.id", env), kwargs=kwargs), steps, render)[0]


def command(options: Namespace) -> int:
    mend, facts = _check(Env(options.env, kwargs=options.kwargs), options.steps, options.render)
    print("\n".join([*facts, *(f"MEND: {line}" for line in mend or ["nothing"])]))
    return int(bool(mend))


def _check(env: Env, steps: int, render: bool) -> tuple[list[str], list[str]]:
    """What to mend, and what else is worth knowing."""
    spec, pool, mend = make_spec(env, Atari()), has_env(env.id), dict[str, str]()
    facts = [f"{_label(f.name)}: {f.spec.dtype} {f.spec.shape}, {f.form}" for f in env_edges(env, Atari()).fields]
    facts.append(f"action: {spec.action.kind}, {spec.action.sizes or spec.action.shape}")
    if spec.agents > 1:
        return [*_by_checker(env, "pettingzoo")], [*facts, f"agents: {spec.agents}, each an env of env.num_envs"]

    def copy(rendered: bool = False) -> PoolBackend | LocalBackend:
        if pool:
            return PoolBackend(env, Atari(), [1], 1, False, rendered)
        backend = LocalBackend(env, [1])
        backend.instance.env = _Spy(backend.instance.env, mend)
        return backend

    try:
        with closing(copy(render)) as played, closing(copy()) as one, closing(copy()) as other:
            facts += _random_steps(played, max(1, steps), spec.max_episode_steps, mend)
            if render:
                facts.append(f"render: frames of {played.render().shape}")
            for k, (a, b) in enumerate(zip(islice(_play(one), _SAME), _play(other), strict=False)):
                if any(x.tobytes() != y.tobytes() for x, y in zip(a.rows(), b.rows(), strict=True)):
                    when = f"differ after {k} equal actions" if k else "begin differently"
                    mend["seed"] = f"two copies with one seed {when}: call super().reset(seed=seed), use self.np_random"
                    break
    except ConfigError as error:
        mend["render"] = str(error)
    except Exception as error:
        mend["raised"] = f"it raises {raised(error)}"
    return [*mend.values(), *([] if pool else _by_checker(env, "gymnasium"))], facts


def _by_checker(env: Env, package: str) -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with closing(open_gym(env.id, json.loads(env.kwargs), env.max_episode_steps)) as made:
                if package == "pettingzoo":
                    importlib.import_module("pettingzoo.test").parallel_api_test(made.env)
                else:
                    env_checker.check_env(made, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            yield f"{package}: {one_line(error).removeprefix('AssertionError: ')}"
    for text in dict.fromkeys(re.sub(r"\x1b\[\d+m|WARN: ", "", str(one.message)) for one in caught):
        if not _KNOWN.search(text):
            yield f"{package}: {text}"


def _play(backend: Backend) -> Iterator[StepResults]:
    """What follows a reset, and each random action after it."""
    ids, rng = np.zeros(1, np.int32), np.random.default_rng(1)
    backend.reset(ids)
    while True:
        yield (answer := backend.recv())
        actions = random_actions(backend.spec.action, rng, 1, answer.obs)
        backend.step(ids, backend.action_map.to_env(actions))


def _random_steps(backend: Backend, steps: int, limit: int, mend: dict[str, str]) -> list[str]:
    """Facts about episodes, rewards and speed."""
    begin, length, rewards, ends = time.monotonic(), 0, list[float](), list[tuple[int, bool]]()
    for before, answer in pairwise(islice(_play(backend), steps + 1)):
        for name, x in [("reward", answer.reward), *((_label(k), x) for k, x in entries(answer.obs).items())]:
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                mend[f"{name} finite"] = f"{name}: {x[~np.isfinite(x)][0]}; a run replaces an env that gives it"
        if before.terminated[0] or before.truncated[0]:  # this is a reset
            length = 0
            continue
        length += 1
        rewards.append(float(answer.reward[0]))
        if answer.terminated[0] or answer.truncated[0]:
            ends.append((length, bool(answer.terminated[0])))
        if time.monotonic() - begin > _LONGEST_S:
            break
    rate, largest = (
        len(rewards) / (time.monotonic() - begin),
        max((abs(x) for x in rewards if math.isfinite(x)), default=0.0),
    )
    lengths, over = [n for n, _ in ends], sum(terminated for _, terminated in ends)
    if not ends and not limit:
        mend["ends"] = f"no episode ended in {len(rewards)} steps: truncate at a limit, or --env.max-episode-steps"
    hint = "; is that a time limit? then return truncated" if over == len(ends) > 2 and len(set(lengths)) == 1 else ""
    which = f"of {min(lengths)} to {max(lengths)} steps, {over} terminated{hint}" if ends else "ended"
    scale = "" if largest <= _LARGE else f"; try --reward.scale {10.0 ** -math.ceil(math.log10(largest)):g}"
    slow = "" if rate > _SLOW else "; the policy will wait for the env: more --env.threads, or a cheaper step"
    return [
        f"episodes: {len(ends)} {which}",
        f"reward: {min(rewards):.3g} to {max(rewards):.3g}{scale if largest else '; random actions find none'}",
        f"speed: {rate:,.0f} env steps/s of one copy{slow}",
    ]


def _label(name: str) -> str:
    return f"observation {name!r}" if name else "observation"


class _Spy(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Compares each entry of an observation with its space."""

    def __init__(self, env: gymnasium.Env[Any, Any], mend: dict[str, str]) -> None:
        super().__init__(env)
        self.mend = mend

    def observation(self, observation: Any) -> Any:
        for path, space in leaf_spaces(self.observation_space):
            x = observation
            for key in path:
                x = x[key]
            if problem := _problem(x, space):
                name = _label(".".join(map(str, path)))
                self.mend.setdefault(f"{name} {problem.split()[0]}", f"{name}: {problem}")
        return observation


def _problem(x: Any, space: gymnasium.Space[Any]) -> str:
    if not isinstance(space, Box):
        return "" if space.contains(x) else f"value {x!r:.60} where its space is {space}"
    x = np.asarray(x)
    if x.shape != space.shape or x.dtype != space.dtype:
        return f"type {x.dtype} {x.shape} where its space has {space.dtype} {space.shape}: convert it"
    if (x < space.low).any() or (x > space.high).any():
        bounds = f"{space.low.min():.4g} to {space.high.max():.4g}"
        return f"values from {x.min():.4g} to {x.max():.4g} where its space has {bounds}: widen the space, or clip"
    return ""

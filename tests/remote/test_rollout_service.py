"""What the rollout service refuses, and that it accepts what real recorders write. Other clients go on meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc import StatusCode

from coterie import presets
from coterie.acting.actor import RolloutLoop
from coterie.acting.base import Stopped
from coterie.acting.recorder import Recorder, local_fields
from coterie.build.factory import env_share, make_agent
from coterie.build.resources import resolve_config
from coterie.envs.make import make_spec
from coterie.remote.rollout_service import VERSION, check_rollout
from coterie.types import ActionSpec, Array, Spec
from coterie.wire.codec import FrameLayout, Refused, check_values
from tests.conftest import IMAGE, VECTOR
from tests.support.services import PULL, PUSH, UNROLL, WIDTH, Rollout, RolloutServices, recorded, shown
from tests.support.waiting import wait_until
from tests.support.wire import channel_to, data_frame

SPECS = {
    "vector": VECTOR,
    "image": IMAGE,
    "multi": Spec("made-up", VECTOR.obs, ActionSpec("multi", (4, 2))),
    "continuous": Spec("made-up", VECTOR.obs, ActionSpec("continuous", low=(-1.0, -1.0), high=(1.0, 1.0))),
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(({"reward": bad}, "reward is not finite") for bad in (np.nan, np.inf)),
        ({"obs/": -np.inf}, "obs/ is not finite"),
        ({"obs/": 1e30}, r"obs/ is beyond 1e\+15"),
        ({"episode_return": 1e308, "episode_length": 1.0}, r"episode_return is beyond 1e\+15"),
        ({"episode_return": 1.0, "episode_length": 1e300}, r"episode_length is beyond 1e\+15"),
        ({"episode_return": 1.0, "episode_length": -5.0}, "a negative episode length"),
        ({"episode_return": 1.0}, "a return without a length"),
    ],
)
def test_a_time_step_that_would_harm_the_learner_is_refused(changes: dict[str, float], why: str):
    seen = shown(VECTOR)
    check_values(VECTOR, seen)
    for name, value in changes.items():
        seen[name][-1] = value
    with pytest.raises(Refused, match=why):
        check_values(VECTOR, seen)


def test_an_observation_far_outside_of_its_space_is_refused():
    narrow = replace(VECTOR, obs={"": replace(VECTOR.obs[""], low=-1.0, high=2.0)})
    seen = shown(narrow)
    seen["obs/"][-1] = 5.0  # envs do not keep their bounds closely
    check_values(narrow, seen)
    seen["obs/"][-1] = 1e3
    with pytest.raises(Refused, match="observation '' is far outside of its space, -1 to 2"):
        check_values(narrow, seen)


def test_a_space_as_wide_as_its_numbers_limits_nothing_and_warns_of_nothing():
    most = float(np.finfo(np.float32).max)  # bounds of gymnasium's CartPole and LunarLander
    wide = replace(VECTOR, obs={"": replace(VECTOR.obs[""], low=-most, high=most)})
    with warnings.catch_warnings(action="error"):
        check_values(wide, shown(wide))


@pytest.mark.parametrize(
    ("kind", "name", "value", "at", "why"),
    [
        # Row 2 of env 0 leads from an episode's last observation to the first one of the next.
        ("vector", "terminated", True, (2, 0), "the masked step"),
        ("vector", "episode_length", 1, (2, 0), "the masked step"),
        ("vector", "reward", 1e-3, (3, 0), "the masked step"),
        ("vector", "episode_length", -1, (1, 0), "a negative episode length"),
        ("vector", "episode_return", np.nan, -1, "a return without a length"),
        ("vector", "episode_return episode_length", np.nan, -1, "episode_return is NaN"),  # as a host sends it
        ("vector", "version", -1, ..., "a version of the weights is negative"),
        ("vector", "log_prob", 0.01, (2, 1), "the probability of an action is above 1"),
        # The action before row 0 is an input of the network, too.
        *(("vector", "action", bad, at, "not in the env's range") for bad in (-1, 4, 2**62) for at in (0, -1)),
        ("multi", "action", 2, (..., 1), "not in the env's range"),  # each component has its own range
        ("continuous", "action", np.nan, -1, "action is not finite"),
        # Those beyond 1e15 are finite, but not what becomes of them: a priority, a square, a sum.
        *(("vector", name, -np.inf, -1, name) for name in ("obs/", "value", "log_prob", "core", "episode_return")),
        *(("image", name, 3e38, -1, r"beyond 1e\+15") for name in ("reward", "value", "log_prob", "core")),
    ],
)
def test_a_rollout_that_no_recorder_writes_is_refused(kind: str, name: str, value: Any, at: Any, why: str):
    arrays = recorded(SPECS[kind], core=(2, 4))
    check_rollout(SPECS[kind], arrays)
    for field in name.split():
        arrays[field][at] = value
    with pytest.raises(Refused, match=why):
        check_rollout(SPECS[kind], arrays)


def test_a_density_above_1_a_certain_action_and_an_episode_that_begins_in_row_0_are_accepted():
    for kind, log_prob in (("continuous", 0.01), ("multi", 1e-7)):
        arrays = recorded(SPECS[kind])
        arrays["log_prob"][2, 1] = log_prob
        arrays["is_first"][0] = True  # after an action with a reward, which is of another rollout
        check_rollout(SPECS[kind], arrays)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[RolloutServices]:
    """They must serve a good client at the end."""
    one = RolloutServices(f"unix:{tmp_path}/s", core=(2, 4))
    yield one
    assert one.works()
    one.close()


def test_each_tensor_of_a_rollout_must_be_the_runs(services: RolloutServices):
    tensors = services.service.reads.tensors
    for k, t in enumerate(tensors):
        fewer = t._replace(shape=(*t.shape[:-1], t.shape[-1] - 1))
        for other in ([t._replace(name="x")], [t._replace(dtype="int8")], [fewer], []):
            layout = FrameLayout([*tensors[:k], *other, *tensors[k + 1 :]])
            status, why = services.ends(services.hello(layout=layout))
            assert (status, "the run's frames hold" in why) == (StatusCode.INVALID_ARGUMENT, True), why


def pushes(services: RolloutServices, *versions: int | tuple[int, int]) -> tuple[StatusCode, str]:
    """Push rollouts that were acted with these weights, or with some and then others."""
    frames = [services.hello()]
    for n, version in enumerate(versions):
        arrays = recorded(VECTOR, services.core)
        arrays["version"][:2], arrays["version"][2:] = version if isinstance(version, tuple) else (version, version)
        frames.append(services.pushed(arrays, n))
    return services.ends(*frames)


def test_weights_that_were_never_published_are_refused(services: RolloutServices):
    services.publish(10)
    # The first one of a stream may be from before the learner was restarted from a checkpoint: it is dropped.
    for newer in (11, (3, 11), 2**63 - 1):
        assert pushes(services, newer)[0] == StatusCode.OK
        status, why = pushes(services, newer, newer)
        assert (status, "of the weights is above 10, the newest" in why) == (StatusCode.INVALID_ARGUMENT, True)
        assert services.learn() == 0
    assert pushes(services, 11, 10)[0] == StatusCode.OK
    assert services.learn() == 1
    assert services.service.produced == UNROLL * WIDTH - 1  # without the masked step
    assert pushes(services, 7, (7, 9))[0] == StatusCode.OK
    assert services.learn() == 3


@pytest.mark.parametrize("falling", [(7, 6), ((7, 9), (8, 9)), (10, 0)])
def test_weights_that_become_older_are_refused(services: RolloutServices, falling: tuple[Any, ...]):
    services.publish(10)
    status, why = pushes(services, *falling)
    assert (status, "that of an earlier rollout" in why) == (StatusCode.INVALID_ARGUMENT, True)
    assert services.learn() == 1
    assert pushes(services, 3)[0] == StatusCode.OK, "on another stream it may be older"


def test_weights_are_sent_only_to_clients_with_older_ones(services: RolloutServices):
    services.publish(10)
    asked = (-(2**63), -1, 0, 9, 10, 11, 2**63 - 1)
    frames = [data_frame(n, VERSION.pack({"version": np.array([v])})) for n, v in enumerate(asked)]
    with channel_to(services.server.address) as channel:
        raw = services.raw(channel, services.hello(PULL), *frames, method=PULL)
        raw.next()
        answers = [raw.next().data for _ in asked]
        assert raw.end()[0] == StatusCode.OK
    assert [bool(x.tensors) for x in answers] == [v < 10 for v in asked]
    assert {x.version for x in answers} == {10}


def test_a_rollout_of_an_actor_that_vanishes_while_it_waits_for_a_slot_is_dropped(services: RolloutServices):
    frames = [services.hello(), *services.questions(PUSH, 2)]  # for both slots
    assert services.ends(*frames)[0] == StatusCode.OK
    with channel_to(services.server.address) as channel:
        for _ in range(3):
            raw = services.raw(channel, *frames[:2], method=PUSH)
            assert raw.next().WhichOneof("kind") == "welcome"
            raw.call.cancel()
    wait_until(lambda: not services.server._streams)
    assert services.learn() == 2
    assert services.works()
    assert services.learn() == 4


BREAKS = '"probability": 0.05}'
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "in place": ("impala", "CountingEnv", {"env.time_limit": "terminate", "env.groups": 2}),
    "continuous": ("impala", "CountingEnv", {"env.kwargs": '{"continuous": true}'}),
    "lstm": ("impala", "CountingEnv", {"model.core": "lstm", "model.core_size": 8}),
    "nan obs": ("impala", "tests.support.flaky:FlakyEnv", {"env.kwargs": '{"how": "nan_obs", ' + BREAKS}),
    "certain": ("dqn", "CountingEnv", {"acting": "decoupled", "q.epsilon": 1e-6, "q.epsilon_end": 1e-6}),
    "text": ("impala", "Mission", {}),
    "lives": ("impala", "Breakout-v5", {"model.torso": "a3c", "env.num_envs": 8, "algo.unroll_length": 40}),
}


class Sink:
    """Keeps the rollouts, and stops the actor after enough of them."""

    def __init__(self, spec: Spec, unroll: int, width: int, core: tuple[int, ...], groups: list[slice]) -> None:
        self.fields = local_fields(spec, unroll, width, torch.device("cpu"), core)
        self.first = Recorder(self.fields, groups, torch.device("cpu"))
        self.kept: list[Rollout] = []

    def pull(self) -> int:
        return len(self.kept)

    def next(self) -> Recorder:
        return self.first

    def check(self) -> None:
        pass

    def deliver(self) -> None:
        self.kept.append({k: x.numpy().copy() for k, x in self.fields.items()})
        if sum(np.count_nonzero(x["episode_length"]) for x in self.kept) > 8:
            raise Stopped


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x == "lives")) for x in CASES])
def test_what_recorders_write_is_accepted(case: str):
    preset, env, changes = CASES[case]
    env_id = env if "-" in env or ":" in env else f"coterie.envs.testing:{env}"
    own = {"env.num_envs": 4, "algo.unroll_length": 7, "env.threads": 1, "env.replace_budget": 10_000, "device": "cpu"}
    config = resolve_config(getattr(presets, preset)(env=env_id, **{**own, **changes, "learners": 1, "actors": 1}))
    spec = make_spec(config.env, config.atari)
    core, sinks = (2, 8) if case == "lstm" else (), list[Sink]()

    def make_sink(agent: Any, groups: list[slice], stages: Any) -> Sink:
        sinks.append(Sink(spec, config.algo.unroll_length, config.env.num_envs, core, groups))
        return sinks[0]

    share = env_share(config, config, spec, 0, 0)
    loop = RolloutLoop(share, make_agent(config, spec), lambda rows: None, make_sink)
    try:
        loop.run(lambda: None)
    finally:
        loop.close()
    kept = sinks[0].kept
    for arrays in kept:
        check_rollout(spec, arrays)

    def count(of: Callable[[Rollout], Array]) -> int:
        return sum(int(np.count_nonzero(of(x))) for x in kept)

    fake, ended = count(lambda x: x["is_first"][1:]), count(lambda x: x["terminated"] | x["truncated"])
    episodes = count(lambda x: x["episode_length"])
    assert fake > 5, "there are steps that are none"
    assert (ended > episodes) == (case == "lives")
    assert (loop.envs.reports.replaced > 0) == (case == "nan obs")

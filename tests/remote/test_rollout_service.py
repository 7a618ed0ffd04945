"""What the services of a learner refuse of their clients' data frames. Only what a recorder could have written reaches
the learner, and other clients go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from coterie.remote.rollout_service import VERSION
from coterie.wire.codec import Layout
from tests.conftest import IMAGE, VECTOR
from tests.support.services import INFER, PULL, PUSH, SPECS, UNROLL, WIDTH, InferenceServices, RolloutServices
from tests.support.waiting import wait_until
from tests.support.wire import channel_to, data_frame


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RolloutServices]]:
    """Starts services, which must serve a good client at the end."""
    made: list[RolloutServices] = []

    def make(kind: str = "vector") -> RolloutServices:
        core = (2, 4) if kind == "core" else ()
        made.append(RolloutServices(f"unix:{tmp_path}/s", SPECS.get(kind, VECTOR), core))
        return made[0]

    yield make
    assert made[0].works()
    made[0].close()


@pytest.fixture(params=[*SPECS, "core"])
def services(request: pytest.FixtureRequest, start: Callable[..., RolloutServices]) -> RolloutServices:
    return start(request.param)


@pytest.mark.parametrize("kind", ["vector", "image", "newest"])
def test_a_time_step_that_would_harm_the_learner_is_refused(tmp_path: Path, kind: str):
    services = InferenceServices(f"unix:{tmp_path}/s", VECTOR if kind == "vector" else IMAGE, kind == "newest")
    ended = {"episode_return": 1.0, "episode_length": 1.0}
    cases: list[tuple[dict[str, Any], str]] = [
        *(({"reward": bad}, "reward is not finite") for bad in (np.nan, np.inf)),
        *([({"obs/": -np.inf}, "obs/ is not finite")] if kind == "vector" else []),
        ({**ended, "episode_return": 1e308}, "episode_return is beyond 1e+15"),
        ({**ended, "episode_length": 1e300}, "episode_length is beyond 1e+15"),
        ({**ended, "episode_length": -5.0}, "a negative episode length"),
        ({"episode_return": 1.0}, "a return without a length"),
    ]
    for changes, why in cases:
        services.is_refused(why, services.hello(), services.changed(changes), method=INFER)
    assert services.works()
    services.close()


def test_the_learner_counts_the_rows_of_a_rollout(services: RolloutServices):
    assert services.works()
    assert services.service.produced == 2 * (UNROLL * WIDTH - 1)  # without the masked step


def test_each_tensor_of_a_rollout_must_be_the_runs(services: RolloutServices):
    tensors = services.service.reads.tensors
    for k, t in enumerate(tensors):
        fewer = t._replace(shape=(*t.shape[:-1], t.shape[-1] - 1))
        for other in ([t._replace(name="x")], [t._replace(dtype="int8")], [fewer], []):
            layout = Layout([*tensors[:k], *other, *tensors[k + 1 :]])
            status, why = services.ends(services.hello(layout=layout), method=PUSH)
            assert (status, "the run's frames hold" in why) == (StatusCode.INVALID_ARGUMENT, True), why


def test_numbers_that_no_learner_can_use_are_refused(services: RolloutServices):
    """Those beyond 1e15 are finite, but not what becomes of them: a priority, a square, a sum."""
    for name in (t.name for t in services.service.reads.tensors if t.dtype.startswith("float")):
        episode = name.startswith("episode_")
        for bad, why in ((np.nan, "without a length" if episode else name), (-np.inf, name), (3e38, "1e+15")):
            if bad != 3e38 or not name.startswith("obs/"):
                services.is_refused(why, services.hello(), services.changed(name, bad, -1))
    # A host sends NaN where no episode has ended; a recorder writes 0.
    nan = services.changed("episode_return", np.nan, episode_length=np.nan)
    services.is_refused("episode_return is NaN", services.hello(), nan)


def test_actions_that_the_env_does_not_have_are_refused(services: RolloutServices):
    sizes, why = services.service.spec.action.sizes, "an action is not in the env's range"
    for bad in (-1, 4, 2**62) if sizes else ():
        for at in (0, -1):  # the one before row 0 is an input of the network, too
            services.is_refused(why, services.hello(), services.changed("action", bad, at))
    if len(sizes) > 1:  # each component has its own range
        services.is_refused(why, services.hello(), services.changed("action", 2, (..., 1)))


def test_a_probability_above_1_is_refused_and_a_density_is_not(services: RolloutServices):
    frames = [services.hello(), services.changed("log_prob", 0.01, (2, 1))]
    if services.service.spec.action.sizes:
        services.is_refused("the probability of an action is above 1", *frames)
        frames[1] = services.changed("log_prob", 1e-7, (2, 1))  # of a certain action, rounded
    assert services.ends(*frames, method=PUSH)[0] == StatusCode.OK
    assert services.learn() == 1


@pytest.mark.parametrize(
    ("name", "value", "at", "why"),
    [
        ("terminated", True, (2, 0), "the masked step"),
        ("episode_length", 1, (2, 0), "the masked step"),
        ("reward", 1e-3, (3, 0), "the masked step"),
        ("episode_length", -1, (1, 0), "a negative episode length"),
        ("version", -1, ..., "a version of the weights is negative"),
    ],
)
def test_what_no_recorder_writes_is_refused(start: Callable[..., RolloutServices], name, value, at, why):
    """Row 2 of env 0 leads from an episode's last observation to the first one of the next."""
    services = start()
    services.is_refused(why, services.hello(), services.changed(name, value, at))
    # Row 0 may begin an episode after an action with a reward: that is of another rollout.
    assert services.ends(services.hello(), services.changed("is_first", True, 0), method=PUSH)[0] == StatusCode.OK
    assert services.learn() == 1


def versions(services: RolloutServices, *pushed: int | tuple[int, int]) -> list[bytes]:
    """Rollouts acted with these weights, or with some and then others."""
    frames = [services.hello()]
    for n, version in enumerate(pushed):
        arrays = services.rollout()
        before, after = version if isinstance(version, tuple) else (version, version)
        arrays["version"][:2], arrays["version"][2:] = before, after
        frames.append(services.pushed(arrays, n))
    return frames


def test_weights_that_were_never_published_are_refused(start: Callable[..., RolloutServices]):
    services = start()
    services.publish(10)
    # The first one of a stream may be from before the learner was restarted from a checkpoint: it is dropped.
    for newer in (11, (3, 11), 2**63 - 1):
        assert services.ends(*versions(services, newer), method=PUSH)[0] == StatusCode.OK
        assert services.learn() == 0
        services.is_refused("of the weights is above 10, the newest", *versions(services, newer, newer))
    assert services.ends(*versions(services, 11, 10), method=PUSH)[0] == StatusCode.OK
    assert services.learn() == 1
    assert services.service.produced == UNROLL * WIDTH - 1
    assert services.ends(*versions(services, 7, (7, 9)), method=PUSH)[0] == StatusCode.OK
    assert services.learn() == 3


@pytest.mark.parametrize("falling", [(7, 6), ((7, 9), (8, 9)), (10, 0)])
def test_weights_that_become_older_are_refused(start: Callable[..., RolloutServices], falling: tuple[Any, ...]):
    services = start()
    services.publish(10)
    status, why = services.ends(*versions(services, *falling), method=PUSH)
    assert (status, "that of an earlier rollout" in why) == (StatusCode.INVALID_ARGUMENT, True)
    assert services.learn() == 1
    assert services.ends(*versions(services, 3), method=PUSH)[0] == StatusCode.OK, "on another stream it may be older"


def test_weights_are_sent_only_to_clients_with_older_ones(start: Callable[..., RolloutServices]):
    services = start()
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


def test_a_rollout_of_an_actor_that_vanishes_is_dropped(start: Callable[..., RolloutServices]):
    """Its rollout waits for a slot meanwhile, and is dropped."""
    services = start()
    frames = [services.hello(), *(services.question(PUSH, n) for n in range(2))]  # for both slots
    assert services.ends(*frames, method=PUSH)[0] == StatusCode.OK
    with channel_to(services.server.address) as channel:
        for _ in range(3):
            raw = services.raw(channel, *frames[:2], method=PUSH)
            assert raw.next().WhichOneof("kind") == "welcome"
            raw.call.cancel()
    wait_until(lambda: services.server.is_idle)
    assert services.learn() == 2
    assert services.works()
    assert services.learn() == 4

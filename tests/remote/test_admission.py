"""Which clients the services of a learner admit, and what their welcomes hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from coterie.build.resources import resolve_config
from coterie.build.validity import room_of
from coterie.config import Ray, Wire
from coterie.remote.admission import ClientIds, Servers, settings_of
from coterie.remote.rollout_service import RolloutService
from coterie.types import ActionSpec, Spec
from coterie.wire.client import Connection, Endpoint
from coterie.wire.codec import FrameLayout, TensorSpec
from tests.conftest import IMAGE, VECTOR, make_config
from tests.support.services import INFER, MOST_ENVS, PULL, PUSH, UNROLL, WIDTH, InferenceServices, RolloutServices
from tests.support.waiting import wait_until
from tests.support.wire import channel_to, data_frame


@pytest.fixture(params=[INFER, PUSH, PULL])
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def services(method: str, tmp_path: Path) -> Iterator[Any]:
    address = f"unix:{tmp_path}/s"
    one = InferenceServices(address) if method == INFER else RolloutServices(address)
    yield one
    assert one.works()
    one.close()


def test_a_good_client_is_served_and_its_welcome_has_the_settings(services: Any, method: str):
    assert services.works()
    assert not services.server.refused
    with closing(Connection(Endpoint(services.server.address), {})) as connection:
        welcome = connection.settings(method)
    settings = json.loads(welcome.settings)
    assert (settings["env_id"], settings["unroll_length"] > 0) == ("CartPole-v1", True)
    assert settings.get("envs", WIDTH) == WIDTH
    assert not welcome.sends


def test_the_log_says_when_a_client_joins_and_when_it_leaves(services: Any, method: str):
    assert services.works()
    wait_until(lambda: not services.server._streams)
    what = "3 envs of a host" if method == INFER else f"{WIDTH} envs of an actor"
    assert services.lines == [f"a local client has joined: {what}", f"a local client has left: {what}"]


def test_clients_that_come_and_go_all_the_time_leave_room_for_refusals():
    servers = Servers(Wire())
    servers._add_client("refused a: no token", True)
    for i in range(500):
        servers._add_client(f"{i} has joined", False)
    refused, *joined = servers.news().failures
    assert refused == "refused a: no token"
    assert len(joined) == 100
    assert joined[-1] == "99 has joined; no more clients that join or leave are logged in this hour"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"env_id": "Pong-v5"}, "the run's envs are CartPole-v1, not 'Pong-v5'"),
        ({"envs": MOST_ENVS + 1}, "9 envs are more than central.max_envs, 8|actors have 2 envs each, not 9"),
        ({"layout": FrameLayout([TensorSpec("x", "int32", (1,))])}, "the client's x: int32[1]"),
        ({"layout": FrameLayout(())}, "the client's no tensors"),
        ({"envs": 0}, "a stream of 0 envs must not send data frames"),
    ],
)
def test_a_hello_that_does_not_fit_the_run_is_refused(services: Any, method: str, changes: dict[str, Any], why: str):
    questions = [data_frame(0, b"")] if changes == {"envs": 0} else services.questions(method, 1)
    status, reason = services.ends(services.hello(method, **changes), *questions, method=method)
    assert (status, why.split("|")[method != INFER and "|" in why] in reason) == (StatusCode.INVALID_ARGUMENT, True)
    assert services.server.refused == {"unix": 1}


def test_a_host_that_hangs_is_closed_where_others_wait_for_it(tmp_path: Path):
    with closing(InferenceServices(f"unix:{tmp_path}/s")) as services:
        services.central.patience = 0.3
        with channel_to(services.server.address) as channel:
            client = services.raw(channel, services.hello(envs=3), method=INFER)
            assert client.next().WhichOneof("kind") == "welcome"
            wait_until(lambda: len(services.lines) == 3)
        assert "is closed: it has sent nothing for 0 s, while others wait for it: 3 envs of a host" in services.lines[1]


def test_settings_are_json_where_an_action_has_no_bounds():
    spec = Spec("CartPole-v1", VECTOR.obs, ActionSpec("continuous", low=(-math.inf, -2.0), high=(math.inf, 2.0)))
    text = json.dumps(settings_of(resolve_config(make_config()), spec, 20), allow_nan=False)
    assert json.loads(text)["action"] == ["continuous", [], [None, -2.0], [None, 2.0]]


def test_what_may_be_secret_is_not_sent(tmp_path: Path):
    services = RolloutServices(f"unix:{tmp_path}/s")
    config = resolve_config(make_config(**{"acting": "decoupled", "algo.unroll_length": UNROLL}))
    env = replace(config.env, kwargs='{"key": "swordfish"}')
    config = replace(config, env=env, ray=Ray(runtime_env='{"env_vars": {"KEY": "swordfish"}}'))
    service = RolloutService(config, VECTOR, 0, services.slots, services.weights, services.service.sizes, 1)
    assert "swordfish" not in service.settings
    assert json.loads(service.settings)["config"]["algo"]["unroll_length"] == UNROLL
    service.close()
    services.close()


def test_remote_envs_have_ids_of_their_own_that_a_client_keeps():
    ids = ClientIds(resolve_config(make_config()), 0)
    streams = [(7, 0, 4), (8, 0, 4), (7, 0, 8), (9, 0, 1)]
    firsts = [(ids.first_env(*stream), stream[2]) for stream in streams]
    found = [env for first, envs in firsts for env in range(first, first + envs)]
    assert len(found) == len(set(found)) == 17
    assert ids.first_env(8, 0, 4) == found[4]
    assert [ids.number(run_id) for run_id in (7, 8, 7, 9)] == [0, 1, 0, 2]


def test_a_host_that_reconnects_replaces_its_old_stream(tmp_path: Path):
    """The old one may still seem to be open; together they would be too many envs."""
    services = InferenceServices(f"unix:{tmp_path}/s", IMAGE, newest=True)
    hello = services.hello(envs=MOST_ENVS, run_id=7)
    with channel_to(services.server.address) as channel:
        streams = [services.raw(channel, hello, *services.questions(INFER, 1, MOST_ENVS), method=INFER)]
        for _ in range(2):
            assert [streams[-1].next().WhichOneof("kind") for _ in range(2)] == ["welcome", "data"]
            streams.append(services.raw(channel, hello, *services.questions(INFER, 1, MOST_ENVS), method=INFER))
        for stream in streams:
            stream.end()
    wait_until(lambda: not services.server._streams)
    assert services.works()
    services.close()


def test_remote_actors_have_room_in_a_replay_or_are_refused(tmp_path: Path):
    services = RolloutServices(f"unix:{tmp_path}/s")
    memory = services.slots, services.weights, services.service.sizes
    assert services.service.room > 1 << 30, "V-trace keeps nothing of them"
    value = {"algorithm": "dqn", "acting": "decoupled", "learners": 1, "actors": 2, "env.num_envs": 8}
    for more, room in (({}, 0), ({"replay.envs": 12}, 4), ({"replay.envs": 12, "actors": 0}, 12)):
        config = resolve_config(make_config(**{**value, "algo.unroll_length": UNROLL, **more}))
        service = RolloutService(config, VECTOR, 0, *memory, room_of(config))
        assert service.room == room
        service.close()
    services.service.room = WIDTH

    def ends(run_id: int) -> tuple[StatusCode, str]:
        return services.ends(services.hello(run_id=run_id), *services.questions(PUSH, 1))

    with channel_to(services.server.address) as channel:
        one = services.raw(channel, services.hello(run_id=1), method=PUSH)
        assert one.next().WhichOneof("kind") == "welcome"
        why = "no room for 2 more envs of remote actors: 2 of 2 (replay.envs)"
        assert ends(2) == (StatusCode.INVALID_ARGUMENT, why)
        assert ends(1)[0] == StatusCode.OK, "a client that reconnects keeps its room"
        one.end()
    wait_until(lambda: not services.server._streams)
    assert ends(2)[0] == StatusCode.OK
    services.close()


def test_an_error_of_the_thread_that_takes_rollouts_is_kept_for_the_learner(tmp_path: Path, monkeypatch: Any):
    def refuse(service: RolloutService) -> None:
        raise OSError("no locks left")

    monkeypatch.setattr(RolloutService, "_next", refuse)
    services = RolloutServices(f"unix:{tmp_path}/s")
    wait_until(lambda: str(services.service.error) == "no locks left", 10, "the thread has ended")
    services.close()

"""Remote workers against real services: what they accept of a run's settings, how they explore, when they leave."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coterie import presets
from coterie.acting.base import Stopped
from coterie.acting.recorder import rollout_layout
from coterie.build.factory import make_model, normalizers
from coterie.build.resources import resolve_config
from coterie.cli.main import main
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.errors import CoterieError
from coterie.parallel.params import FlatParams
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights
from coterie.remote.admission import settings_of
from coterie.remote.rollout_service import RolloutService
from coterie.roles.remote_worker import WorkerOptions, _actor_config, run_actor, run_env_host
from coterie.runs.config_io import replace, to_dict
from coterie.wire.auth import offset
from coterie.wire.client import Endpoint
from coterie.wire.server import Server
from coterie.wire.service import ServiceStream
from tests.conftest import VECTOR
from tests.support.waiting import wait_until

Serve = Callable[..., Endpoint]
BASE = resolve_config(replace(Config(), {"env.num_envs": 2, "learners": 1}))


@pytest.fixture
def serve(tmp_path) -> Iterator[Serve]:
    """Makes a server of these services, that of learner 0, 1, ..."""
    servers: list[Server] = []

    def make(services: dict[str, Any]) -> Endpoint:
        servers.append(Server(offset(f"unix:{tmp_path}/s", len(servers)), services))
        return Endpoint(servers[-1].address, patience=5.0)

    yield make
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("work", "changes", "why"),
    [
        (run_env_host, {"env": {"max_episode_steps": "x"}}, "env.max_episode_steps: 'x' is not an integer"),
        (run_env_host, {"env": {"time_limit": 3}}, "env.time_limit: 3 is not one of"),
        (run_env_host, {"env": None}, "did not send a run's settings"),
        (run_env_host, {"unroll_length": 0}, "algo.unroll_length: 0 must be at least 1"),
        (run_env_host, {"env_id": "Acrobot-v1"}, "the run's envs are Acrobot-v1, not CartPole-v1"),
        (run_actor, {"env": {"max_episode_steps": "x"}}, "env.max_episode_steps: 'x' is not an integer"),
        (run_actor, {"config": 3}, "the run's config: config: 3 is not a table of settings"),
        # Code from the other machine.
        (
            run_actor,
            {"algorithm": "m:M"},
            "names code: algorithm m:M; if you trust it, name it here, too: --algorithm m:M",
        ),
        (run_actor, {"plugins": {"modules": ["m"]}}, "names code: plugins.modules m; if you trust it"),
        (run_actor, {"model": {"torso": "m:M"}}, "names code: model.torso m:M; if you trust it"),
    ],
)
def test_settings_that_a_worker_cannot_use_are_refused_with_one_line(serve: Serve, work: Any, changes: Any, why: str):
    config = resolve_config(Config())
    settings: dict[str, Any] = settings_of(config, VECTOR, 20) | {"envs": 4, "config": to_dict(config)}
    for name, value in changes.items():
        into = settings["config"] if name in ("algorithm", "model", "plugins") else settings
        into[name] = {**into[name], **value} if isinstance(value, dict) else value
    method = "Infer" if work is run_env_host else "PushRollouts"
    endpoint = serve({method: lambda hello: ServiceStream({"learners": 1, "settings": json.dumps(settings)})})
    with pytest.raises(CoterieError) as caught:
        work(BASE, endpoint, WorkerOptions(print, lambda: None))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


class Learner:
    """Takes rollouts and publishes the initial weights."""

    def __init__(self, config: ResolvedConfig, rank: int, width: int) -> None:
        spec = make_spec(config.env, config.atari)
        model = make_model(config, spec)
        params, moments = FlatParams(model), normalizers(config, model)
        sizes = len(params.data), moments.size
        fields = rollout_layout(spec, config.algo.unroll_length, width, ())
        self.slots, weights = Slots(fields, 2, width, width), Weights(*sizes)
        weights.publish(params.data, torch.zeros(moments.size, dtype=torch.float64), 1)
        self.service = RolloutService(config, spec, rank, self.slots, weights, sizes, sys.maxsize)
        for batch in range(self.slots.batches):
            self.slots.open(batch, 0)

    def log_probs(self) -> dict[int, Any]:
        """Of the actions of each env whose rollouts have arrived."""
        found = {}
        for fields in (self.slots.fields[batch] for batch in range(self.slots.batches) if self.slots.is_full(batch)):
            found |= dict(zip(fields["env_id"].tolist(), fields["log_prob"].numpy().T.astype(float), strict=True))
        return found


def test_remote_actors_explore_by_the_ladder_of_the_whole_run(serve: Serve):
    """Each env acts with the epsilon of its place among all envs of the run's two learners."""
    own = {"acting": "decoupled", "learners": 2, "actors": 0, "env.num_envs": 8, "algo.unroll_length": 16}
    config = resolve_config(presets.make("dqn", "CartPole-v1", **own, **{"q.ladder": 7.0, "q.epsilon_end": 0.4}))
    learners = [Learner(config, rank, 2) for rank in range(2)]
    endpoint, _ = (serve({"PushRollouts": one.service.push, "PullParameters": one.service.pull}) for one in learners)
    left = threading.Event()

    def leave() -> None:
        if left.is_set():
            raise Stopped

    worker = WorkerOptions(lambda line: None, leave, finish_s=0.0)
    threads = [threading.Thread(target=run_actor, args=(BASE, endpoint, worker)) for _ in learners]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(len(one.log_probs()) == 2 for one in learners), what="a rollout for each learner")
    finally:
        left.set()
        for thread in threads:
            thread.join(20.0)
        for one in learners:
            one.service.close()
    found = {env_id % 16: x for one in learners for env_id, x in one.log_probs().items()}
    assert sorted(found) == [0, 1, 8, 9], "the first envs of each learner's share of 16"
    for place, log_prob in found.items():
        # One of two actions at random with probability epsilon: epsilon / 2 for the one that is not the best.
        epsilon = 0.4 ** (1 + 7 * place / 15)
        probability = np.exp(log_prob)
        assert np.minimum(probability, 1 - probability) == pytest.approx(epsilon / 2, rel=0.01, abs=1e-5)


def test_the_seed_of_an_actors_envs_is_the_commands_and_that_of_its_network_the_runs():
    config = resolve_config(presets.make("impala", "CartPole-v1", learners=1, actors=1))
    session: Any = SimpleNamespace(settings={"config": to_dict(config)}, run=config)
    run, mine = _actor_config(replace(BASE, {"seed": 7}), session)
    assert (run.seed, mine.seed) == (config.seed, 7)


@pytest.mark.parametrize(
    ("numbers", "code"), [((signal.SIGTERM, signal.SIGTERM), 0), ((signal.SIGTERM, signal.SIGINT), 1)]
)
def test_a_second_ctrl_c_ends_a_host_whose_env_hangs_and_a_doubled_sigterm_does_not(monkeypatch, numbers, code):
    def hang(*_: object) -> None:
        for number in numbers:
            signal.raise_signal(number)

    monkeypatch.setattr("coterie.roles.remote_worker.run_env_host", hang)
    assert main(["envs", "--connect", "127.0.0.1:1", "--env", "CartPole-v1"]) == code

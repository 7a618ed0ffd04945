"""Clients that share no code with Coterie send valid rollouts (docs/reference/wire.md)."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from coterie import presets
from coterie.acting.central_stream import EnvHostService
from coterie.build.resources import resolve_config
from coterie.remote.admission import FIRST_REMOTE_ID
from coterie.roles.learner_process import LearnerProcess
from coterie.wire.auth import read_token
from coterie.wire.keys import make_keys
from coterie.wire.server import Server, server_credentials
from coterie.wire.service import Limits, ServiceStream
from tests.support.net import free_port, free_ports
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES, PROTO = ROOT / "examples", ROOT / "coterie" / "wire" / "coterie.proto"
ENVS, UNROLL, ROLLOUTS, WAIT_S = 8, 20, 25, 60.0
# What npm says where it finds no registry.
OFFLINE = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT"
)


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A copy of the examples with the packages that the JavaScript one needs; skips where they cannot be had."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "wire_client.js"):
        shutil.copy(EXAMPLES / name, folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm install took more than 120 s: the registry is slow or cannot be reached")
    if done.returncode and (found := OFFLINE.search(done.stderr)):
        pytest.skip(f"npm install could not reach the registry: {found[0]}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=["python", pytest.param("javascript", marks=pytest.mark.slow)])
def client(request):
    """The command that starts a client, but for its arguments."""
    if request.param == "python":
        return [sys.executable, str(EXAMPLES / "wire_client.py")]
    return ["node", str(request.getfixturevalue("node") / "wire_client.js"), "--proto", str(PROTO)]


@contextlib.contextmanager
def started(command):
    """A process without this one's PYTHONPATH; killed at the end, if it still runs."""
    env = {"PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES, env=env
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def learning(address, **access):
    """A learner of central acting without local hosts, and its server, which sends heartbeats often."""
    changes = {"log.stall": 20.0, "algo.unroll_length": UNROLL, "central.batch_size": ENVS}
    learner = LearnerProcess(resolve_config(presets.make("seed-vtrace", "CartPole-v1", **changes)))
    server = Server(address, {"Infer": EnvHostService(learner.acting)}, limits=Limits(heartbeat_s=0.02), **access)
    try:
        yield learner, server
    finally:
        server.close()
        learner.close()


def collect(learner):
    """Rollouts one after the other: rows of N + 1 observations and of N actions with their consequences."""
    learner.acting.publish(0)
    source, parts, ended = learner.acting.rollouts(lambda: None), [], []
    for _ in range(ROLLOUTS):
        rollout = next(source)
        assert rollout.obs.shape == (UNROLL + 1, ENVS, 4)
        assert rollout.env_id.tolist() == list(range(FIRST_REMOTE_ID, FIRST_REMOTE_ID + ENVS))
        assert (rollout.policy_version == 0).all()
        names = ("obs", "is_first", "action", "reward", "terminated", "truncated")
        parts.append({name: getattr(rollout, name).numpy().copy() for name in names})
        ended += [(env, score, length) for score, length, env in rollout.episodes]
    for before, after in itertools.pairwise(parts):
        for name in ("obs", "is_first"):
            np.testing.assert_array_equal(before[name][-1], after[name][0])
    rows = {name: np.concatenate([part[name][:UNROLL] for part in parts]) for name in parts[0]}
    for name in ("obs", "is_first"):
        rows[name] = np.concatenate([rows[name], parts[-1][name][-1:]])
    return rows, ended


def check_convention(rows, ended):
    done, first = rows["terminated"] | rows["truncated"], rows["is_first"]
    assert first[0].all()
    assert not first[1].any()
    np.testing.assert_array_equal(first[2:], done[:-1], "a fake step follows each end, and nothing else")
    assert done.any()
    assert not (done & first[1:]).any()
    np.testing.assert_array_equal(rows["reward"], (~first[1:]).astype(np.float32))
    assert (np.abs(rows["obs"][first]) <= 0.05).all()
    episodes = []
    for column in range(ENVS):
        begin = 0
        for row in np.flatnonzero(done[:, column]):
            length = row + 1 - begin
            assert first[begin, column]
            episodes.append((FIRST_REMOTE_ID + column, rows["reward"][begin : row + 1, column].sum(), length))
            begin = row + 2  # what the fake step shows
    assert sorted(ended) == sorted(episodes)


def check_physics(rows):
    """Each step is gymnasium's, by the action that the policy here chose: nothing is a row early or late."""
    env, checked = CartPoleEnv(), 0
    env.reset()
    for row in range(2 * UNROLL):
        for column in np.flatnonzero(~rows["is_first"][row + 1]):
            env.state, env.steps_beyond_terminated = rows["obs"][row, column].astype(np.float64), None
            obs, _, terminated, _, _ = env.step(int(rows["action"][row, column]))
            np.testing.assert_allclose(rows["obs"][row + 1, column], obs, rtol=1e-4, atol=1e-5)
            assert terminated == rows["terminated"][row, column]
            checked += 1
    assert checked > UNROLL * ENVS


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Arguments of a server and of a client: TLS and a token."""
    token, cert, key, envs, *_ = make_keys(str(tmp_path_factory.mktemp("keys")), [])
    access = {"token": read_token(str(token)), "credentials": server_credentials(str(cert), str(key))}
    return access, ["--token", str(envs), "--cert", str(cert)]


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_a_foreign_client_finds_its_learner_and_makes_rollouts_until_the_end(client, tls, tmp_path, keys):
    """Learner 0 sends it to learner 1."""
    access, arguments = keys if tls else ({}, [])
    port = free_ports(2)
    first, second = (f"127.0.0.1:{port + i}" if tls else f"unix:{tmp_path}/s" + ".1" * i for i in range(2))
    welcome = {"number": 5, "learners": 2, "settings": "{}"}
    other = Server(first, {"Infer": lambda hello: ServiceStream(welcome)}, **access)
    try:
        with learning(second, **access) as (learner, server), started([*client, first, *arguments]) as process:
            wait_until(lambda: learner.acting.envs == ENVS or process.poll() is not None, what="it connects")
            time.sleep(0.2)  # for heartbeats: no weights are published yet
            rows, ended = collect(learner)
            check_convention(rows, ended)
            check_physics(rows)
            server.close()
            out, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, err
            steps, reason = re.fullmatch(r"(\d+) steps; over: (.*)\n", out).groups()
            assert reason == "the run has ended"
            assert 0 <= int(steps) - learner.acting.produced <= ENVS, "all but the last frame were answered"
    finally:
        other.close()


def test_a_refused_foreign_client_prints_the_reason(client, tmp_path, keys):
    access, (_, _, *cert) = keys
    (tmp_path / "other").write_text("another token than the run's")
    address = f"127.0.0.1:{free_port()}"
    server = Server(address, {"Infer": lambda hello: ServiceStream({})}, **access)
    try:
        with started([*client, address, "--token", str(tmp_path / "other"), *cert]) as process:
            out, err = process.communicate(timeout=WAIT_S)
    finally:
        server.close()
    assert process.returncode == 1, out
    assert err.splitlines()[-1] == "the server does not know the token"


def test_the_example_client_imports_nothing_of_coterie():
    assert not re.search(r"^\s*(import|from) coterie", (EXAMPLES / "wire_client.py").read_text(), re.M)


def test_the_compiled_messages_are_those_of_the_proto(tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    out = tmp_path / "coterie.desc"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", PROTO.parent, f"--descriptor_set_out={out}", PROTO.name]
    done = subprocess.run(command, cwd=PROTO.parent, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == PROTO.with_suffix(".desc").read_bytes(), "run `make proto`"

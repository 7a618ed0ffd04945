"""`coterie envs` and `coterie actor`: this machine's cores for a run elsewhere, for as long as both like."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import torch

from coterie.acting.decoupled import Stopped
from coterie.acting.recorder import Recorder, Stages, local_fields
from coterie.build.resources import resolve_config
from coterie.config import ResolvedConfig
from coterie.envs.make import make_spec
from coterie.models.heads import Moments
from coterie.parallel.params import FlatParams
from coterie.remote.admission import ENV_SETTINGS
from coterie.remote.rollout_service import rollout_tensors, weights_tensors
from coterie.roles.actor import Unrolls
from coterie.roles.env_host import Dialer, HostWork
from coterie.runs.config_io import from_dict
from coterie.types import CoterieError, Spec
from coterie.wire.auth import offset
from coterie.wire.client import Lost, Over, Stream, ask_settings, keep_trying, open_channel
from coterie.wire.codec import Layout, Tensor

Say = Callable[[str], None]
_SAY_S = 10.0
_FINISH_S = 10.0  # for a rollout that was begun when the order to leave came


@dataclass(frozen=True)
class Door:
    """Where a run's learner is, and what it takes to come in."""

    address: str
    token: str = ""
    cert: str = ""
    patience: float = 600.0  # seconds that it may be away


def _settings(
    base: ResolvedConfig, door: Door, method: str, run_id: int, say: Say, leave: Callable[[], None]
) -> tuple[dict[str, Any], str]:
    """What learner 0 says to a client that has only asked, and the address of the learner that it belongs to."""
    channel, hello = open_channel(door.address, door.cert), {"client": "coterie", "run_id": run_id, "number": -1}
    try:
        welcome = keep_trying(
            lambda: ask_settings(channel, method, hello, door.token, leave), door.address, door.patience, leave, say
        )
    finally:
        channel.close()
    settings: dict[str, Any] = json.loads(welcome.settings)
    if base.env.id != settings["env_id"]:
        raise CoterieError(f"the run's envs are {settings['env_id']}, not {base.env.id}")
    return settings, offset(door.address, welcome.number % max(1, welcome.learners))


def _config(base: ResolvedConfig, settings: dict[str, Any]) -> ResolvedConfig:
    """The client's own env with the run's settings of what an env step is. Only numbers and names are taken from the
    other side, never code.
    """
    own = {k: settings["env"][k] for k in ENV_SETTINGS}
    atari = type(base.atari)(**{k: v for k, v in settings["atari"].items() if k in vars(base.atari)})
    return replace(base, env=replace(base.env, **own), atari=atari)


class Unhurried:
    """What `leave` says of an order to leave, but only once there was time to finish the rollout that was begun."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave, self.ordered = leave, 0.0

    def __call__(self) -> None:
        try:
            self.leave()
        except Stopped:
            self.ordered = self.ordered or time.monotonic()
            if time.monotonic() - self.ordered > _FINISH_S:
                raise


class Told:
    """Says from time to time how far the work is, and how long its envs have waited for their actions."""

    def __init__(self, say: Say) -> None:
        self.say, self.at = say, time.monotonic()
        self.latencies = deque[float](maxlen=20_000)

    def hear(self, content: dict[str, Any], env_steps: int) -> None:
        """`content`: what a host or an actor reports."""
        for reason in content["failures"]:
            self.say(reason)
        self.latencies.extend(content["latencies"])
        if time.monotonic() - self.at < _SAY_S:
            return
        line = f"{env_steps:,} env steps"
        if self.latencies:
            p50, p99 = np.percentile(np.array(self.latencies), (50, 99)) * 1e3
            line += f"; actions came after {p50:.2f} ms (p50), {p99:.2f} ms (p99)"
        self.say(line)
        self.at = time.monotonic()
        self.latencies.clear()


def lend_envs(base: ResolvedConfig, door: Door, say: Say, leave: Callable[[], None]) -> None:
    """Step `base.env` for a run until it has ended. `leave` raises `Stopped` when this is to end before."""
    run_id = random.SystemRandom().getrandbits(64)
    settings, address = _settings(base, door, "Infer", run_id, say, leave)
    config, late = _config(base, settings), Unhurried(leave)
    dialer = Dialer(
        address, config.env.id, make_spec(config.env, config.atari), token=door.token, cert=door.cert,
        newest=settings["newest_frame"], patience=door.patience, leave=late, say=say,
    )  # fmt: skip
    dialer.run_id = run_id
    work = HostWork(config, 0, 0, dialer, late, unroll=max(1, int(settings["unroll_length"])), rest=leave)
    say(f"{config.env.num_envs} envs of {config.env.id} for {address}")
    told = Told(say)
    try:
        work.run(lambda content: told.hear(content, work.env_steps))
    except Over as over:
        say(f"{over}: {work.env_steps:,} env steps")
    except Stopped:
        say(f"left: {work.env_steps:,} env steps")
    finally:
        work.close()


class Wire:
    """An actor's ledge at the other end of two streams."""

    def __init__(
        self, door: Door, address: str, run_id: int, spec: Spec, env_id: str, unroll_length: int, width: int,
        core: tuple[int, ...], params: FlatParams, moments: Moments, groups: list[slice], stages: Stages,
        say: Say, leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self.say = say
        self.door, self.address, self.stages, self._leave = door, address, stages, leave
        self.params, self.moments = params, moments
        self.hello = {"client": "coterie", "run_id": run_id, "env_id": env_id, "envs": width, "number": -1}
        self.fields = local_fields(spec, unroll_length, width, torch.device("cpu"), core)
        self.first = Recorder(self.fields, groups, torch.device("cpu"))
        self.layout = rollout_tensors(spec, unroll_length, width, core)
        self.expected = weights_tensors(len(params.data), moments.size)
        self.channel: grpc.Channel | None = None
        self.streams: dict[str, Stream] = {}
        self.version, self.rollouts = -1, 0
        self.check = Unhurried(leave)

    def pull(self) -> int:
        begin = time.perf_counter()
        while True:
            self._leave()
            answer, version = self._ask("PullParameters", {"version": np.array([self.version])}, self._leave)
            if answer:
                self.params.data.copy_(torch.from_numpy(answer["params"].copy()))
                if self.moments.size:
                    self.moments.write(torch.from_numpy(answer["moments"].copy()))
                self.version = version
            if self.version >= 0:
                self.stages.add("pull", begin)
                return self.version
            time.sleep(0.05)  # the learner has not begun

    def next(self) -> Recorder:
        return self.first

    def leave(self) -> None:
        begin = time.perf_counter()
        arrays = {k: x.numpy() for k, x in self.fields.items()}
        # Sent once: who resends what was not answered may be learned from twice.
        if self._ask("PushRollouts", arrays, self.check, again=False) is not None:
            self.rollouts += 1
        self.stages.add("wait", begin)

    def _ask(self, method: str, arrays: dict[str, Any], check: Callable[[], None], again: bool = True) -> Any:
        """An answer, asked for `again` on a new stream where the old one is lost; else None."""

        def ask() -> Any:
            try:
                if method not in self.streams:
                    self.streams[method] = self._open(method, check)
                self.streams[method].send(arrays)
                return self.streams[method].receive()
            except Lost:
                if (old := self.streams.pop(method, None)) is not None:
                    old.close()
                self.version = -1  # the learner may have gone back to a checkpoint
                if again:
                    raise
                return None  # the next question goes to the other stream, which hears of the run's end

        return keep_trying(ask, self.address, self.door.patience, check, self.say)

    def _open(self, method: str, check: Callable[[], None]) -> Stream:
        sends = self.layout if method == "PushRollouts" else Layout([Tensor("version", "int64", (1,))])
        if self.channel is None:
            self.channel = open_channel(self.address, self.door.cert)
        stream = Stream(self.channel, method, self.hello, sends, token=self.door.token, check=check)
        if method == "PullParameters" and stream.reads.tensors != self.expected.tensors:
            raise CoterieError("the run's network is another one: is this the same version of coterie?")
        return stream

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        if self.channel is not None:
            self.channel.close()


def lend_actor(base: ResolvedConfig, door: Door, say: Say, leave: Callable[[], None]) -> None:
    """Act in `base.env` for a run of decoupled acting until it has ended."""
    run_id = random.SystemRandom().getrandbits(64)
    settings, address = _settings(base, door, "PushRollouts", run_id, say, leave)
    run = resolve_config(from_dict(settings["config"]))
    if ":" in run.model.torso and run.model.torso != base.model.torso:
        raise CoterieError(f"the run's torso is {run.model.torso}: if you trust it, name it with --model.torso")
    if run.own.algorithm and run.own.algorithm != base.own.algorithm:
        raise CoterieError(f"the run's algorithm is {run.own.algorithm}: if you trust it, name it with --algorithm")
    run = replace(run, seed=run_id >> 33)
    mine = _config(replace(run, env=replace(base.env, num_envs=settings["envs"], groups=run.env.groups)), settings)
    spec = make_spec(mine.env, mine.atari)
    wires: list[Wire] = []

    def wire(params: FlatParams, moments: Moments, groups: list[slice], stages: Stages) -> Wire:
        wires.append(
            Wire(
                door, address, run_id, spec, mine.env.id, settings["unroll_length"], mine.env.num_envs,
                tuple(settings["core"]), params, moments, groups, stages, say, leave,
            )
        )  # fmt: skip
        return wires[0]

    told, steps = Told(say), 0

    def count(rows: int) -> None:
        nonlocal steps
        steps += rows

    unrolls = Unrolls(replace(run, env=mine.env), mine, spec, 0, 0, count, wire)
    say(f"an actor with {mine.env.num_envs} envs of {mine.env.id} for {address}")
    try:
        unrolls.run(lambda: told.hear(unrolls.report(), steps))
        say(f"left: {steps:,} env steps")
    except Over as over:
        say(f"{over}: {steps:,} env steps")
    finally:
        unrolls.close()
        for one in wires:
            one.close()

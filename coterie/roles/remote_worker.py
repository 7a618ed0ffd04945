"""`coterie envs` and `coterie actor`: environments or an actor on this machine for a run on another one."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.acting.actor import RolloutLoop
from coterie.acting.base import Agent, Stopped, core_shape
from coterie.acting.child_processes import WorkerReport
from coterie.acting.env_host import EnvLoop, GroupStream, host_envs
from coterie.acting.recorder import Recorder, local_fields
from coterie.build.factory import env_share, make_agent
from coterie.build.resources import resolve_config
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.envs.news import Means
from coterie.errors import ConfigError, CoterieError
from coterie.parallel.stages import Stages
from coterie.remote.admission import ENV_SETTINGS
from coterie.remote.rollout_service import VERSION, rollout_tensors, weights_tensors
from coterie.runs.config_io import from_dict
from coterie.runs.trust import IMPORTED_BY_ACTORS, code_of, refuse_code
from coterie.runs.validate import validate
from coterie.wire.auth import offset
from coterie.wire.client import Connection, Endpoint, ReconnectingStream, RunEnded, Stream
from coterie.wire.codec import FrameLayout, timestep_layout


@dataclass(frozen=True)
class WorkerOptions:
    """What a remote worker needs of its user: what to print, whether to leave, and how fast."""

    report: Callable[[str], None]
    leave: Callable[[], None]  # raises `Stopped` when the worker must leave the run
    report_s: float = 10.0  # between two lines of progress
    finish_s: float = 10.0  # to complete a rollout before leaving


@dataclass(frozen=True)
class Session:
    """A worker's place in a run."""

    connection: Connection  # to the learner that it works for
    run: Config  # the run's settings that a worker needs
    settings: dict[str, Any]  # all that the run sent


def _join(base: ResolvedConfig, endpoint: Endpoint, method: str, worker: WorkerOptions) -> Session:
    """Ask learner 0 for the run's settings and for the learner to work for."""
    with closing(Connection(endpoint, {}, worker.report)) as first:
        welcome = first.settings(method, worker.leave)
    settings, run = read_settings(welcome.settings)
    if base.env.id != run.env.id:
        raise ConfigError(f"env.id: the run's envs are {run.env.id}, not {base.env.id}")
    endpoint = replace(endpoint, address=offset(endpoint.address, welcome.number % max(1, welcome.learners)))
    hello = {**first.hello, "env_id": run.env.id, "envs": run.env.num_envs}
    return Session(Connection(endpoint, hello, worker.report), run, settings)


def read_settings(text: str) -> tuple[dict[str, Any], Config]:
    """The settings of a welcome as they came, and checked as fields of a config. Raises `CoterieError`."""
    try:
        settings = json.loads(text)
        atari = {k: v for k, v in settings["atari"].items() if k in vars(Config().atari)}
        env = {k: settings["env"][k] for k in ENV_SETTINGS}
        fields = {
            "env": {"id": settings["env_id"], **env, "num_envs": settings.get("envs", 1)},
            "atari": atari,
            "algo": {"unroll_length": settings["unroll_length"]},
            "central": {"newest_frame": settings["newest_frame"]},
        }
        return settings, validate(from_dict(fields))
    except ConfigError as error:
        raise CoterieError(f"the run's settings: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CoterieError("the server did not send a run's settings: is it the same version of coterie?") from None


def _local_env(base: ResolvedConfig, run: Config) -> ResolvedConfig:
    """The worker's own env with the run's definition of an env step."""
    env = {k: getattr(run.env, k) for k in ENV_SETTINGS}
    return replace(base, env=replace(base.env, **env), atari=run.atari)


class FinishRollout:
    """Delays an order to leave by up to `seconds`, to complete the current rollout."""

    def __init__(self, leave: Callable[[], None], seconds: float) -> None:
        self._leave, self._seconds, self._ordered = leave, seconds, 0.0

    def __call__(self) -> None:
        try:
            self._leave()
        except Stopped:
            self._ordered = self._ordered or time.monotonic()
            if time.monotonic() - self._ordered > self._seconds:
                raise


class ProgressPrinter:
    """Adds up the numbers in info in `info`, prints replaced envs at once, and every few seconds the env steps and the
    latency of the actions.
    """

    def __init__(self, worker: WorkerOptions, env_steps: Callable[[], int], info: Means) -> None:
        self._worker, self._env_steps, self._info, self._printed = worker, env_steps, info, time.monotonic()
        self._latencies = deque[float](maxlen=20_000)

    def update(self, content: WorkerReport) -> None:
        self._info.add(content.news.info)
        for reason in content.news.failures:
            self._worker.report(reason)
        self._latencies.extend(content.latencies)
        if time.monotonic() - self._printed < self._worker.report_s:
            return
        line = f"{self._env_steps():,} env steps"
        if self._latencies:
            p50, p99 = np.percentile(np.array(self._latencies), (50, 99)) * 1e3
            line += f"; actions came after {p50:.2f} ms (p50), {p99:.2f} ms (p99)"
        self._worker.report(line)
        self._printed = time.monotonic()
        self._latencies.clear()

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Report at the end whether the run has ended or the worker left it."""
        reason = "left"
        try:
            yield
        except RunEnded as over:
            reason = str(over)
        except Stopped:
            pass
        self._worker.report(f"{reason}: {self._env_steps():,} env steps")


def run_env_host(base: ResolvedConfig, endpoint: Endpoint, worker: WorkerOptions) -> None:
    """Step `base.env` for a run of central acting until it has ended."""
    session = _join(base, endpoint, "Infer", worker)
    run, config, finish = session.run, _local_env(base, session.run), FinishRollout(worker.leave, worker.finish_s)
    spec = make_spec(config.env, config.atari)

    def connect(group: int, width: int) -> GroupStream:
        layout = timestep_layout(spec, width, run.central.newest_frame)
        return GroupStream(session.connection, layout, group, finish, finish)

    with closing(session.connection):
        envs = host_envs(env_share(config, config, spec, 0, 0))
        with closing(EnvLoop(envs, connect, finish, run.algo.unroll_length, worker.leave)) as loop:
            worker.report(f"{config.env.num_envs} envs of {config.env.id} for {session.connection.endpoint.address}")
            progress = ProgressPrinter(worker, lambda: loop.env_steps, info := Means())
            loop.streams[0].info = info.take
            with progress.until_the_end():
                loop.run(progress.update)


class RemoteSink:
    """An actor's weights and rollouts over two streams to its learner. `layout`: of a rollout."""

    def __init__(self, session: Session, worker: WorkerOptions, layout: FrameLayout) -> None:
        self._connection = connection = session.connection
        self._leave, self.check = worker.leave, FinishRollout(worker.leave, worker.finish_s)
        self.version, self.env_steps = -1, 0
        connect = partial(self._connect, "PushRollouts", layout, self.check)
        self._push = ReconnectingStream(connect, connection, self.check)
        self.info = Means()
        self._push.info = self.info.take
        self._pull = ReconnectingStream(partial(self._connect_pull, self.check), connection, self.check)

    def _connect(self, method: str, sends: FrameLayout, check: Callable[[], None]) -> Stream:
        self.version = -1  # the learner may have been restarted from a checkpoint
        return self._connection.stream(method, sends, check)

    def _connect_pull(self, check: Callable[[], None]) -> Stream:
        stream = self._connect("PullParameters", VERSION, check)
        if stream.reads.tensors != weights_tensors(len(self._params.data), self._moments.size).tensors:
            stream.close()
            raise CoterieError("the run has a different network: is this the same version of coterie?")
        return stream

    def first_env_id(self) -> int:
        """The run's id of this actor's first env."""
        first: int = self._push.open().welcome.first_env_id
        return first

    def attach(
        self, fields: Mapping[str, torch.Tensor], agent: Agent, groups: list[slice], stages: Stages
    ) -> RemoteSink:
        """Connect the sink with the network that acts and the memory that rollouts are recorded in."""
        self._fields, self._params, self._moments, self._stages = fields, agent.params, agent.moments, stages
        self.first = Recorder(fields, groups, torch.device("cpu"))
        return self

    def pull(self) -> int:
        while True:
            answer, version = self._pull.ask(lambda: {"version": np.array([self.version])})
            if answer:
                self._params.data.copy_(torch.from_numpy(answer["params"].copy()))
                if self._moments.size:
                    self._moments.write(torch.from_numpy(answer["moments"].copy()))
                self.version = version
            if self.version >= 0:
                return self.version
            time.sleep(0.05)  # the learner has not published any weights

    def count(self, rows: int) -> None:
        self.env_steps += rows

    def next(self) -> Recorder:
        self._leave()  # between rollouts
        return self.first

    def deliver(self) -> None:
        self._stages.start()
        # Sent once: a rollout that is sent again after a loss could be learned from twice.
        self._push.ask_once(lambda: {k: x.numpy() for k, x in self._fields.items()})
        self._stages.lap("wait")

    def close(self) -> None:
        self._push.close()
        self._pull.close()
        self._connection.close()


def run_actor(base: ResolvedConfig, endpoint: Endpoint, worker: WorkerOptions) -> None:
    """Act in `base.env` for a run of decoupled acting until it has ended."""
    session = _join(base, endpoint, "PushRollouts", worker)
    run, mine = _actor_config(base, session)
    spec, unroll, width = make_spec(mine.env, mine.atari), session.run.algo.unroll_length, mine.env.num_envs
    agent = make_agent(run, spec)
    fields = local_fields(spec, unroll, width, torch.device("cpu"), core_shape(agent.model))
    with closing(RemoteSink(session, worker, rollout_tensors(fields))) as sink:
        share = env_share(run, mine, spec, 0, sink.first_env_id())
        with closing(RolloutLoop(share, agent, sink.count, partial(sink.attach, fields))) as loop:
            worker.report(f"an actor with {width} envs of {mine.env.id} for {session.connection.endpoint.address}")
            progress = ProgressPrinter(worker, lambda: sink.env_steps, sink.info)
            with progress.until_the_end():
                loop.run(lambda: progress.update(loop.report.take()))


def _actor_config(base: ResolvedConfig, session: Session) -> tuple[ResolvedConfig, ResolvedConfig]:
    """The run's config, and the same with this actor's envs."""
    try:
        given = from_dict(session.settings["config"])
        code = {f: x for f, x in code_of(given).items() if f in IMPORTED_BY_ACTORS and x != code_of(base).get(f)}
        refuse_code(code, "it", "name it here, too: " + " ".join(f"--{f} {x}" for f, x in code.items()))
        run = resolve_config(given)
    except ConfigError as error:
        raise CoterieError(f"the run's config: {error}") from None
    except LookupError:
        raise CoterieError("the server sent no config: is it the same version of coterie?") from None
    env = replace(base.env, num_envs=session.run.env.num_envs, groups=run.env.groups)
    # The seed of its envs and actions. The network is made from the run's: it may have parts that are not trained.
    mine = replace(_local_env(replace(run, env=env), session.run), seed=base.seed)
    # An env explores by its id among all envs of the run: the algorithm needs the run's number of envs.
    return replace(run, env=replace(mine.env, num_envs=run.env.num_envs)), mine

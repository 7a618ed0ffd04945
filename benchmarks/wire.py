"""The throughput of the wire: streams of a trivial env from a few processes through one server, without training.

    python benchmarks/wire.py [--streams 1,4,16,64,256] [--envs 32] [--processes 4] [--seconds 5]
        [--address HOST:PORT] [--out FILE.json]

Prints env steps/s, messages/s, a client's latency (p50, p99), and the server's memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def serve(address: str, envs: int, ready: Any) -> None:
    """A learner that acts for all streams and discards the rollouts."""
    from coterie import presets
    from coterie.acting.central import Central
    from coterie.acting.central_stream import EnvHostService
    from coterie.build.factory import ProcessContext
    from coterie.build.resources import resolve_config
    from coterie.roles.learner_process import LearnerProcess
    from coterie.wire.server import Server

    wide = {"env.num_envs": envs, "actors": 1, "central.batch_size": 64, "central.max_envs": 100_000}
    learner = LearnerProcess(resolve_config(presets.seed_vtrace(env="CartPole-v1", **wide)), 0, ProcessContext())
    acting = learner.acting
    assert isinstance(acting, Central)
    server = Server(address, {"Infer": EnvHostService(acting)})
    ready.set()
    for _ in acting.rollouts(lambda: acting.publish(0)):
        pass
    server.close()


def ask(connection: Any, layout: Any, group: int, begun: Any, seconds: float) -> list[float]:
    """One stream's questions, one after the other: how long each answer took. All streams begin to count when each of
    them has had an answer.
    """
    zeros, latencies = {t.name: np.zeros(t.shape, t.dtype) for t in layout.tensors}, list[float]()
    zeros["episode_return"][:] = zeros["episode_length"][:] = np.nan
    stream = connection.stream("Infer", layout, lambda: None, envs=len(zeros["episode_return"]), group=group)

    def question() -> float:
        begin = time.perf_counter()
        stream.send(zeros)
        stream.receive()
        return time.perf_counter() - begin

    question()
    begun.wait(120)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        latencies.append(question())
    stream.close()
    return latencies


def clients(address: str, streams: int, envs: int, seconds: float, begun: Any, results: Any) -> None:
    """One process with so many streams, each in a thread."""
    from coterie.config import Config
    from coterie.envs.make import make_spec
    from coterie.wire.client import Connection, Endpoint
    from coterie.wire.codec import timestep_layout

    config = Config()
    layout = timestep_layout(make_spec(config.env, config.atari), envs)
    connection = Connection(Endpoint(address), {"env_id": "CartPole-v1"})
    with ThreadPoolExecutor(streams) as pool:
        each = pool.map(lambda group: ask(connection, layout, group, begun, seconds), range(streams))
        results.put([latency for latencies in each for latency in latencies])


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def measure(streams: int, envs: int, processes: int, seconds: float, address: str = "") -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = address or f"unix:{folder}/wire"
        ready, results, begun = spawn.Event(), spawn.Queue(), spawn.Barrier(streams)
        server = spawn.Process(target=serve, args=(address, envs * streams, ready), daemon=True)
        server.start()
        assert ready.wait(120), "the server does not start"
        assert server.pid is not None
        count = min(processes, streams)
        shares = [streams // count + (i < streams % count) for i in range(count)]
        workers = [
            spawn.Process(target=clients, args=(address, n, envs, seconds, begun, results), daemon=True) for n in shares
        ]
        for worker in workers:
            worker.start()
        memory, latencies = list[float](), list[float]()
        ended = 0
        while ended < count:
            try:
                latencies += results.get(timeout=1.0)
                ended += 1
            except queue.Empty:
                if any(process.exitcode for process in (server, *workers)):
                    raise SystemExit("the server or a client has failed") from None
                memory.append(rss_mb(server.pid))
        for worker in workers:
            worker.join(10)
        server.terminate()
        server.join(10)
    ms = np.array(latencies) * 1e3
    return {
        "streams": streams,
        "envs_per_message": envs,
        "processes": count,
        "messages_per_s": len(ms) / seconds,
        "env_steps_per_s": len(ms) * envs / seconds,
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "server_rss_mb": memory[len(memory) // 2 :],
    }


def echo(address: str, envs: int, newest: bool, ready: Any) -> None:
    from coterie.wire.codec import action_layout, timestep_layout
    from coterie.wire.server import Server
    from coterie.wire.service import ServiceStream

    class Echo(ServiceStream):
        """A stream that answers at once."""

        def __init__(self) -> None:
            super().__init__({})
            self.reads, self.writes = timestep_layout(atari(), envs, newest), action_layout(atari(), envs)
            self.actions = {t.name: np.zeros(t.shape, t.dtype) for t in self.writes.tensors}

        def ask(self, arrays: Any, answer: Any) -> None:
            answer(self.actions, 0)

    Server(address, {"Infer": lambda hello: Echo()})
    ready.set()
    time.sleep(3600)


def atari() -> Any:
    from coterie.types import ActionSpec, ObsSpec, Spec

    return Spec("Breakout-v5", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (4,)))


def cost(envs: int, newest: bool, messages: int = 400) -> dict[str, Any]:
    """Core-seconds for one env step of Atari on the wire, client and server together, when nothing else is done."""
    from coterie.wire.channel import open_channel
    from coterie.wire.client import Stream
    from coterie.wire.codec import Newest, timestep_layout

    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address, ready = f"unix:{folder}/wire", spawn.Event()
        server = spawn.Process(target=echo, args=(address, envs, newest, ready), daemon=True)
        server.start()
        assert ready.wait(60)
        layout = timestep_layout(atari(), envs, newest)
        stream, parts = Stream(open_channel(address), "Infer", {"envs": envs}, layout), Newest(layout)
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (messages + 5, envs, 84, 84), dtype=np.uint8)
        plain = {t.name: np.zeros(t.shape, t.dtype) for t in timestep_layout(atari(), envs).tensors}
        stacks = [np.ascontiguousarray(np.stack([frames[i + k] for k in range(4)], 1)) for i in range(messages)]

        def send(stack: Any) -> None:
            stream.send(parts.split({**plain, "obs/": stack}))
            stream.receive()

        send(stacks[0])
        ticks = os.sysconf("SC_CLK_TCK")

        def spent() -> float:
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            return time.process_time() + (int(fields[11]) + int(fields[12])) / ticks

        before, begin = spent(), time.perf_counter()
        for stack in stacks[1:]:
            send(stack)
        cpu, wall = spent() - before, time.perf_counter() - begin
        stream.close()
        server.terminate()
        server.join(10)
    each = (messages - 1) * envs
    return {
        "envs": envs,
        "newest_frame": newest,
        "core_us_per_step": 1e6 * cpu / each,
        "us_per_step": 1e6 * wall / each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,4,16,64,256")
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--address", default="", help="HOST:PORT on loopback; empty: a unix socket")
    parser.add_argument("--out", default="")
    parser.add_argument("--cost", action="store_true", help="what an env step of Atari costs on the wire instead")
    options = parser.parse_args()
    if options.cost:
        for newest in (False, True, False, True):
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in cost(options.envs, newest).items()})
        return
    how = options.envs, options.processes, options.seconds, options.address
    found = [measure(int(n), *how) for n in options.streams.split(",")]
    for row in found:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""An acting in one file: child processes step the envs, the learner chooses all actions, over shared memory."""

from __future__ import annotations

import time

import coterie
from coterie.acting import base
from coterie.acting.base import ActingKind, core_shape, group_policy
from coterie.acting.child_processes import child_process_refusals
from coterie.acting.inline import Inline
from coterie.acting.recorder import Recorder, local_fields
from coterie.config import Central, Refusal
from coterie.envs.news import Reports
from coterie.envs.tasks import envs_per_child
from coterie.errors import CoterieError
from coterie.parallel.shm import SharedArrays, fence
from coterie.parallel.threads import Team
from coterie.types import TimeStep

POLL_S = 1e-4


class Memory(base.Memory):
    """One row for each child: its time step and actions, and how many of either were written."""

    def __init__(self, setup):
        config, spec = setup.config, setup.spec
        self.config, self.spec, self.width = config, spec, envs_per_child(config)
        self.children = config.actors // config.learners
        rows = self.children, self.width
        layout = {f"obs/{k}": ((*rows, *s.shape), s.dtype) for k, s in spec.obs.items()}
        layout |= dict.fromkeys(("reward", "episode_return", "episode_length"), (rows, "float64"))
        layout |= dict.fromkeys(("terminated", "truncated", "is_first"), (rows, "bool"))
        layout |= {"env_id": (rows, "int64"), "action": ((*rows, *spec.action.shape), spec.action.dtype)}
        layout |= dict.fromkeys(("shown", "answered"), ((self.children,), "int64"))
        self.shared = SharedArrays(layout, name="memory-acting")

    def write(self, child, ts):
        arrays = self.shared.arrays
        for key, x in ts.obs.items() if isinstance(ts.obs, dict) else [("", ts.obs)]:
            arrays[f"obs/{key}"][child] = x
        for name, x in ts._asdict().items():
            if name != "obs":
                arrays[name][child] = x
        fence()
        arrays["shown"][child] += 1

    def read(self, child):
        arrays = {k: x[child].copy() for k, x in self.shared.arrays.items() if k not in ("shown", "answered", "action")}
        obs = {k.removeprefix("obs/"): arrays.pop(k) for k in list(arrays) if k.startswith("obs/")}
        return TimeStep(obs=obs[""] if list(obs) == [""] else obs, **arrays)

    def close(self):
        self.shared.close()


class Stepper:
    """The work of a child process."""

    def __init__(self, setup, memory):
        self.setup, self.memory, self.envs = setup, memory, setup.envs.make(0)

    def run(self, post):
        board, row, number = self.setup.board, self.setup.row, self.setup.number
        arrays = self.memory.shared.arrays
        while True:
            self.memory.write(number, self.envs.recv(0))
            with board.blocked(row):
                while arrays["answered"][number] < arrays["shown"][number]:
                    board.heartbeat(row)
                    if board.closed:
                        return
                    time.sleep(POLL_S)
            fence()
            self.envs.send(0, arrays["action"][number].copy())

    def close(self):
        self.envs.close()


class RemoteEnvs:
    """The envs of all children, as inline acting sees them: one group for each child."""

    def __init__(self, memory, setup):
        self.reports = Reports(setup.config.env)
        self.memory, self.board, self.rank, self.timeout = memory, setup.board, setup.rank, setup.timeout
        self.spec, self.num_envs = memory.spec, memory.children * memory.width
        self.groups = [slice(k * memory.width, (k + 1) * memory.width) for k in range(memory.children)]
        self.seen = [0] * memory.children

    def recv(self, group):
        arrays, end = self.memory.shared.arrays, time.monotonic() + self.timeout
        with self.board.blocked(self.rank):
            while arrays["shown"][group] == self.seen[group]:
                if time.monotonic() > end:
                    raise CoterieError(f"no time step for {self.timeout:g} s: a child process hangs")
                time.sleep(POLL_S)
        fence()
        self.seen[group] += 1
        return self.memory.read(group)

    def send(self, group, action):
        self.memory.shared.arrays["action"][group] = action
        fence()
        self.memory.shared.arrays["answered"][group] += 1

    def close(self):
        pass


def connect(setup, memory):
    envs, share = RemoteEnvs(memory, setup), setup.envs
    fields = local_fields(share.spec, setup.unroll_length, envs.num_envs, share.device, core_shape(setup.agent.model))
    policy = group_policy(share, envs, setup.agent, setup.actor, setup.refresh_actor)
    return Inline(envs, policy, Recorder(fields, envs.groups, share.device), setup.stages, Team(1))


KIND = ActingKind(
    connect,
    lambda config, groups, threads: f"{config.env.num_envs} envs in {config.actors} child processes",
    Memory,
    Stepper,
    child="stepper",
    refusals=(
        *child_process_refusals(lambda config: Central()),
        Refusal(lambda c, s: c.env.groups != 1, "env.groups", "must be 1: each child process is a group"),
    ),
)
coterie.register_acting("memory", KIND)

"""The environment loop, and the Recorder that turns what it sees into rollouts.

`env_loop` is independent of learning: `act` is any callable, such as a local policy, a rendezvous or an RPC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.envs.news import Reports
from coterie.parallel.stages import Stages
from coterie.types import AgentOutput, Array, Inputs, Rollout, Spec, TimeStep, entries, from_entries

Act = Callable[[int, int, TimeStep], Array | Tensor]  # (group, row of the rollout, what is seen) -> actions


class Envs(Protocol):
    """What acting needs of a set of environments; `envs/group.py` has the real one."""

    spec: Spec
    num_envs: int
    groups: list[slice]
    reports: Reports

    def recv(self, group: int) -> TimeStep: ...
    def send(self, group: int, action: Array | Tensor) -> None: ...  # recv then gives tensors, if the envs have such
    def close(self) -> None: ...


def env_loop(envs: Envs, act: Act, rows: range, seen: dict[int, TimeStep], stages: Stages) -> dict[int, TimeStep]:
    """Take a step for each of `rows` in each group of `seen`, which has the last time step of each; returns the next.

    With two groups, one steps while the policy acts for the other: the loop waits for a group only at its next turn.
    """
    seen = dict(seen)
    stages.start()
    for row in rows:
        for g in seen:
            if row > rows.start:
                seen[g] = envs.recv(g)
                stages.lap("env")
            envs.send(g, act(g, row, seen[g]))
            stages.lap("act")
    for g in seen:
        seen[g] = envs.recv(g)
    stages.lap("env")
    return seen


_POISON = -42.42  # fills floats before they are written, so that a misread is visible
_OBS = "obs/"
ON_HOST = ("reward", "is_first", "terminated", "truncated", "version", "env_id", "episode_return", "episode_length")

Fields = Mapping[str, Tensor]


def rollout_layout(
    spec: Spec, unroll_length: int, num_envs: int, core: tuple[int, ...] = ()
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each array of a rollout; `core` is the shape of one env's recurrent state.

    Actions and rewards have a row before row 0, so that `prev_action` and `prev_reward` are views of the same storage.
    """
    t, b = unroll_length, num_envs
    layout: dict[str, tuple[tuple[int, ...], str]] = {
        _OBS + k: ((t + 1, b, *s.shape), s.dtype) for k, s in spec.obs.items()
    }
    layout |= {
        "action": ((t + 1, b, *spec.action.shape), spec.action.dtype),
        "log_prob": ((t, b), "float32"),
        "value": ((t + 1, b), "float32"),
        "reward": ((t + 1, b), "float32"),
        "is_first": ((t + 1, b), "bool"),
        "terminated": ((t, b), "bool"),
        "truncated": ((t, b), "bool"),
        "version": ((t, b), "int64"),
        "env_id": ((b,), "int64"),
        "episode_return": ((t, b), "float64"),
        "episode_length": ((t, b), "float64"),
    }
    return layout | ({"core": ((b, *core), "float32")} if core else {})


def local_fields(
    spec: Spec, unroll_length: int, num_envs: int, device: torch.device, core: tuple[int, ...] = ()
) -> Fields:
    """A rollout's arrays in this process: the fields in `ON_HOST` on the host, the rest on `device`."""
    host = torch.device("cpu")
    fields = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=host if name in ON_HOST else device)
        for name, (shape, dtype) in rollout_layout(spec, unroll_length, num_envs, core).items()
    }
    for name in ("log_prob", "value", "reward"):
        fields[name].fill_(_POISON)
    fields["reward"][0] = 0
    fields["is_first"].fill_(True)
    return fields


def valid_rows(fields: Fields) -> int:
    """The rows of a rollout that count as env steps: the others show the reset after an episode."""
    return int((~fields["is_first"][1:]).sum())


def as_rollout(fields: Fields, device: torch.device, uploaded: Mapping[str, Tensor] = {}) -> Rollout:
    """The rollout in `fields`, as views that are valid until the fields are written again. A field that is not on
    `device` is copied to it, unless `uploaded` has the copy already.
    """

    def up(name: str) -> Tensor:
        x = uploaded.get(name, fields[name])
        return x if x.device == device else x.to(device, non_blocking=True)

    obs = {k.removeprefix(_OBS): up(k) for k in fields if k.startswith(_OBS)}
    reward, action = up("reward"), up("action")
    score, length, env_id = (fields[name].numpy() for name in ("episode_return", "episode_length", "env_id"))
    ended = np.nonzero(length)
    of_each = score[ended], length[ended].astype(int), env_id[ended[1]]
    return Rollout(
        obs=from_entries(obs),
        is_first=up("is_first"),
        prev_action=action,
        prev_reward=reward,
        action=action[1:],
        reward=reward[1:],
        terminated=up("terminated"),
        truncated=up("truncated"),
        behavior_log_prob=up("log_prob"),
        behavior_value=up("value"),
        policy_version=up("version"),
        env_id=up("env_id"),
        core_state=up("core") if "core" in fields else None,
        episodes=list(zip(*(x.tolist() for x in of_each), strict=True)),
    )


@dataclass
class _Columns:
    """What one group writes and reads: views of the recorder's arrays, `[b, ...]` for each row."""

    obs: dict[str, list[Tensor]]
    host: dict[str, Array]  # the same memory, where it is the host's
    is_first: list[Tensor]  # on the host
    action: list[Tensor]
    reward: list[Tensor]  # on the host
    log_prob: list[Tensor]
    value: list[Tensor]


class Recorder:
    """Writes timesteps and agent outputs of all groups into the arrays of one rollout, in place.

    Observations and agent outputs may live on a device, written as they are acted on (one upload per observation, none
    at training); the env's small fields are written on the host and follow when the rollout is done.
    """

    def __init__(self, fields: Fields, groups: list[slice], device: torch.device) -> None:
        self.fields, self.groups, self.device = fields, groups, device
        self.unroll_length = len(fields["log_prob"])
        self.obs = {k.removeprefix(_OBS): x for k, x in fields.items() if k.startswith(_OBS)}
        self.plain = list(self.obs) == [""]
        host = {name: fields[name].numpy() for name in ON_HOST}
        self.version, self.reward, self.is_first = host["version"], host["reward"], host["is_first"]
        self.terminated, self.truncated, self.env_id = host["terminated"], host["truncated"], host["env_id"]
        self.episode_return, self.episode_length = host["episode_return"], host["episode_length"]
        self.columns = [
            _Columns(
                {k: list(x[:, cols]) for k, x in self.obs.items()},
                {k: x[:, cols].numpy() for k, x in self.obs.items() if x.device.type == "cpu"},
                *(list(fields[name][:, cols]) for name in ("is_first", "action", "reward", "log_prob", "value")),
            )
            for cols in groups
        ]

    def last(self) -> tuple[Tensor, Tensor]:
        """The last action and reward, copied: the next rollout begins with them, whatever is written here meanwhile."""
        return self.fields["action"][-1].clone(), self.fields["reward"][-1].clone()

    def begin(self, core_states: list[Tensor | None], last: tuple[Tensor, Tensor]) -> None:
        """Start a rollout after one that ended with `last`."""
        self.fields["action"][0].copy_(last[0])
        self.fields["reward"][0].copy_(last[1])
        self.episode_length[:] = 0
        for cols, state in zip(self.groups, core_states, strict=True):
            if state is not None:
                self.fields["core"][cols].copy_(state)

    def write_step(self, g: int, row: int, ts: TimeStep) -> Inputs:
        """Write `obs[row]` and the consequence of `action[row - 1]`; returns the row's columns as the model's input."""
        cols, mine = self.groups[g], self.columns[g]
        for key, x in entries(ts.obs).items():
            storage = mine.obs[key]
            if isinstance(x, Tensor):  # on the device already, perhaps
                storage[row].copy_(x)
            elif key in mine.host:  # with numpy: arrays from the wire are read-only, which torch does not support
                mine.host[key][row] = x
            else:
                storage[row].copy_(torch.from_numpy(x if x.flags.writeable else x.copy()), non_blocking=True)
        self.is_first[row, cols] = ts.is_first
        if row:
            self.reward[row, cols] = ts.reward
            self.terminated[row - 1, cols] = ts.terminated
            self.truncated[row - 1, cols] = ts.truncated
            ended = ~np.isnan(ts.episode_length)
            if ended.any():
                self.episode_return[row - 1, cols][ended] = ts.episode_return[ended]
                self.episode_length[row - 1, cols][ended] = ts.episode_length[ended]
        else:
            self.env_id[cols] = ts.env_id
        return self.inputs(g, row)

    def inputs(self, g: int, row: int) -> Inputs:
        """The model's input at `row`."""
        mine = self.columns[g]
        obs = mine.obs[""][row] if self.plain else {k: x[row] for k, x in mine.obs.items()}
        return Inputs(obs, self._up(mine.is_first[row]), mine.action[row], self._up(mine.reward[row]))

    def write_output(self, g: int, row: int, out: AgentOutput, version: int) -> None:
        """Write the policy's output at `row`."""
        mine = self.columns[g]
        mine.action[row + 1].copy_(out.action)
        mine.log_prob[row].copy_(out.log_prob)
        mine.value[row].copy_(out.value)
        self.version[row, self.groups[g]] = version

    def bootstrap(self, g: int, value: Tensor) -> None:
        """Write the value of row T."""
        self.columns[g].value[-1].copy_(value)

    def _up(self, tensor: Tensor) -> Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

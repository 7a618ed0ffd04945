"""Central acting without a wire and without envs: streams that a test takes, a policy whose answers can be checked."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.acting.central import Central
from coterie.acting.central_stream import EnvStream
from coterie.types import AgentOutput, Array, Inputs, Rollout, Spec, map_tensors
from tests.conftest import VECTOR
from tests.support.central import OneWeight, learner_setup, time_step
from tests.support.waiting import wait_until

WAIT_S = 8.0  # for what must happen, on a machine with other work
QUIET_S = 0.15  # in which what must not happen would have
UNROLL = 4
EPISODE = 6  # steps from one `is_first` to the next
LIFE = 1000  # what an env says of its episode: this times its life, and which of that life it is


class Rig:
    """A Central whose policy is the model's one weight (as the value), the step within the episode (as the action and
    in the recurrent state), and a record of every batch. `own`: other options of central acting.
    """

    def __init__(
        self, spec: Spec = VECTOR, envs: int = 4, unroll_length: int = UNROLL, max_lag: int = 0,
        timeout: float = WAIT_S, is_over: Callable[[], bool] = lambda: False, **own: Any,
    ) -> None:  # fmt: skip
        options = {"actors": 1, "env.num_envs": envs, "algo.unroll_length": unroll_length, "max_lag": max_lag}
        options |= {f"central.{name}": x for name, x in own.items()}
        self.model = OneWeight()  # what is trained
        self.gate = threading.Event()  # while it is not set, the policy takes its time
        self.gate.set()
        self.busy = threading.Event()  # the policy has been called
        self.batches: list[list[tuple[int, int]]] = []  # env and life of each row
        self.error: Exception | None = None
        before = threading.enumerate()
        self.central = Central(learner_setup(self._policy, self.model, options, spec, timeout=timeout, is_over=is_over))
        self.threads = [thread for thread in threading.enumerate() if thread not in before]

    def close(self) -> None:
        self.gate.set()
        self.central.close()
        assert len(self.threads) == 2
        assert not any(thread.is_alive() for thread in self.threads)

    def _policy(
        self, model: OneWeight, inputs: Inputs, state: Tensor | None, ids: Tensor, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor]:
        assert state is not None
        assert isinstance(inputs.obs, Tensor)
        self.busy.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        env, episode, step = inputs.obs.flatten(1)[:, :3].unbind(1)
        self.batches.append(list(zip(env.int().tolist(), (episode // LIFE).int().tolist(), strict=True)))
        rows = len(step)
        after = torch.where(inputs.is_first[:, None], 0.0, state) + 1
        return AgentOutput(step.long() % 4, torch.zeros(rows), model.weight.repeat(rows)), after

    def rollouts(self, version: list[int] | None = None) -> Iterator[Rollout]:
        """As the learner has them, but copies; a weight is the number of its version, which goes up by one each."""
        at = version or [0]

        def refresh() -> None:
            self.model.weight.fill_(at[0])
            self.central.publish(at[0])

        for rollout in self.central.rollouts(refresh):
            yield map_tensors(torch.clone, rollout)
            at[0] += 1


class Client:
    """What shows a stream's envs: (env, episode, step), and as the reward the step and the action before it."""

    def __init__(
        self, rig: Rig, number: int, first_env: int | None = None, width: int = 2, life: int = 0, group: int = 0
    ) -> None:
        first = number * width if first_env is None else first_env
        self.rig, self.number, self.life, self.width = rig, number, life, width
        self.stream: EnvStream = rig.central.open_stream(number, group, first, width)
        self.answers = queue.SimpleQueue[tuple[Array, int]]()
        self.episode = self.step = self.shown = self.answered = 0
        self.action = np.zeros(width, np.int64)
        self.going = False

    def again(self) -> Client:
        """Its host starts again: another life takes the stream."""
        self.going = False
        return Client(self.rig, self.number, self.stream.first_env_id, self.width, self.life + 1)

    def arrays(self) -> dict[str, Array]:
        n, first, ends = self.width, self.step == 0, self.step == EPISODE - 1
        obs = np.zeros((n, 3), np.float32)
        obs[:, 0] = self.stream.ids
        obs[:, 1], obs[:, 2] = self.life * LIFE + self.episode, self.step
        return time_step(
            obs,
            reward=np.zeros(n, np.float32) if first else (16 * self.step + self.action).astype(np.float32),
            terminated=np.full(n, ends),
            is_first=np.full(n, first and self.shown > 0),  # a new life need not say so
            episode_return=np.full(n, 1.0 if ends else np.nan),
            episode_length=np.full(n, float(EPISODE - 1) if ends else np.nan),
        )

    def ask(self) -> None:
        self.stream.ask(self.arrays(), self._answered)
        self.shown += 1
        self.step, self.episode = (0, self.episode + 1) if self.step == EPISODE - 1 else (self.step + 1, self.episode)

    def _answered(self, arrays: Any, version: int) -> None:
        self.action = arrays["action"].copy()
        self.answered += 1
        self.answers.put((self.action, version))
        if self.going:
            self.ask()

    def go(self) -> Client:
        """Show the next step whenever the last has its action, until it is told to stop."""
        self.going = True
        self.ask()
        return self

    def answer(self) -> tuple[Array, int]:
        return self.answers.get(timeout=WAIT_S)

    def turn(self) -> tuple[Array, int]:
        self.ask()
        return self.answer()

    def leave(self) -> None:
        self.going = False
        self.stream.leave()


def check(seen: list[Rollout]) -> None:
    """Every rollout is of one life of each env, row after row; those of a life follow each other."""
    ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for r in seen:
        assert isinstance(r.obs, Tensor)
        for b, env in enumerate(r.env_id.tolist()):
            ids, episode, step = r.obs[:, b].unbind(1)
            first = r.is_first[:, b]
            assert (ids == env).all()
            lives = episode // LIFE
            assert (lives == lives[0]).all(), "two lives in one rollout"
            assert torch.equal(first, step == 0)
            goes = ~first[1:]
            assert (step[1:] == step[:-1] + 1)[goes].all()
            assert (episode[1:] == episode[:-1])[goes].all()
            assert (episode[1:] == episode[:-1] + 1)[~goes].all()
            assert torch.equal(r.action[:, b], step[:-1].long() % 4)
            assert torch.equal(r.reward[:, b], torch.where(goes, 16 * step[1:] + r.action[:, b], 0.0))
            assert torch.equal(r.behavior_value[:-1, b], r.policy_version[:, b].float())
            assert (r.policy_version[1:, b] >= r.policy_version[:-1, b]).all()
            assert r.core_state is not None
            key = env, int(lives[0])
            if key in ends:
                assert torch.equal(r.obs[0, b], ends[key][0][:3]), "rollouts of a life follow each other"
                assert r.prev_action[0, b] == ends[key][1]
                assert int(r.core_state[b]) == int(step[0]) or first[0]
            else:
                assert first[0]
                assert step[0] == 0
                assert int(r.core_state[b]) == 0
                assert int(r.prev_action[0, b]) == 0
            ends[key] = r.obs[-1, b], r.action[-1, b]


def valid(seen: list[Rollout]) -> int:
    return sum(int(r.mask.sum()) for r in seen)


def still(count: Callable[[], int], least: int = 0) -> int:
    """What it comes to when nothing more happens, once it is at least so much."""
    wait_until(lambda: count() >= least, what=f"there are {least}")
    before = -1
    while (now := count()) != before:
        before = now
        time.sleep(QUIET_S)
    return now

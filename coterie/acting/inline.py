"""Inline acting: the learner's own process steps the envs, chooses the actions and records them.

A2C, PPO and the learners of A3C, APPO and GALA: act for T steps with the weights of the last update, hand the rollout
over, repeat. Accelerated Methods' alternating sampling (section 3.1) is the two groups of `env_loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import Tensor

from coterie.actor import Envs, Recorder, Stages, env_loop
from coterie.types import AgentOutput, Array, Inputs, Rollout, TimeStep

# (inputs, core state) -> output and the next core state
Policy = Callable[[Inputs, Tensor | None], tuple[AgentOutput, Tensor | None]]


class Inline:
    """Yields rollouts; `refresh` makes the weights current before each."""

    def __init__(
        self,
        envs: Envs,
        policy: Policy,
        recorder: Recorder,
        initial_state: Callable[[int], Tensor | None],
        on_publish: Callable[[], None],
        stages: Stages,
    ) -> None:
        self.envs, self.policy, self.recorder, self.stages = envs, policy, recorder, stages
        self.on_publish, self.version = on_publish, 0
        self.states = [initial_state(len(range(*cols.indices(envs.num_envs)))) for cols in envs.groups]

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close = getattr(self.envs, "close", None)
        if close is not None:
            close()

    def publish(self, version: int) -> None:
        """The learner's weights changed: act with those of learner step `version` from now on."""
        self.on_publish()
        self.version = version

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        seen = [self.envs.recv(g) for g in range(len(self.envs.groups))]
        while True:
            refresh()
            with torch.inference_mode():
                self.recorder.begin(self.states)
                seen = env_loop(self.envs, self._act, self.recorder.unroll_length, seen, self.stages)
                self._finish(seen)
            yield self.recorder.rollout()
            seen = [self.envs.begin_rollout(g) for g in range(len(seen))]

    def _act(self, g: int, row: int, ts: TimeStep) -> Array:
        inputs = self.recorder.see(g, row, ts)
        out, self.states[g] = self.policy(inputs, self.states[g])
        self.recorder.act(g, row, out, self.version)
        return out.action.cpu().numpy()

    def _finish(self, seen: list[TimeStep]) -> None:
        """Record row T. Its value is judged by the weights that acted; its action waits for the next ones."""
        self.envs.end_rollout()
        for g, ts in enumerate(seen):
            out, _ = self.policy(self.recorder.see(g, self.recorder.unroll_length, ts), self.states[g])
            self.recorder.bootstrap(g, out.value)

"""Inline acting: the learner's own process steps the envs, chooses the actions and records them.

A2C, PPO and the learners of A3C, APPO and GALA: act for T steps with the weights of the last update, hand the rollout
over, repeat. Accelerated Methods' alternating sampling (section 3.1) is two groups: one group's envs step while the
policy acts for the other, in one thread by turns or in one thread per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch

from coterie.acting.base import Acting, ActingKind, GroupPolicy, LearnerSetup, core_shape, group_policy
from coterie.acting.recorder import Envs, Recorder, as_rollout, env_loop, local_fields, valid_rows
from coterie.config import Refusal, ResolvedConfig
from coterie.envs.news import EnvNews
from coterie.errors import counted
from coterie.parallel.stages import Stages
from coterie.parallel.threads import Team
from coterie.plugins import substitute
from coterie.types import Rollout, TimeStep


class Inline(Acting):
    """Yields rollouts. `refresh` updates the acting weights before each rollout, or every `poll` steps within it."""

    def __init__(
        self,
        envs: Envs,
        policy: GroupPolicy,
        recorder: Recorder,
        stages: Stages,
        team: Team,
        poll: int = 0,
        next_recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        self.envs, self.policy, self.recorder, self.stages, self.team = envs, policy, recorder, stages, team
        self.next_recorder = next_recorder or (lambda: recorder)  # for the next rollout
        self.version = 0
        self.poll = poll or recorder.unroll_length  # steps with the same weights
        self.produced = 0  # valid rows recorded
        self.clocks = [Stages() for _ in range(team.size)]
        self.states = [policy.initial_state(len(range(*cols.indices(envs.num_envs)))) for cols in envs.groups]

    def close(self) -> None:
        self.team.close()
        self.envs.close()

    def counts(self) -> dict[str, int]:
        """Valid rows produced and envs replaced, since the start."""
        return {"produced": self.produced, "replaced": self.envs.reports.replaced}

    def news(self) -> EnvNews:
        return self.envs.reports.take()

    def publish(self, version: int) -> None:
        """The learner's weights changed: act with those of learner step `version` from now on."""
        self.policy.refresh()
        self.version = version

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        seen = [self.envs.recv(g) for g in range(len(self.envs.groups))]
        action, reward = self.recorder.last()
        last = action.zero_(), reward.zero_()
        while True:
            self.recorder = self.next_recorder()
            self.recorder.begin(self.states, last)
            for begin in range(0, self.recorder.unroll_length, self.poll):
                refresh()
                rows = range(begin, min(begin + self.poll, self.recorder.unroll_length))
                shares = [dict(list(enumerate(seen))[k :: self.team.size]) for k in range(self.team.size)]
                parts = self.team.run([partial(self._collect, rows, *x) for x in zip(shares, self.clocks, strict=True)])
                seen = [ts for _, ts in sorted({g: ts for part in parts for g, ts in part.items()}.items())]
            self.stages.merge(self.clocks)
            self.produced += valid_rows(self.recorder.fields)
            last = self.recorder.last()
            yield as_rollout(self.recorder.fields, self.recorder.device)

    @torch.inference_mode()
    def _collect(self, rows: range, seen: dict[int, TimeStep], clock: Stages) -> dict[int, TimeStep]:
        """Step one thread's groups through `rows`, and record row T after the last one. Its value comes from the acting
        weights; its action is chosen with the next weights.
        """
        seen = env_loop(self.envs, self._act, rows, seen, clock)
        if rows.stop == self.recorder.unroll_length:
            for g, ts in seen.items():
                out, _ = self.policy.act(g, self.recorder.write_step(g, rows.stop, ts), self.states[g])
                self.recorder.bootstrap(g, out.value)
        return seen

    def _act(self, g: int, row: int, ts: TimeStep) -> torch.Tensor:
        inputs = self.recorder.write_step(g, row, ts)
        out, self.states[g] = self.policy.act(g, inputs, self.states[g])
        self.recorder.write_output(g, row, out, self.version)
        return out.action


def connect(setup: LearnerSetup, memory: None) -> Acting:
    config, share = setup.config, setup.envs
    core = core_shape(setup.agent.model)
    with ExitStack() as made:  # closes the envs where a part cannot be made
        made.callback((envs := share.make(0)).close)
        fields = local_fields(share.spec, setup.unroll_length, envs.num_envs, share.device, core)
        # Noise is sampled into the network: two groups must not act at once.
        team = Team(1 if config.q.noisy else min(share.groups, setup.threads))
        made.callback(team.close)
        acting = substitute(config, "acting", Inline)(
            envs,
            group_policy(share, envs, setup.agent, setup.actor, setup.refresh_actor),
            Recorder(fields, envs.groups, share.device),
            setup.stages,
            team,
            config.algo.poll,
        )
        made.pop_all()
    return acting


def describe(config: ResolvedConfig, groups: int, threads: int) -> str:
    envs, threads = counted(config.env.num_envs, "env"), min(threads, config.env.num_envs)
    return f"{envs} in {counted(groups, 'group')} on {counted(threads, 'thread')}"


KIND = ActingKind(
    connect,
    describe,
    refusals=(
        Refusal(lambda c, s: c.actors != 0, "acting", "must be decoupled or central if actors is set: inline has none"),
        Refusal(lambda c, s: "," in c.env.id, "env.id", "must be a single task, or set acting to decoupled or central"),
    ),
    replay="coterie.acting.inline:connect",  # nothing is left to chance
    simulation="coterie.tools.plan.acting:SimInline",
)

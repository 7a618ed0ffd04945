"""A subclass of a built-in algorithm or exchange is obeyed, whichever methods it overrides, and its state is saved."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from coterie import presets
from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import Algorithm
from coterie.algorithms.dqn import DQN
from coterie.algorithms.ppo import PPO
from coterie.algorithms.r2d2 import R2D2
from coterie.algorithms.vtrace import VTrace
from coterie.build.resources import resolve_config
from coterie.cli.options import possible
from coterie.config import Config, Refusal
from coterie.errors import ConfigError
from coterie.exchange.base import Exchange
from coterie.exchange.gossip import Gossip
from coterie.roles.learner_process import LearnerProcess

SMALL = {"q.learn_start": 160, "q.batch_size": 8, "q.target_every": 30, "replay.capacity": 4000, "env.num_envs": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "MyA2C": ("a2c", {}),
    "MyPPO": ("ppo", {"ppo.minibatch_size": 8, "algo.unroll_length": 8}),
    "MyVTrace": ("impala", {"acting": "inline", "env.num_envs": 4, "learners": 1, "actors": "auto"}),
    "MyDQN": ("dqn", SMALL),
    "MyR2D2": ("seed-r2d2", {
        **SMALL, "acting": "inline", "algo.unroll_length": 5, "r2d2.length": 10, "r2d2.burn_in": 5,
        "r2d2.stride": 5, "actors": "auto",
    }),
    "MyGossip": ("a2c", {"exchange": "gossip"}),
}  # fmt: skip


def methods(protocol: type) -> set[str]:
    """The methods that a protocol names."""
    special = {"__enter__", "__exit__"}
    return {name for name, x in vars(protocol).items() if callable(x) and (name in special or name[0] != "_")}


def counting(base: type, protocol: type) -> type:
    """A subclass that overrides every method of the protocol to count its calls, with one more tensor of state."""

    def override(method: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            if "calls" not in vars(self):
                self.calls = Counter()
            self.calls[method] += 1
            if method == "load_state_dict":
                args = ({k: x for k, x in args[0].items() if k != "mine"},)
            found = getattr(base, method)(self, *args)
            return {**found, "mine": torch.tensor(7)} if method == "state_dict" else found

        return call

    return type(f"My{base.__name__}", (base,), {method: override(method) for method in methods(protocol)})


MyA2C, MyPPO, MyVTrace, MyDQN, MyR2D2 = (counting(base, Algorithm) for base in (A2C, PPO, VTrace, DQN, R2D2))
MyGossip = counting(Gossip, Exchange)


@pytest.mark.parametrize("name", CASES)
def test_a_subclass_that_overrides_every_method_is_obeyed(name: str) -> None:
    preset, options = CASES[name]
    part, protocol = ("exchange", Exchange) if name == "MyGossip" else ("algorithm", Algorithm)
    field = "plugins.exchange" if part == "exchange" else part
    config = presets.make(preset, "CartPole-v1", **{**options, field: f"{__name__}:{name}"})
    learner, rollouts = LearnerProcess(resolve_config(config)), []
    mine: Any = getattr(learner, part)

    def enough(rollout: Any) -> bool:
        rollouts.append(1)
        learner.exchange.agree(False, False)
        return len(rollouts) == 60 or (len(rollouts) > 2 and learner.progress.learner_steps > 2)

    try:
        learner.exchange.report_to(lambda line: None)
        learner.start({}, 0)
        learner.run(enough)
        learner.algorithm.acts_at(1)
        learner.gauges()
        learner.news()
        saved = learner.tensors()
        learner.load(saved)
        assert int(saved[part]["mine"]) == 7
    finally:
        learner.close()
    assert set(mine.calls) == methods(protocol)
    assert not methods(protocol) & set(vars(mine))


class Short(PPO):
    """PPO that answers for its class, too: rollouts of three steps, and one more refusal."""

    refusals = (*PPO.refusals, Refusal(lambda c, s: c.seed == 13, "seed", "must not be 13"))

    @staticmethod
    def unroll_length(config: Config) -> int:
        return 3


LATE = {"first_rows": staticmethod(lambda config: 10**6)}
LateDQN, LateR2D2 = type("LateDQN", (DQN,), LATE), type("LateR2D2", (R2D2,), LATE)


@pytest.mark.parametrize(
    ("preset", "name", "options", "says"),
    [
        ("ppo", "Short", {"ppo.minibatch_size": 8, "seed": 13}, "seed: 13 must not be 13"),
        ("ppo", "Short", {"ppo.minibatch_size": 64}, "ppo.minibatch_size: 64 must not exceed"),  # 3 x 16 samples
        ("dqn", "LateDQN", {"q.learn_start": 2000}, "q.learn_start: 2000 must be at least"),
        ("seed-r2d2", "LateR2D2", {**CASES["MyR2D2"][1], "learners": 1}, "q.learn_start: 160 must be at least"),
    ],
)
def test_a_subclass_answers_for_its_class(preset: str, name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        possible(presets.make(preset, "CartPole-v1", **{**options, "algorithm": f"{__name__}:{name}"}))

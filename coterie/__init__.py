"""Coterie: distributed deep reinforcement learning from one code path.

    import coterie
    summary = coterie.train(coterie.presets.ppo(env="CartPole-v1", steps=100_000))
    policy = coterie.load(summary["folder"])

Names are imported when first used: env worker processes load this package without torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie import presets
    from coterie.acting.table import register_acting
    from coterie.algorithms.base import AlgorithmBase
    from coterie.algorithms.table import register_algorithm
    from coterie.build.policy import Policy, evaluate_run, load
    from coterie.config import Config
    from coterie.envs.backend import Backend, StepResults, declare
    from coterie.errors import ConfigError, CoterieError
    from coterie.exchange.table import register_exchange
    from coterie.launch.session import resume, train
    from coterie.roles.callbacks import Callback, Run
    from coterie.tools.check_env import check_env

__version__ = "0.1.0"
__all__ = [
    "AlgorithmBase", "Backend", "Callback", "Config", "ConfigError", "CoterieError", "Policy", "Run", "StepResults",
    "check_env", "declare", "evaluate_run", "load", "presets", "register_acting", "register_algorithm",
    "register_exchange", "resume", "train",
]  # fmt: skip

# Must be set before torch loads its OpenMP: by default idle torch threads spin for milliseconds on the very cores
# that the env threads need. Breakout on 2 cores, two torch threads: 1,620 acted env steps/s spinning, 3,230 passive.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOME = {
    "build.policy": ("Policy", "evaluate_run", "load"),
    "config": ("Config",),
    "errors": ("ConfigError", "CoterieError"),
    "roles.callbacks": ("Callback", "Run"),
    "tools.check_env": ("check_env",),
    "acting.table": ("register_acting",),
    "algorithms.base": ("AlgorithmBase",),
    "algorithms.table": ("register_algorithm",),
    "envs.backend": ("Backend", "StepResults", "declare"),
    "exchange.table": ("register_exchange",),
    "launch.session": ("resume", "train"),
}


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "presets":
            return importlib.import_module("coterie.presets")
        for module, names in _HOME.items():
            if name in names:
                return getattr(importlib.import_module(f"coterie.{module}"), name)
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]

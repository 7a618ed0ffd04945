"""Google Research Football through its own package: the checkpoint reward, larger maps, stacked frames.

As SEED RL ran it: `--env football:Football` with this file's folder on PYTHONPATH; `env.kwargs` has its arguments.
EnvPool runs the same scenarios (`gfootball/...`), but with the scoring reward and maps of 96x72 only. Needs the package
`gfootball`, which is built from source (docs/guides/environments.md). Left out: several players, pixels, and the
packing of maps into bits that the paper's code does.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from coterie.errors import ConfigError

SIZES = {"default": (96, 72), "medium": (120, 90), "large": (144, 108)}  # width and height of a map
_SEEDS = 2_000_000_000  # the package's own range


def _package() -> Any:
    """The module `gfootball.env`, with a gym whose wrappers still take its steps of four values."""
    try:  # gym first: gfootball's own import of it would say less
        gym, module = importlib.import_module("gym"), importlib.import_module("gfootball.env")
    except ImportError as error:
        raise ConfigError(f"env.id: needs gfootball (docs/guides/environments.md): {error}") from error
    if tuple(int(part) for part in gym.__version__.split(".")[:2]) >= (0, 26):
        raise ConfigError(f"env.id: gfootball does not work with gym {gym.__version__}: pip install 'gym<0.26'")
    return module


class Football(gymnasium.Env[Any, Any]):
    """One player of the left team, the active one. The observation `[height, width, 4]`, or 16 where four are stacked,
    has a map each of the left team, the right team, the ball and the active player: 255 where one is. `rewards`:
    `scoring` is 1 for a goal and -1 for one against; `scoring,checkpoints` adds 0.1 for each of ten distances from the
    goal that the ball is brought to, once an episode.
    """

    def __init__(
        self,
        scenario: str = "11_vs_11_hard_stochastic",
        rewards: Literal["scoring", "scoring,checkpoints"] = "scoring",
        size: Literal["default", "medium", "large"] = "default",
        stacked: bool = True,
    ) -> None:
        if rewards not in ("scoring", "scoring,checkpoints"):
            raise ConfigError(f"env.kwargs: rewards is 'scoring' or 'scoring,checkpoints', not {rewards!r}")
        if size not in SIZES:
            raise ConfigError(f"env.kwargs: size is one of {', '.join(SIZES)}, not {size!r}")
        package = _package()
        if scenario not in importlib.import_module("gfootball.env.scenario_builder").all_scenarios():
            raise ConfigError(f"env.kwargs: gfootball has no scenario {scenario!r}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gym on its own steps of four values
            self.match = package.create_environment(
                scenario, stacked=stacked, rewards=rewards, representation="extracted", channel_dimensions=SIZES[size]
            )
        width, height = SIZES[size]
        self.observation_space = spaces.Box(0, 255, (height, width, 16 if stacked else 4), np.uint8)
        self.action_space = spaces.Discrete(int(self.match.action_space.n))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = int(self.np_random.integers(_SEEDS))
        # The package draws from Python's global generator, and which team moves first only once.
        self.match.unwrapped._config.update(
            {"game_engine_random_seed": chosen, "reverse_team_processing": bool(chosen % 2)}
        )
        return self.match.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, done, _ = self.match.step(int(action))
        # The clock is not in the observation: its end is a time limit, as EnvPool has it.
        late = bool(done) and self.match.unwrapped.observation()[0]["steps_left"] == 0
        return obs, float(reward), bool(done) and not late, late, {}

    def close(self) -> None:
        self.match.close()

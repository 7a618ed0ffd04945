"""DeepMind Lab's levels as gymnasium environments: `--env dmlab/LEVEL`, with this file's folder on PYTHONPATH.

After IMPALA, appendix D: 96x72 RGB frames, each action for 4 frames, nine actions. Needs your own build of the module
`deepmind_lab`, which no package registry has. Not tested with the real module: written from its documentation, and
tested on a stand-in with the same calls (tests/envs/test_example_envs.py).

Left out: DMLab-30 as one run with its score and its shaped reward.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from coterie.errors import ConfigError
from coterie.types import Array

PREFIX = "dmlab/"
BUILD_PAGE = "https://github.com/google-deepmind/lab/blob/master/docs/users/build.md"

_PARTS = [
    "LOOK_LEFT_RIGHT_PIXELS_PER_FRAME",
    "LOOK_DOWN_UP_PIXELS_PER_FRAME",
    "STRAFE_LEFT_RIGHT",
    "MOVE_BACK_FORWARD",
    "FIRE",
    "JUMP",
    "CROUCH",
]
ACTIONS: Array = np.array(
    [
        (0, 0, 0, 1, 0, 0, 0),  # forward
        (0, 0, 0, -1, 0, 0, 0),  # backward
        (0, 0, -1, 0, 0, 0, 0),  # strafe left
        (0, 0, 1, 0, 0, 0, 0),  # strafe right
        (-20, 0, 0, 0, 0, 0, 0),  # look left
        (20, 0, 0, 0, 0, 0, 0),  # look right
        (-20, 0, 0, 1, 0, 0, 0),  # forward and look left
        (20, 0, 0, 1, 0, 0, 0),  # forward and look right
        (0, 0, 0, 0, 1, 0, 0),  # fire
    ],
    np.intc,
)
# The lab keeps DMLab-30's scripts in a subfolder; the papers name them without it.
_DMLAB30 = frozenset(
    f"{family}_{rest}"
    for family, names in {
        "rooms": "collect_good_objects_test collect_good_objects_train exploit_deferred_effects_test "
        "exploit_deferred_effects_train select_nonmatching_object watermaze keys_doors_puzzle",
        "language": "select_described_object select_located_object execute_random_task answer_quantitative_question",
        "lasertag": "one_opponent_small three_opponents_small one_opponent_large three_opponents_large",
        "natlab": "fixed_large_map varying_map_regrowth varying_map_randomized",
        "skymaze": "irreversible_path_hard irreversible_path_varied",
        "psychlab": "arbitrary_visuomotor_mapping continuous_recognition sequential_comparison visual_search",
        "explore": "object_locations_small object_locations_large obstructed_goals_small obstructed_goals_large "
        "goal_locations_small goal_locations_large object_rewards_few object_rewards_many",
    }.items()
    for rest in names.split()
)
_MOST_CHARACTERS = 1000  # of an instruction
_SEEDS = 2**31 - 1  # the lab's seeds are non-negative C ints


class LevelCache:
    """Compiled maps in a folder, one file for each key; what `deepmind_lab.Lab` takes as its `level_cache`.

    A generated maze must be compiled before its episode starts; kept here, it is compiled once. Many processes may
    share the folder, because a file is moved there when it is complete.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Copy the map of this key to `pk3_path`; False where there is none."""
        try:
            shutil.copyfile(self.folder / key, pk3_path)
        except FileNotFoundError:
            return False
        return True

    def write(self, key: str, pk3_path: str) -> None:
        """Keep the map in `pk3_path`. A second writer replaces it by the same map."""
        temporary = self.folder / f".{key}-{secrets.token_hex(8)}"
        try:
            shutil.copyfile(pk3_path, temporary)
            os.replace(temporary, self.folder / key)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class DMLab(gymnasium.Env[Any, Any]):
    """One level. The observation is the frame `[height, width, 3]` uint8, or a dict of `image` and `instruction`.

    An episode's end is `terminated`, whether the level's goal or its clock ended it: the lab does not report which, and
    the papers bootstrap from neither. It has no frame after the end, so the last one is returned again. `reset(seed=s)`
    restarts a series of episodes that depends on `s` alone; every later `reset()` continues that series.
    `level_cache`: folder of compiled maps, made if missing; "": none. `config`: further settings of
    the lab (`datasetPath`, `logLevel`, ...). `renderer`: software or hardware.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012, gymnasium declares it so
    render_mode = "rgb_array"

    def __init__(
        self,
        level: str,
        width: int = 96,
        height: int = 72,
        action_repeat: int = 4,
        instruction: bool = False,
        level_cache: str = "",
        config: Mapping[str, Any] | None = None,
        renderer: str = "software",
    ) -> None:
        if action_repeat < 1:
            raise ConfigError(f"env.kwargs: action_repeat must be at least 1, not {action_repeat}")
        self.action_repeat, self.instruction = action_repeat, instruction
        image = spaces.Box(0, 255, (height, width, 3), np.uint8)
        text = spaces.Text(_MOST_CHARACTERS, min_length=0, charset=string.printable)
        self.observation_space: spaces.Space[Any] = (
            spaces.Dict({"image": image, "instruction": text}) if instruction else image
        )
        self.action_space = spaces.Discrete(len(ACTIONS))
        settings = {"width": width, "height": height, **(config or {})}
        self.lab = _module(level).Lab(
            f"contributed/dmlab30/{level}" if level in _DMLAB30 else level,
            ["RGB_INTERLEAVED", "INSTR"] if instruction else ["RGB_INTERLEAVED"],
            config={key: str(value) for key, value in settings.items()},
            renderer=renderer,
            level_cache=LevelCache(level_cache) if level_cache else None,
        )
        if (found := [part["name"] for part in self.lab.action_spec()]) != _PARTS:
            self.lab.close()
            raise ConfigError(f"env.id '{PREFIX}{level}': its actions are {', '.join(found)}; not those of the papers")
        self.last: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # The lab counts its episodes, and a level may depend on the number: a seed restarts the count.
        episode = -1 if seed is None else 0
        self.lab.reset(episode=episode, seed=int(self.np_random.integers(_SEEDS)))
        self.last = self.lab.observations()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.lab.step(ACTIONS[action], num_steps=self.action_repeat)
        over = not self.lab.is_running()
        if not over:
            self.last = self.lab.observations()
        return self._observation(), reward, over, False, {}

    def _observation(self) -> Any:
        image = self.last["RGB_INTERLEAVED"]
        return {"image": image, "instruction": self.last["INSTR"]} if self.instruction else image

    def render(self) -> Any:
        return self.last["RGB_INTERLEAVED"]

    def close(self) -> None:
        self.lab.close()


def _module(level: str) -> Any:
    """The user's build of `deepmind_lab`."""
    try:
        return importlib.import_module("deepmind_lab")
    except ModuleNotFoundError as error:
        if error.name != "deepmind_lab":
            raise
        raise ConfigError(
            f"env.id '{PREFIX}{level}' needs the module deepmind_lab, which no package registry has: "
            f"build it as {BUILD_PAGE} says and put it on PYTHONPATH"
        ) from None

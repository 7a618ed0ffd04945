"""Stands in for DeepMind Lab's module of this name: the same calls, and strict where the real one is or is undefined.

Written from the lab's docs/users/python_api.md and python/dmlab_module.c. A frame tells what the lab was told: pixel
row 0 is (number of the episode, frames played, num_steps), row 1 the action plus 128, row 2 the seed, byte by byte.
A frame of forward movement pays a point. A level's maze has one of three maps, which a level cache may keep.
"""

import tempfile
from pathlib import Path

import numpy as np

FRAMES = 42  # of an episode
LEVELS = {
    "seekavoid_arena_01": False,
    "contributed/dmlab30/explore_goal_locations_small": False,
    "contributed/dmlab30/language_execute_random_task": True,  # it has instructions
    "tests/custom_actions_test": False,
}
ACTIONS = [
    ("LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", -512, 512),
    ("LOOK_DOWN_UP_PIXELS_PER_FRAME", -512, 512),
    ("STRAFE_LEFT_RIGHT", -1, 1),
    ("MOVE_BACK_FORWARD", -1, 1),
    ("FIRE", 0, 1),
    ("JUMP", 0, 1),
    ("CROUCH", 0, 1),
]


def _must(what, error, message):
    if not what:
        raise error(message)


class Lab:
    def __init__(self, level, observations, config=None, renderer="software", level_cache=None):
        _must(type(level) is str and type(observations) is list, TypeError, "bad argument type")
        _must(config is None or type(config) is dict, TypeError, "must be dict")
        config = config or {}
        _must(all(type(x) is str for pair in config.items() for x in pair), TypeError, "bad argument type: not str")
        _must(renderer in ("software", "hardware"), RuntimeError, f"Failed to set renderer, actual {renderer!r}!")
        _must(level in LEVELS, RuntimeError, f"Invalid levelName flag '{level}'")
        self.level, self.config, self.renderer, self.level_cache = level, config, renderer, level_cache
        self.width, self.height = int(config.get("width", "320")), int(config.get("height", "240"))
        known = {spec["name"] for spec in self.observation_spec()}
        for name in observations:
            _must(name in known, ValueError, f"Unknown observation '{name}'.")
        self.names, self.status = list(observations), "uninitialized"
        self.episode = 0
        self.log = []  # (action, num_steps) of every step
        self.resets = []  # (episode, seed) as given
        self.compiled = 0

    def reset(self, episode=-1, seed=None):
        _must(self.status != "closed", RuntimeError, "the lab is closed")
        _must(type(episode) is int, TypeError, "an integer is required")
        _must(
            seed is None or type(seed) is int, ValueError, f"'seed' must be int or None, was '{type(seed).__name__}'."
        )
        _must(seed is None or 0 <= seed < 2**31, OverflowError, "the seed is no non-negative C int")
        self.resets.append((episode, seed))
        self.episode = episode if episode >= 0 else self.episode
        self.seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        self._load_map()
        self.number, self.episode = self.episode, self.episode + 1
        self.played, self.action, self.last_num_steps = 0, np.zeros(7, np.intc), 0
        self.status = "running"
        return True

    def _load_map(self):
        if self.level_cache is None:
            return
        key = f"maze{self.seed % 3}_noaas_0123456789abcdef"
        with tempfile.TemporaryDirectory() as folder:
            pk3 = Path(folder) / "maze.pk3"
            if not self.level_cache.fetch(key, str(pk3)):
                self.compiled += 1
                pk3.write_bytes(key.encode() * 1000)
                self.level_cache.write(key, str(pk3))
            _must(pk3.read_bytes() == key.encode() * 1000, RuntimeError, "the map is damaged")

    def step(self, action, num_steps=1):
        _must(type(action) is np.ndarray, TypeError, "action must be numpy.ndarray")
        _must(type(num_steps) is int and num_steps > 0, TypeError, "num_steps must be a positive int")
        _must(self.is_running(), RuntimeError, "Environment in wrong status to advance.")
        _must(action.shape == (len(self.action_spec()),), ValueError, "action must have shape (7)")
        _must(action.dtype == np.intc, ValueError, "action must have dtype np.intc")
        _must(action.flags.c_contiguous, ValueError, "the real lab would read other memory")
        for x, spec in zip(action.tolist(), self.action_spec(), strict=True):
            _must(spec["min"] <= x <= spec["max"], ValueError, f"{spec['name']} is out of bounds")
        self.action, self.last_num_steps = action.copy(), num_steps
        self.log.append((self.action, num_steps))
        frames = min(num_steps, FRAMES - self.played)
        self.played += frames
        if self.played == FRAMES:
            self.status = "terminated"
        return float(frames * max(action[3], 0))

    def is_running(self):
        return self.status == "running"

    def observations(self):
        _must(self.is_running(), RuntimeError, "Environment in wrong status for call to observations()")
        frame = np.zeros((self.height, self.width, 3), np.uint8)
        frame[:, :, 1] = np.arange(self.height)[:, None]
        frame[0, 0] = self.number % 256, self.played, self.last_num_steps
        frame[1, :7, 0] = np.clip(self.action + 128, 0, 255)
        frame[2, :4, 0] = list(self.seed.to_bytes(4, "big"))
        text = f"Get the red hat from the blue room, and be quick: {self.seed}."
        return {name: frame if name == "RGB_INTERLEAVED" else text for name in self.names}

    def observation_spec(self):
        specs = [{"name": "RGB_INTERLEAVED", "dtype": np.uint8, "shape": (self.height, self.width, 3)}]
        return specs + ([{"name": "INSTR", "dtype": str, "shape": ()}] if LEVELS[self.level] else [])

    def action_spec(self):
        parts = ACTIONS + ([("SMILE", 0, 1)] if self.level == "tests/custom_actions_test" else [])
        return [{"name": name, "min": low, "max": high} for name, low, high in parts]

    def num_steps(self):
        return self.played

    def fps(self):
        return 60

    def close(self):
        before, self.status = self.status, "closed"
        return before != "closed"

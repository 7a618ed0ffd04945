"""An env whose process dies, in a module that is imported quickly."""

from __future__ import annotations

import os

from coterie.envs.testing import CountingEnv


class Mortal(CountingEnv):
    """Its process dies in its 40th episode, but not in a replay."""

    def step(self, action):
        if self.episode == 39 and "REPLAYED" not in os.environ:
            os._exit(3)
        return super().step(action)

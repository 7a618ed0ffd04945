"""Envs that fail, in a module that is imported quickly."""

from __future__ import annotations

import os

from coterie.envs.testing import CountingEnv


class Mortal(CountingEnv):
    """The first that is reset in a process fails, and so does the one made in its place. In the 20th episode of any of
    them its process dies. In a replay nothing of that happens.
    """

    left = ("reset", "make", "")

    def __init__(self):
        super().__init__()
        self.fail("make")

    def reset(self, **options):
        self.fail("reset")
        return super().reset(**options)

    def step(self, action):
        if self.episode == 19 and "REPLAYED" not in os.environ:
            os._exit(3)
        return super().step(action)

    def fail(self, where):
        if self.left[0] == where and "REPLAYED" not in os.environ:
            Mortal.left = self.left[1:]
            raise ValueError("not now")

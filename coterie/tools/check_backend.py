"""What `check-env` finds in a vector env or in a user's own backend: a backend that looks at each answer of another."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from coterie.envs.backend import Backend, CannotReplace, StepResults
from coterie.envs.spaces import on_host
from coterie.envs.vector import VectorBackend, check_results, place_of
from coterie.errors import ConfigError
from coterie.types import MASK, Array, entries, from_entries, map_obs

FLAGS = ("terminated", "truncated", "game_over")


def observation(name: str) -> str:
    """What findings call an entry of an observation, or the whole of it."""
    return f"observation {name!r}" if name else "observation"


def outside(x: Array, low: Any, high: Any) -> str:
    """The finding about values that are not within their space; empty if all are."""
    if not ((x < low) | (x > high)).any():
        return ""
    bounds = f"{np.min(low):.4g} to {np.max(high):.4g}"
    return f"values from {x.min():.4g} to {x.max():.4g} where its space has {bounds}: widen the space, or clip"


class CheckingBackend(Backend):
    """Gives the answers of `inner` as NumPy arrays, and adds to `mend` what is wrong with them."""

    def __init__(self, inner: Backend, mend: dict[str, str]) -> None:
        super().__init__(inner.declared, inner.num_instances)
        self.inner, self.mend = inner, mend
        self._mode = inner._mode if isinstance(inner, VectorBackend) else None
        self._ended = np.zeros(inner.num_instances, bool)  # by the last step
        self._kept = list[tuple[str, Array, Array]]()  # the last arrays, and copies of them
        self._ends = self._overs = 0
        self._device: Any = "cpu"
        self.seconds = 0.0  # that `inner` has taken to step

    def reset(self, ids: Array) -> None:
        self._ended[ids] = False
        self.inner.reset(ids)

    def step(self, ids: Array, actions: Any) -> None:
        if self.inner.tensors and not self.action_map.leaves:
            import torch

            actions = torch.as_tensor(actions, device=self._device)
        begin = time.perf_counter()
        self.inner.step(ids, actions)
        self.seconds += time.perf_counter() - begin

    def recv(self) -> StepResults:
        begin = time.perf_counter()
        answer = self.inner.recv()
        self.seconds += time.perf_counter() - begin
        return self._seen(answer, self.num_instances)

    def close(self) -> None:
        self.inner.close()
        if self._ends and not self._overs:
            self.mend["never over"] = (
                f"game_over: False at each of {self._ends} ends of episodes, so no return is reported; it is "
                "terminated | truncated, except where only a life of the game ended"
            )

    def restarted_alone(self) -> bool:
        """Whether env 0 can be restarted without the others. Called last."""
        try:
            self.inner.replace([0], [1])
        except CannotReplace:
            return False
        if isinstance(self.inner, VectorBackend):
            here = np.arange(self.num_instances) == 0
            before, after = self._last, map_obs(on_host, self.inner._flat(self.inner.restart(here)))
            for name, x in entries(after).items():
                if not np.array_equal(x[~here & ~self._ended], entries(before)[name][~here & ~self._ended]):
                    self.mend["mask"] = (
                        'reset(options={"reset_mask": mask}): it changes the observations of envs outside the mask; '
                        "restart those inside only, and return the last observation of the others"
                    )
        ids = np.zeros(1, np.int32)
        self.inner.reset(ids)
        self._seen(self.inner.recv(), 1)
        return True

    def _seen(self, answer: StepResults, n: int) -> StepResults:
        """The answer of `n` envs, on the host."""
        if not isinstance(answer, StepResults):
            raise ConfigError(f"recv returned {type(answer).__name__}, not StepResults")
        for name, array, copy in self._kept:
            if array.tobytes() != copy.tobytes():
                self.mend[f"{name} kept"] = f"{name}: the array changes after it was given; give a new one each time"
        check_results(self.spec, answer, n)
        obs = {name: entries(answer.obs)[name] for name in self.spec.obs}
        self._device = place_of(self.inner, answer.obs)
        want = {observation(k): s.dtype for k, s in self.spec.obs.items()}
        want |= {"reward": "float32", **dict.fromkeys(FLAGS, "bool")}
        given = dict(zip(want, [*obs.values(), answer.reward, *answer[2:5]], strict=True))
        self._kept = [(name, x, x.copy()) for name, x in given.items() if isinstance(x, np.ndarray)]
        for name, dtype in want.items():
            x = given[name] = on_host(given[name])
            if x.dtype != dtype:
                self.mend[f"{name} type"] = f"{name}: type {x.dtype}, not {dtype}: convert it"
        plain = from_entries({k: x.copy() for k, x in zip(obs, given.values(), strict=False)})
        rest: Any = {name: given[name].astype(dtype) for name, dtype in want.items() if name in StepResults._fields}
        seen = answer._replace(obs=plain, first=on_host(answer.first), **rest)
        if n == self.num_instances:
            self._follow(seen)
        return seen

    def _follow(self, seen: StepResults) -> None:
        """Bounds, and what an episode's end means."""
        for name, spec in self.spec.obs.items():
            if problem := outside(entries(seen.obs)[name], spec.low, spec.high):
                self.mend[f"{name} bounds"] = f"{observation(name)}: {problem}"
        done, again = seen.terminated | seen.truncated, self._ended
        if self._mode in (None, AutoresetMode.NEXT_STEP) and (seen.reward.astype(bool) | done)[again].any():
            mode = "" if self._mode is None else "; metadata['autoreset_mode'] says so, or is it SAME_STEP?"
            self.mend["restart"] = (
                "the step after an episode's end has a reward, or ends an episode: it must only begin the next one, "
                f"with its first observation, reward 0 and both flags False{mode}"
            )
        if (seen.game_over & ~done).any():
            self.mend["over"] = "game_over: True where neither terminated nor truncated is"
        self._ends, self._overs = self._ends + int(done.sum()), self._overs + int(seen.game_over.sum())
        self._ended, self._last = done, map_obs(np.copy, seen.obs)
        if isinstance(seen.obs, dict) and MASK in seen.obs:
            seen.obs[MASK][done] = True  # no action is taken there

"""`CountingEnv`'s arithmetic as one vector env in each mode of autoreset, of NumPy arrays or of torch tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from coterie.envs.testing import Catch, CountingEnv, Mission
from tests.support.masked import Masked
from tests.support.telling import TellingEnv

copies: list[str] = []  # calls that bring an observation of kind "spy" to the host


class Spy(torch.Tensor):
    """A tensor on the CPU that plays one on a device: it notes each call that copies a batch of rows to the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("cpu", "numpy", "__array__", "tolist", "to") and args[0].dim() > 1:
            copies.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Counting(VectorEnv[Any, Any, Any]):
    """Env i begins with count 100 i. `kind`: numpy, torch, dlpack, spy. `lacks`: final_obs, mode, rows, envs,
    info, or arrays of all envs' last observations and info: there are objects instead. Or, from the first step on, rows
    again ("later"), or the shape of the rewards ("reward") or flags ("flags"); or bytes or float64 ("double"),
    which its space has."""

    def __init__(
        self, num_envs: int, mode: str = "NextStep", kind: str = "numpy", lacks: str = "", nan: int = 0, length: int = 5
    ) -> None:
        self.num_envs, self.mode, self.kind, self.lacks, self.nan = num_envs, AutoresetMode(mode), kind, lacks, nan
        self.num_envs -= lacks == "envs"
        self.metadata = {} if lacks == "mode" else {"autoreset_mode": self.mode}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        if lacks == "double":
            self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        if lacks == "bytes":
            self.single_observation_space = spaces.Box(0, 255, (2,), np.uint8)
        self.single_action_space = spaces.Box(-2, 6, (2,), np.float32)
        self.begin = 100 * np.arange(self.num_envs)
        self.finished, self.length, self.calls = np.zeros(self.num_envs, bool), length, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options is None:
            self.count, self.episode = self.begin.copy(), np.zeros(self.num_envs, int)
        else:
            self.nan = 0
            self._restart(options["reset_mask"])
        return self._see(), {}

    def _restart(self, mask: Any) -> None:
        self.episode[mask & self.finished] += 1  # a reset of an env that has not finished repeats its episode
        self.count[mask], self.finished[mask] = self.begin[mask], False

    def step(self, actions: Any) -> Any:
        if self.kind != "numpy":
            assert isinstance(actions, torch.Tensor)
            actions = actions.numpy()
        assert actions.shape == (self.num_envs, 2)
        fake, info, self.calls = self.finished.copy(), dict[str, Any](), self.calls + 1
        assert self.mode is not AutoresetMode.DISABLED or not fake.any(), "a finished env is stepped"
        reward = (16 * self.count + actions.sum(1)).astype(np.float32)
        self.count += 1
        if self.mode is AutoresetMode.NEXT_STEP:
            self._restart(fake)
            reward[fake] = 0
        self.finished = self.count - self.begin >= self.length
        terminated, truncated = self.finished & (self.episode % 2 == 0), self.finished & (self.episode % 2 == 1)
        if self.mode is AutoresetMode.SAME_STEP and self.finished.any():
            info = {} if self.lacks == "final_obs" else {"final_obs": self._see()}
            if self.lacks == "arrays":
                info = {"final_obs": np.full(self.num_envs, None), "final_info": np.full(self.num_envs, {})}
                for i in np.flatnonzero(self.finished):
                    info["final_obs"][i] = np.asarray(self._see()[i])
            self._restart(self.finished)
        calls, odd = np.full(self.num_envs, float(self.calls)), np.where(self.begin == 0, np.inf, 1.0)
        told = {"step": calls if self.kind == "numpy" else torch.from_numpy(calls)}
        info |= {"deep": told, "final_odd": odd, "": "", 3: 1}
        if self.lacks == "reward":
            reward = reward[:, None]
        if self.lacks == "flags":
            terminated, truncated = terminated[:, None], truncated[:, None]
        answer = self._see(), reward, terminated, truncated, None if self.lacks == "info" else info
        return answer[:4] if self.lacks == "a value" else answer

    def _see(self) -> Any:
        obs = np.stack([self.count, self.episode], 1).astype(np.float32)
        if self.nan and self.calls == self.nan:
            obs[1] = np.nan
        if self.lacks == "rows" or (self.lacks == "later" and self.calls):
            obs = obs[:, :1]
        if self.kind == "dlpack":
            x = torch.from_numpy(obs)  # as JAX's arrays, known to torch by DLPack only
            return SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)
        return {"numpy": obs, "torch": torch.from_numpy(obs), "spy": torch.from_numpy(obs).as_subclass(Spy)}[self.kind]


class _Same(CountingEnv):  # a reset of an env that has not finished repeats its episode
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self.steps < self.length and seed is None:
            self.episode -= 1
        return super().reset(seed=seed)


def gymnasiums(num_envs: int, mode: str = "NextStep", **kwargs: Any) -> Any:
    return SyncVectorEnv([lambda: _Same(**kwargs)] * num_envs, autoreset_mode=mode)


def missions(num_envs: int, mode: str) -> Any:
    return SyncVectorEnv([Mission] * num_envs, autoreset_mode=AutoresetMode(mode))


def masked(num_envs: int, mode: str = "NextStep", where: str = "obs") -> Any:
    return SyncVectorEnv([lambda: Masked(where)] * num_envs, autoreset_mode=mode)


def telling(num_envs: int, mode: str) -> SyncVectorEnv:
    """Envs that have numbers in their info."""
    return SyncVectorEnv([lambda: TellingEnv(odd=False)] * num_envs, autoreset_mode=AutoresetMode(mode))


def images(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Catch(image=True, scale=8)] * num_envs)

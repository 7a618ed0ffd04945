"""Made-up lives of envs, of which a test knows everything, and the rollouts that tell a replay of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.replay.storage import Capacity, EnvReplay
from coterie.types import ActionSpec, ObsSpec, Rollout, Spec
from tests.conftest import needs_gpu

GAMMA = 0.9
# Where observations are: in memory, on disk, on a GPU, or on a CPU as they are on a GPU.
PLACES = ["memory", "disk", "cpu", pytest.param("cuda", marks=needs_gpu)]
STACK = 3
IMAGE = Spec("x", {"": ObsSpec((STACK, 5, 4), "uint8")}, ActionSpec("categorical", (4,)))
COLOR = Spec("x", {"": ObsSpec((3 * STACK, 5, 4), "uint8")}, ActionSpec("categorical", (4,)))
DICT = Spec("x", {"a": ObsSpec((3,), "float32"), "b": ObsSpec((2, 2), "int64")}, ActionSpec("categorical", (4,)))


@dataclass
class Life:
    """All rows of one env: what was seen, done and got, and what the row was followed by. The state that acting had
    before a row is the life's number and the row's.
    """

    rng: np.random.Generator
    spec: Spec
    seen: list[dict[str, np.ndarray]] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    rows: list[tuple[int, float, bool, bool, bool]] = field(default_factory=list)  # action, reward, flags, valid
    breaks: set[int] = field(default_factory=set)  # rows that no step was taken from: another life follows
    number: int = 0

    def obs(self, first: bool) -> dict[str, np.ndarray]:
        if self.spec is DICT:
            return {"a": self.rng.random(3, np.float32), "b": self.rng.integers(0, 9, (2, 2))}
        if self.spec is COLOR:
            return {"": self.rng.integers(0, 255, (3 * STACK, 5, 4), np.uint8)}
        frame = self.rng.integers(0, 255, (5, 4), np.uint8)
        kind = self.rng.integers(3) if first else 1
        if not self.seen or kind == 0:
            return {"": np.stack([frame] * STACK)}
        if kind == 1:  # it goes on, also beyond the loss of a life
            return {"": np.concatenate([self.seen[-1][""][1:], frame[None]])}
        return {"": self.rng.integers(0, 255, (STACK, 5, 4)).astype(np.uint8)}  # no promise was made

    def look(self, first: bool) -> None:
        self.seen.append(self.obs(first))
        self.first.append(first)

    def live(self, steps: int, again: bool) -> Rollout:
        """The next rollout of this env. `again`: it was started anew, and nothing led here."""
        if not self.seen:
            self.look(True)
        elif again:
            self.breaks.add(len(self.seen) - 1)
            self.rows.append((0, 0.0, False, False, False))
            if not self.first[-1] and self.rng.random() < 0.5:  # an episode begins with what was seen last
                self.seen.append(self.seen[-1])
                self.first.append(True)
            else:
                self.look(True)
        begin = len(self.seen) - 1
        for _ in range(steps):
            last = self.rows[-1] if self.rows and len(self.seen) - 1 not in self.breaks else None
            ended = last is not None and (last[2] or last[3]) and not self.first[-1]
            replaced = not ended and self.rng.random() < 0.04
            if ended or replaced:
                self.rows.append((int(self.rng.integers(4)), 0.0, False, False, False))
                self.look(True)
                continue
            dice = self.rng.random()
            term, trunc = dice < 0.12, dice > 0.9
            self.rows.append((int(self.rng.integers(4)), float(np.float32(self.rng.normal())), term, trunc, True))
            self.look(False)
        rows, seen = self.rows[begin:], self.seen[begin:]
        obs = {k: torch.from_numpy(np.stack([x[k] for x in seen]))[:, None] for k in seen[0]}
        action, reward, term, trunc = (torch.tensor([row[i] for row in rows])[:, None] for i in range(4))
        before = self.rows[begin - 1] if begin else (0, 0.0)
        return Rollout(
            obs.get("", obs), torch.tensor(self.first[begin:])[:, None],
            torch.cat((torch.tensor([[before[0]]]), action)), torch.cat((torch.tensor([[before[1]]]), reward)),
            action, reward.float(), term, trunc,
            torch.zeros(steps, 1), torch.zeros(steps + 1, 1), torch.zeros(steps, 1, dtype=torch.long),
            torch.zeros(1, dtype=torch.long), torch.tensor([[self.number, begin]]).float(),
        )  # fmt: skip

    def after(self, row: int) -> str:
        _, _, term, trunc, _ = self.rows[row]
        if term:
            return "nothing"
        replaced = row + 1 < len(self.rows) and not self.rows[row + 1][4]
        return "cut" if trunc or replaced or row + 1 in self.breaks else "more"

    def transition(self, row: int, n: int) -> tuple[float, float, int]:
        """Return, discount and place of what follows, by going there."""
        total, discount = 0.0, 1.0
        for i in range(n):
            total += discount * self.rows[row + i][1]
            discount *= GAMMA
            after = self.after(row + i)
            if after != "more":
                return total, 0.0 if after == "nothing" else discount, row + i + 1
        return total, discount, row + n


def put(room: Capacity, place: str, folder: Path) -> Capacity:
    """A room at one of `PLACES`."""
    if place == "memory":
        return room
    return replace(room, disk=str(folder)) if place == "disk" else replace(room, device=torch.device(place))


def is_at(place: str, ring: EnvReplay) -> bool:
    kind, rows = {"memory": np.ndarray, "disk": np.memmap}.get(place), [store.rows for store in ring.obs.values()]
    return all(isinstance(x, kind) if kind else x.device.type == place for x in rows)


def join(rollouts: list[Rollout], ids: list[int]) -> Rollout:
    fields = {}
    for k, x in vars(rollouts[0]).items():
        if isinstance(x, dict):
            fields[k] = {name: torch.cat([getattr(r, k)[name] for r in rollouts], 1) for name in x}
        elif isinstance(x, torch.Tensor) and k != "env_id":
            fields[k] = torch.cat([getattr(r, k) for r in rollouts], 0 if k == "core_state" else 1)
    return Rollout(**fields, env_id=torch.tensor(ids))


def tell(lives: dict[int, Life], ids: list[int], steps: int, rng: np.random.Generator) -> Rollout:
    """What these envs live next. One in ten was started anew before."""
    return join([lives[env_id].live(steps, rng.random() < 0.1) for env_id in ids], ids)

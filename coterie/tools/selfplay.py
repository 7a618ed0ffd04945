"""The callback of self-play (its env is in duel.py): a pool of frozen checkpoints, and the policy's Elo against them.

A member keeps the rating that the policy has when it joins; the policy's follows from its games. Random play has 0.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.errors import reason_of
from coterie.roles.callbacks import Callback, Run
from coterie.runs.files import write_whole
from coterie.tools.duel import RANDOM

SCORES = ("0.0", "0.5", "1.0")


class SelfPlay(Callback):
    """`size`: most members; the oldest checkpoint goes first. `step`: Elo's K, the most that a game can change."""

    size, step = 20, 8.0

    def on_start(self, run: Run) -> None:
        self.folder, self.read_at, self.scores = run.folder / "selfplay", 0.0, deque[float](maxlen=500)
        (self.folder / "results").mkdir(parents=True, exist_ok=True)
        for file in (self.folder / "results").iterdir():  # of games that are not in the saved rating
            file.unlink()
        self.members, self.elo, self.said = {RANDOM: 0.0}, 0.0, set[str]()
        if (saved := self.folder / "pool.json").exists():
            members, self.elo = json.loads(saved.read_text()).values()
            self.members = {name: elo for name, elo in members.items() if name == RANDOM or self.weights(name).exists()}
        run.set_env("pool", {"folder": str(self.folder.absolute()), "members": list(self.members)})

    def on_rollout(self, run: Run) -> None:
        """Rate the games that have ended."""
        if time.monotonic() < self.read_at:
            return
        self.read_at = time.monotonic() + 1.0  # at most once a second
        with self.kept_going(run, "rated"):
            self._rate(run)

    @contextmanager
    def kept_going(self, run: Run, what: str) -> Iterator[None]:
        """A disk that is full or gone does not end the run: what it refused is tried again the next time."""
        try:
            yield
        except OSError as error:
            if what not in self.said:
                run.log(f"self-play: games are not {what}: {reason_of(error)}")
            self.said.add(what)

    def _rate(self, run: Run) -> None:
        results = self.folder / "results"
        for file in results.glob("*.old"):
            for line in file.read_text().splitlines():
                opponent, _, score = line.partition(" ")
                if opponent in self.members and score in SCORES:  # a full disk cuts lines short
                    expected = 1 / (1 + 10 ** ((self.members[opponent] - self.elo) / 400))
                    self.elo += self.step * (float(score) - expected)
                    self.scores.append(float(score))
            file.unlink()
        for file in results.iterdir():  # read the next time: an env may still write to a file that it has opened
            file.rename(file.with_suffix(".old"))
        run.recorded |= {"selfplay/elo": self.elo, "selfplay/pool": float(len(self.members))}
        if self.scores:
            run.recorded["selfplay/win_rate"] = sum(self.scores) / len(self.scores)

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        with self.kept_going(run, "played against this checkpoint"):
            self._add(run, folder)

    def _add(self, run: Run, folder: Path) -> None:
        for file in self.folder.glob("*.safetensors"):
            if file.stem not in self.members:  # gone since the last checkpoint: no env draws it any more
                file.unlink()
        name = str(int(folder.name.removeprefix("step_")))
        write_whole(self.weights(name), (folder / "learner_0" / "model.safetensors").read_bytes())
        self.members[name] = self.elo
        if len(self.members) > self.size:
            del self.members[next(member for member in self.members if member != RANDOM)]
        run.set_env("pool", {"folder": str(self.folder.absolute()), "members": list(self.members)})
        self.save()

    def on_end(self, run: Run) -> None:
        """Rate the last games, too."""
        for _ in range(2):
            self.read_at = 0.0
            self.on_rollout(run)
        with self.kept_going(run, "kept"):
            self.save()

    def weights(self, member: str) -> Path:
        return self.folder / f"{member}.safetensors"

    def save(self) -> None:
        write_whole(self.folder / "pool.json", json.dumps({"members": self.members, "elo": self.elo}))

"""The parts of a run on a cluster: placed, watched, started again. Ray finds the places; what is here asks it.

A part is a `coterie` command on one machine: `train` or `resume` for learners that share its memory (a site), `envs` or
`actor` for whoever steps environments elsewhere. What a site writes into its run folder comes back to where the run was
started, and goes along when the site moves to another machine.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coterie.acting.table import acting_kind
from coterie.launch.ray import sync
from coterie.launch.ray.calls import SILENT_S, Calls, Part
from coterie.launch.ray.node import News
from coterie.launch.ray.placement import Layout, Machine, lender_args, site_config, targets
from coterie.launch.ray.watchdog import GRACE_S
from coterie.parallel.signals import on_signals
from coterie.runs import checkpoint
from coterie.runs.config_io import save_config, to_dict
from coterie.types import EXIT_INTERRUPTED, ConfigError, CoterieError
from coterie.wire.auth import CERT, TOKEN, make_keys

_POLL_S = 0.5
_HINTS = ("evaluate: ", "resume: ", "watch: ")  # how to go on with a run: this one is not where its site says
_PLACE_S = 600.0  # for Ray to find a place for learners; others are waited for as long as it takes
_WARN_S = 15.0  # after which the reason is said
_LEAVE_S = 20.0  # for those that step envs to leave at the end
_LEFT_S = 5.0  # before one that has left is started again
_STORE_S = 10.0  # between two looks at what storage has not yet
_LAST_STORE_S = 300.0  # for storage to have all of it at the end
_BACK_OFF_S = 1.0  # before a command that failed is started again


class Fleet:
    """All parts of a run, from the first command to the summary."""

    def __init__(self, ray: Any, layout: Layout, folder: Path, quiet: bool, machines: list[Machine]) -> None:
        self.calls = Calls(ray, self._check)
        self.layout, self.folder, self.quiet = layout, folder, quiet
        self.config = config = layout.config
        self.signal: signal.Signals | None = None
        # The run's, as it has them on one machine; Ray itself only knows of each part's.
        self.budgets = {"restarts": config.restarts, f"{config.acting}.restarts": acting_kind(config).restarts(config)}
        self.lost = Counter[str]()
        self.hosts = sorted({m.address for m in machines})
        self.keys = self._make_keys() if len(self.hosts) > 1 else {}
        folders = [folder / "sites" / str(k) if k else folder for k in range(len(layout.sites))]
        self.targets = targets(layout, [reached(own) for own in folders])  # before anything is written
        try:
            for own in folders:  # as many as there are sites, for who resumes
                own.mkdir(parents=True, exist_ok=True)
                (own / "summary.json").unlink(missing_ok=True)
            save_config(folder / "config.json", config)
            self.log = (folder / "ray.txt").open("a")
        except OSError as error:
            raise CoterieError(f"out: cannot write to {folder}: {error.strerror or error}") from None
        own_storage = config.ray.storage.rstrip("/")
        under = [f"/sites/{k}" if k else "" for k in range(len(folders))]
        pairs = [(own, own_storage + name) for own, name in zip(folders, under, strict=True)]
        self.storage = sync.Storage(pairs, skip=("sites",)) if own_storage else None
        self.sites = [
            Part(
                f"site {k}", self.calls.place(site.machine, site.cpus, site.gpus, config.restarts),
                2 * site.learners + 1,  # for envs or actors, and for gossip
                folders[k],
            )
            for k, site in enumerate(layout.sites)
        ]  # fmt: skip
        budget = acting_kind(config).restarts(config)
        self.lenders = [
            Part(f"{x.kind} {x.number}", self.calls.place(x.machine, 1, 0, budget), 1) for x in layout.lenders
        ]

    def _make_keys(self) -> dict[str, bytes]:
        """A token and a pair of keys for this run, for all addresses that it has."""
        with TemporaryDirectory() as new:
            return {path.name: path.read_bytes() for path in make_keys(f"{new}/keys", self.hosts)}

    def say(self, line: str) -> None:
        self.log.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        self.log.flush()
        if not self.quiet:
            print(line, flush=True)

    def work(self, resumed: bool) -> tuple[str, str]:
        """Start all parts and see them through; returns the status of the run and the reason."""
        with on_signals(self._hear):
            try:
                self._start_sites(resumed)
                told = False
                while any(site.code is None for site in self.sites):
                    if self.signal is not None:
                        self._pass_on(self.signal, told)
                        told = True
                    self._poll([*self.sites, *self.lenders])
                    self.store()
                self._dismiss()
            except CoterieError:
                with suppress(Exception):  # what the others have learned is kept
                    self._halt(self.sites)
                raise
        if self.signal is not None and any(site.code != 0 for site in self.sites):
            return "interrupted", self.signal.name
        return "finished", ""

    def _pass_on(self, asked: signal.Signals, told: bool) -> None:
        """The end, to all sites that are at work."""
        if not told:
            self.say(f"{asked.name}: a checkpoint of every site, then the end (again: stop at once)")
            for site in self.sites:
                site.handle.stop.remote()
        for site in self.sites:
            if site.code is None and site.what != "news":  # it is not at work: its last checkpoint has to do
                site.code = EXIT_INTERRUPTED

    def store(self, last: bool = False) -> None:
        """Bring `ray.storage` up to date."""
        if self.storage is not None and (last or time.monotonic() > self.storage.tried + _STORE_S):
            for line in self.storage.bring(_LAST_STORE_S if last else _POLL_S):
                self.say(line)

    def _check(self, part: Part) -> None:
        """While a place is waited for."""
        if self.signal is not None:
            raise CoterieError(f"{self.signal.name} before {part.name} had a place")

    def _hear(self, number: signal.Signals) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    # Places

    def _begin(self, part: Part, *args: Any) -> bool:
        """Start a part's command; False: it was lost again."""
        try:
            part.stamps = self.calls.ask(part, "start", *args, seconds=_PLACE_S)
        except self.calls.errors.RayActorError:
            part.what, part.asked, part.since = "started", None, time.monotonic()
            part.reason = part.reason or "its machine is gone or out of reach"
            return False
        part.code, part.asked, part.what = None, None, "news"
        return True

    def _start_sites(self, resume: bool) -> None:
        """Start all sites once they have a place; whoever steps envs for them starts when it has one."""
        todo = [site for site in self.sites if site.code != 0 and (site.what == "news" or not site.address[1])]
        for site in todo:
            while not site.address[1]:
                try:
                    site.address = self.calls.ask(site, "open", *self._way(site), seconds=_PLACE_S)
                except self.calls.errors.RayActorError:  # lost before it has begun
                    self._count(site, "its machine is gone or out of reach")
        if self.keys and any(site.address[0] not in self.hosts for site in self.sites):
            self.hosts = sorted({*self.hosts, *(site.address[0] for site in self.sites)})
            self.keys = self._make_keys()  # a machine that was not there before
        for site in todo:
            self._start_site(self.sites.index(site), resume)
        for i, part in enumerate(self.lenders):
            if part.what == "news" and part.code is None:  # others are told when they have a place
                self._start_lender(i)

    def _way(self, part: Part) -> tuple[str, int]:
        return ("" if self.keys else "127.0.0.1"), part.ports

    def _start_site(self, k: int, resume: bool) -> None:
        site, own = self.sites[k], self.layout.sites[k]
        assert site.folder is not None
        config = site_config(self.layout, k, site.address, self.sites[0].address, bool(self.keys), self.targets[k])
        files = {"config.json": json.dumps(to_dict(config)).encode(), **self.keys}
        if resume and reached(site.folder) >= self.targets[k]:
            site.code = 0  # it was lost when it had done all that it had to
            return
        if resume and checkpoint.latest(site.folder / "checkpoints") is not None:
            everything = sync.changes(site.folder, {}, skip=("sites", "ray.txt", "config.json", "summary.json"))
            begun = self._begin(site, ["resume", "{here}/run"], files, everything)
        else:
            begun = self._begin(site, ["train", "{here}/config.json", "--out", "{here}/run"], files)
        if not begun:
            return
        learners = f"{own.learners} learners" if own.learners > 1 else "a learner"
        self.say(f"{site.name}: {learners} at {site.address[0]}")

    def _start_lender(self, i: int) -> None:
        part, lender = self.lenders[i], self.layout.lenders[i]
        args = lender_args(self.layout, lender, self.sites[lender.site].address, bool(self.keys))
        if self._begin(part, args, {name: x for name, x in self.keys.items() if name in (TOKEN, CERT)}):
            self.say(f"{part.name}: at {part.address[0]}, for {self.sites[lender.site].name}")

    # What happens

    def _poll(self, parts: list[Part]) -> None:
        """Ask everybody, and hear who answers."""
        now = time.monotonic()
        for part in parts:
            if part.asked is None and part.code is None and now >= part.not_before:
                args = {"news": (part.stamps,), "open": self._way(part), "started": ()}[part.what]
                part.asked = getattr(part.handle, part.what).remote(*args)
                if part.what == "news":
                    part.since = now
        asked = {part.asked: part for part in parts if part.asked is not None}
        if asked:
            ready, _ = self.calls.ray.wait(list(asked), num_returns=len(asked), timeout=_POLL_S)
            for ref in ready:
                if asked[ref].asked is ref:  # and it has not been started anew because of another's answer
                    self._hear_of(asked[ref])
            for part in parts:
                if part.asked is not None:
                    self._miss(part, now - part.since)
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - now)))

    def _miss(self, part: Part, seconds: float) -> None:
        """A part has not answered for so long."""
        if part.what == "news" and seconds > SILENT_S:
            part.since = time.monotonic()
            self.say(f"{part.name}: no answer for {SILENT_S:.0f} s: it is given up")
            self.calls.ray.kill(part.handle, no_restart=False)
        elif part.what != "news" and seconds > _PLACE_S and part.folder is not None:
            raise CoterieError(f"ray: no place for {part.name} for {_PLACE_S:.0f} s; {self.calls.free()}")
        elif part.what != "news" and seconds > _WARN_S and not part.warned:
            part.warned = True
            self.say(f"{part.name}: waits for a place; {self.calls.free()}")

    def _hear_of(self, part: Part) -> None:
        errors = self.calls.errors
        try:
            answer = self.calls.ray.get(part.asked)
        except errors.RayError as error:
            if (why := self.calls.final(part, error)) is not None:
                raise why from None
            if part.what == "news":
                part.reason, part.since = "its machine is gone or out of reach", time.monotonic()
            part.what, part.asked, part.not_before = "started", None, time.monotonic() + _POLL_S
            return
        part.asked = None
        if part.what == "news":
            part.since = time.monotonic()
            self._hear_news(part, answer)
        elif part.what == "open":
            self._settle(part, answer)
        elif answer:
            self.say(f"{part.name}: was out of reach for {time.monotonic() - part.since:.0f} s")
            part.what = "news"
        else:
            self._count(part, part.reason)

    def _hear_news(self, part: Part, news: News) -> None:
        self._keep(part, news)
        alone = len(self.sites) == 1 and part.folder is not None
        for line in news.lines:
            if not line.startswith(_HINTS):
                self.say(line if alone else f"{part.name}: {line}")
        part.last = next((x for x in reversed(news.lines) if x.strip()), part.last)
        if news.code is None:
            return
        said = part.last.removeprefix("coterie: ")
        if news.code == 2:
            raise ConfigError(f"{part.name}: {said}")
        if news.code == 1 and part.folder is not None:
            raise CoterieError(f"{part.name}: {said}")
        own = part if part.folder is not None else self.sites[self.layout.lenders[self.lenders.index(part)].site]
        stopped = self.signal is not None or own.code is not None
        if stopped or (part.folder is not None and news.code == 0):
            part.code = news.code
        elif news.code == 0:  # the run is over, as will be heard soon, or somebody has told it to leave
            part.what, part.since, part.not_before = "open", time.monotonic(), time.monotonic() + _LEFT_S
        else:
            self._count(
                part, f"its command ended with exit code {news.code}" + (f" ({said})" if news.code == 1 else "")
            )

    def _keep(self, part: Part, news: News) -> None:
        """What has changed in a site's folder, in the copy here."""
        if part.folder is not None and news.changes:
            sync.take(part.folder, news.changes, skip=("config.json",) if part.folder == self.folder else ())
        part.stamps = news.changes.stamps

    def _count(self, part: Part, reason: str) -> None:
        """A part is to be started again."""
        what = "restarts" if part.folder is not None else f"{self.config.acting}.restarts"
        self.lost[what] += 1
        if self.lost[what] > self.budgets[what]:
            raise CoterieError(f"{part.name}: {reason}; {what} ({self.budgets[what]}) are used up")
        self.say(f"{part.name}: {reason}; it is started again")
        part.what, part.warned, part.since = "open", False, time.monotonic()
        part.not_before = time.monotonic() + _BACK_OFF_S

    def _settle(self, part: Part, address: tuple[str, int]) -> None:
        """A part has a place: its command starts there, from what its last checkpoint has."""
        before, part.address = part.address, address
        if self.signal is not None:
            return
        if part.folder is None:
            self._start_lender(self.lenders.index(part))
            return
        k = self.sites.index(part)
        if (k == 0 and len(self.sites) > 1) or (self.keys and address[0] not in self.hosts):
            self.say(f"{part.name} is at {address[0]} now: all go on from their checkpoints")
            self._halt([site for site in self.sites if site is not part])
            part.what, part.code = "news", None
            self._start_sites(resume=True)
            return
        self._start_site(k, resume=True)
        for i, lender in enumerate(self.layout.lenders):
            if lender.site == k and address != before and self.lenders[i].what == "news":
                self._start_lender(i)

    def _halt(self, parts: list[Part]) -> None:
        """End commands in good order, and keep what they leave."""
        end = time.monotonic() + SILENT_S
        at_work = [part for part in parts if part.code is None and part.what == "news"]
        for part in at_work:
            part.handle.stop.remote()
        for part in at_work:
            part.asked = None
            while part.code is None and time.monotonic() < end:
                with suppress(self.calls.errors.RayActorError):
                    news: News = self.calls.ask(part, "news", part.stamps)
                    self._keep(part, news)
                    part.code = news.code
                time.sleep(0.1)

    def _dismiss(self) -> None:
        """All sites have ended: whoever steps envs is told by them, or now."""
        end = time.monotonic() + _LEAVE_S
        for part in self.lenders:
            part.handle.stop.remote()
        at_work = [part for part in self.lenders if part.what == "news"]
        with suppress(CoterieError):  # the run is over: who is lost now is not missed
            while any(part.code is None for part in at_work) and time.monotonic() < end:
                self._poll(at_work)

    def close(self) -> None:
        parts = [*self.sites, *self.lenders]
        closing = [part.handle.close.remote() for part in parts if part.address[1]]  # who has no place cannot answer
        with suppress(Exception):  # what is gone needs no end
            self.calls.ray.wait(closing, num_returns=len(closing), timeout=GRACE_S + _LEAVE_S)
        for part in parts:
            with suppress(Exception):
                self.calls.ray.kill(part.handle)
        self.log.close()


def reached(folder: Path) -> int:
    """Env steps of a site's last checkpoint."""
    path = checkpoint.latest(folder / "checkpoints")
    return 0 if path is None else int(json.loads((path / "state.json").read_text())["env_steps"])

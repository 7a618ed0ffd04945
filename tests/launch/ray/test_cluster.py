"""What a run on a cluster counts and sums up, without a cluster (test_ray.py has one)."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from coterie import presets
from coterie.launch.ray import run
from coterie.launch.ray.calls import Part
from coterie.launch.ray.cluster import Fleet
from coterie.types import CoterieError


class Lost(Exception):
    """Ray's, of an actor that is gone and may come back."""


def fleet(**budgets: int) -> Fleet:
    it = object.__new__(Fleet)
    it.config = presets.make("impala", "CartPole-v1")
    it.budgets, it.lost, it.lines = budgets, Counter(), list[str]()
    it.say = it.lines.append
    return it


def test_budgets_are_the_run_s_and_not_each_part_s(tmp_path):
    it = fleet(**{"restarts": 1, "decoupled.restarts": 2})
    sites = [Part(f"site {k}", None, 3, tmp_path) for k in range(2)]
    lenders = [Part(f"actor {k}", None, 1) for k in range(3)]
    for part in (sites[0], *lenders[:2]):
        it._count(part, "its machine is gone")
    assert it.lines[0] == "site 0: its machine is gone; it is started again"
    with pytest.raises(CoterieError, match=r"^site 1: it is gone, too; restarts \(1\) are used up$"):
        it._count(sites[1], "it is gone, too")
    with pytest.raises(CoterieError, match=r"decoupled.restarts \(2\) are used up$"):
        it._count(lenders[2], "it is gone, too")
    assert sum(it.lost.values()) == 5


def test_a_site_that_is_lost_before_it_begins_is_waited_for(tmp_path):
    it = fleet(restarts=1)
    site, answers = Part("site 0", None, 3, tmp_path), [Lost(), ("10.0.0.1", 9000)]

    def ask(part, what, *args, seconds):
        assert what == "open"
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    it.calls = SimpleNamespace(ask=ask, errors=SimpleNamespace(RayActorError=Lost))
    it.keys, it.hosts, it.sites, it.lenders, started = {}, ["10.0.0.1"], [site], [], list[int]()
    it._start_site = lambda k, resume: started.append(k)
    it._start_sites(resume=False)
    assert (site.address, started, it.lost["restarts"]) == (("10.0.0.1", 9000), [0], 1)
    site.address, answers[:] = ("", 0), [Lost()]
    with pytest.raises(CoterieError, match=r"restarts \(1\) are used up"):
        it._start_sites(resume=False)


def test_a_site_without_a_summary_hides_no_other(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in "abc"]
    one = dict.fromkeys(run._SUMMED, 100) | {
        "rows": {"produced": 110, "learned": 100}, "env_steps_per_s": 5.0, "mean_return": 3.0, "seconds": 9.0,
    }  # fmt: skip
    for folder in folders:
        folder.mkdir()
    for folder in folders[:2]:
        (folder / "summary.json").write_text(json.dumps(one))
    monkeypatch.setattr(run, "reached", lambda folder: {"c": 70}.get(folder.name, 0))
    total = run._together(folders)
    assert (total["env_steps"], total["rows"]["produced"], total["without_summary"]) == (270, 220, ["site 2"])
    assert run._together(folders[2:])["env_steps"] == 70
    assert "without_summary" not in run._together(folders[:2])
    assert run._together(folders[:1])["env_steps"] == 100

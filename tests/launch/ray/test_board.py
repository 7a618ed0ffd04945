"""What the nodes of a run have in common, and what its sites come to together."""

from __future__ import annotations

import json

import pytest

from coterie import presets
from coterie.launch.ray.cluster import Board
from coterie.launch.ray.placement import Machine, Site, Worker, allocate
from coterie.launch.ray.supervisor import sum_up
from coterie.types import CoterieError
from tests.launch.ray.test_storage import save

MACHINES = [Machine(name, f"10.0.0.{k}", 4, 0) for k, name in enumerate("abc", 1)]


def board(preset: str, hosts: int = 1, **changes: object) -> Board:
    allocation = allocate(presets.make(preset, "CartPole-v1", launch="ray", **changes), MACHINES)
    return Board(allocation, [m.address for m in MACHINES[:hosts]])


def test_restarts_are_counted_for_the_whole_run():
    one = board("impala", restarts=1, **{"decoupled.restarts": 2})
    sites = [Site(k, MACHINES[0], 1, 1, 0) for k in range(2)]
    workers = [Worker("actor", k, 0, MACHINES[0]) for k in range(3)]
    for part in (*sites, *workers, sites[0], *workers[:2]):
        one.begin(part)  # three of them for the second time
    assert one.collect()[0] == [
        f"{name}: its machine is gone or out of reach; it is restarted" for name in ("site 0", "actor 0", "actor 1")
    ]
    with pytest.raises(CoterieError, match=r"^its command failed; restarts \(1\) are used up$"):
        one.restart(sites[1], "its command failed")
    with pytest.raises(CoterieError, match=r"decoupled.restarts \(2\) are used up$"):
        one.begin(workers[2])
    assert one.summary() == {"machines": 1, "restarts": 5}


def test_parts_start_again_when_the_site_that_they_connect_to_has_moved():
    one = board("gala-ppo", hosts=3, learners=2)
    hub, other = (Site(k, MACHINES[k], 1, 1, 0) for k in range(2))
    worker = Worker("envs", 0, 1, MACHINES[2])
    assert one.report(other, []).terms.peer is None  # the first site has no place yet
    one.publish(0, ("10.0.0.1", 9000))
    one.publish(1, ("10.0.0.2", 9100))
    terms = {part: one.report(part, []).terms for part in (hub, other, worker)}
    assert [x.peer for x in terms.values()] == [("10.0.0.1", 9000), ("10.0.0.1", 9000), ("10.0.0.2", 9100)]
    one.publish(1, ("10.0.0.3", 9200))
    assert [one.report(part, []).terms == terms[part] for part in terms] == [True, True, False]
    one.publish(0, ("10.0.0.2", 9300))
    assert one.report(other, []).terms != terms[other]
    assert one.collect()[0] == ["site 0 is at 10.0.0.2 now: all go on from their checkpoints"]
    keys = terms[hub].keys
    one.publish(1, ("10.0.0.9", 9400))  # a machine that joined the cluster later: the certificate does not name it
    assert one.report(hub, []).terms.keys != keys
    one.stop(Site)
    assert (one.report(hub, []).stop, one.report(worker, []).stop) == (True, False)


def test_a_site_without_a_summary_counts_with_its_last_checkpoint(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    one = dict.fromkeys(
        ("env_steps", "env_frames", "learner_steps", "samples_trained", "episodes", "masked_steps"), 100
    )
    one |= {"rows": {"produced": 110, "learned": 100}, "env_steps_per_s": 5.0, "mean_return": 3.0, "seconds": 9.0}
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(one))
    save(folders[2], 70)
    total = sum_up(folders)
    assert (total["env_steps"], total["rows"]["produced"], total["without_summary"]) == (270, 220, ["site 2"])
    assert sum_up(folders[2:])["env_steps"] == 70
    assert "without_summary" not in sum_up(folders[:2])
    assert sum_up(folders[:1])["env_steps"] == 100

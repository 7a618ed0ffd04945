"""What children find, and temporary folders: nobody's but those that a killed run has left are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from coterie.parallel.affinity import available_cores
from coterie.parallel.processes import Child, found_by, own_folder
from coterie.types import CoterieError

OWN = "from coterie.parallel.processes import own_folder; print(own_folder({where!r}), flush=True); input()"


def test_folders_of_killed_owners_are_swept_and_no_others(tmp_path):
    def owner() -> subprocess.Popen[str]:
        code = OWN.format(where=str(tmp_path))
        return subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)

    with owner() as alive, owner() as killed:
        left = []
        for process in (alive, killed):
            left.append(tmp_path / process.stdout.readline().strip())
        killed.kill()
        killed.wait()
        (left[1] / "0").touch()
        dead = left[1].name.split("-")[2]
        others = [
            tmp_path / name for name in ("coterie-abcdefgh", f"coterie-123-{dead}-elsewhere", "coterie-runs-of-me")
        ]
        others.append(tmp_path / f"{left[1].name.rsplit('-', 2)[0]}-x-y")  # no pid
        for folder in others:
            folder.mkdir()
        mine = own_folder(str(tmp_path))
        assert sorted(tmp_path.iterdir()) == sorted([left[0], mine, *others])
        assert f"-{os.getpid()}-" in mine.name
        alive.stdin.write("\n")


def find(post, what: object) -> None:
    """A child."""
    if what == "late":
        time.sleep(60)
    if what == "wrong":
        raise CoterieError("it went wrong")
    if what is not None:
        post("found", what)


def finds(*each: object, within: float = 60.0) -> list[object]:
    children = [Child(f"child {i}", available_cores(), find, (what,)) for i, what in enumerate(each)]
    try:
        return found_by(children, within)
    finally:
        for child in children:
            child.kill()


def test_what_children_find_comes_in_their_order_and_they_may_end_at_once():
    for _ in range(5):
        assert finds(1, 2, 3) == [1, 2, 3]


def test_a_child_that_finds_nothing_is_named():
    with pytest.raises(CoterieError, match=r"^child 1: ended with exit code 0$"):
        finds(1, None)
    with pytest.raises(CoterieError, match=r"^child 1: .*it went wrong"):
        finds(1, "wrong")
    with pytest.raises(CoterieError, match=r"^child 1: nothing for 3 s$"):
        finds(1, "late", within=3.0)

"""Temporary folders: nobody's but those that a killed run has left are removed."""

from __future__ import annotations

import os
import subprocess
import sys

from coterie.parallel.processes import own_folder

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

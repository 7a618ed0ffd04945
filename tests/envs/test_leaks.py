"""No process and no descriptor outlives its envs; workers exit with their parent."""

import gc
import os
import signal
import subprocess
import sys

import numpy as np

from tests.envs.env_harness import COUNTING, Player, make, play, worker_pids
from tests.support.waiting import wait_until


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descriptors():
    gc.collect()  # frees what an earlier test's exception still holds in a cycle
    return sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if _open(fd))


def _open(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_close_leaves_no_process_and_no_descriptor():
    with make(COUNTING, 2) as envs:  # opens what is opened once
        play(envs, 1)
    before = descriptors()
    with make(COUNTING, 4, groups=2, threads=2) as envs:
        player = Player(envs)
        player.rollout(7)
        workers = worker_pids(envs)
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
        assert any("memfd" in name for name in descriptors())
        os.kill(workers[0], signal.SIGKILL)
        player.rollout(3)
        workers += worker_pids(envs)
        envs.send(0, np.zeros(2, np.int64))  # closed with a step under way
    assert not any(alive(pid) for pid in workers)
    assert descriptors() == before


def test_workers_are_named():
    with make(COUNTING, 2, threads=2) as envs:
        names = []
        for pid in worker_pids(envs):
            with open(f"/proc/{pid}/cmdline") as file:
                names.append([x for x in file.read().split("\0") if x.startswith("coterie-env")])
    assert names == [["coterie-env-0-0"], ["coterie-env-0-1"]]


def test_workers_exit_when_their_parent_is_killed(tmp_path):
    code = (
        "import sys, time; from tests.envs.env_harness import *\n"
        "e = make(FLAKY, 2, threads=2, kwargs={'how': 'hang', 'at': 1, 'marker': sys.argv[1]})\n"
        "e.recv(0); print(*worker_pids(e), flush=True)\n"
        "e.send(0, np.zeros(2, np.int64)); print('sent', flush=True); time.sleep(60)"
    )
    marker = str(tmp_path / "hangs")
    with subprocess.Popen([sys.executable, "-c", code, marker], stdout=subprocess.PIPE, text=True) as parent:
        try:
            workers = [int(x) for x in parent.stdout.readline().split()]
            parent.stdout.readline()
            # One worker hangs in its env, the other waits for requests.
            wait_until(lambda: os.path.exists(marker), 30, "a worker hangs")
            assert [alive(pid) for pid in workers] == [True, True]
        finally:
            parent.kill()
    wait_until(lambda: not any(alive(pid) for pid in workers), 15, "the workers exit")

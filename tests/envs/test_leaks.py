"""Nothing stays behind: no process, no descriptor; workers leave with their parent."""

import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np

from tests.envs.env_harness import COUNTING, Player, make, play


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descriptors():
    gc.collect()  # what an earlier test's exception still holds in a cycle is not this test's
    return sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if _open(fd))


def _open(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_close_leaves_no_process_and_no_descriptor():
    with make(COUNTING, 2) as envs:  # whatever is opened once, is
        play(envs, 1)
    before = descriptors()
    with make(COUNTING, 4, groups=2, threads=2, reset="swap") as envs:
        player = Player(envs)
        player.rollout(7)
        workers = [w.popen.pid for b in envs._backends for w in b._workers]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
        assert any("memfd" in name for name in descriptors())
        os.kill(workers[0], signal.SIGKILL)
        player.rollout(3)
        workers += [w.popen.pid for b in envs._backends for w in b._workers]
        envs.send(0, np.zeros(2, np.int64))  # closed with a step under way
    assert not any(alive(pid) for pid in workers)
    assert descriptors() == before


def test_workers_are_named():
    with make(COUNTING, 2, threads=2) as envs:
        names = []
        for w in envs._backends[0]._workers:
            with open(f"/proc/{w.popen.pid}/cmdline") as file:
                names.append([x for x in file.read().split("\0") if x.startswith("coterie-env")])
    assert names == [["coterie-env-0-0"], ["coterie-env-0-1"]]


def test_workers_leave_when_their_parent_is_killed():
    code = (
        "import sys, time; from tests.envs.env_harness import *\n"
        "e = make(FLAKY, 2, threads=2, kwargs={'how': 'hang', 'at': 1, 'marker': sys.argv[1]})\n"
        "e.recv(0); print(*[w.popen.pid for w in e._backends[0]._workers], flush=True)\n"
        "e.send(0, np.zeros(2, np.int64)); print('sent', flush=True); time.sleep(60)"
    )
    marker = f"/tmp/coterie-hang-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", code, marker], stdout=subprocess.PIPE, text=True) as parent:
        try:
            workers = [int(x) for x in parent.stdout.readline().split()]
            parent.stdout.readline()
            while not os.path.exists(marker):  # one worker hangs in its env, the other waits for requests
                time.sleep(0.05)
            assert [alive(pid) for pid in workers] == [True, True]
        finally:
            parent.kill()
            if os.path.exists(marker):
                os.unlink(marker)
    deadline = time.monotonic() + 15
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [alive(pid) for pid in workers] == [False, False]

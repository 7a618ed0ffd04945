"""A second process beside a run of one process, or beside a check of an env: it ends the first one where native code
holds Python's lock (GIL), since no thread of Python can do that then. It ends with its input, and loads little.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

_TRACE_S = 5.0  # for the process to print where it is
_KILLED_S = 30.0  # for the kernel to end a killed process: at once, but on a machine that hangs


class StallGuard:
    """Ends this process once `alive` was not called for `limit` seconds, and says so with a traceback of all threads.
    `says`: what follows these seconds in the message. Time for which the process was stopped does not count.
    """

    def __init__(self, limit: float, says: str) -> None:
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # a crash in C leaves a traceback, too
        command = [sys.executable, "-P", "-m", "coterie.parallel.guard", str(os.getpid()), str(limit), says]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        # In a session of its own, no signal to the process group reaches it.
        self._popen = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        assert self._popen.stdin is not None
        self._pipe = self._popen.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def alive(self) -> None:
        with suppress(OSError, ValueError):  # it is slow, gone, or closed
            self._pipe.write(b".")

    def close(self) -> None:
        self._popen.kill()
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):  # the reason for which the run ended must not be lost for it
            self._popen.wait(_KILLED_S)


def main(pid: int, limit: float, says: str) -> None:
    silent, last = 0.0, time.monotonic()
    while silent <= limit:
        ready, _, _ = select.select([0], [], [], min(1.0, limit / 4))
        if ready and not os.read(0, 4096):
            return  # the run has ended
        now = time.monotonic()
        silent = 0.0 if ready else silent + min(now - last, 2.0) * _runs(pid)  # and this process may have been stopped
        last = now
    print(f"coterie: no sign of life for {silent:.0f} s{says}", file=sys.stderr, flush=True)
    os.kill(pid, signal.SIGABRT)
    if not select.select([0], [], [], _TRACE_S)[0]:
        os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])

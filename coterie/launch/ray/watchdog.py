"""Runs a command for as long as whoever started it lives: `python leash.py COMMAND...`, holding its standard input.

When that closes, by a word or by death, the command gets SIGTERM and time for a checkpoint, then SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 60.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # before the fork


def main(command: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # its own end is told by its input alone
        signal.signal(number, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)

    def hold() -> None:
        while os.read(0, 4096):
            process.send_signal(signal.SIGTERM)  # a word: end in good order; a second one: at once
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    threading.Thread(target=hold, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _default_signals() -> None:
    """The command's, between fork and exec: it hears of the leash's own death, too, where the system can tell."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs a command until its own standard input closes: `python watchdog.py COMMAND...`.

Any input, or EOF (for example because the parent died), sends SIGTERM to the command. After EOF the command has time
for a checkpoint, then it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from coterie.parallel.signals import STOP, stop_with_parent

GRACE_S = 60.0


def main(command: list[str]) -> int:
    for number in STOP:  # only its input ends it
        signal.signal(number, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)

    def hold() -> None:
        while os.read(0, 4096):
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    threading.Thread(target=hold, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _default_signals() -> None:
    """For the command, between fork and exec: it gets SIGTERM when the watchdog is killed, on Linux."""
    stop_with_parent()
    for number in STOP:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

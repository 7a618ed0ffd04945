"""`coterie` and `python -m coterie`: the command line. Signals are handled before anything that loads slowly."""

import io
import os
import signal
import sys
import threading
import time
from types import FrameType

_SAY_S, _LEFT_S = 10.0, 600.0  # until threads that an env or a callback has left are named, and until they are ended


def main() -> int:
    stop = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if sys.argv[1:2] in (["resume"], ["train"]) else []
    if stop and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        stop.pop()
    for number in stop:
        signal.signal(number, _leave)
    if stop:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the run handles it, with log.checkpoint_on_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a folder's name, for example, that the encoding does not have
            stream.reconfigure(errors="backslashreplace")
    from coterie.cli.main import main as run

    code = run()
    for number in stop:  # nothing is left but the exit, whose code says how the run has ended
        signal.signal(number, lambda *_: os._exit(code))
    if stop:
        threading.Thread(target=_end, args=(code,), daemon=True).start()
    return code


def _end(code: int) -> None:
    """End the process, if it is still there when these times are over."""
    time.sleep(_SAY_S)
    left = ", ".join(x.name for x in threading.enumerate() if not x.daemon and x is not threading.main_thread())
    try:
        os.write(2, f"coterie: waiting up to {_LEFT_S:g} s for threads of an env or a callback: {left}\n".encode())
    finally:
        time.sleep(_LEFT_S)
        os._exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    """Until the command handles signals. Not by an exception: a module that is being imported may catch it."""
    try:
        os.write(2, f"coterie: {signal.Signals(number).name} before the run began; nothing was written\n".encode())
    finally:  # the terminal may be gone
        os._exit(75 if sys.argv[1] == "resume" else 128 + number)


if __name__ == "__main__":
    sys.exit(main())

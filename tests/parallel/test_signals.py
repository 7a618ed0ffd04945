import os
import signal
import threading

from coterie.parallel.processes import STOP, on_signals


def test_signals_are_noted_and_their_handlers_restored_afterwards():
    before, noted = [signal.getsignal(number) for number in STOP], []
    with on_signals(noted.append):
        for number in STOP:
            os.kill(os.getpid(), number)
    assert noted == [signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(number) for number in STOP] == before


def test_outside_the_main_thread_signal_handlers_stay_as_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with on_signals(seen.append):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [before]

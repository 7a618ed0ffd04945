import os
import signal
import threading

from coterie.parallel.signals import STOP, on_signals


def test_signals_are_noted_and_then_whoevers_they_were():
    before, heard = [signal.getsignal(number) for number in STOP], []
    with on_signals(heard.append):
        for number in STOP:
            os.kill(os.getpid(), number)
    assert heard == [signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(number) for number in STOP] == before


def test_in_another_thread_they_stay_whoevers_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with on_signals(seen.append):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [before]

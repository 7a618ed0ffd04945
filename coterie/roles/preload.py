"""Modules preloaded by the fork server: torch, EnvPool without its families, and this package with all its choices.

A signal to the whole process group (a terminal, `timeout`, a batch system) is for the parent of the run to handle. The
server must outlive it, because it reports how its children end.
"""

import os
import signal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it prints traces of handled errors, such as a lost machine

from coterie.parallel.signals import HANDLED, ignore_signals
from coterie.runs.starting import gc_paused

with gc_paused():
    import coterie.roles.learner_process
    from coterie.acting.table import ACTING
    from coterie.algorithms.table import ALGORITHMS
    from coterie.envs import pool
    from coterie.exchange.table import EXCHANGES

LOADED = [coterie.roles.learner_process, *ALGORITHMS.values(), *ACTING.values(), *EXCHANGES.values()]
pool.modules()

ignore_signals()
signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # blocked while the server was started

"""What the server that learners are forked from loads before any of them: torch and this package.

A signal to the whole process group (a terminal, `timeout`, a batch system) is for the parent of the run to act on; the
server must outlive it, or nobody would know how its children end.
"""

import os
import signal

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # else it prints traces of what is handled: a machine that is gone

import coterie.roles.actor
import coterie.roles.env_host
import coterie.roles.learner

assert coterie.roles.env_host
assert coterie.roles.actor
assert coterie.roles.learner
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # blocked while the server was started

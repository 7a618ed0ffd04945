"""What the server that learners are forked from loads before any of them: torch and this package.

A signal to the whole process group (a terminal, `timeout`, a batch system) is for the parent of the run to act on; the
server must outlive it, or nobody would know how its children end.
"""

import signal

import coterie.roles

assert coterie.roles
signal.signal(signal.SIGTERM, signal.SIG_IGN)

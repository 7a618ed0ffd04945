"""Streams between a learner and the processes that act for it, over gRPC."""

import os

# An env may start programs from several threads at once (ViZDoom's do): gRPC's handlers of forks, which are for clients
# that call it after a fork, end the process then. None of ours does.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else a line for each connection without the run's certificate

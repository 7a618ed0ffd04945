"""Connections that send nothing are closed; those that have sent a byte, and those of others, are left alone."""

import socket
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from coterie.exchange.elastic import interface
from coterie.exchange.silent_connections import SilentConnections
from tests.exchange.harness import together
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts are Linux's")


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connections_that_send_nothing_are_closed():
    other = socket.create_server(("127.0.0.1", 0))  # it was there before
    begin, closer = time.monotonic(), SilentConnections(4.0)  # it looks after 0.4 s
    with other, socket.create_server(("127.0.0.1", 0)) as server:
        left_alone = socket.create_connection(other.getsockname())
        clients = [socket.create_connection(server.getsockname()) for _ in range(20)]
        taken = [server.accept()[0] for _ in clients]
        clients[3].sendall(b"x")
        closer.seconds = 0.5
        wait_until(lambda: closer.closed == 19, seconds=20)
        assert time.monotonic() - begin >= 0.5
        assert [is_closed(x) for x in clients] == [k != 3 for k in range(20)]
        assert taken[3].recv(1) == b"x"
        assert not is_closed(left_alone)
        closer.close()
        for x in (left_alone, *clients, *taken):
            x.close()


def test_a_group_goes_on_where_silent_connections_to_it_are_closed(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface("127.0.0.1"))
    store, groups = HashStore(), {}

    def form(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    def sums() -> list[float]:
        found = [torch.ones(1000) for _ in range(2)]
        together([lambda rank=rank: groups[rank].allreduce([found[rank]]).wait() for rank in range(2)])
        return [float(x[0]) for x in found]

    before = {x.laddr.port for x in psutil.Process().net_connections("tcp") if x.status == "LISTEN"}
    closer = SilentConnections(20.0)
    together([lambda rank=rank: form(rank) for rank in range(2)])
    closer.seconds = 0.5
    ports = {x.laddr.port for x in psutil.Process().net_connections("tcp") if x.status == "LISTEN"} - before
    clients = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(100)]
    try:
        assert sums() == [2.0, 2.0]
        wait_until(lambda: all(map(is_closed, clients)), seconds=20)
        assert closer.closed == len(clients) == 200
        assert sums() == [2.0, 2.0]
    finally:
        closer.close()
        for x in clients:
            x.close()

"""Hosts in network namespaces of their own."""

from __future__ import annotations

import signal
import time

import pytest

from coterie.cli.main import main
from tests.launch.namespaces import ip, networks
from tests.support.net import free_port
from tests.support.remote_workers import central, finish, goes_on
from tests.support.runs import check_rows

__all__ = ["networks"]  # a fixture
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("away", [1.0, 50.0])
def test_hosts_in_other_networks_survive_the_loss_of_a_link(tmp_path, meddler, worker_processes, networks, away):
    """With TLS and a token. `away`: seconds without a link, less and more than anybody waits."""
    keys = tmp_path / "keys"
    assert main(["keys", str(keys), *(x for _, address, _ in networks for x in ("--host", address))]) == 0
    port = free_port()
    args = ["--token-file", str(keys / "token"), "--cert", str(keys / "cert.pem")]

    def meddle() -> None:
        mine = [
            worker_processes("envs", port, *args, host=address, prefix=("ip", "netns", "exec", name))
            for name, address, _ in networks
        ]
        for client in mine:
            client.at_work()
        meddler.at_work()
        link = networks[0][2]
        ip("link", "set", link, "down")
        time.sleep(away)
        goes_on(meddler)
        ip("link", "set", link, "up")
        mine[1].end(signal.SIGTERM)  # now only the other can bring the run on
        goes_on(meddler)
        finish(meddler)
        code, said = mine[0].end()
        assert code == 0, said
        assert "the run has ended" in said
        assert mine[1].end()[0] == 0

    wire = {"wire.bind": f"0.0.0.0:{port}", "wire.token-file": keys / "token"}
    wire |= {"wire.cert": keys / "cert.pem", "wire.key": keys / "key.pem"}
    assert meddler.run(central(meddler.out, port, **wire), meddle) == 75
    check_rows(meddler.out)
    meddler.check_nothing_left()

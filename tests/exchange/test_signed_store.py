"""All-reduce between machines, in a network with processes that do not know the token."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from coterie.exchange.lineage import Request
from coterie.exchange.signed_store import SignedStore
from tests.exchange.elastic_harness import PATIENCE_S, TIMING, TOKEN, rest, store_of, train
from tests.support.net import free_port
from tests.support.waiting import wait_until


@pytest.mark.parametrize("token", ["", "another token for tests", None])
def test_a_process_without_the_token_neither_joins_nor_disturbs(machine, token):
    """None: it repeats what it has read under other names."""
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    group, listening = machines[0].group, machines[0].group.client
    assert listening is not None
    store = store_of(machines[0], token or "")
    signed = store.store.get(f"beat/{listening.uid}")
    put = store.store.set if token is None else store.set
    value = signed if token is None else "1"
    for key in ("over", f"broken/{group.number}", "beat/x"):
        put(key, value)
    intruder = Request("x", "x", "it", 9, 2**40, group.number)
    for key in ("ticket", "call"):
        put(f"{key}/{store.add('tickets', 1)}", signed if token is None else json.dumps(asdict(intruder)))
    store.store.set(f"beat/{machines[1].group.client.uid}", "gone")
    time.sleep(TIMING.silent / 2)
    train(machines, 2)
    assert not any(m.group.alone for m in machines)
    assert not any(line.startswith("allreduce: x ") for line in machines[0].lines)
    if token is not None:
        stranger = machine(4, patience=1.0, token=token)
        wait_until(lambda: stranger.error is not None, PATIENCE_S, "it gives up")
        assert "for 1 s: host is not signed with this run's token" in str(stranger.error)
        train(machines, 2)
    machines.append(machine(3))
    train(machines, 3)
    rest(machines)


def test_a_machine_connects_only_to_addresses_of_those_that_know_the_token():
    port = free_port()
    first = SignedStore(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False), TOKEN)
    store = SignedStore(first.store.clone(), "another token for tests")
    first.set("group/1/0/1", b"an address")
    assert first.clone().get("group/1/0/1") == b"an address"
    store.set("group/1/0/1", b"another address")
    assert not first.check(["group/1/0/1"])
    with pytest.raises(RuntimeError, match="is not signed with this run's token"):
        first.get("group/1/0/1")
    with pytest.raises(RuntimeError, match="not signed"):
        dist.ProcessGroupGloo(PrefixStore("group/1", first), 0, 2, timedelta(seconds=5))

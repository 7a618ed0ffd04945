"""Batches on their way to a GPU: a stand-in that copies only when it is waited for, and a real one if there is one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from coterie.parallel.gpu import Uploads
from tests.conftest import needs_gpu

BATCHES = 3


class Machine:
    """A stand-in for a GPU: a copy is made when an event after it is waited for."""

    def __init__(self, pins: bool) -> None:
        self.copies: list[Callable[[], None]] = []
        self.cuda = MagicMock()
        self.cuda.Event.side_effect = self.event
        self.cuda.current_stream().wait_event = lambda event: event.copy()
        self.runtime = self.cuda.cudart()
        self.runtime.cudaHostRegister.return_value = 0 if pins else 1
        self.ones = MagicMock(side_effect=RuntimeError("CUDA error: the refusal is pending"))  # for the next kernel

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at=0, copy=lambda: [copy() for copy in self.copies[: event.at]])
        event.record = lambda: setattr(event, "at", len(self.copies))
        event.synchronize = MagicMock(side_effect=event.copy)
        return event

    def tensor(self, host: torch.Tensor) -> SimpleNamespace:
        """A tensor in pinned memory that can be copied to this machine."""

        def to(device: object, non_blocking: bool) -> SimpleNamespace:
            assert non_blocking
            there = SimpleNamespace(data=None, record_stream=MagicMock())
            self.copies.append(lambda: there.data is None and setattr(there, "data", host.tolist()))
            return there

        return SimpleNamespace(to=to)


@pytest.fixture
def gpu(monkeypatch):
    def make(pins: bool = True) -> tuple[Machine, Uploads, np.ndarray]:
        machine, memory = Machine(pins), np.zeros((BATCHES, 4))
        monkeypatch.setattr("coterie.parallel.gpu.torch", SimpleNamespace(cuda=machine.cuda, ones=machine.ones))
        batches = [{"x": machine.tensor(torch.from_numpy(row))} for row in memory]
        return machine, Uploads(batches, memory, torch.device("cuda")), memory

    return make


def test_a_batch_is_sent_once_and_the_training_stream_waits_for_it(gpu):
    machine, uploads, memory = gpu()
    memory[:] = np.arange(BATCHES)[:, None]
    for _ in range(2):
        uploads.send(1)
    assert len(machine.copies) == 1
    machine.cuda.stream.assert_called_once_with(uploads.stream)
    got = uploads.get(1)["x"]
    assert got.data == [1.0] * 4
    assert not uploads.copied[1][1].synchronize.called  # this process does not wait
    got.record_stream.assert_called_once()  # the training stream keeps its memory from being freed
    assert uploads.get(1)["x"] is got
    assert uploads.get(2)["x"].data == [2.0] * 4  # sent when it is asked for


def test_memory_is_free_for_actors_only_when_its_copy_is_whole(gpu):
    _, uploads, memory = gpu()
    memory[0] = 1
    uploads.send(0)
    sent = uploads.copied[0][0]["x"]
    assert sent.data is None  # still on its way
    uploads.free(0)
    memory[0] = 2  # an actor writes its next rollout
    assert sent.data == [1.0] * 4
    assert uploads.get(0)["x"].data == [2.0] * 4  # copied again
    uploads.free(1)  # never sent: nothing to wait for


@pytest.mark.parametrize("pins", [True, False])
def test_memory_is_unpinned_once_after_the_last_copy_if_it_could_be_pinned(gpu, pins):
    machine, uploads, memory = gpu(pins)
    assert machine.runtime.cudaHostRegister.call_args.args[1] == memory.nbytes
    assert machine.ones.called != pins
    machine.runtime.cudaHostUnregister.side_effect = lambda at: machine.cuda.synchronize.assert_called_once()
    uploads.close()
    uploads.close()
    assert machine.runtime.cudaHostUnregister.call_count == pins


def test_on_a_cpu_no_batch_is_copied():
    batches = [{"x": torch.zeros(2)}]
    uploads = Uploads(batches, np.zeros(2), torch.device("cpu"))
    uploads.send(0)
    assert uploads.get(0) is batches[0]
    uploads.free(0)
    uploads.close()


@needs_gpu
def test_on_a_gpu_each_copy_is_what_was_written_before_it():
    device, memory = torch.device("cuda"), np.zeros((2, 1 << 22), np.float32)
    uploads = Uploads([{"x": torch.from_numpy(row)} for row in memory], memory, device)
    try:
        assert uploads.pinned.done
        for k in range(20):
            memory[k % 2] = k
            uploads.send(k % 2)
            assert (uploads.get(k % 2)["x"] == k).all()
            uploads.free(k % 2)
    finally:
        uploads.close()

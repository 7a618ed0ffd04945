"""Batches on their way to a GPU: a stand-in that copies only when it is waited for, and a real one if there is one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coterie.parallel.upload import Uploads

BATCHES = 3


class Machine:
    """A stand-in for a GPU: copies on the side stream are made only when an event after them is waited for."""

    def __init__(self, pins: bool = True) -> None:
        self.queue: list[Callable[[], None]] = []
        self.calls: list[str] = []
        self.pins = pins

    def drain(self, upto: int) -> None:
        for k in range(upto):
            self.queue[k]()
            self.queue[k] = lambda: None

    def cuda(self) -> SimpleNamespace:
        machine = self

        class Event:
            def record(self) -> None:
                self.at = len(machine.queue)

            def synchronize(self) -> None:
                machine.calls.append("synchronize")
                machine.drain(self.at)

        class Stream:
            def __init__(self, device: object = None) -> None: ...

            def __enter__(self) -> None:
                machine.calls.append("side")

            def __exit__(self, *args: object) -> None: ...

            def wait_event(self, event: Event) -> None:
                machine.calls.append("wait")
                machine.drain(event.at)

        class Runtime:
            def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
                machine.calls.append(f"pin {size}")
                return 0 if machine.pins else 1

            def cudaHostUnregister(self, at: int) -> int:
                machine.calls.append("unpin")
                return 0

        return SimpleNamespace(
            Stream=Stream, Event=Event, stream=lambda s: s, current_stream=lambda device: Stream(), cudart=Runtime,
            synchronize=lambda device: machine.calls.append("all done"),
        )  # fmt: skip

    def tensor(self, host: torch.Tensor) -> SimpleNamespace:
        """A tensor in pinned memory, that can be copied to this machine."""

        def to(device: object, non_blocking: bool) -> SimpleNamespace:
            assert non_blocking
            there = SimpleNamespace(data=None, used=[], record_stream=lambda s: there.used.append(s))
            self.queue.append(lambda: setattr(there, "data", host.clone()))
            return there

        return SimpleNamespace(to=to)


@pytest.fixture
def gpu(monkeypatch):
    def make(pins: bool = True) -> tuple[Machine, Uploads, np.ndarray]:
        machine, memory = Machine(pins), np.zeros((BATCHES, 4))
        monkeypatch.setattr("coterie.parallel.upload.torch", SimpleNamespace(cuda=machine.cuda()))
        batches = [{"x": machine.tensor(torch.from_numpy(row))} for row in memory]
        return machine, Uploads(batches, memory, torch.device("cuda")), memory

    return make


def test_a_batch_is_sent_once_and_there_when_the_learner_gets_it(gpu):
    machine, uploads, memory = gpu()
    memory[:] = np.arange(BATCHES)[:, None]
    for _ in range(2):
        uploads.send(1)
    assert len(machine.queue) == 1
    got = uploads.get(1)["x"]
    assert machine.calls == [f"pin {memory.nbytes}", "side", "wait"]
    assert got.data.tolist() == [1.0] * 4
    assert len(got.used) == 1  # the training stream keeps its memory from being freed
    assert uploads.get(1)["x"] is got
    assert uploads.get(2)["x"].data.tolist() == [2.0] * 4  # sent when it is asked for


def test_memory_is_free_for_actors_only_when_its_copy_is_whole(gpu):
    machine, uploads, memory = gpu()
    memory[0] = 1
    uploads.send(0)
    sent = uploads.copied[0][0]["x"]
    assert sent.data is None  # still on its way
    uploads.free(0)
    memory[0] = 2  # an actor writes its next rollout
    assert sent.data.tolist() == [1.0] * 4
    assert machine.calls[-1] == "synchronize"
    assert uploads.get(0)["x"].data.tolist() == [2.0] * 4  # copied again
    uploads.free(1)  # never sent: nothing to wait for
    assert machine.calls.count("synchronize") == 1


@pytest.mark.parametrize("pins", [True, False])
def test_memory_is_unpinned_once_after_the_last_copy_if_it_could_be_pinned(gpu, pins):
    machine, uploads, memory = gpu(pins)
    memory[1] = 3
    assert uploads.get(1)["x"].data.tolist() == [3.0] * 4
    uploads.close()
    uploads.close()
    assert machine.calls[3:] == ["all done", "unpin"] * pins


def test_on_a_cpu_nothing_is_copied():
    batches = [{"x": torch.zeros(2)}]
    uploads = Uploads(batches, np.zeros(2), torch.device("cpu"))
    uploads.send(0)
    assert uploads.get(0) is batches[0]
    uploads.free(0)
    uploads.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_each_copy_is_what_was_written_before_it():
    device, memory = torch.device("cuda"), np.zeros((2, 1 << 22), np.float32)
    uploads = Uploads([{"x": torch.from_numpy(row)} for row in memory], memory, device)
    try:
        assert uploads.pinned
        for k in range(20):
            memory[k % 2] = k
            uploads.send(k % 2)
            assert (uploads.get(k % 2)["x"] == k).all()
            uploads.free(k % 2)
    finally:
        uploads.close()

"""What the tests of the exchanges share: a rule that adds up by hand, small flat weights, threads and processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coterie.exchange.base import Exchange, GradientGuard, Peers, Setup
from coterie.exchange.store import Store
from coterie.models.heads import Moments, Normalizer
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import Child, listen
from coterie.parallel.shm import SharedArrays
from tests.conftest import make_config

BETAS = (0.8, 0.95)
NOTHING = torch.zeros(0, dtype=torch.float64)  # moments of no normalizers


class Sgd:
    """param -= lr grad: with gradients and rates of few bits, what was applied adds up exactly."""

    def state(self, param: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        param.sub_(grad, alpha=lr)


class Weights(nn.Module):
    """Parameters of these sizes, and nothing else."""

    def __init__(self, *sizes: int, seed: int = 0) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        for k, size in enumerate(sizes):
            self.register_parameter(f"w{k}", nn.Parameter(torch.randn(size, generator=rng)))


def flat(*sizes: int, seed: int = 0) -> FlatParams:
    return FlatParams(Weights(*sizes, seed=seed))


def gradients(params: FlatParams, count: int, seed: int = 0) -> list[Tensor]:
    """Random gradients, zero in the padding as a backward pass leaves it."""
    rng = torch.Generator().manual_seed(seed)
    used = torch.zeros_like(params.data)
    for at in params.slices.values():
        used[at] = 1
    return [torch.randn(len(used), generator=rng) * used for _ in range(count)]


def together(works: Sequence[Callable[[], object]], seconds: float = 30.0) -> None:
    """Run all at once, each in a thread; what one of them raises is raised here, and none may hang."""
    errors: list[BaseException] = []

    def enter(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enter, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def make_setup(
    params: FlatParams, rule: object = None, *, clip: float = 0.0, skip: bool = False, timeout: float = 20.0,
    norms: Sequence[Normalizer] = (), peers: Peers | None = None, **changes: object,
) -> Setup:  # fmt: skip
    """What an exchange is made of; SGD by itself. `changes`: of the config, with __ for a dot."""
    config = make_config(**{name.replace("__", "."): value for name, value in changes.items()})
    return Setup(config, params, Moments(norms), peers or Peers(), timeout, rule or Sgd(), GradientGuard(clip, skip))


def member(
    kind: type, shared: SharedArrays | None, params: FlatParams, rule: object, *, rank: int = 0,
    board: Board | None = None, **how: Any,
) -> Any:  # fmt: skip
    """A learner's end of an exchange whose learners share this memory; its optimizer has BETAS."""
    peers = Peers(rank, board or Board(4), shared)
    return kind(make_setup(params, rule, peers=peers, optim__beta1=BETAS[0], optim__beta2=BETAS[1], **how))


def store(
    shared: SharedArrays, params: FlatParams, rule: object, chunks: int, *, local_steps: int = 1, **how: Any
) -> Any:
    return member(Store, shared, params, rule, store__chunks=chunks, store__local_steps=local_steps, **how)


def apply(exchange: Exchange, params: FlatParams, grad: Tensor, lr: float = 1e-2) -> float:
    """One step with this gradient, which is cleared; returns its norm."""
    params.grad.copy_(grad)
    norm = exchange.step(params, lr)
    assert not params.grad.any()
    return norm


def start(target: Callable[..., None], *args: Any, name: str = "test") -> Child:
    """A process on any core that runs `target(post, *args)`."""
    return Child(name, sorted(os.sched_getaffinity(0)), target, args)


def collect(children: Sequence[Child], seconds: float = 60.0) -> list[list[tuple[str, Any]]]:
    """All messages of the children until the last has ended; they are killed if that takes too long."""
    said: list[list[tuple[str, Any]]] = [[] for _ in children]
    going, end = list(children), time.monotonic() + seconds
    try:
        while going:
            assert time.monotonic() < end, f"{[child.name for child in going]} hang; so far {said}"
            for child, kind, content in listen(going, 0.1):
                said[children.index(child)].append((kind, content))
                if kind == "end":
                    going.remove(child)
    finally:
        for child in going:
            child.kill()
    return said


def expect(child: Child, kinds: set[str], seconds: float = 60.0) -> tuple[str, Any]:
    """The child's next message, which is of one of these kinds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _, kind, content in listen([child], 0.1):
            assert kind in kinds, (kind, content)
            return kind, content
    raise AssertionError(f"{child.name} said nothing")

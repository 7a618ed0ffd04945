"""The check of a network that has parts of the user's, before a run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError
from coterie.models.build import Network
from coterie.types import Inputs, ObsSpec, from_entries

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def try_out(model: Network, single_steps: bool = False) -> None:
    """Run it on 2 x 3 rows, and on some of these. Raises a `ConfigError` where parts of the user's cannot work.
    `single_steps`: the algorithm knows nothing of the step before.
    """
    spec, rows, rng = model.spec, (2, 3), torch.Generator().manual_seed(0)
    obs = {k: _sample(s, rows, rng) for k, s in spec.obs.items()}
    action = torch.zeros(*rows, *spec.action.shape, dtype=getattr(torch, spec.action.dtype))
    is_first = torch.tensor([[True], [False]]).expand(rows)
    inputs = Inputs(from_entries(obs), is_first, action, torch.zeros(rows))

    @torch.no_grad()
    def run(begin: int = 0, end: int = 2, envs: int = 3, state: Tensor | None = None, of: Inputs = inputs) -> Any:
        state = model.initial_state(envs) if state is None else state
        return model(of.map(lambda x: x[begin:end, :envs]), state)

    state = model.initial_state(3)
    if state is not None and (state.dtype != torch.float32 or len(state.shape) < 2 or len(state) != 3):
        raise ConfigError(f"model: initial_state(3) is {state.dtype} {list(state.shape)}, not float32 [3, N, ...]")
    if state is not None and state.any():
        raise ConfigError("model: initial_state must be zeros, which stand for it where an episode begins")
    before = {name: x.clone() for name, x in model.named_buffers()}
    hooked = isinstance(model.core, nn.Module) and not isinstance(model.core, torch.jit.ScriptModule)  # has no hooks
    with cast(nn.Module, model.core).register_forward_hook(_check_width) if hooked else nullcontext():
        params, values, state = one = run()
    if not _same(one, run(), 1e-6) or any(isinstance(part, _DROPOUT) and part.p for part in model.modules()):
        raise ConfigError("model: two passes over the same rows differ; dropout, for example, is not supported")
    for name, x in model.named_buffers():
        if not torch.equal(x, before[name]):
            raise ConfigError(f"model: forward changes the buffer {name}, which does not reach other processes")
    if not _same((params[:, :1], values[:, :1]), run(envs=1)):
        raise ConfigError("model: what it makes of an env depends on the other envs of the batch")
    other = torch.ones_like(action) if min(spec.action.sizes, default=2) > 1 else action
    later = inputs._replace(is_first=~is_first, prev_action=other, prev_reward=torch.ones(rows))
    if single_steps and not _same(one, run(of=later)):
        raise ConfigError("model: its output for a step depends on the step before, which this algorithm does not know")
    if state is not None:
        first = run(end=1)
        if not (_same((params[:1], values[:1]), first) and _same((params[1:], values[1:]), run(1, state=first[2]))):
            raise ConfigError("model: two steps at once must give what they do one by one, with the core state between")
        if not _same(first[:2], run(end=1, state=state)):
            raise ConfigError("model: where is_first is True, the core state of the episode before must have no effect")


def _check_width(core: nn.Module, inputs: object, outputs: Any) -> None:
    """A core's features must be as wide as its `size` says."""
    features, _ = outputs
    if features.shape[-1] != core.size:
        raise ConfigError(f"model.core: its size is {core.size}, but its output has shape {list(features.shape)}")


def _same(one: Iterable[Any], other: Iterable[Any], within: float = 1e-4) -> bool:
    """`within`: rounding depends on the number of rows."""
    pairs = zip(one, other, strict=False)  # without the core state, where that is compared by its effect
    return all(x is None or torch.allclose(x, y, 10 * within, within, equal_nan=True) for x, y in pairs)


def _sample(spec: ObsSpec, rows: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Numbers from 0 to 1, or an action mask that allows all; zeros where an integer may mean something."""
    shape, dtype = (*rows, *spec.shape), getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=rng, dtype=dtype)
    return torch.full(shape, dtype == torch.bool, dtype=dtype)

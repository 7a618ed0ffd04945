"""The network: torso, optional core, heads, normalizers. Time is folded into the batch outside the core.

`model.network` names a network of the user's in place of torso, core and heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.config import Model as ModelConfig
from coterie.config import Q
from coterie.errors import ConfigError
from coterie.models.cores import Core, build_core, is_recurrent
from coterie.models.heads import NoisyLinear, Normalizer, QHead, init
from coterie.models.text import TextTorso
from coterie.models.torsos import build_pair, build_torso
from coterie.ops.dist import ILLEGAL, make_distribution
from coterie.plugins import call
from coterie.types import MASK, Inputs, Obs, ObsSpec, Spec, entries, map_obs


class ValueOutput(NamedTuple):
    """The output of a user's value network: for each action its value, or logits of `atoms` returns."""

    actions: int
    atoms: int  # 1: values


class Network(nn.Module):
    """`forward(inputs, core_state)` -> policy parameters `[.., P]`, value `[..]` (both float32) and the new core state.
    With `q` the parameters are the actions' values, or their distributions' logits side by side, and the value is that
    of the best. Where the observation has an action mask, the parameters of illegal choices are `ILLEGAL`.

    Without a core the leading axes are free: `[B]`, `[T, B]`, or `[N]` rows in any order. With one they are `[T, B]`,
    and `core_state` is what it was before row 0. `[B]` inputs are taken as one time step.
    """

    atoms: Tensor
    squashes = False  # whether continuous actions are the tanh of what the parameters describe

    def __init__(self, spec: Spec, config: ModelConfig, q: Q | None = None) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        self.recurrent = is_recurrent(config)
        self.masked, self.single, obs = spec.masked, "", spec.obs
        if spec.masked:
            obs = {k: s for k, s in obs.items() if k != MASK}
            if len(obs) == 1:  # what is left without the mask is no dict
                ((self.single, alone),) = obs.items()
                obs = {"": alone}
        self.outputs = make_distribution(spec.action).head_size if q is None else spec.action.sizes[0] * max(1, q.atoms)
        self.body: nn.Module | None = None
        self.core: Core | None = None
        self.q: QHead | ValueOutput | None = None
        if config.network:
            self.body = call("model.network", config.network, replace(spec, obs=obs), config, self.outputs)
            if not isinstance(self.body, nn.Module):
                raise ConfigError(f"model.network: it must be a torch.nn.Module, not {type(self.body).__name__}")
            self.q = ValueOutput(spec.action.sizes[0], max(1, q.atoms)) if q is not None else None
        else:
            self._build(obs, q)
        if q is not None and q.atoms:
            self.register_buffer("atoms", torch.linspace(q.v_min, q.v_max, q.atoms), persistent=False)
        self.log_std = None
        if spec.action.low:
            self.log_std = nn.Parameter(torch.full((len(spec.action.low),), config.init_log_std))
        self.obs_norm = nn.ModuleDict()
        if config.normalize_obs:
            for key, s in obs.items():
                if s.is_numeric:
                    self.obs_norm[_module_name(key)] = Normalizer(s.shape)
        self.return_norm = Normalizer(())

    def _build(self, obs: dict[str, ObsSpec], q: Q | None) -> None:
        """Torso, core and heads."""
        config, action = self.config, self.spec.action
        large = any(s.is_image or s.text or s.codes for s in obs.values())
        share = q is not None or config.share == "yes" or (config.share == "auto" and (large or self.recurrent))
        pair = None if share else build_pair(obs, config)
        self.paired = pair is not None
        self.torso = pair or build_torso(obs, config)
        self.value_torso = None if share or self.paired else build_torso(obs, config)
        size = cast(int, self.torso.size)
        if self.recurrent:
            extra = sum(action.sizes) + len(action.low) + 1 if config.last_action_reward else 0
            self.core = build_core(size + extra, config)
            size = self.core.size
        if q is not None:
            self.q = QHead(size, action.sizes[0], q.atoms, q.dueling, q.noisy, scaled=not self.recurrent)
        else:
            self.policy = init(nn.Linear(size, self.outputs), 0.01)
            self.value = init(nn.Linear(size if share else cast(int, self.torso.size), 1), 1.0)

    def initial_state(self, batch: int) -> Tensor | None:
        """`[batch, ...]`; None for a network without memory."""
        if not self.recurrent:
            return None
        state = (self.core or cast(Any, self.body)).initial_state(batch)
        if not isinstance(state, Tensor):
            raise ConfigError(f"model: initial_state must return one tensor, not {type(state).__name__}")
        return state.to(self.return_norm.mean.device)  # a core of the user's may not know it

    def forward(self, inputs: Inputs, core_state: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        axes = inputs.is_first.shape
        obs, legal = _fold(inputs.obs, len(axes)), None
        if self.masked:
            obs, legal = self._without_mask(obs)
        obs = self._normalized(obs)
        if self.body is not None:
            params, value, core_state = self._custom(inputs, obs, core_state)
        else:
            params, value, core_state = self._forward(inputs, obs, core_state)
        params, value = self._postprocess(params, value, legal)
        if len(axes) != 1:
            params, value = params.reshape(*axes, -1), value.reshape(*axes, 1)
        return params, value.squeeze(-1), core_state

    def _forward(self, inputs: Inputs, obs: Obs, core_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Torso, core and heads: parameters `[N, ..]` and values `[N, 1]`."""
        x = self.torso(obs)
        v = None if self.value_torso is None else self.value_torso(obs)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._behind(x, v, inputs, core_state)
        return self._behind(x, v, inputs, core_state)

    def _behind(
        self, x: Tensor, v: Tensor | None, inputs: Inputs, core_state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Core and heads, in float32."""
        axes = inputs.is_first.shape
        if self.core is not None:
            assert core_state is not None
            if self.config.last_action_reward:
                x = torch.cat((x.float(), self._last(inputs).flatten(0, len(axes) - 1)), -1)
            time = axes if len(axes) == 2 else (1, *axes)
            x, core_state = self.core(x.float().reshape(*time, x.shape[-1]), inputs.is_first.reshape(time), core_state)
            x = x.flatten(0, 1)
        if self.paired:
            x, v = x.unbind(0)
        return *self._heads(x, x if v is None else v), core_state

    def _custom(self, inputs: Inputs, obs: Obs, core_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The user's network, on rows `[N]`, or with a memory on `[T, B]`."""
        assert self.body is not None
        rows = Inputs(obs, *(x.flatten(0, inputs.is_first.dim() - 1) for x in inputs[1:]))
        if self.recurrent:
            time = (1, *inputs.is_first.shape)[-2:]
            rows = rows.map(lambda x: x.reshape(*time, *x.shape[1:]))
        found, lead = self.body(rows, core_state), tuple(rows.is_first.shape)
        if not isinstance(found, tuple) or len(found) != 3:
            raise ConfigError("model.network: its forward must return parameters, values and the next core state")
        fitting: dict[str, list[tuple[int, ...] | None]] = {
            "parameters": [(*lead, self.outputs), (*lead, self.outputs + len(self.spec.action.low))],
            "values": [lead, (*lead, 1), *([] if self.q is None else [None])],
            "a core state": [None if core_state is None else tuple(core_state.shape)],
        }
        for (what, shapes), x in zip(fitting.items(), found, strict=True):
            if (shape := None if x is None else tuple(x.shape)) not in shapes:
                raise ConfigError(f"model.network: it returned {what} of shape {shape}, not {shapes[0]}")
        params, value, core_state = found
        value = params[..., 0] if value is None else value  # `_postprocess` replaces it
        return params.float().flatten(0, -2), value.float().reshape(-1, 1), core_state

    def _without_mask(self, obs: Obs) -> tuple[Obs, Tensor]:
        """The observation without its action mask, and the mask `[N, choices]`."""
        rest = {k: x for k, x in obs.items() if k != MASK}
        return rest[self.single] if self.single else rest, obs[MASK].bool()

    def _heads(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """In float32: a log-prob has no digits to spare."""
        if isinstance(self.q, QHead):
            params = self.q(x.float())
            return params, params[..., :1]  # the value is that of the best, see `_postprocess`
        return self.policy(x.float()), self.value(v.float())

    def _postprocess(self, params: Tensor, value: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mark illegal choices, and append the log deviations of continuous actions."""
        if legal is not None:
            legal = legal if self.q is None else legal.repeat_interleave(self.q.atoms, -1)
            k = legal.shape[-1]
            choices = torch.where(legal, params[..., :k], ILLEGAL)
            params = choices if k == params.shape[-1] else torch.cat((choices, params[..., k:]), -1)
        if self.q is not None:
            return params, self.expected(params).amax(-1, keepdim=True)
        if self.log_std is not None and params.shape[-1] == self.outputs:
            params = torch.cat((params, self.log_std.expand(*params.shape[:-1], -1)), -1)
        return params, value

    def expected(self, params: Tensor) -> Tensor:
        """The value of each action, `[.., A]`, from a value network's `params`."""
        assert self.q is not None
        if self.q.atoms == 1:
            return params
        logits = params.view(*params.shape[:-1], self.q.actions, self.q.atoms)
        values = (logits.softmax(-1) * self.atoms).sum(-1)  # a product of matrices would be in autocast's few digits
        return torch.where(logits[..., 0] > ILLEGAL, values, ILLEGAL) if self.masked else values

    def resample(self, rng: torch.Generator | None) -> None:
        """Draw new noise for the noisy layers; None: no noise."""
        for module in self.modules():
            if isinstance(module, NoisyLinear):
                module.resample(rng)

    def _normalized(self, obs: Obs) -> Obs:
        if not self.obs_norm:
            return obs
        if not isinstance(obs, dict):
            return self.obs_norm[_module_name("")](obs)
        names = {key: _module_name(key) for key in obs}
        return {key: self.obs_norm[names[key]](x) if names[key] in self.obs_norm else x for key, x in obs.items()}

    def _last(self, inputs: Inputs) -> Tensor:
        """Last action (one-hot, or as it is) and reward; zeros where an episode begins."""
        sizes, last = self.spec.action.sizes, inputs.prev_action
        if self.spec.action.kind == "categorical":
            last = last[..., None]
        if k := len(sizes):
            hot = [F.one_hot(a, n) for a, n in zip(last[..., :k].long().unbind(-1), sizes, strict=True)]
            last = torch.cat((*hot, last[..., k:]), -1)
        reward = inputs.prev_reward.clamp(-1, 1) if self.config.clip_last_reward else inputs.prev_reward
        both = torch.cat((last.float(), reward[..., None]), -1)
        return both * (~inputs.is_first)[..., None]

    @torch.no_grad()
    def observe(self, obs: Obs, valid: Tensor) -> None:
        """Update the observation normalizers with the rows where `valid` (same leading axes)."""
        for key, x in entries(obs).items():
            if (name := _module_name("" if self.masked and key == self.single else key)) in self.obs_norm:
                self.obs_norm[name].update(x[valid])  # type: ignore[operator]


def _module_name(key: str) -> str:
    """An observation's name as a module's, which may hold no dot and be no attribute."""
    return "obs_" + key.replace(".", "/")


def _fold(obs: Obs, axes: int) -> Obs:
    return obs if axes == 1 else map_obs(lambda x: x.flatten(0, axes - 1), obs)


def acting_copy(model: Network, dtype: torch.dtype, always_copy: bool = False) -> tuple[Network, Callable[[], None]]:
    """A copy that only acts, with torsos in `dtype`, and a call that updates it. `always_copy`: also where the model
    itself would do, because it acts while the model is trained.

    Converting the weights once for each publication is cheaper than autocast's conversion at every call. In float32
    the model itself acts, and so does one with a custom part, which may not support another dtype.
    """
    as_it_is = dtype == torch.float32 or ":" in model.config.torso + model.config.network
    if as_it_is and not always_copy:
        return model, lambda: None
    twin = copy.deepcopy(model).requires_grad_(False)
    for torso in () if as_it_is else (twin.torso, twin.value_torso):
        if torso is not None:
            torso.to(dtype)
            for module in torso.modules():
                if isinstance(module, TextTorso):
                    module.float()  # as in training: an LSTM accumulates rounding errors
    pairs = list(zip(_tensors(twin), _tensors(model), strict=True))
    into, source = [a for a, _ in pairs], [b.detach() for _, b in pairs]

    @torch.no_grad()
    def refresh() -> None:
        torch._foreach_copy_(into, source)

    refresh()
    return twin, refresh


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]

"""A policy as one graph, from the env's observations to the env's actions.

The traced forward is the network's own with everything around it in acting: normalizers, the division of bytes, the
one-hot of the last action, the greedy choice, and the mapping to the env's bounds. It does not sample actions: it
outputs the distribution's parameters.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.acting.base import core_shape
from coterie.envs.spaces import ActionMap
from coterie.errors import ConfigError, first_line
from coterie.models.build import Network
from coterie.ops.dist import make_distribution
from coterie.types import MASK, ActionSpec, Inputs, from_entries

OPSET = 18  # the oldest that torch's exporter writes without a conversion


@dataclass(frozen=True)
class Port:
    """An input or output, `[B, *shape]`. A `next_` output is the input of that name at the next step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str


def obs_name(key: str) -> str:
    """The input's name for an entry of the observation; "" is an observation without entries."""
    return f"obs.{key}" if key else "obs"


class Graph(nn.Module):
    """`forward` takes and returns tensors in the order of `inputs` and `outputs`. The inputs are those that the network
    uses: without a core only observations.
    """

    def __init__(self, model: Network, actions: ActionMap) -> None:
        super().__init__()
        model.resample(None)
        self.model, self.actions, self.dist = model, actions, make_distribution(model.spec.action)
        action, size = actions.spec, sum(actions.spec.sizes)
        self.inputs = [
            Port(obs_name(k), s.shape, s.dtype, "legal choices" if k == MASK else "observation")
            for k, s in model.spec.obs.items()
        ]
        self.outputs = [
            Port("action", actions.shape, action.dtype, "the best action, as the env takes it"),
        ]
        if not model.squashes:  # SAC's policy has no value
            self.outputs.append(Port("value", (), "float32", "the expected return, of rewards as in training"))
        if model.q is not None:
            self.outputs.append(Port("q_values", (size,), "float32", "the expected return of each action"))
        elif action.sizes:
            logits = "of each action" if action.kind == "categorical" else "of each component's choices, side by side"
            self.outputs.append(Port("logits", (size,), "float32", f"unnormalized log-probabilities {logits}"))
        if action.low:
            then = "whose tanh is scaled to the bounds" if model.squashes else "before clipping to the bounds"
            text, shape = f"of a normal distribution, {then}", (len(action.low),)
            self.outputs += [Port(name, shape, "float32", f"{name} {text}") for name in ("mean", "std")]
        if not model.recurrent:
            return
        state = core_shape(model)
        self.inputs.append(Port("is_first", (), "bool", "an episode begins: the recurrent state is reset"))
        self.inputs.append(Port("core_state", state, "float32", "the recurrent state, zeros at first"))
        self.outputs.append(Port("next_core_state", state, "float32", "the state after this step"))
        if model.config.last_action_reward or model.body is not None:
            self.inputs.append(Port("prev_action", action.shape, action.dtype, "the last `next_prev_action`"))
            self.inputs.append(Port("prev_reward", (), "float32", "the env's reward for it"))
            self.outputs.append(Port("next_prev_action", action.shape, action.dtype, "the action before the mapping"))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip((port.name for port in self.inputs), tensors, strict=True))
        obs = {key: given[obs_name(key)] for key in self.model.spec.obs}
        none = tensors[0].new_zeros(tensors[0].shape[0], dtype=torch.bool)  # for inputs that the network does not use
        inputs = Inputs(
            from_entries(obs),
            given.get("is_first", none),
            given.get("prev_action", none),
            given.get("prev_reward", none),
        )
        params, value, state = self.model(inputs, given.get("core_state"))
        if self.model.q is not None:
            params = self.model.expected(params)
        choice = self.dist.mode(params)
        choice = choice.tanh() if self.model.squashes else choice
        value = [] if self.model.squashes else [value]
        found = [_to_env(self.actions, choice), *value, *split_params(params, self.actions.spec)]
        if state is not None:
            found.append(state)
        if "prev_action" in given:
            found.append(choice)
        return tuple(found)


def split_params(params: Tensor, action: ActionSpec) -> list[Tensor]:
    """The logits or values of the choices, and the means and deviations of the continuous components, if any."""
    k = sum(action.sizes)
    logits, normals = params[..., :k], params[..., k:]
    mean, log_std = normals.chunk(2, -1) if action.low else (normals, normals)
    return [*([logits] if action.sizes else []), *([mean, log_std.exp()] if action.low else [])]


def _to_env(actions: ActionMap, a: Tensor) -> Tensor:
    """`ActionMap.to_env` on tensors."""
    if actions.leaves:
        of_leaf = [
            _to_env(leaf, a[:, int(at[0]) : int(at[-1]) + 1].to(getattr(torch, leaf.spec.dtype)))
            for leaf, at in actions.leaves
        ]
        return torch.cat([x.reshape(a.shape[0], -1).to(a.dtype) for x in of_leaf], 1)
    constants = (actions.scale, actions.offset, actions.low, actions.high)
    scale, offset, low, high = (None if x is None else torch.from_numpy(x) for x in constants)
    a = a.reshape(a.shape[0], *actions.shape)  # len() would be a constant of the graph
    a = a if scale is None else scale * a
    a = a if offset is None else offset + a
    return a if low is None else a.clamp(low, high)


def to_onnx(graph: Graph) -> bytes:
    """The file's bytes. Raises `ConfigError` if the network cannot be exported: some custom ones, and text with torch
    2.6.
    """
    import onnx

    example = tuple(torch.zeros(2, *port.shape, dtype=getattr(torch, port.dtype)) for port in graph.inputs)
    batch = torch.export.Dim("batch", max=2**31 - 1)  # torch 2.6 needs a bound for an LSTM
    try:
        with _silent(), torch.no_grad():
            graph(*example)  # before tracing, so that cached tensors are real ones
            shapes = {"tensors": tuple({0: batch} for _ in example)}
            program = torch.export.export(graph, example, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions({torch.ops.aten.baddbmm.default: _baddbmm})
            made = torch.onnx.export(
                program, (), dynamo=True, opset_version=OPSET, verbose=False,
                input_names=[port.name for port in graph.inputs], output_names=[port.name for port in graph.outputs],
            )  # fmt: skip
        assert made is not None
        proto = made.model_proto
    except Exception as error:  # from torch.export, the exporter or a custom torso
        raise ConfigError(
            f"model: PyTorch cannot export this network: {first_line(error.__cause__ or error)[:200]}"
        ) from None
    for value in (*proto.graph.input, *proto.graph.output):  # the exporter may name a Port's first axis differently
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del proto.graph.value_info[:], proto.graph.metadata_props[:]
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        del node.metadata_props[:]  # call stacks, with paths of this machine
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _baddbmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """An MLP's layers (models/mlp.py) in two steps: torch 2.6 cannot broadcast the bias over a batch of any size."""
    return bias + torch.bmm(x, weight)


@contextmanager
def _silent() -> Iterator[None]:
    """Without the exporters' log messages and prints; errors are raised as well."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)

"""A policy as one graph: what the env shows in, what the env takes out.

The network's own forward is traced with all that stands around it in acting: normalizers, the division of bytes, the
one-hot of the last action, the greedy choice, and its way to the env's bounds. Drawing actions at random is left out:
the graph tells what to draw from.
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

from coterie.envs.spaces import ActionMap
from coterie.models.build import Network
from coterie.ops.dist import make_distribution
from coterie.types import ConfigError, Inputs, first_line

OPSET = 18  # the oldest that torch's exporter writes without converting


@dataclass(frozen=True)
class Port:
    """An input or output, `[B, *shape]`. A `next_` output is the input of that name at the next step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str


def obs_name(key: str) -> str:
    """The input of an observation's entry; "" is an observation without entries."""
    return f"obs.{key}" if key else "obs"


class Graph(nn.Module):
    """`forward` takes and gives tensors in the order of `inputs` and `outputs`. What the network does not look at is no
    input: without a core those are observations alone.
    """

    def __init__(self, model: Network, actions: ActionMap) -> None:
        super().__init__()
        model.resample(None)
        self.model, self.actions, self.dist = model, actions, make_distribution(model.spec.action)
        action, size = actions.spec, sum(actions.spec.sizes)
        self.inputs = [Port(obs_name(k), s.shape, s.dtype, "observation") for k, s in model.spec.obs.items()]
        self.outputs = [
            Port("action", actions.shape, action.dtype, "the best action, as the env takes it"),
            Port("value", (), "float32", "what the network expects, of rewards as they were trained on"),
        ]
        if model.q is not None:
            self.outputs.append(Port("q_values", (size,), "float32", "the same of each action"))
        elif action.kind == "continuous":
            self.outputs += [
                Port("mean", action.shape, "float32", "of a normal distribution, before clipping to the bounds"),
                Port("std", action.shape, "float32", "its standard deviation"),
            ]
        else:
            logits = "of each action" if action.kind == "categorical" else "of each component's choices, side by side"
            self.outputs.append(Port("logits", (size,), "float32", f"unnormalised log-probabilities {logits}"))
        if model.core is None:
            return
        state = (2, model.core.size)
        self.inputs.append(Port("is_first", (), "bool", "an episode begins: all that is remembered is forgotten"))
        self.inputs.append(Port("core_state", state, "float32", "the LSTM's hidden and cell state"))
        self.outputs.append(Port("next_core_state", state, "float32", "the state after this step"))
        if model.config.last_action_reward:
            self.inputs.append(Port("prev_action", action.shape, action.dtype, "the last action, as the network chose"))
            self.inputs.append(Port("prev_reward", (), "float32", "what the env paid for it"))
            self.outputs.append(Port("next_prev_action", action.shape, action.dtype, "the action as it was chosen"))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip((port.name for port in self.inputs), tensors, strict=True))
        obs = {key: given[obs_name(key)] for key in self.model.spec.obs}
        none = tensors[0].new_zeros(tensors[0].shape[0], dtype=torch.bool)  # stands for what is not looked at
        inputs = Inputs(
            obs[""] if list(obs) == [""] else obs,
            given.get("is_first", none),
            given.get("prev_action", none),
            given.get("prev_reward", none),
        )
        params, value, state = self.model(inputs, given.get("core_state"))
        if self.model.q is not None:
            params = self.model.expected(params)
            told = [params]
        elif self.actions.spec.kind == "continuous":
            mean, log_std = params.chunk(2, -1)
            told = [mean, log_std.exp()]
        else:
            told = [params]
        choice = self.dist.mode(params)
        found = [self._to_env(choice), value, *told]
        if state is not None:
            found.append(state)
        if "prev_action" in given:
            found.append(choice)
        return tuple(found)

    def _to_env(self, choice: Tensor) -> Tensor:
        """`ActionMap.to_env` on tensors."""
        own = self.actions
        a = choice.reshape(choice.shape[0], *own.shape)  # len() would be a constant of the graph
        if own.limit is not None:
            limit = torch.from_numpy(own.limit)
            a = a.clamp(-limit, limit)
        if own.scale is not None:
            a = torch.from_numpy(own.scale) * a
        return a if own.offset is None else torch.from_numpy(own.offset) + a


def to_onnx(graph: Graph) -> bytes:
    """The file's bytes. Raises `ConfigError` where the network cannot be exported: a torso of the user's own, or text
    with torch 2.6.
    """
    import onnx

    example = tuple(torch.zeros(2, *port.shape, dtype=getattr(torch, port.dtype)) for port in graph.inputs)
    batch = torch.export.Dim("batch", max=2**31 - 1)  # without a bound torch 2.6 takes no LSTM
    try:
        with _silent(), torch.no_grad():
            graph(*example)  # before it is traced: what functions keep for next time are real tensors then
            shapes = {"tensors": tuple({0: batch} for _ in example)}
            program = torch.export.export(graph, example, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions({torch.ops.aten.baddbmm.default: _baddbmm})
            made = torch.onnx.export(
                program, (), dynamo=True, opset_version=OPSET, verbose=False,
                input_names=[port.name for port in graph.inputs], output_names=[port.name for port in graph.outputs],
            )  # fmt: skip
        assert made is not None
        proto = made.model_proto
    except Exception as error:  # of torch.export's, of the exporter's, or of a torso that is the user's own
        raise ConfigError(
            f"model.torso: PyTorch cannot export this network: {first_line(error.__cause__ or error)[:200]}"
        ) from None
    for value in (*proto.graph.input, *proto.graph.output):  # a Port's first axis, whatever the exporter has named it
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del proto.graph.value_info[:], proto.graph.metadata_props[:]
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        del node.metadata_props[:]  # stacks of calls, with the paths of this machine's files
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _baddbmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """An MLP's layers (models/mlp.py) in two: torch 2.6 cannot spread the bias over a batch of any size."""
    return bias + torch.bmm(x, weight)


@contextmanager
def _silent() -> Iterator[None]:
    """Without what torch's exporters log and print of their own parts, and of a graph that they cannot trace."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # an error is raised as well
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)

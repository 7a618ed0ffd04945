"""Compare the exported file with the network: onnxruntime beside PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.build.policy import Policy
from coterie.envs.make import make_envs
from coterie.envs.spaces import ActionMap, random_actions
from coterie.envs.tasks import task_config, tasks
from coterie.errors import ConfigError, CoterieError, first_line
from coterie.tools.export.graph import Graph, obs_name, split_params
from coterie.types import Array, Inputs, ObsSpec, entries, from_entries, map_obs

# Relative to a number's size, and at least to 1 or to the largest return that a distribution has an atom for: both
# compute in float32, in different orders, and the rounding of a mean over atoms from -10 to 10 grows with the largest.
TOLERANCE = 1e-4
_RANDOM_STEPS, _REAL_STEPS, _ENVS, _SEED = 12, 48, 3, 1


@dataclass(frozen=True)
class Checked:
    """`largest`: the largest difference of any output, in TOLERANCE's measure, over a number of `observations`."""

    largest: float
    observations: int


@dataclass(frozen=True)
class _Expected:
    """The acting network's outputs at one step."""

    numbers: dict[str, Array]  # compared with a tolerance
    actions: dict[str, Array]  # compared exactly where `decided`
    decided: dict[str, Array]  # of each of `actions` `[B, components]`; empty: continuous actions, numbers as well
    scale: float  # the smallest size that a value's difference is relative to
    state: Tensor | None


@torch.inference_mode()
def check(policy: Policy, graph: Graph, onnx: bytes) -> Checked:
    """Compare on random observations and on the env's, for several batch sizes, with episodes that begin in between
    and each side's own recurrent state. Raises `CoterieError` if they differ.
    """
    session, rng = _session(onnx), np.random.default_rng(_SEED)
    names = [port.name for port in graph.outputs]
    largest, observations = 0.0, 0
    batches = [(n, _made_up(policy, rng, n)) for n in (1, 3, 5)]
    envs = -(-_ENVS // policy.spec.agents) * policy.spec.agents
    for batch, steps in [*batches, (envs, _real(policy, rng, envs))]:
        state = policy.model.initial_state(batch)
        carried = None if state is None else state.numpy()
        for inputs in steps:
            expected = _expected(policy, inputs, state)
            found = dict(zip(names, session.run(None, _feed(graph, inputs, carried)), strict=True))
            state, carried = expected.state, found.get("next_core_state")
            largest = max(largest, _difference(expected, found))
            observations += batch
    return Checked(largest, observations)


def _session(onnx: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    try:
        return onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        raise ConfigError(f"model: onnxruntime cannot run this network: {first_line(error)[:200]}") from None


def _feed(graph: Graph, inputs: Inputs, core_state: Array | None) -> dict[str, Any]:
    fed = {obs_name(key): x.numpy() for key, x in entries(inputs.obs).items()} | {"core_state": core_state}
    fed |= {name: x.numpy() for name, x in inputs._asdict().items() if name != "obs"}
    return {port.name: fed[port.name] for port in graph.inputs}


def _expected(policy: Policy, inputs: Inputs, state: Tensor | None) -> _Expected:
    model, spec = policy.model, policy.spec.action
    out, after = policy.algorithm.act(model, inputs, state, None, torch.Generator())
    scores, scale = model(inputs, state)[0], 1.0
    numbers = {"value": out.value.numpy()}
    names = [*(["logits"] if spec.sizes else []), *(["mean", "std"] if spec.low else [])]
    if model.q is not None:
        scores, scale = model.expected(scores), float(model.atoms.abs().max()) if model.q.atoms > 1 else 1.0
        names = ["q_values"]
    numbers |= {name: x.numpy() for name, x in zip(names, split_params(scores, spec), strict=True)}
    if after is not None:
        numbers["next_core_state"] = after.numpy()
    actions = {"action": policy.actions.to_env(out.action.numpy()), "next_prev_action": out.action.numpy()}
    return _Expected(numbers, actions, _decided(policy.actions, scores, scale), scale, after)


def _difference(expected: _Expected, found: dict[str, Array]) -> float:
    """The largest difference in TOLERANCE's measure. Raises `CoterieError` if it is more than that."""
    largest = 0.0
    for name, x in (expected.numbers | expected.actions).items():
        if name not in found:  # a network without memory does not return its action
            continue
        y = found[name]
        if y.shape != x.shape or y.dtype != x.dtype:
            shown = (f"{z.dtype} {z.shape}" for z in (y, x))
            raise CoterieError(f"onnxruntime and PyTorch give {name} as {', '.join(shown)}; nothing is written")
        if (decided := expected.decided.get(name)) is not None:
            if not ((x == y).reshape(decided.shape) | ~decided).all():
                raise CoterieError(f"onnxruntime's {name} is not PyTorch's; nothing is written")
            continue
        scale = expected.scale if name in ("value", "q_values") else 1.0
        error = float((np.abs(x - y) / np.maximum(scale, np.abs(x))).max())
        if not error <= TOLERANCE:  # also if it is NaN
            allowed = f"by {error:.1e}, {TOLERANCE:.0e} is allowed"
            raise CoterieError(f"onnxruntime's {name} differs from PyTorch's {allowed}; nothing is written")
        largest = max(largest, error)
    return largest


def _decided(actions: ActionMap, scores: Tensor, scale: float) -> dict[str, Array]:
    """Where each component's best choice is best by more than rounding, `[B, components]` bool, in the order of the
    policy's action and of the env's. Numbers beside choices are not compared here, but by the means.
    """
    if not (sizes := actions.spec.sizes):
        return {}
    found = []
    for part in torch.split(scores[:, : sum(sizes)], list(sizes), -1):
        best = part.topk(min(2, part.shape[-1])).values
        gap = best[:, 0] - best[:, -1]
        found.append((gap > 2 * TOLERANCE * best[:, 0].abs().clamp(min=scale)) | (part.shape[-1] == 1))
    numbers = [torch.zeros(len(scores), dtype=torch.bool)] * len(actions.spec.low)
    decided = torch.stack([*found, *numbers], -1).numpy()
    order = [at for _, at in actions.leaves] or [np.arange(decided.shape[-1])]
    return {"next_prev_action": decided, "action": decided[:, np.concatenate(order)]}


def _made_up(policy: Policy, rng: np.random.Generator, batch: int) -> Iterator[Inputs]:
    spec = policy.spec
    for t in range(_RANDOM_STEPS):
        obs = {key: torch.from_numpy(made_up(s, rng, batch)) for key, s in spec.obs.items()}
        yield Inputs(
            from_entries(obs),
            torch.from_numpy(rng.random(batch) < (0.2 if t else 1.0)),
            torch.from_numpy(random_actions(spec.action, rng, batch)),
            torch.from_numpy(2 * rng.standard_normal(batch, np.float32)),
        )


def made_up(spec: ObsSpec, rng: np.random.Generator, n: int) -> Array:
    """Random observations `[n, *shape]` of the spec's dtype; bounds are not kept."""
    shape = (n, *spec.shape)
    if spec.text:
        words, lengths = rng.integers(1, int(spec.high) + 1, shape), rng.integers(spec.shape[0] + 1, size=(n, 1))
        return np.where(np.arange(spec.shape[0]) < lengths, words, 0).astype(spec.dtype)
    if spec.codes:
        return rng.integers(0, spec.codes, shape).astype(spec.dtype)
    if spec.dtype == "float32":
        return rng.standard_normal(shape, np.float32)
    return rng.integers(0, 256 if spec.dtype == "uint8" else 2, shape).astype(spec.dtype)


def _real(policy: Policy, rng: np.random.Generator, n: int) -> Iterator[Inputs]:
    """The env's observations under random actions, which reach more of it than a bad policy."""
    first_task, spec = tasks(policy.config.env.id)[0], policy.spec
    config = task_config(policy.config, first_task)
    env = replace(config.env, num_envs=n, decorrelate=0, delay=0.0)
    union = first_task != policy.config.env.id
    with make_envs(env, config.atari, seed=_SEED, threads=1, training=False, union=union) as envs:
        action = np.zeros((n, *spec.action.shape), spec.action.dtype)
        for t in range(_REAL_STEPS):
            ts = envs.recv(0)
            first = ts.is_first.copy()
            first[0] |= t == _REAL_STEPS // 2  # long episodes do not end by themselves
            yield Inputs(
                map_obs(lambda x: torch.from_numpy(x.copy()), ts.obs),
                torch.from_numpy(first),
                torch.from_numpy(action),
                torch.from_numpy(ts.reward.copy()),
            )
            action = random_actions(spec.action, rng, n, ts.obs)
            envs.send(0, action)

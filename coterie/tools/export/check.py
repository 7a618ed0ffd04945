"""Whether the file does what the network does: onnxruntime beside PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.build.evaluate import Policy
from coterie.envs.make import make_envs
from coterie.envs.spaces import random_actions
from coterie.envs.tasks import task_config, tasks
from coterie.tools.export.graph import Graph, obs_name
from coterie.types import Array, ConfigError, CoterieError, Inputs, ObsSpec, first_line, map_obs

# Of a number's size, or where that is smaller of 1, or of the largest return that a distribution has an atom for: both
# compute in float32, in different orders, and a mean over atoms from -10 to 10 has its rounding from the largest.
TOLERANCE = 1e-4
_RANDOM_STEPS, _REAL_STEPS, _ENVS, _SEED = 12, 48, 3, 1


@dataclass(frozen=True)
class Checked:
    """`largest`: the largest difference of any output, in TOLERANCE's measure, over so many `observations`."""

    largest: float
    observations: int


def check(policy: Policy, graph: Graph, onnx: bytes) -> Checked:
    """Compare on made-up observations and on the env's, for several batch sizes, with episodes that begin in between
    and each side's own recurrent state carried along. Raises `CoterieError` where they differ.
    """
    beside = _Beside(policy, graph, onnx)
    rng = np.random.default_rng(_SEED)
    for batch in (1, 3, 5):
        beside.run(_made_up(policy, rng, batch), batch)
    beside.run(_real(policy, rng), _ENVS)
    return Checked(beside.largest, beside.observations)


class _Beside:
    def __init__(self, policy: Policy, graph: Graph, onnx: bytes) -> None:
        import onnxruntime

        self.policy, self.graph = policy, graph
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        try:
            self.session: Any = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's have no parent of their own
            raise ConfigError(f"model.torso: onnxruntime cannot run this network: {first_line(error)[:200]}") from None
        self.names = [port.name for port in graph.outputs]
        self.rng = torch.Generator()
        self.largest, self.observations = 0.0, 0

    @torch.inference_mode()
    def run(self, steps: Iterator[Inputs], batch: int) -> None:
        model, state = self.policy.model, self.policy.model.initial_state(batch)
        carried = None if state is None else state.numpy()
        for inputs in steps:
            out, after = self.policy.algorithm.act(model, inputs, state, None, self.rng)
            params = model(inputs, state)[0]
            state = after
            theirs = dict(zip(self.names, self.session.run(None, self._feed(inputs, carried)), strict=True))
            carried = theirs.get("next_core_state")
            self._compare(out.action, out.value, params, state, theirs)
            self.observations += batch

    def _feed(self, inputs: Inputs, core_state: Array | None) -> dict[str, Array]:
        obs = inputs.obs if isinstance(inputs.obs, dict) else {"": inputs.obs}
        fed = {obs_name(key): x.numpy() for key, x in obs.items()}
        fed |= {name: getattr(inputs, name).numpy() for name in ("is_first", "prev_action", "prev_reward")}
        if core_state is not None:
            fed["core_state"] = core_state
        return {port.name: fed[port.name] for port in self.graph.inputs}

    def _compare(
        self, action: Tensor, value: Tensor, params: Tensor, state: Tensor | None, theirs: dict[str, Array]
    ) -> None:
        """Of one step: what acting has found, and onnxruntime's outputs."""
        spec, model = self.policy.spec.action, self.policy.model
        scores = params if model.q is None else model.expected(params)
        least = float(model.atoms.abs().max()) if model.q is not None and model.q.atoms > 1 else 1.0
        ours = {"value": value.numpy()}
        if model.q is not None:
            ours["q_values"] = scores.numpy()
        elif spec.kind == "continuous":
            ours |= {"mean": scores[:, : len(spec.low)].numpy(), "std": scores[:, len(spec.low) :].exp().numpy()}
        else:
            ours["logits"] = scores.numpy()
        if state is not None:
            ours["next_core_state"] = state.numpy()
        chosen = {"action": self.policy.actions.to_env(action.numpy())}
        if "next_prev_action" in theirs:
            chosen["next_prev_action"] = action.numpy()
        for name, x in (ours | chosen).items():
            if theirs[name].shape != x.shape or theirs[name].dtype != x.dtype:
                raise CoterieError(f"onnxruntime gives {name} as {theirs[name].dtype} {theirs[name].shape} "
                                   f"and PyTorch as {x.dtype} {x.shape}; nothing is written")  # fmt: skip
        for name, x in (ours | chosen if spec.kind == "continuous" else ours).items():
            self._judge(name, x, theirs[name], least if name in ("value", "q_values") else 1.0)
        if spec.kind != "continuous":
            sure = _decided(scores, spec.sizes, least).numpy()
            for name, x in chosen.items():
                same = (x == theirs[name]).reshape(sure.shape)
                if not (same | ~sure).all():
                    raise CoterieError(f"onnxruntime's {name} is not PyTorch's; nothing is written")

    def _judge(self, name: str, ours: Array, theirs: Array, least: float) -> None:
        error = float((np.abs(ours - theirs) / np.maximum(least, np.abs(ours))).max())
        if not error <= TOLERANCE:  # NaN neither
            raise CoterieError(
                f"onnxruntime's {name} differs from PyTorch's by {error:.1e}, {TOLERANCE:.0e} is allowed; "
                "nothing is written"
            )
        self.largest = max(self.largest, error)


def _decided(scores: Tensor, sizes: tuple[int, ...], least: float) -> Tensor:
    """Where the best of each component's choices is so by more than rounding, `[B, components]` bool."""
    found = []
    for part in torch.split(scores, list(sizes), -1):
        best = part.topk(min(2, part.shape[-1])).values
        gap = best[:, 0] - best[:, -1]
        found.append((gap > 2 * TOLERANCE * best[:, 0].abs().clamp(min=least)) | (part.shape[-1] == 1))
    return torch.stack(found, -1)


def _made_up(policy: Policy, rng: np.random.Generator, batch: int) -> Iterator[Inputs]:
    spec = policy.spec
    for t in range(_RANDOM_STEPS):
        obs = {key: torch.from_numpy(made_up(s, rng, batch)) for key, s in spec.obs.items()}
        yield Inputs(
            obs[""] if list(obs) == [""] else obs,
            torch.from_numpy(rng.random(batch) < (0.2 if t else 1.0)),
            torch.from_numpy(random_actions(spec.action, rng, batch)),
            torch.from_numpy(2 * rng.standard_normal(batch, np.float32)),
        )


def made_up(spec: ObsSpec, rng: np.random.Generator, n: int) -> Array:
    """Observations `[n, *shape]` that an env could give as far as its spec tells."""
    shape = (n, *spec.shape)
    if spec.text:
        words = rng.integers(1, int(spec.high) + 1, shape)
        return np.where(np.arange(spec.shape[0]) < rng.integers(spec.shape[0] + 1, size=(n, 1)), words, 0).astype(
            spec.dtype
        )
    if spec.codes:
        return rng.integers(0, spec.codes, shape).astype(spec.dtype)
    if spec.dtype == "float32":
        return rng.standard_normal(shape, np.float32)
    return rng.integers(0, 256 if spec.dtype == "uint8" else 2, shape).astype(spec.dtype)


def _real(policy: Policy, rng: np.random.Generator) -> Iterator[Inputs]:
    """The env's own, under random actions, which see more of it than a policy that stands still."""
    first_task, spec = tasks(policy.config.env.id)[0], policy.spec
    config = task_config(policy.config, first_task)
    env = replace(config.env, num_envs=_ENVS, reset="in_place", decorrelate=0, delay=0.0)
    union = first_task != policy.config.env.id
    with make_envs(env, config.atari, seed=_SEED, threads=1, training=False, union=union) as envs:
        action = np.zeros((_ENVS, *spec.action.shape), spec.action.dtype)
        for t in range(_REAL_STEPS):
            ts = envs.recv(0)
            first = ts.is_first.copy()
            first[0] |= t == _REAL_STEPS // 2  # where games are long, none ends by itself
            yield Inputs(
                map_obs(lambda x: torch.from_numpy(x.copy()), ts.obs),
                torch.from_numpy(first),
                torch.from_numpy(action),
                torch.from_numpy(ts.reward.copy()),
            )
            action = random_actions(spec.action, rng, _ENVS)
            envs.send(0, action)

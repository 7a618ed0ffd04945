"""Learner steps and acting on a GPU: launched from Python or recorded, with frames in either layout.

    python benchmarks/gpu_steps.py

Images of 84x84x4, bf16 in the torso, made-up rollouts: microseconds of a learner step without the optimizer, and of
acting for all envs, means of 30 calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie import presets
from coterie.acting.recorder import as_rollout, local_fields
from coterie.algorithms.base import Compute
from coterie.build.factory import acting_policy, make_algorithm, make_model
from coterie.build.resources import resolve_config
from coterie.learner import Gradients
from coterie.models.mlp import compute_dtype
from coterie.models.torsos import Frames
from coterie.parallel.graphs import record
from coterie.parallel.params import FlatParams
from coterie.types import ActionSpec, Inputs, ObsSpec, Rollout, Spec

GPU = torch.device("cuda")
SPEC = Spec("made-up", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (4,)))
# Algorithm, torso, unroll, envs, samples of a minibatch (0: no minibatches).
CASES = [
    ("ppo", "nature", 16, 128, 2048),
    ("ppo", "a3c", 64, 32, 256),
    ("a2c", "nature", 5, 256, 0),
    ("vtrace", "impala", 20, 64, 0),
    ("vtrace", "nature", 20, 512, 0),
]


def microseconds(call: Callable[[], object], calls: int = 30) -> float:
    for _ in range(4):  # recorded at the third
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / calls


def channels_first(self: Frames, x: Tensor) -> Tensor:
    """`Frames.forward` without the change of layout."""
    dtype = compute_dtype(self.conv.weight)
    return F.conv2d(x.to(dtype), self.conv.weight * (1 / 255), self.conv.bias, self.conv.stride, self.conv.padding)


def made_up(unroll: int, envs: int) -> Rollout:
    fields = dict(local_fields(SPEC, unroll, envs, GPU))
    fields["obs/"].random_(0, 255)
    fields["is_first"].fill_(False)
    fields["log_prob"].fill_(-1.4)
    fields["value"].zero_()
    return as_rollout(fields, GPU)


def measure(name: str, torso: str, unroll: int, envs: int, samples: int, recorded: bool) -> tuple[float, float]:
    changes: dict[str, object] = {"algorithm": name, "model.torso": torso, "algo.unroll_length": unroll}
    if samples:
        changes |= {"ppo.minibatch_size": samples, "ppo.batch_size": 0}
    config = resolve_config(presets.ppo("Pong-v5", **{**changes, "env.num_envs": envs}))
    taken, rollout = record if recorded else None, made_up(unroll, envs)
    compute = Compute(torch.bfloat16, record=taken, device=GPU)
    model = make_model(config, SPEC).to(GPU)
    algorithm = make_algorithm(config, SPEC, compute)
    gradients = Gradients(model, FlatParams(model), compute)
    batch = next(iter(algorithm.batches(model, rollout)))
    step = microseconds(lambda: gradients.compute(algorithm, batch))
    policy, rng, ids = acting_policy(algorithm, taken), torch.Generator(GPU), torch.arange(envs, device=GPU)
    inputs = Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward).map(lambda x: x[0])
    with torch.inference_mode():
        return step, microseconds(lambda: policy(model, inputs, None, ids, rng))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_steps.py needs a GPU")
    last = Frames.forward
    for case in CASES:
        name, torso, unroll, envs, samples = case
        print(f"{name}, {torso}, {samples or unroll * envs} samples; acting for {envs}", flush=True)
        for recorded in (False, True):
            for layout, forward in (("first", channels_first), ("last", last)):
                Frames.forward = forward  # type: ignore[method-assign]
                step, act = measure(*case, recorded)
                print(f"  {'graph' if recorded else 'plain'}, channels {layout}: {step:,.0f}, acting {act:,.0f}")
        Frames.forward = last  # type: ignore[method-assign]


if __name__ == "__main__":
    main()

"""How much a policy depends on an entry of the observation: its returns with that entry zeroed, or of another env.

python benchmarks/hide.py runs/fetch mission
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from coterie.build.evaluate import Trial, evaluate
from coterie.build.policy import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("entry")
    parser.add_argument("--episodes", type=int, default=400)
    options = parser.parse_args()
    ways = {
        "shown": lambda x: x,
        "hidden": torch.zeros_like,
        "of another env": lambda x: x.roll(1, 0),
    }
    for name, way in ways.items():
        policy = load(options.run)

        def change(module: torch.nn.Module, args: tuple[Any, ...], way: Any = way) -> tuple[Any, ...]:
            obs, *rest = args
            return ({**obs, options.entry: way(obs[options.entry])}, *rest)

        policy.model.torso.register_forward_pre_hook(change)
        scores = evaluate(policy.algorithm, policy.model, policy.config, Trial(options.episodes, sampled=True))
        returns = np.array(scores.returns)
        print(json.dumps({options.entry: name, "return": returns.mean(), "nothing": (returns <= 0).mean()}), flush=True)


if __name__ == "__main__":
    main()

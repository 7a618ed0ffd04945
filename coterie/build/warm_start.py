"""A run that begins with the weights of another one (`init_from`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import cast

import torch

from coterie.build.factory import make_model
from coterie.build.policy import WEIGHTS, checkpoint_of, own_checkpoint, weights_of
from coterie.config import Config
from coterie.errors import ConfigError
from coterie.models.build import Network
from coterie.models.heads import NoisyLinear, Normalizer
from coterie.models.torsos import torsos_of
from coterie.presets.common import flat
from coterie.runs import checkpoint
from coterie.runs.config_io import get
from coterie.runs.files import read_json
from coterie.types import MASK, Spec

# Names of a network's tensors that mean an action, and of those whose shapes may depend on the actions.
_CHOICES = ("policy.", "q.", "log_std")
_HEADS = (*_CHOICES, "value.")
# A policy was learned with its normalizers of observations. Those of a small data set (`bc`) would be moved far by the
# first rollout, and the policy with them.
_ROWS = 100_000


def first_model(config: Config, spec: Spec) -> Network:
    """A learner's network, with the weights of `init_from`. What goes on from a checkpoint has that empty."""
    model = make_model(config, spec)
    if config.init_from:
        begin_from(Path(config.init_from), model, given=() if config.sac.learn_alpha else ("log_alpha",))
    return model


def source_of(folder: Path) -> Path:
    """A run's best checkpoint, or its last; a checkpoint is its own. While that run trains these change. Raises a
    `ConfigError` if there is none.
    """
    if not (folder := folder.expanduser()).is_dir():
        raise ConfigError(f"init_from: {folder}: there is no such folder")
    return own_checkpoint(folder) or checkpoint_of(folder, "init_from")


def fitting(path: Path, config: Config, spec: Spec) -> Path:
    """The checkpoint at `path`. Raises a `ConfigError` if its weights would be another policy under this config."""
    there, model = flat(read_json(path.parent.parent / "config.json", dict) or {}), config.model
    if model.network:  # which reads what it likes
        return path
    torsos = torsos_of({name: obs for name, obs in spec.obs.items() if name != MASK}, model).values()
    mlp = "mlp" in torsos and config.algorithm != "sac"
    for name, used in {"model.activation": mlp, "model.clip_last_reward": model.last_action_reward}.items():
        if used and there.get(name, here := get(config, name)) != here:
            raise ConfigError(f"init_from: {path} was trained with {name} {there[name]}, here it is {here}")
    return path


def begin_from(folder: Path, model: Network, elsewhere: bool = False, given: Collection[str] = ()) -> str:
    """Give a new network the weights and normalizers of a run or checkpoint; returns a line about it. Heads for other
    actions stay new. `elsewhere`: actors make the network, too, and receive only what is trained. `given`: what
    settings say. Raises a `ConfigError` if there is no checkpoint, or another network.
    """
    path = source_of(folder)
    there, mine = weights_of(checkpoint.load(path, ends=WEIGHTS)[0], "0"), model.state_dict()
    names = [*mine, *sorted(there.keys() - mine.keys())]  # safetensors has no order
    shapes = {k: [list(x[k].shape) if k in x else "missing" for x in (there, mine)] for k in names}
    spec, action = read_json(path.parent.parent / "spec.json", dict), model.spec.action
    there_too = (spec or {}).get("action")  # a copied checkpoint may be in the folder of something else
    same = not isinstance(there_too, list) or there_too[:2] == [action.kind, list(action.sizes)]
    new = () if same else _CHOICES
    other = {k: pair for k, pair in shapes.items() if pair[0] != pair[1] or k.startswith(new)}
    for k, (a, b) in other.items():
        if not k.startswith(_HEADS):
            raise ConfigError(f"init_from: {folder} has another network: {k} is {a} there, {b} here")
    trained = {k for k, x in model.named_parameters() if x.requires_grad} | other.keys()
    sent = tuple(f"{k}." for k, part in model.named_modules() if isinstance(part, Normalizer | NoisyLinear))
    kept = sorted(k for k in mine.keys() - trained if not k.startswith(sent))
    if frozen := [k for k in kept if elsewhere and not torch.equal(mine[k], there[k])]:
        raise ConfigError(f"init_from: {frozen[0]} is not trained; actors make it by the seed: use that of {folder}")
    model.load_state_dict({k: x if k in other or k in given else there[k] for k, x in mine.items()})
    for normalizer in model.obs_norm.values():
        cast(Normalizer, normalizer).count_as(_ROWS)
    fresh = [k for k in other if k in mine]
    return f"begins with the weights of {path}" + (f"; new: {', '.join(fresh)}" if fresh else "")

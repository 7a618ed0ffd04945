"""Optional packages: the extras of Coterie, what each is for, and one error for a missing one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.errors import ConfigError

EXTRAS = {
    "envpool": "fast C++ environments: Atari, Box2D, MuJoCo, classic control, ViZDoom and more",
    "gym": "gymnasium's Box2D and MuJoCo environments",
    "pettingzoo": "environments of several agents: PettingZoo's Butterfly, and Classic except chess and card games",
    "video": "watch, and videos on pages",
    "plots": "report, compare, dashboard, reproduce",
    "ray": "--launch ray",
    "wandb": "--log.wandb",
    "export": "export: policies as ONNX and web pages",
    "plan": "plan: layouts and costs on other hardware",
    "keys": "keys: TLS certificates and tokens",
    "completion": "completion: of commands in the shell",
    "minari": "--bc.dataset: learning from data sets",
    "optuna": "examples/optuna_search.py",
    "brax": "examples/brax_env.py (650 MB, not in all)",
    "yaml": "train FILE.yaml",
    "gpu": "energy and utilization of NVIDIA GPUs",
}


def install(extra: str) -> str:
    """The command that installs an extra, for a clone or for an installed package."""
    clone = Path(__file__).parents[1]
    package = f"-e '{clone}[{extra}]'" if (clone / "pyproject.toml").exists() else f"'coterie[{extra}]'"
    return f"pip install {package}"


def missing(what: str, extra: str) -> ConfigError:
    return ConfigError(f"{what} needs the extra {extra!r}: {install(extra)}")


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Around imports of optional packages: a missing one raises a `ConfigError` that says how to install it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("coterie"):
            raise
        raise missing(what, extra) from error

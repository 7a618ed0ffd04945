"""What several tests share: small specs, models, rollouts made up from a seed."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from coterie.config import Config, Env, Model
from coterie.models.build import Network
from coterie.runs.config_io import replace
from coterie.types import ActionSpec, ObsSpec, Rollout, Spec

pytest.register_assert_rewrite("tests.support.runs", "tests.support.meddler")  # so that their failures show values
torch.set_num_threads(1)
settings.register_profile("coterie", deadline=None)  # a busy machine fails no test
settings.load_profile("coterie")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else hundreds of processes compile all modules
if "COTERIE_TESTS_STATE" not in os.environ:  # else it is the parent's: xdist's workers and children end without atexit
    os.environ["COTERIE_TESTS_STATE"] = tempfile.mkdtemp(prefix="coterie-tests-")
    atexit.register(shutil.rmtree, os.environ["COTERIE_TESTS_STATE"], ignore_errors=True)
# For a key and a cache of the tests' own.
os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"] = os.environ["COTERIE_TESTS_STATE"]


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tokens of loopback servers do not go to the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test that fails fails again."""
    torch.manual_seed(0)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
VECTOR = Spec("made-up", {"": ObsSpec((3,), "float32")}, ActionSpec("categorical", (4,)))
IMAGE = Spec("made-up", {"": ObsSpec((2, 36, 36), "uint8")}, ActionSpec("categorical", (4,)))


def made_by(kind: Callable[..., Any], end: Callable[[Any], object]) -> Iterator[Callable[..., Any]]:
    """The body of a fixture: gives what makes any number of `kind`, each of which is ended after the test."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        end(one)


def make_rollout(spec: Spec, t: int, b: int, seed: int = 0, core_size: int = 0) -> Rollout:
    """T steps of B envs with episodes that end (and restart one masked step later) at random."""
    rng = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=rng)

    obs = {}
    for key, s in spec.obs.items():
        x = rand(t + 1, b, *s.shape)
        obs[key] = (x * 255).to(torch.uint8) if s.dtype == "uint8" else x * 2 - 1
    terminated, truncated = torch.zeros(t, b, dtype=torch.bool), torch.zeros(t, b, dtype=torch.bool)
    is_first = torch.zeros(t + 1, b, dtype=torch.bool)
    for i in range(t):
        going = ~is_first[i + 1]
        ends = rand(b)
        terminated[i], truncated[i] = (ends < 0.1) & going, (ends > 0.9) & going
        if i + 2 <= t:
            is_first[i + 2] = terminated[i] | truncated[i]
    mask = ~is_first[1:]
    low = spec.action.low
    action = rand(t + 1, b, len(low)) * 2 - 1 if low else (rand(t + 1, b) * spec.action.sizes[0]).long()
    reward = torch.zeros(t + 1, b)
    reward[1:] = (rand(t, b) * 2 - 1) * mask
    return Rollout(
        obs=obs[""] if list(obs) == [""] else obs,
        is_first=is_first,
        prev_action=action,
        prev_reward=reward,
        action=action[1:],
        reward=reward[1:],
        terminated=terminated & mask,
        truncated=truncated & mask,
        behavior_log_prob=-rand(t, b) - 0.5,
        behavior_value=rand(t + 1, b),
        policy_version=torch.zeros(t, b, dtype=torch.long),
        env_id=torch.arange(b),
        core_state=rand(b, 2, core_size) if core_size else None,
    )


def make_config(**changes: object) -> Config:
    config = Config(env=Env(id="CartPole-v1", num_envs=4), model=Model(hidden=(16,)))
    return replace(config, changes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long proofs have hours where the others have minutes (pyproject.toml)."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3 * 3600))


@pytest.fixture
def small_model() -> Network:
    torch.manual_seed(0)
    return Network(VECTOR, Model(hidden=(16,)))


def after(rollouts: int) -> Callable[[Rollout], bool]:
    """For `Learner.run`: stop after so many rollouts."""
    left = iter(range(rollouts - 1, -1, -1))
    return lambda rollout: next(left) == 0

"""Vector envs and the user's own backends: aligned in each mode of autoreset; tensors stay on their device."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

import coterie
from coterie import config
from coterie.envs import vector
from coterie.envs.backend import StepResults
from coterie.envs.make import make_envs, make_spec
from coterie.envs.testing import Catch
from coterie.envs.vector import action_adapter, check_results, make_together
from coterie.errors import CoterieError
from coterie.types import ActionSpec, ObsSpec, Spec
from tests.conftest import make_config
from tests.envs.env_harness import check_counting, make, play
from tests.support import vectors
from tests.support.masked import Masked

COUNTING, GYMNASIUMS, MASKED = (f"tests.support.vectors:{name}" for name in ("Counting", "gymnasiums", "masked"))
WALKS = "tests.tools.test_check_backend:Walks"
EXAMPLES = Path(__file__).parents[2] / "examples"


NO_VECTOR = "env.backend vector needs a VectorEnv, made with num_envs; for a single env leave env.backend auto"


def one(num_envs: int) -> Catch:
    return Catch()


def plain(num_envs: int, **kwargs: Any) -> Any:
    """No `VectorEnv`, with what the guide says that it needs."""
    env, names = vectors.Counting(num_envs, **kwargs), ["num_envs", "metadata", "reset", "step", "close"]
    return SimpleNamespace(**{k: getattr(env, k) for k in (*names, "single_observation_space", "single_action_space")})


def refused(says: str) -> Any:
    return pytest.raises(CoterieError, match=says)


def clipped(action: Any) -> Any:
    """What CountingEnv's continuous actions add to its reward: they are stretched from [-1, 1] to [-2, 6]."""
    return (4 * action.clip(-1, 1) + 2).sum(-1)


@pytest.mark.parametrize("breaks", [lambda env: 1 / 0, lambda env: sys.exit(4)])
def test_an_error_of_close_hides_no_other_one(breaks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors.Counting, "close", breaks)
    vector._declared.cache_clear()
    with make(COUNTING, 2, backend="vector") as envs:
        play(envs, 2)


@pytest.mark.parametrize("mode", ["NextStep", "Disabled", "SameStep"])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_step_of_gymnasiums_own_is_aligned(mode: str, groups: int) -> None:
    kwargs = {"mode": mode, "obs": "dict", "continuous": True}
    with make(GYMNASIUMS, 4, backend="vector", groups=groups, kwargs=kwargs) as envs:
        seen = play(envs, 60)
    check_counting(seen, seen.obs["inner.vector"], clipped(seen.action), 5)
    np.testing.assert_array_equal(seen.obs["image"][:, :, 0, 3, 3], seen.obs["inner.vector"][..., 0] % 256)


@pytest.mark.parametrize("mode", ["NextStep", "Disabled", "SameStep"])
def test_texts_of_gymnasiums_own_are_those_of_each_episode(mode: str) -> None:
    """Each mission is of one episode, and of other words than the next one."""
    with make("tests.support.vectors:missions", 3, backend="vector", kwargs={"mode": mode}) as envs:
        seen = play(envs, 30)
    changes = (seen.obs["mission"][1:] != seen.obs["mission"][:-1]).any(-1)
    assert changes.any()
    assert seen.is_first[1:][changes].all()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize("env", [COUNTING, f"{__name__}:plain"])
def test_every_step_of_another_is_aligned(mode: str, kind: str, env: str) -> None:
    with make(env, 3, backend="vector", kwargs={"mode": mode, "kind": kind}) as envs:
        seen = play(envs, 60)
    check_counting(seen, seen.obs, clipped(seen.action), 5)


@pytest.mark.parametrize(("kind", "lacks"), [("numpy", ""), ("torch", ""), ("numpy", "arrays"), ("torch", "arrays")])
def test_a_same_step_env_that_cannot_wait_loses_the_first_step_and_no_more(kind: str, lacks: str) -> None:
    """The last observation of an episode is its own, and the reward of the step that is lost counts in the return."""
    with make(COUNTING, 3, backend="vector", kwargs={"mode": "SameStep", "kind": kind, "lacks": lacks}) as envs:
        seen = play(envs, 60)
    steps = seen.obs[..., 0] - [0, 100, 200]
    assert (steps[seen.done] == 5).all()
    assert (steps[1:][seen.is_first[1:]] == 1).all()
    effect = 16 * seen.obs[:-1, :, 0] + clipped(seen.action)
    np.testing.assert_allclose(seen.reward[1:][seen.real], effect[seen.real], rtol=1e-6)
    later = seen.done & (np.cumsum(seen.done, 0) > 1)
    assert (seen.episode_length[later] == 4).all()
    for t, env in np.argwhere(later):
        lost = 16 * 100 * env + clipped(seen.action[t - 5, env])
        np.testing.assert_allclose(seen.episode_return[t, env], seen.reward[t - 3 : t + 1, env].sum() + lost, rtol=1e-6)


def run_of(env_id: str = COUNTING, **changes: Any) -> Any:
    kwargs = json.dumps(changes.pop("kwargs", {}))
    settings = {"env.id": env_id, "env.backend": "vector", "env.num_envs": 4, "algo.unroll_length": 5, "learners": 1}
    return make_config(**{**settings, "env.kwargs": kwargs, "steps": 120, "eval.every": 0, **changes})


@pytest.mark.parametrize("groups", [1, 2])
def test_observations_stay_on_their_device_and_actions_come_there(groups: int, tmp_path: Any) -> None:
    """No call copies a batch of observations to the host; the env refuses actions that are not tensors."""
    vectors.copies.clear()
    config = run_of(kwargs={"kind": "spy"}, out=str(tmp_path / "run"), **{"env.groups": groups})
    assert coterie.train(config, quiet=True)["env_steps"] >= 120
    assert vectors.copies == ["cpu", "__array__"] * groups  # the very first ones
    assert coterie.evaluate_run(tmp_path / "run", episodes=2)["episodes"] == 2
    assert "cpu" in vectors.copies  # an evaluation has them on the host


def test_actions_are_tensors_also_where_all_observations_are_converted_on_the_host() -> None:
    with make(COUNTING, 3, backend="vector", kwargs={"kind": "torch", "lacks": "double"}) as envs:
        assert play(envs, 6).obs.dtype == np.float32  # the env asserts what it gets
    backend = make_together(config.Env(COUNTING, "vector", kwargs='{"kind": "torch", "lacks": "double"}'), [0])
    backend.reset(np.arange(1))
    backend.device = torch.device("meta")  # as if the env were on one
    assert action_adapter(backend, backend.recv())(np.zeros((1, 2), np.float32)).device.type == "meta"


@pytest.mark.slow
@pytest.mark.parametrize("acting", ["decoupled", "central"])
def test_other_processes_have_arrays_on_the_host(acting: str, tmp_path: Any) -> None:
    changes = {"acting": acting, "decoupled.lockstep": True, "central.lockstep": True, "actors": 1}
    summary = coterie.train(run_of(kwargs={"kind": "torch"}, out=str(tmp_path / "run"), **changes), quiet=True)
    assert summary["status"] == "finished"


def test_a_mask_in_the_observation_is_respected(tmp_path: Any) -> None:
    """`Masked` raises at an illegal choice."""
    config = run_of(MASKED, out=str(tmp_path / "run"), **{"env.num_envs": 3})
    assert coterie.train(config, quiet=True)["status"] == "finished"
    with refused("^env.max_episode_steps or eval.max_episode_steps: TypeError: "):  # before it trains
        coterie.train(run_of(out=str(tmp_path / "a"), **{"eval.every": 9, "eval.max_episode_steps": 9}), quiet=True)


def cut(num_envs: int) -> Any:
    return SyncVectorEnv([lambda: TimeLimit(Masked(), 3)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def test_a_mask_holds_where_an_episode_is_truncated() -> None:
    with make(f"{__name__}:cut", 3, backend="vector") as envs:
        for step in range(12):
            seen = envs.recv(0)
            assert seen.truncated.all() == (step % 4 == 3)
            np.testing.assert_array_equal(seen.obs["action_mask"], [(step % 4 + np.arange(4)) % 3 != 0] * 3)
            envs.send(0, seen.obs["action_mask"].argmax(1))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_env_with_a_nan_is_restarted_alone_where_that_can_be(kind: str) -> None:
    with make(COUNTING, 3, backend="vector", kwargs={"mode": "Disabled", "nan": 3, "kind": kind}) as envs:
        seen = play(envs, 12)
        assert envs.reports.replaced == 1
    assert np.argwhere(seen.is_first[:5]).tolist() == [[0, 0], [0, 1], [0, 2], [3, 1]]
    assert np.isfinite(seen.obs).all()
    assert seen.obs[4, :, 0].tolist() == [4, 101, 204]
    with make(COUNTING, 3, backend="vector", kwargs={"nan": 3}) as envs, refused("env 1: .* cannot be restarted"):
        play(envs, 12)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "NoSuch-v0"}, "env.id 'NoSuch-v0' cannot be made: NameNotFound"),
        ({"id": "coterie.envs.testing:Catch"}, f"env.id 'coterie.envs.testing:Catch': {NO_VECTOR}"),
        ({"id": "tests.envs.test_vector:one"}, f"env.id 'tests.envs.test_vector:one': {NO_VECTOR}"),
        ({"id": "Catch-v0"}, f"env.id 'Catch-v0': {NO_VECTOR}"),  # EnvPool's
        ({"id": "pettingzoo/classic/rps_v2"}, f"env.id 'pettingzoo/classic/rps_v2': {NO_VECTOR}"),
        ({"backend": COUNTING}, "env.backend .*:Counting: it is not a Backend; envs go to env.id, a VectorEnv with"),
        ({"backend": WALKS, "kwargs": '{"fault": "no super"}'}, "env.backend .*:Walks: its __init__ must call super"),
        ({"backend": WALKS, "kwargs": '{"fault": "tuple"}'}, "env.backend: recv returned tuple, not StepResults"),
        ({"backend": "auto"}, "env.id .*:Counting': it is a VectorEnv: set env.backend to vector"),
        ({"kwargs": '{"lacks": "envs"}'}, "env.num_envs: .*:Counting has 0 envs instead of 1"),
        ({"kwargs": '{"lacks": "mode"}'}, r"metadata\['autoreset_mode'\] is None, not an AutoresetMode"),
        ({"kwargs": '{"size": 1}'}, "env.kwargs: TypeError: .*unexpected keyword argument 'size'"),
        ({"max_episode_steps": 9}, "env.max_episode_steps or eval.max_episode_steps: TypeError: .*unexpected key"),
        ({"on_error": "replace"}, "env.on_error: must be fail; env.backend vector steps all envs together"),
        ({"action_repeat": 2}, "env.action_repeat: must be 1; env.backend vector steps all envs together"),
        ({"decorrelate": 9}, "env.decorrelate: must be 0; env.backend vector steps all envs together"),
        ({"backend": "pol"}, "env.backend: 'pol' is not auto, pool, workers, vector or package.module:callable"),
        ({"kwargs": '{"lacks": "rows"}'}, r"observation has shape \(3, 1\), not \(3, 2\)"),
        ({"id": MASKED, "kwargs": '{"mode": "Disabled"}'}, "action_mask must be in the observation, with NEXT_STEP"),
        ({"id": MASKED, "kwargs": '{"where": "info"}'}, "action_mask must be in the observation, with NEXT_STEP"),
    ],
)
def test_what_cannot_work_is_one_line(options: dict[str, Any], says: str) -> None:
    env = config.Env(**{"id": COUNTING, "backend": "vector", "num_envs": 3, **options})
    with refused(says):
        make_spec(env, config.Atari())
        make_envs(env, config.Atari(), seed=1)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("later", r"observation has shape \(3, 1\), not \(3, 2\)"),
        ("reward", r"reward has shape \(3, 1\), not \(3,\)"),
        ("flags", r"terminated has shape \(3, 1\), not \(3,\)"),
        ("bytes", "observation has type .*float32, but its space has uint8"),
        ("a value", r"step must return \(observation, reward, terminated, truncated, info\), not 4 values"),
    ],
)
def test_results_that_would_be_broadcast_or_cut_are_one_line(kind: str, lacks: str, says: str) -> None:
    options = {"backend": "vector", "kwargs": {"kind": kind, "lacks": lacks}}
    with refused(f"^env.id '{COUNTING}': {says}$"), make(COUNTING, 3, **options) as envs:  # type: ignore[arg-type]
        play(envs, 2)


def test_flags_that_are_integers_are_those_of_a_sound_backend() -> None:
    seen = []
    for fault in ("ints", ""):
        with make("walks", 3, backend=WALKS, kwargs={"fault": fault}) as envs:
            seen.append(play(envs, 30))
    for ints, sound in zip(*seen, strict=True):
        np.testing.assert_array_equal(ints, sound)
    assert seen[0].terminated.sum() == 9


def test_episodes_of_one_step_are_refused_where_each_would_be_lost() -> None:
    kwargs = {"mode": "SameStep", "length": 1}
    with (
        make(COUNTING, 3, backend="vector", kwargs=kwargs) as envs,
        refused("episodes of one step need autoreset NEXT_STEP or DISABLED"),
    ):
        play(envs, 200)
    with make(COUNTING, 3, backend="vector", kwargs={"length": 1}) as envs:
        assert play(envs, 200).done.sum() == 300


def test_an_episode_without_its_last_observation_cannot_be_truncated() -> None:
    options = {"backend": "vector", "kwargs": {"mode": "SameStep", "lacks": "final_obs"}}
    with make(COUNTING, 3, **options) as envs, refused("no final_obs in info; set env.time_limit terminate"):
        play(envs, 12)
    with make(COUNTING, 3, **options, time_limit="terminate") as envs:
        assert play(envs, 12).terminated.sum() == 6


@pytest.mark.filterwarnings("default")  # Brax's imports warn
def test_every_step_of_brax_is_aligned(monkeypatch: Any) -> None:
    """In its env `fast`, a positive action adds 0.02 to a velocity; the reward is the position."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with make("fast", 3, backend="brax_env:Brax", max_episode_steps=4) as envs:
        seen = play(envs, 12)
    (position, velocity), first = np.moveaxis(seen.obs, -1, 0), seen.is_first[1:]
    faster = velocity[:-1] + 0.02 * (seen.action[..., 0] > 0)
    assert faster[~first].max() > 0.05
    np.testing.assert_allclose(velocity[1:], np.where(first, 0, faster), atol=1e-6)
    np.testing.assert_allclose(position[1:], np.where(first, 0, position[:-1] + 0.02 * faster), atol=1e-6)
    np.testing.assert_allclose(seen.reward[1:], position[1:], atol=1e-6)
    assert seen.is_first.T.tolist() == [[t % 5 == 0 for t in range(13)]] * 3
    assert seen.truncated.T.tolist() == [[t % 5 == 4 for t in range(13)]] * 3
    assert not seen.terminated.any()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["torch", pytest.param("brax", marks=pytest.mark.slow)])  # JAX compiles for 40 s
def test_the_examples_run(name: str, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "9000"])
    runpy.run_path(str(EXAMPLES / f"{name}_env.py"), run_name="__main__")
    assert "mean return" in capsys.readouterr().out


def test_pixels_that_pass_for_codes_of_a_grid_are_refused() -> None:
    spec = Spec(
        "MiniGrid-Mine-v0",
        {"image": ObsSpec((7, 7, 3), "uint8", 0, 255, codes=(11, 6, 4))},
        ActionSpec("categorical", (2,)),
    )
    flags = np.zeros((3, 1), bool)
    for value, fits in ((12, True), (200, False)):
        seen = StepResults({"image": np.full((1, 7, 7, 3), value, np.uint8)}, np.zeros(1, np.float32), *flags)
        with nullcontext() if fits else refused("observation 'image' has pixels, not MiniGrid's codes"):
            check_results(spec, seen, 1)

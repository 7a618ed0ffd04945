"""Which numbers in the info of envs count: those of each episode's last step, or of all steps."""

import numpy as np
import pytest
import torch

from coterie.envs.gym import numbers
from coterie.envs.news import Means
from tests.envs.env_harness import make, play

TELLING = "tests.support.telling:TellingEnv"


@pytest.mark.parametrize("groups", [1, 2])
def test_by_default_it_is_the_last_step_of_each_episode(groups):
    with make(TELLING, 4, threads=2, groups=groups) as envs:
        play(envs, 12)  # episodes of 5 steps, a restart, and 5 steps
        news = envs.reports.take()
        assert not envs.reports.take().info
    # Two episodes of each env: the first ends terminated, the second truncated.
    assert news.info == {"step": (40.0, 8), "deep/half": (20.0, 8), "success": (4.0, 8)}
    assert news.info.means("env/") == {"env/deep/half": 2.5, "env/step": 5.0, "env/success": 0.5}


def test_it_may_be_all_steps_or_none():
    with make(TELLING, 2, info="steps") as envs:
        play(envs, 8)  # rows 1 to 5, a restart, whose info does not count, and two more
        assert envs.reports.take().info == {
            "step": (2 * (15.0 + 3), 14),
            "deep/half": (15.0 + 3, 14),
            "success": (2.0, 2),
        }
    with make(TELLING, 2, info="off") as envs:
        play(envs, 8)
        assert not envs.reports.take().info


def test_with_action_repeat_it_is_the_last_of_the_repeated_steps():
    with make(TELLING, 2, action_repeat=2) as envs:
        play(envs, 4)
        assert envs.reports.take().info == {"step": (10.0, 2), "deep/half": (5.0, 2), "success": (2.0, 2)}


def test_what_an_env_did_before_the_run_does_not_count():
    with make(TELLING, 4, decorrelate=4) as envs:
        first = play(envs, 6)
        whole = ~np.isnan(first.episode_length)
        assert envs.reports.take().info.get("step", (0.0, 0))[1] == whole.sum()


def test_numbers_in_envpools_info_count_too():
    with make("HalfCheetah-v4", 2, max_episode_steps=5, info="steps") as envs:
        seen = play(envs, 5)
        total, count = envs.reports.take().info["reward_run"]
    assert count == 10
    assert np.isfinite(total)
    assert seen.real.sum() == 10
    with make("Breakout-v5", 2, max_episode_steps=5) as envs:  # only what the other fields do not say
        play(envs, 7)
        assert set(envs.reports.take().info) <= {"elapsed_step"}


def test_what_counts_as_a_number_is_the_same_for_one_env_and_for_many():
    loop, row = {"x": 1}, np.array([[True], [False]])
    loop["loop"] = loop
    info = {"ints": torch.tensor([1, 2]), "column": row, 3: 4, "": np.float16(5), "zero": np.array(6), "loop": loop}
    info |= {"deep": {"y": torch.tensor(7.0), "_y": row[::-1, 0]}, "_hidden": 8, "grad": torch.ones(2).requires_grad_()}
    info |= {"wide": np.ones((2, 2)), "text": "9", "none": None, "objects": np.array([{}, None]), "list": [1, 2]}
    info |= {"time": np.timedelta64(5, "s"), "complex": 1j, "huge": 10**400}
    found = {name: x.tolist() for name, x in numbers(info, 2).items() if not name.startswith("loop")}
    assert np.isnan(found["deep/y"][0])
    assert found.pop("deep/y")[1] == 7
    one = {"3": [4, 4], "": [5, 5], "zero": [6, 6]}
    assert found == {"ints": [1, 2], "column": [1, 0], "grad": [1, 1], **one}
    assert {name: x.item() for name, x in numbers(info, 1).items() if name in one} == {"3": 4, "": 5, "zero": 6}
    assert numbers(None, 1) == {}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_vector_env_may_have_them_nested_and_may_have_none(kind):
    for lacks, wanted in (("info", {}), ("", {"deep/step": (20.0, 8), "final_odd": (4.0, 4), "3": (8.0, 8)})):
        kwargs = {"kind": kind, "lacks": lacks}
        with make("tests.support.vectors:Counting", 2, backend="vector", kwargs=kwargs, info="steps") as envs:
            play(envs, 4)
            assert envs.reports.take().info == wanted


@pytest.mark.parametrize("mode", ["NextStep", "Disabled", "SameStep"])
def test_numbers_in_the_info_of_a_vector_env_count_too(mode):
    success = 4.0 if mode == "NextStep" else 8.0  # elsewhere two resets for each episode: all numbers are even
    for which, wanted in (("episodes", (40.0, 8)), ("steps", (8 * 15.0, 40))):
        with make("tests.support.vectors:telling", 4, backend="vector", kwargs={"mode": mode}, info=which) as envs:
            play(envs, 12)  # episodes of 5 steps, a restart, 5 steps, and another restart
            assert envs.reports.take().info == {"step": wanted, "success": (success, 8)}


def test_only_bools_for_each_env_say_which_envs_have_a_number():
    info = {"x": 1.0, "_x": 0, "y": 2.0, "_y": np.bool_(False), "deep": {"z": 3.0}, "_deep": {"z": 0}}
    assert {name: x.item() for name, x in numbers(info, 1).items()} == {"x": 1, "y": 2, "deep/z": 3}
    many = numbers({"x": 1.0, "_x": np.array([False, True]), "y": 2.0, "_y": np.array([0, 1])}, 2)
    assert np.isnan(many["x"][0])
    assert many["x"][1] == 1
    assert many["y"].tolist() == [2, 2]


def test_names_without_end_are_not_metrics_without_end():
    """Such as those of a host that has ids in its info's names."""
    means, names = Means(), [f"id{k}" for k in range(1000)]
    lines = [line for name in names for line in means.add({name: (1.0, 1), "same": (2.0, 1)})]
    assert lines == ["info has more than 200 numbers; 'id199' and others are no metrics"]
    assert means.take() == {"same": (2000.0, 1000), **dict.fromkeys(names[:199], (1.0, 1))}
    assert means.add({"id1000": (1.0, 1), "id7": (3.0, 1)}) == []
    assert means.take() == {"id7": (3.0, 1)}

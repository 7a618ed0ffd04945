"""Envs that give NaN, die or hang cost one masked step; an exception ends the run with its traceback; no process or
descriptor outlives its envs.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from coterie import config
from coterie.envs.local import LocalBackend
from coterie.envs.make import make_spec
from coterie.envs.workers import _declared, worker_declared
from coterie.errors import CoterieError
from tests.envs.env_harness import COUNTING, FLAKY, Player, make, pattern, play, worker_pids
from tests.support.flaky import FlakyEnv
from tests.support.process_table import gone
from tests.support.waiting import wait_until

REASONS = {
    "nan_reward": "reward is not finite",
    "nan_obs": "observation is not finite",
    "exit": r"its worker process died \(exit code 3\)",
    "kill": r"its worker process died \(killed by SIGKILL\)",
    "hang": r"no answer in env\.timeout 1\.5 s",
}


@pytest.mark.parametrize("how", REASONS)
def test_a_failure_costs_one_masked_step(how, tmp_path):
    kwargs = {"how": how, "at": 7, "length": 5, "marker": str(tmp_path / "once")}
    with make(FLAKY, 4, threads=2, timeout=1.5, kwargs=kwargs) as envs:
        seen = play(envs, 20)
        failures, replaced = envs.reports.take().failures, envs.reports.replaced
    # A lost process takes its two envs along; the marker lets one fail only.
    assert replaced == len(failures) == (2 if how in ("exit", "kill", "hang") else 1)
    assert all(re.fullmatch(f"replaced env [0-3]: .*{REASONS[how]}", reason) for reason in failures)
    expected = "F....DF....TF....DF.."  # 5 steps, one restart, and so on
    at = next(t for t in range(20) if any(pattern(seen, e)[t] != expected[t] for e in range(4)))
    hit = [e for e in range(4) if pattern(seen, e)[at] != expected[at]]
    assert len(hit) == replaced
    assert at == 8  # the 7th env step is the 8th row: one row is the restart's
    for env in range(4):
        if env not in hit:
            assert pattern(seen, env) == expected
            continue
        assert pattern(seen, env) == "F....DF.F....DF....TF"
        count, episode = seen.obs[:, env, 0], seen.obs[:, env, 1]
        assert episode[8:14].tolist() == [0] * 6  # a new env in its first episode
        assert (count[8:14] == count[8] + np.arange(6)).all()
        assert seen.reward[8, env] == 0
        np.testing.assert_array_equal(np.flatnonzero(~np.isnan(seen.episode_return[:, env])), [5, 13, 19])
        assert seen.episode_return[13, env] == seen.reward[9:14, env].sum()
    np.testing.assert_array_equal(seen.reward[1:][seen.real], (16 * seen.obs[:-1, :, 0] + seen.action)[seen.real])


def test_over_the_budget_of_replaced_envs_the_run_fails_with_the_last_reason():
    envs = make(FLAKY, 2, replace_budget=3, kwargs={"how": "nan_reward", "at": 2})
    with envs:
        workers = worker_pids(envs)
        with pytest.raises(
            CoterieError, match=r"^4 envs .* env\.replace_budget 3 in an hour; the last: env 1: reward is not finite"
        ):
            play(envs, 10)
    assert envs.reports.replaced == 4
    assert all(map(gone, workers))


BUGGY = """
import os
from pathlib import Path
from coterie.envs.testing import CountingEnv

class Buggy(CountingEnv):
    made = 0

    def __init__(self, where, marker=""):
        super().__init__()
        self.where, self.marker = where, marker
        Buggy.made += 1
        if where == "replacement" and Buggy.made > 1:
            {}["made"]
        if where == "restart" and Path(marker).exists() and not Path(f"{marker}2").exists():
            Path(f"{marker}2").touch()
            raise OSError("address already in use")

    def reset(self, **options):
        if self.where == "reset":
            {}["reset"]
        return super().reset(**options)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.where == "step":
            {}["step"]
        if self.where == "restart" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os._exit(3)
        return obs, float("nan") if self.where == "replacement" else reward, *rest
"""


@pytest.mark.parametrize(("where", "line"), [("step", 27), ("reset", 21), ("replacement", 14)])
def test_an_exception_ends_the_run_at_once_with_its_traceback(where, line, tmp_path, monkeypatch):
    (tmp_path / "buggy.py").write_text(BUGGY)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("buggy", None)
    with pytest.raises(CoterieError) as caught, make("buggy:Buggy", 1, kwargs={"where": where}) as envs:
        play(envs, 10)
    key, inside = ("made", "__init__") if where == "replacement" else (where, where)
    at = tmp_path / "buggy.py"
    assert str(caught.value) == f"env.id 'buggy:Buggy': KeyError: '{key}' ({at}, line {line}, in {inside})"
    assert f'File "{at}", line {line}, in {inside}\n    {{}}["{key}"]' in caught.value.trace


def test_an_env_that_raises_can_be_replaced_and_its_traceback_comes_once(tmp_path, monkeypatch):
    (tmp_path / "buggy.py").write_text(BUGGY)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("buggy", None)
    settings = {"on_error": "replace", "replace_budget": 5}
    with make(FLAKY, 2, kwargs={"how": "raise", "at": 3}, **settings) as envs:
        seen, reasons = play(envs, 7), envs.reports.take().failures
    assert [pattern(seen, e) for e in range(2)] == ["F..F..F."] * 2  # each third step is masked
    assert len(reasons) == 4
    assert all(reason.startswith("replaced env ") and "ValueError: flaky by design (" in reason for reason in reasons)
    assert ["Traceback (most recent" in reason for reason in reasons] == [True, False, False, False]
    with (
        pytest.raises(CoterieError) as caught,
        make("buggy:Buggy", 1, kwargs={"where": "replacement"}, **settings) as e,
    ):
        play(e, 3)
    assert str(caught.value).startswith("6 envs had to be replaced")
    assert str(caught.value).endswith("buggy.py, line 14, in __init__)")
    assert "in __init__\n" in caught.value.trace


def test_an_exception_in_a_restarted_worker_is_replaced_or_ends_the_run(tmp_path, monkeypatch):
    """The env ends its process once, and the next one cannot be made: a license, or a port that is still taken."""
    (tmp_path / "buggy.py").write_text(BUGGY)
    monkeypatch.syspath_prepend(tmp_path)
    kwargs = {"where": "restart", "marker": str(tmp_path / "once")}
    with make("buggy:Buggy", 1, kwargs=kwargs, on_error="replace") as envs:
        seen, reasons = play(envs, 6), envs.reports.take().failures
    assert [reason.split(": ", 1)[1].partition(" (")[0] for reason in reasons] == [
        "its worker process died", "OSError: address already in use",
    ]  # fmt: skip
    assert pattern(seen, 0) == "FF....D"
    for marker in tmp_path.glob("once*"):
        marker.unlink()
    says = "OSError: address already in use"
    with pytest.raises(CoterieError, match=says), make("buggy:Buggy", 1, kwargs=kwargs) as envs:
        play(envs, 6)


def test_an_env_that_was_edited_since_it_was_described_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited.py").write_text("from coterie.envs.testing import CountingEnv as Edited\n")
    worker_declared(config.Env(id="edited:Edited"))
    (tmp_path / "edited.py").write_text("from coterie.envs.testing import Catch as Edited\n")
    says = r"^env.id 'edited:Edited': its spaces differ from those read at the start, Box\(.* now: restart Python"
    with pytest.raises(CoterieError, match=says), make("edited:Edited", 1) as envs:
        envs.recv(0)


def test_an_exception_of_the_constructor_has_its_traceback():
    with pytest.raises(CoterieError, match=r"RuntimeError: this env cannot be made \(.*flaky\.py, line") as caught:
        make(FLAKY, 1, kwargs={"how": "construct"})
    assert "in __init__\n" in caught.value.trace


@pytest.mark.parametrize("ends", [lambda: 1 / 0, lambda: sys.exit(4)])
def test_an_env_whose_close_raises_can_be_used(monkeypatch, ends):
    _declared.cache_clear()
    monkeypatch.setattr(FlakyEnv, "close", lambda self: ends())
    env = config.Env(id=FLAKY, kwargs='{"how": "raise", "at": 77}')
    assert worker_declared(env).spec.agents == 1
    LocalBackend(env, [1]).close()


def test_an_env_without_frames_says_that_it_does_not_draw_any():
    with pytest.raises(CoterieError, match=r"CountingEnv' cannot be drawn: it has no render\(\) of its own$"):
        LocalBackend(config.Env(id=COUNTING), [1]).render()


def test_an_env_that_exits_is_a_bug_like_another_exception():
    says = r"SystemExit: no license \(.*flaky\.py, line"
    with make(FLAKY, 1, kwargs={"how": "quit", "at": 2}) as envs, pytest.raises(CoterieError, match=says):
        play(envs, 3)


def test_a_replaced_env_has_another_seed_that_is_reproducible(tmp_path):
    def run(name):
        kwargs = {"how": "nan_reward", "at": 3, "marker": str(tmp_path / name)}
        with make(FLAKY, 1, kwargs=kwargs) as envs:
            return play(envs, 4).obs[:, 0, 0]

    a, b = run("a"), run("b")
    np.testing.assert_array_equal(a, b)
    assert a[3] not in (a[0], a[2] + 1)


def descriptors():
    gc.collect()  # frees what an earlier test's exception still holds in a cycle
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link).split(":")[0] for link in links if os.path.islink(link))


def test_close_leaves_no_process_and_no_descriptor():
    with make(COUNTING, 2) as envs:  # opens what is opened once
        play(envs, 1)
    before = descriptors()
    with make(COUNTING, 4, groups=2, threads=2) as envs:
        player = Player(envs)
        player.rollout(7)
        workers = worker_pids(envs)
        assert len(workers) == 2
        for k, pid in enumerate(workers):
            assert f"coterie-env-{k}-0" in psutil.Process(pid).cmdline()
        assert not any(map(gone, workers))
        assert any("memfd" in name for name in descriptors())
        os.kill(workers[0], signal.SIGKILL)
        player.rollout(3)
        workers += worker_pids(envs)
        envs.send(0, np.zeros(2, np.int64))  # closed with a step under way
    assert all(map(gone, workers))
    assert descriptors() == before


def test_workers_exit_when_their_parent_is_killed(tmp_path):
    code = (
        "import sys, time; from tests.envs.env_harness import *\n"
        "e = make(FLAKY, 2, threads=2, kwargs={'how': 'hang', 'at': 1, 'marker': sys.argv[1]})\n"
        "e.recv(0); print(*worker_pids(e), flush=True)\n"
        "e.send(0, np.zeros(2, np.int64)); print('sent', flush=True); time.sleep(60)"
    )
    marker = str(tmp_path / "hangs")
    with subprocess.Popen([sys.executable, "-c", code, marker], stdout=subprocess.PIPE, text=True) as parent:
        try:
            workers = [int(x) for x in parent.stdout.readline().split()]
            parent.stdout.readline()
            # One worker hangs in its env, the other waits for requests.
            wait_until(lambda: os.path.exists(marker), 30, "a worker hangs")
            assert not any(map(gone, workers))
        finally:
            parent.kill()
    wait_until(lambda: all(map(gone, workers)), 15, "the workers exit")


HANGS = """
import time
from gymnasium.vector import SyncVectorEnv
from coterie.envs.testing import CountingEnv

class Hangs(CountingEnv):
    def __init__(self, where):
        super().__init__()
        self.where = where
        while where == "constructor":
            try:
                time.sleep(60)
            except Exception:
                pass  # tries again, like a client of a simulator that is not there

    def close(self):
        time.sleep(60 * (self.where == "close"))

def hangs(num_envs, where):
    return SyncVectorEnv([lambda: Hangs(where)] * num_envs)
"""


@pytest.mark.parametrize("backend", ["auto", "vector"])
@pytest.mark.parametrize("where", ["constructor", "close"])
def test_an_env_that_hangs_when_it_is_made_or_closed_is_given_up(where, backend, tmp_path, monkeypatch):
    (tmp_path / "slow_env.py").write_text(HANGS)
    monkeypatch.syspath_prepend(tmp_path)
    if where == "constructor":
        monkeypatch.setattr("coterie.envs.make.START_S", 2.0)
    monkeypatch.setattr(f"coterie.envs.{'workers' if backend == 'auto' else 'vector'}.CLOSE_S", 0.5)
    name = "slow_env:Hangs" if backend == "auto" else "slow_env:hangs"
    env = config.Env(name, backend, kwargs=json.dumps({"where": where}), timeout=0.5)
    if where == "close":
        begin = time.monotonic()
        assert make_spec(env, config.Atari()).action.sizes
        assert time.monotonic() - begin < 30
        return
    with pytest.raises(CoterieError, match=r"(?i)hangs'.*: not made within 2\.5 s, env\.timeout and 2: ") as caught:
        make_spec(env, config.Atari())
    assert "time.sleep(60)" in caught.value.trace

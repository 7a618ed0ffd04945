"""Numbers in the info of envs are in a run's metrics, in every acting and over the wire."""

import pytest

from coterie.cli.main import main
from coterie.config import Env
from coterie.launch.session import train
from coterie.roles.remote_worker import run_actor, run_env_host
from coterie.runs.metrics import read_metrics
from tests.support.net import free_port
from tests.support.remote_workers import central, decoupled, finish, goes_on

TELLING = "tests.support.telling:TellingEnv"


@pytest.mark.parametrize("acting", ["inline", "decoupled", "central"])
def test_a_run_has_them_in_its_metrics(tmp_path, acting):
    settings = {"env.num_envs": 4, "actors": 0 if acting == "inline" else 2, "log.every": 0.0, "log.tensorboard": False}
    preset = "a2c" if acting == "inline" else "impala"
    train(preset=preset, env=TELLING, acting=acting, steps=600, out=str(tmp_path / "run"), quiet=True, **settings)
    lines = [line for line in read_metrics(tmp_path / "run") if "env/success" in line]
    assert lines
    assert {line["env/step"] for line in lines} == {5.0}
    assert all(0 <= line["env/success"] <= 1 for line in lines)


def test_an_evaluation_has_them_for_its_own_episodes(tmp_path, capsys):
    settings = {"env.num_envs": 4, "eval.every": 200, "eval.episodes": 20, "log.tensorboard": False}
    train(preset="a2c", env=TELLING, steps=600, out=str(tmp_path / "run"), quiet=True, **settings)
    lines = [line for line in read_metrics(tmp_path / "run") if "eval/return" in line]
    assert [line["eval/env/step"] for line in lines] == [5.0] * len(lines)
    assert lines
    # Of 20 episodes 16 are an env's first, which ends terminated, and 4 their second, which is truncated.
    assert [line["eval/env/success"] for line in lines] == [16 / 20] * len(lines)
    assert main(["eval", str(tmp_path / "run"), "--episodes", "3"]) == 0
    assert "(3 episodes, greedy, deep/half 2.5, step 5, success 1, checkpoint at " in capsys.readouterr().out


@pytest.mark.parametrize("work", [run_env_host, run_actor])
def test_remote_envs_have_them_in_the_runs_metrics(meddler, worker_threads, work):
    port, env = free_port(), Env(TELLING)

    def meddle() -> None:
        mine = worker_threads(work, port, env)
        meddler.at_work()
        goes_on(meddler)
        meddler.until(lambda: any("env/success" in line for line in read_metrics(meddler.out)), "a line with them")
        finish(meddler, mine)

    options = {"env.id": TELLING, "log.every": 0.2}
    args = central(meddler.out, port, **options) if work is run_env_host else decoupled(meddler.out, port, **options)
    assert meddler.run(args, meddle) == 75
    found = [line["env/step"] for line in read_metrics(meddler.out) if "env/step" in line]
    assert found
    assert set(found) == {5.0}

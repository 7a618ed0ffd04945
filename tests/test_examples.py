"""What the examples of several machines say is what the command line takes, and the one for SLURM is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.cli.options import config_of
from coterie.config import Config
from coterie.runs.config_io import parse_cli
from coterie.types import ActionSpec, ObsSpec, Spec
from tests.support.meddler import PATIENCE
from tests.support.net import free_port
from tests.support.process_table import tagged
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "examples" / name for name in ("kubernetes.yaml", "cloud.yaml")]
ATARI = Spec("Breakout-v5", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (4,)))
FAKES = {
    "srun": 'while [ "$1" != coterie ]; do shift; done\nexec "$@"',
    "scontrol": 'echo "$@" > requeued',
    "coterie": f'exec {sys.executable} -m coterie "$@"',
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_commands_of_the_cluster_examples_are_possible(path):
    found = re.findall(r"^ *(?:exec )?(coterie (?:train|envs) .*)$", path.read_text(), re.M)
    assert len(found) == 2
    for line in found:
        words = shlex.split(re.sub(r"\$wire", "--wire.token-file t --wire.cert c", line))
        if words[1] == "train":
            check(resolve_config(config_of(words[2:])), ATARI)
        else:
            own = [
                w for k, w in enumerate(words[2:]) if not {words[1 + k], w} & {"--connect", "--token-file", "--cert"}
            ]
            parse_cli(Config(), own)


@pytest.mark.slow
def test_a_slurm_job_is_preempted_requeued_and_resumed(tmp_path):
    """Two nodes of one machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    tag = f"COTERIE_TEST={tmp_path}"
    small = "--log.every 0.2 --log.tensorboard False --log.checkpoint-every 0.5 --algo.unroll-length 8"
    env = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "RUN": str(tmp_path / "run"),
        "ENV": "CartPole-v1", "PORT": str(free_port()), "HEAD": "localhost", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7",
        "COTERIE_TEST": str(tmp_path), "OPTIONS": f"--steps 1000000000 --env.num-envs 16 {small}",
    }  # fmt: skip

    def learned() -> int:
        states = (tmp_path / "run" / "checkpoints").glob("step_*/state.json")
        return max((json.loads(p.read_text())["env_steps"] for p in states), default=0)

    for _ in range(2):
        before = learned()
        with (tmp_path / "said").open("a") as file:
            job = subprocess.Popen(
                [ROOT / "examples" / "slurm.sh"], env=env, cwd=tmp_path, start_new_session=True, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:

            def goes_on(before: int = before, job: subprocess.Popen[bytes] = job) -> bool:
                assert job.poll() is None, (tmp_path / "said").read_text()
                return learned() > before + 1000

            wait_until(goes_on, PATIENCE, "it learns")
            for pid, command in tagged(tag).items():  # as SLURM signals the steps of a job
                if re.search(r"coterie (train|resume|envs) ", command):
                    os.kill(pid, signal.SIGTERM)
            assert job.wait(PATIENCE) == 75, (tmp_path / "said").read_text()
            assert (tmp_path / "requeued").read_text() == "requeue 7\n"
            (tmp_path / "requeued").unlink()
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()

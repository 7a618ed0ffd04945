"""What a user gets beside the package works: the examples, the notebook, the site, and README on a fresh clone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import coterie
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.cli.options import config_of
from coterie.config import Config
from coterie.runs.metrics import read_metrics
from coterie.types import ActionSpec, ObsSpec, Spec
from tests.support.meddler import PATIENCE
from tests.support.net import free_port
from tests.support.options import parse_cli
from tests.support.process_table import tagged
from tests.support.waiting import wait_until
from tests.test_docs import commands, run, shrink

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "examples" / name for name in ("kubernetes.yaml", "cloud.yaml")]
ATARI = Spec("Breakout-v5", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (4,)))
FETCHED = (
    r'<(?:script|img|iframe|video|source)\b[^>]*\bsrc="([^"]*)"|<link\b[^>]*\bhref="([^"]*)"|url\(["\']?([^"\')]*)'
)
FAKES = {
    "srun": 'echo "$*" | grep -q -e "--ntasks=1 " || exit 1\nwhile [ "$1" != coterie ]; do shift; done\nexec "$@"',
    "scontrol": 'echo "$@" > requeued',
    "coterie": f'exec {sys.executable} -m coterie "$@"',
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_commands_of_the_cluster_examples_are_valid(path):
    found = re.findall(r"^ *(?:exec )?(coterie (?:train|envs) .*)$", path.read_text(), re.M)
    assert len(found) == 2
    for line in found:
        words = shlex.split(re.sub(r"\$wire", "--wire.token-file t --wire.cert c", line))
        if words[1] == "train":
            check(resolve_config(config_of(words[2:])), ATARI)
        else:
            own = [w for k, w in enumerate(words[2:]) if "--connect" not in (words[1 + k], w)]
            parse_cli(Config(), own)


@pytest.mark.slow
def test_a_slurm_job_is_preempted_requeued_and_resumed(tmp_path):
    """Two nodes of one machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
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
            for pid, command in tagged("COTERIE_TEST", str(tmp_path)).items():  # as SLURM signals the steps of a job
                if re.search(r"coterie (train|resume|envs) ", command):
                    os.kill(pid, signal.SIGTERM)
            assert job.wait(PATIENCE) == 75, (tmp_path / "said").read_text()
            assert (tmp_path / "requeued").read_text() == "requeue 7\n"
            (tmp_path / "requeued").unlink()
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def test_the_notebook_runs_from_top_to_bottom_and_learns_cartpole(tmp_path):
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples" / "cartpole.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    claim = "import json\njson.dump([summary['mean_return'], score['mean_return'], steps], open('found', 'w'))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*code, claim])],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, scored, steps = json.loads((tmp_path / "found").read_text())
    assert trained > 150
    assert scored > 300
    assert steps > 200


@pytest.mark.parametrize("preset", ["ppo", "gala-a2c", "rainbow", "seed-r2d2", "impala", "sac"])
def test_the_metrics_that_a_run_writes_are_on_their_page(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["--learners", "2"] if preset == "gala-a2c" else []
    env = "Pendulum-v1" if preset == "sac" else "CartPole-v1"
    train = ["coterie", "train", preset, "--env", env, *more, "--log.every", "0.2", "--out", "run"]
    assert run([*shrink(train), "--eval.every", "300", "--eval.episodes", "2"]) == 0
    names = re.findall(r"`([\w/.-]+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text())
    pattern = "|".join(re.escape(name).replace(r"\.\.\.", ".+").replace("TASK", ".+") for name in names)
    written = {name for line in read_metrics(tmp_path / "run") for name in line}
    assert len(written) > 20
    assert sorted(name for name in written if not re.fullmatch(pattern, name)) == []


def test_every_public_name_is_on_the_page_of_the_python_api():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text()
    assert {*dir(coterie)} == {*coterie.__all__, "__version__"}
    missing = [name for name in coterie.__all__ if not re.search(rf"coterie\.{name}\b", page)]
    assert not missing


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material: the extra `docs`")
def test_the_site_builds_without_a_warning_has_every_page_and_fetches_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'not included in the "nav"' not in done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    matrix = (tmp_path / "reference" / "matrix.html").read_text()
    assert "<td>solo, allreduce, hogwild, store, gossip</td>" in matrix  # a table
    structure = (tmp_path / "explanation" / "structure.html").read_text()
    assert 'href="../source/coterie/acting/inline.py.html"' in structure  # a source file is a page
    assert "class Inline" in re.sub(r"<[^>]*>", "", (tmp_path / "source/coterie/acting/inline.py.html").read_text())
    fetched = {
        target
        for file in tmp_path.rglob("*")
        if file.suffix in (".html", ".css")
        for found in re.findall(FETCHED, file.read_text())
        for target in found
        if re.match(r"(https?:)?//", target)
    }
    assert not fetched


@pytest.mark.parametrize("page", ["a2c", "a3c", "gala", "impala", "seed"])
def test_a_page_on_an_architecture_has_the_figure_the_file_and_the_command(page):
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text()
    assert "```text" in text
    assert re.search(r"\]\(\.\./\.\./coterie/(acting|exchange)/\w+\.py\)", text)
    assert "\ncoterie train " in text
    assert "](../results/learning.md#" in text


def typed(line: str) -> str:
    """A command of README with a small budget."""
    words = shlex.split(line)
    if words[0] == "make":
        return f"{line} ARGS='--steps 3000 --env.num-envs 8'"
    return shlex.join(["coterie", *shrink(words)]) if words[0] == "coterie" else line


def activated(venv: Path) -> dict[str, str]:
    """As after `source venv/bin/activate`; neither this checkout nor the environment of the tests is to be found."""
    env = {k: x for k, x in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**env, "PATH": f"{venv / 'bin'}{os.pathsep}{env['PATH']}"}


@pytest.mark.slow
def test_a_wheel_and_a_source_distribution_train_in_empty_environments(tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path), str(tmp_path / "clone")], check=True)
    built = sorted(tmp_path.glob("coterie-*"))
    assert [path.suffix for path in built] == [".whl", ".gz"]
    for path in built:
        home = tmp_path / path.suffix[1:]
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        train = "coterie train ppo --env CartPole-v1 --steps 2000 --out run && coterie eval run --episodes 2"
        line = f"pip install -q -c {ROOT / '.ci' / 'constraints.txt'} {path} && {train}"
        subprocess.run(["bash", "-c", line], cwd=home, env=activated(home), check=True, timeout=600)


@pytest.mark.slow
def test_readme_works_from_top_to_bottom_on_a_fresh_clone(tmp_path):
    """Its commands are typed as they stand there, into a shell that has nothing but the installed package."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "coterie")], check=True)
    here = tmp_path / "coterie"
    env = activated(here / ".venv")
    lines = commands(here / "README.md")
    assert lines[0] == "make train"
    (code,) = re.findall(r"```python\n(.*?)```", (here / "README.md").read_text(), re.S)
    for line in (*map(typed, lines), shlex.join(["python", "-c", code.replace("20_000", "2_000")])):
        done = subprocess.run(
            ["bash", "-c", line], cwd=here, env=env, capture_output=True, text=True, check=False, timeout=1800
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert (here / "runs" / "moon" / "watch.mp4").stat().st_size > 1000
    assert (here / "runs" / "moon" / "report.html").is_file()

"""Every command in README and docs is run, with small budgets; what is generated is current."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.cli.main import main
from coterie.cli.options import config_of, possible
from coterie.errors import CoterieError
from coterie.presets import value as values
from coterie.runs.metrics import read_metrics
from tests.plugins.page import write_files
from tests.support.net import free_port

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = [
    *("--steps", "64", "--env.num-envs", "4", "--env.decorrelate", "0", "--algo.unroll-length", "8"),
    *("--ppo.batch-size", "0", "--ppo.minibatch-size", "8", "--ppo.epochs", "1", "--eval.every", "0"),
]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def shrink(command: list[str]) -> list[str]:
    """The same command with a small budget."""
    command = command[1:]
    if "--seeds" in command:  # each is a process of its own
        command[command.index("--seeds") + 1] = "0..1" if "--jobs" in command else "0..0"
    if "train" in command and "--help" not in command:
        value = ["--q.learn-start", "400", "--q.batch-size", "8", "--steps", "600", "--replay.capacity", "20000"]
        more = ["--learners", "2"] if command[1] == "a3c" else value * hasattr(values, command[1].replace("-", "_"))
        more += ["--q.intensity", "8"] * (command[1] == "sac")  # its 256 are for batches of 256
        if command[1] == "seed-r2d2":
            more += ["--r2d2.length", "16", "--r2d2.burn-in", "8", "--r2d2.stride", "8"]
        small = list(SMALL)
        if any(word.count(",") == 2 and "-v5" in word for word in command):  # three tasks share them out
            small[small.index("--env.num-envs") + 1] = "6"
        return [*command, *small, *more]
    if "plan" in command:
        for option in {"--cores", "--hosts", "--host-cores"} & set(command):
            command[command.index(option) + 1] = "1"
        small = ["--seconds", "1", "--env.num-envs", "4", "--env.decorrelate", "0", "--algo.unroll-length", "8"]
        return [*command, *small]
    if "bench" in command:
        if "--seconds" in command:
            command[command.index("--seconds") + 1] = "1"
        return [*command, "--env.num-envs", "4", "--env.decorrelate", "0"]
    if "resume" in command and "--steps" in command:
        command[command.index("--steps") + 1] = "500"
    for option in {"--export-step", "--to", "--from"} & set(command):  # of a replay: learner steps
        command[command.index(option) + 1] = "4"
    if "eval" in command:
        return [*command, "--episodes", "2"]
    return command


def run(args: list[str]) -> int:
    """In this process: starting Python and torch for each takes longer than most commands do."""
    if "--launch" in args:  # Ray has threads and warnings of its own
        return subprocess.run([sys.executable, "-m", "coterie", *args], timeout=300).returncode
    try:
        return main(args)
    except SystemExit as end:  # --help
        return int(end.code or 0)


def lend(words: list[str], env: dict[str, str]) -> None:
    """The command against a run that waits for it, with keys of its own."""
    address = f"127.0.0.1:{free_port()}"
    assert main(["keys", "keys", "--host", "127.0.0.1"]) == 0
    preset = ["seed-vtrace", "--actors", "0"] if words[1] == "envs" else ["impala", "--actors", "1"]
    keys = ["--wire.token-file=keys/token", "--wire.cert=keys/cert.pem", "--wire.key=keys/key.pem"]
    train = ["coterie", "train", *preset, "--env", "CartPole-v1", "--wire.bind", address, *keys, "--out", "run"]
    own = {"--connect": address, "--wire.token-file": f"keys/{words[1]}.token", "--wire.cert": "keys/cert.pem"}
    for option, value in own.items():
        words[words.index(option) + 1] = value
    endless = [sys.executable, "-m", "coterie", *shrink(train), "--steps", "1000000000", "--log.every", "0.5"]
    with subprocess.Popen(endless, env=env) as process:

        def end_it() -> None:
            """The command, once the run has had something from it."""
            end = time.monotonic() + 120
            while time.monotonic() < end and process.poll() is None:
                lines = read_metrics(Path("run"))
                if lines and lines[-1].get("wire/bytes_in_per_step", 0) > 0:
                    return os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)

        ender = threading.Thread(target=end_it)
        ender.start()
        try:
            assert main([*words[1:], "--patience", "60"]) == 0
            process.terminate()
            assert process.wait(60) == 75
        finally:
            process.kill()
            ender.join()


def beside(words: list[str], section: str, metric: str, env: dict[str, str], *more: str) -> None:
    """The command beside the run that it connects to, until the command has ended."""
    at = words.index(f"--{section}.connect")
    listens = [*words[:at], f"--{section}.bind", words[at + 1], *words[at + 2 :], *more, "--out", "first"]
    endless = [sys.executable, "-m", "coterie", *shrink(listens), "--steps", "1000000000", "--log.every", "0.5"]
    with subprocess.Popen(endless, env=env) as process:
        try:
            assert run([*shrink(words), "--steps", "2000", "--out", "second"]) == 0
            assert read_metrics(Path("second"))[-1][metric] > 1
            process.terminate()
            assert process.wait(60) == 75
        finally:
            process.kill()


def show(words: list[str], env: dict[str, str]) -> None:
    """The dashboard says where it is and ends with Ctrl-C."""
    command = [sys.executable, "-m", "coterie", *words[1:], "--port", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


RECORDS = ("results", "benchmarks")  # these tell what was run, and not how a thing is done


def kind(line: str) -> tuple[str, ...]:
    """What a command shows: its verb, for `train` the preset and whether user code takes part."""
    words = shlex.split(line)
    if words[:2] != ["coterie", "train"]:
        return tuple(words[: 3 if words[:2] == ["coterie", "list"] else 2])
    custom = [w for w, value in zip(words, [*words[1:], ""], strict=True) if w.startswith("--") and ":" in value]
    more = {"--launch", "--grid", "--chaos", "--gossip.connect", "--allreduce.connect", "--help"} & set(words)
    return ("train", words[2], *custom, *sorted(more))


def lasting(page: Path, line: str) -> bool:
    """Whether only `make test-all` runs the command: other tests prove what it shows, in less time."""
    words = line.split()
    return (
        page.parent.name in RECORDS
        or not {"--launch", "--gossip.connect", "--allreduce.connect", "--wire.bind"}.isdisjoint(words)
        or words[1:2] == ["actor"]
        or line.count("--grid") > 1
    )


def documented() -> list[Any]:
    """Each distinct command once. `make test` runs the first of each kind; the others are slow."""
    found, lines, kinds = [], set[str](), set[tuple[str, ...]]()
    for page in PAGES:
        for i, line in enumerate(commands(page)):
            if line in lines:
                continue
            lines.add(line)
            slow = lasting(page, line) or kind(line) in kinds
            if not slow:
                kinds.add(kind(line))
            found.append(pytest.param(page, line, id=f"{page.name}-{i}", marks=[pytest.mark.slow] * slow))
    return found


@pytest.fixture
def page_modules(tmp_path, monkeypatch):
    """The folder of a page's files: here and on the path, and its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(shrink(["coterie", "train", "ppo", "--env", "CartPole-v1", "--out", str(folder)])) == 0
    return folder


@pytest.mark.parametrize(("page", "line"), documented())
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_command_runs(page, line, page_modules, trained, capsys):
    tmp_path, env = page_modules, {**os.environ, "PYTHONPATH": str(ROOT)}
    write_files(tmp_path, page)
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
    elif words[0] == "pip":
        extras = re.search(r"\[(.*)\]", words[-1])[1].split(",")
        text = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = ", text, re.M) for extra in extras), line
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), line
        done = subprocess.run([sys.executable, ROOT / words[1], "--help"], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
    elif words[1] in ("envs", "actor"):
        lend(words, env)
    else:
        assert words[0] == "coterie", line
        if "--web" in words and shutil.which("npm") is None:
            pytest.skip("no npm here: apt install npm")
        read = [words[2]] if words[1] in ("eval", "watch", "resume", "report", "dashboard", "export", "replay") else []
        read += [f"{words[2]}/{name}" for name in "ab" if words[1] == "compare"]
        read += [value for option, value in pairwise(words) if option == "--init-from"]
        for out in read:
            shutil.copytree(trained, out)
        if "--services" in words:
            services = Path(words[words.index("--services") + 1])
            assert run(shrink(["coterie", *words[1:5], "--seconds", "1", "--save-services", str(services)])) == 0
        if "--wire.cert" in words:
            assert run(["keys", "runs/keys", "--host", "127.0.0.1"]) == 0
        if "--gossip.connect" in words:
            return beside(words, "gossip", "gossip/bytes_in_per_step", env, "--wire.key=runs/keys/key.pem")
        if "--allreduce.connect" in words:
            return beside(words, "allreduce", "allreduce/machines", env, "--seed", "7")
        if "--allreduce.machines" in words:
            words[words.index("--allreduce.machines") + 1] = "1"
        if words[1] == "dashboard":
            return show(words, env)
        assert run(shrink(words)) == 0, f"{line}\n{capsys.readouterr().err[-2000:]}"
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_documented_runs_are_possible(page_modules):
    """Also those that only `make test-all` runs."""
    write_files(page_modules, *PAGES)
    refused = []
    for line in sorted({line for page in PAGES for line in commands(page)}):
        words = [w for w in shlex.split(line) if w not in ("--json", "--chaos", "--help", "--print-config")]
        if words[:2] in (["coterie", "train"], ["coterie", "bench"]):
            try:
                possible(config_of(without(words[2:], "--seeds", "--jobs", "--grid", "--seconds")))
            except CoterieError as error:
                refused.append(f"{line}: {error}")
    assert not refused


def without(args: list[str], *options: str) -> list[str]:
    """The arguments but for some options of one value."""
    return [a for a, before in zip(args, ["", *args], strict=False) if a not in options and before not in options]


def python(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name != "README.md"))
        for page in PAGES
        if python(page) and page.name != "export.md"  # tests/tools/export runs it
    ],
)
def test_python_on_a_page_runs(page, page_modules, monkeypatch):
    write_files(page_modules, page)
    if out := {"first-run.md": "runs/lander/first", "runs.md": "runs/one"}.get(page.name):  # which its code loads
        assert run(shrink(["coterie", "train", "ppo", "--env", "LunarLander-v3", "--out", out])) == 0
    whole, ends = coterie.train, []
    monkeypatch.setattr(coterie, "train", lambda c, **k: ends.append(whole(replace(c, steps=2000), **k)) or ends[-1])
    names: dict[str, Any] = {}
    for code in python(page):
        exec(code, names)  # as a user types it
    trained = sum(code.count("coterie.train(") for code in python(page))
    assert [one["status"] for one in ends] == trained * ["finished"]


def test_the_generated_pages_are_current_and_every_setting_of_a_preset_has_its_source(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = importlib.import_module("generate")
    assert [*module.unsourced()] == [], "name their sources in docs/reference/sources.toml"
    assert [*module.unused()] == []
    stale = [path.name for path, text in module.pages().items() if path.read_text() != text]
    assert not stale, "run `python docs/generate.py`"

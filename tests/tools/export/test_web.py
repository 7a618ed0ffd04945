"""The page in a real browser, its dynamics beside gymnasium's, and the failures of npm."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import coterie
from coterie.cli.main import main
from coterie.errors import CoterieError
from coterie.tools.export import web
from tests.support.http import BROWSER, needs_browser, serving
from tests.tools.export.runs import make_run
from tests.tools.export.test_export import HERE, LSTM, REWARD, one_line

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CARTPOLE = Path(web.__file__).parent / "web" / "cartpole.mjs"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js here: apt install nodejs")

# The test server's frame around the page: it reads the page's texts until there are enough episodes.
PROBE = """<!doctype html><iframe src="/index.html?fast&seed=1"></iframe><script type="module">
const page = () => document.querySelector("iframe").contentDocument;
for (;;) {
  await new Promise((done) => setTimeout(done, 200));
  const returns = page().getElementById("returns")?.textContent ?? "";
  const episodes = returns.split(", ").filter(Boolean).map(Number);
  const failed = page().querySelector(".error")?.textContent ?? "";
  if (episodes.length >= 10 || failed) {
    const drawn = page().querySelector("canvas").getContext("2d").getImageData(0, 0, 600, 300).data.some((x) => x);
    await fetch("/told", { method: "POST", body: JSON.stringify({ episodes, failed, drawn, title: page().title }) });
    break;
  }
}
</script>"""


@pytest.fixture(scope="module")
def onnxruntime_web():
    """The files that npm fetches; skips without npm or its registry."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here: apt install npm")
    done = subprocess.run(["npm", "view", web.PACKAGE, "version"], capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("npm does not reach its registry")
    return web.onnxruntime_web()


class Handler(SimpleHTTPRequestHandler):
    """The folder as static files, and the probe around it."""

    def do_GET(self):
        self.server.asked.append(self.path.partition("?")[0])
        if self.path == "/probe":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PROBE.encode())
        else:
            super().do_GET()

    def do_POST(self):
        self.server.told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.done.set()

    def log_message(self, *args):
        pass


def look(folder: Path, profile: Path) -> tuple[dict, list[str]]:
    """What Chromium shows of the page, and the files that it requested. It finds no other host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    server.asked, server.told, server.done = [], None, threading.Event()
    with serving(server):
        browser = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             f"http://127.0.0.1:{server.server_address[1]}/probe", "--remote-debugging-port=0"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert server.done.wait(240), server.asked
        finally:
            browser.terminate()
            browser.wait(30)
        return server.told, server.asked


@needs_browser
@needs_node
@pytest.mark.slow
def test_a_policy_with_memory_plays_in_the_browser(tmp_path, onnxruntime_web):
    """An LSTM with its last action and reward: the page's episodes are Python's from the same start. Untrained networks
    have short episodes, in which each step depends on those before.
    """
    run = make_run(tmp_path / "run", "ppo", "CartPole-v1", **LSTM, **REWARD)
    assert main(["export", str(run), "--web"]) == 0
    seen, asked = look(run / "export", tmp_path / "profile")
    assert seen["failed"] == ""
    assert seen["title"] == "ppo plays CartPole-v1"
    assert seen["drawn"]
    files = {path.name for path in (run / "export").iterdir()}
    assert {path.lstrip("/") for path in asked} - {"probe", "favicon.ico"} == files
    policy = coterie.load(run)
    state, episodes = 1, []

    def random() -> float:
        nonlocal state
        state = (state * 1664525 + 1013904223) % 2**32
        return state / 2**32

    env = gymnasium.make("CartPole-v1")
    for _ in range(10):
        env.reset()
        at = env.unwrapped.state = [0.1 * random() - 0.05 for _ in range(4)]
        obs, reward, steps, over = np.array(at, np.float32), 0.0, 0, False
        policy.reset()
        while not over:
            action = policy(obs[None], reward=np.array([reward]))
            obs, reward, terminated, truncated, _ = env.step(int(action[0]))
            steps, over = steps + 1, terminated or truncated
        episodes.append(steps)
    assert seen["episodes"][:10] == episodes


@needs_node
def test_the_javascript_dynamics_are_gymnasiums():
    """Each step from gymnasium's own state, and whole episodes from their start for 100 steps: an upright pole is
    chaotic (a difference in the last digit grows to 1e-6 after about 300).
    """
    rng, env = np.random.default_rng(0), gymnasium.make("CartPole-v1").unwrapped
    episodes = []
    for seed in range(20):
        env.reset(seed=seed)
        states, ends, actions = [list(map(float, env.state))], [], []
        while not ends or not ends[-1]:
            # Pushed towards its fall, and at times at random: some episodes are long.
            actions.append(int(rng.integers(2) if rng.random() < 0.3 else env.state[2] + env.state[3] > 0))
            ends.append(bool(env.step(actions[-1])[2]) or len(actions) == 500)
            states.append(list(map(float, env.state)))
        episodes.append({"states": states, "actions": actions, "fallen": len(actions) < 500})
    script = f"""
    import {{ step }} from {json.dumps(CARTPOLE.as_uri())};
    const episodes = JSON.parse((await import("node:fs")).readFileSync(0));
    const found = episodes.map(({{ states, actions }}) => {{
      let state = states[0];
      return actions.map((action, t) => {{
        state = step(state, action).state;
        return {{ ...step(states[t], action), carried: state }};
      }});
    }});
    console.log(JSON.stringify(found));
    """
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], input=json.dumps(episodes), capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert max(len(episode["actions"]) for episode in episodes) > 100
    for episode, found in zip(episodes, json.loads(done.stdout), strict=True):
        np.testing.assert_allclose([s["state"] for s in found], episode["states"][1:], rtol=0, atol=1e-12)
        carried = [s["carried"] for s in found[:100]]
        np.testing.assert_allclose(carried, episode["states"][1:101], rtol=0, atol=1e-6)
        ends = [s["terminated"] for s in found]
        assert ends == [False] * (len(ends) - 1) + [episode["fallen"]]


def test_an_env_without_javascript_is_refused(tmp_path, capsys):
    for env, changes, says in (
        ("Pendulum-v1", {}, "--web: Pendulum-v1 does not run in a browser; CartPole-v0 and CartPole-v1 do"),
        (f"{HERE}:Many", {}, "does not run in a browser"),
        (
            "CartPole-v1",
            {"env.backend": "workers", "env.kwargs": '{"sutton_barto_reward": true}'},
            "only without env.kwargs",
        ),
    ):
        run = make_run(tmp_path / env, "ppo", env, **changes)
        assert main(["export", str(run), "--web"]) == 2
        assert says in one_line(capsys)
        assert not (run / "export").exists()


def npm(folder: Path, body: str) -> str:
    """A PATH on which npm is this script."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "npm").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_page_without_npm_is_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", "ppo", "CartPole-v1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["export", str(run), "--web"]) == 2
    assert "--web: needs npm, which fetches onnxruntime-web" in one_line(capsys)
    monkeypatch.setenv("PATH", npm(tmp_path / "offline", "echo 'npm error code EAI_AGAIN' >&2; exit 1"))
    assert main(["export", str(run), "--web"]) == 1
    assert "npm cannot fetch onnxruntime-web@1.30.0: npm error code EAI_AGAIN" in one_line(capsys)
    assert not (run / "export").exists()


def test_an_npm_that_hangs_or_fetches_something_else_is_refused(tmp_path, monkeypatch):
    for name, body, timeout, error in (
        ("hangs", "exec sleep 60", 0.5, "has not fetched"),
        ("empty", "tar czf other.tgz --files-from /dev/null", 30, "is not the onnxruntime-web@"),
        ("rubbish", "echo rubbish > some.tgz", 30, "is not the onnxruntime-web@"),
    ):
        monkeypatch.setenv("PATH", npm(tmp_path / name, body))
        with pytest.raises(CoterieError, match=error):
            web.onnxruntime_web(timeout)

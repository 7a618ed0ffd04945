"""The web page where a policy plays: static files, with onnxruntime-web from the npm registry.

The env must run in the browser, so its dynamics exist in JavaScript: only CartPole's so far.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import IO, cast

from coterie.config import Config
from coterie.errors import ConfigError, CoterieError

ENVS = ("CartPole-v0", "CartPole-v1")
PACKAGE = "onnxruntime-web@1.30.0"
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # of its archive
_OURS = ("index.html", "play.mjs", "cartpole.mjs")
# The CPU build: its script, and the WebAssembly that it loads.
_THEIRS = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")


def playable(config: Config) -> None:
    """Raises `ConfigError` if the env does not exist in JavaScript."""
    if config.env.id not in ENVS:
        raise ConfigError(f"--web: {config.env.id} does not run in a browser; {' and '.join(ENVS)} do")
    if json.loads(config.env.kwargs):
        raise ConfigError(f"--web: {config.env.id} runs in a browser only without env.kwargs")


def page() -> dict[str, bytes]:
    """The files by name, except the policy's own."""
    here = files("coterie.tools.export") / "web"
    return {**onnxruntime_web(), **{name: (here / name).read_bytes() for name in _OURS}}


def onnxruntime_web(timeout: float = 180.0) -> dict[str, bytes]:
    """onnxruntime-web's script and WebAssembly, fetched by npm, which verifies and caches the package. None of its code
    runs here. `timeout`: seconds for its 33 MB. Raises `ConfigError` without npm, `CoterieError` if npm fails.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(f"--web: needs npm, which fetches {PACKAGE}: apt install npm")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", PACKAGE, "--prefer-offline", "--ignore-scripts", "--pack-destination", folder]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise CoterieError(f"--web: npm has not fetched {PACKAGE} within {timeout:.0f} s") from None
        made = list(Path(folder).glob("*.tgz"))
        if done.returncode or not made:
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise CoterieError(f"--web: npm cannot fetch {PACKAGE}: {said[:200]}")
        data = made[0].read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != SHA512:
        raise CoterieError(f"--web: what npm fetched is not the {PACKAGE} that this version of coterie was tested with")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {name: cast(IO[bytes], tar.extractfile(f"package/dist/{name}")).read() for name in _THEIRS}

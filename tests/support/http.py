"""HTTP servers of a test in a thread, and the browser of this machine."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")


@contextmanager
def serving(server: HTTPServer) -> Iterator[None]:
    """It answers meanwhile, and is closed at the end."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(10)

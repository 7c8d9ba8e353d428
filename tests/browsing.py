"""What the tests that need a browser share: a page server, and what to do where there is no browser."""
import contextlib
import functools
import http.server
import os
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


def missing(what, remedy):
    "Skip, or fail where a browser is required."
    message = f"{what}; remedy: {remedy}"
    pytest.fail(message) if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip(message)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


@contextlib.contextmanager
def serving(folder):
    "The folder on a free port of the loopback interface."
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()

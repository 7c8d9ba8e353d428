"""Fixtures that several test modules share."""
import os
import shutil
import signal

os.environ.setdefault("TRITON_INTERPRET", "1")     # Triton's kernels run on the CPU, line by line; read when it is imported

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.browsing import ARGS, missing  # noqa: E402

# No test measures time; on a busy machine an example of a drawing may take longer than the default deadline.
hypothesis.settings.register_profile("book", deadline=None)
hypothesis.settings.load_profile("book")
torch.set_num_threads(1)                     # many small operations: threads would only wait for each other


@pytest.fixture(autouse=True)
def usual_process(monkeypatch):
    "Signal handlers and folders as before a test: `rvnnbook run` sets them for the rest of its process."
    for name in ("RVNNBOOK_DATA", "RVNNBOOK_RUNS"):
        if name in os.environ:
            monkeypatch.setenv(name, os.environ[name])
        else:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)             # at the end of the test it is absent again
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def browser():
    "Headless Chromium: $CHROMIUM or one on the path."
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        missing("no Chromium found", "install Chromium, or set CHROMIUM to its program file")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield chromium
        chromium.close()

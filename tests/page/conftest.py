"""A real server with the bundled model, and a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from attack.running import RunningServer, running_server
from page.visits import Visit, open_visit
from playwright.sync_api import Browser, sync_playwright

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

_BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


def _chromium() -> str:
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        reason = "the page's tests need Chromium (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """What is started inside may run on any core: a server keeps this process's one busy."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if own is not None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    if own is not None:
        os.sched_setaffinity(0, own)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with the module: as long as Playwright runs, its event loop is this thread's, and asyncio.run refuses."""
    path = _chromium()
    with _on_all_cores(), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS), headless=True)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture
def visit(browser: Browser, server: RunningServer) -> Iterator[Visit]:
    """The page of a server without a key. Fails the test for anything that was recorded."""
    visit = open_visit(browser, server.url)
    yield visit
    visit.context.close()
    visit.check()

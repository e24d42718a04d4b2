"""Chromium, controlled by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """Provide a headless browser, or skip the test if none is installed.

    While it is open, this thread has a running asyncio loop, so asyncio.run needs another thread.
    """
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("this is tried in Chromium, which is not installed")
    with sync_playwright() as playwright:
        # Chromium has no sandbox as root. It opens only our own pages.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()

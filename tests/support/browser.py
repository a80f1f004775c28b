"""A headless Chromium for the pages that a run writes, and TensorBoard to look at in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

# nothing but the page's own requests, and no sandbox, which root has none of
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_SIZE = (1400, 900)


@dataclass
class BrowserPage:
    """A page in light mode, and what has gone wrong on it.

    Attributes:
        page: Playwright's; its waiting methods give up after 30 seconds.
        errors: of the console, which has requests without an answer too, and of scripts.
    """

    page: Page
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def of_console(message: ConsoleMessage) -> None:
            if message.type == "error":
                self.errors.append(f"console: {message.text}")

        self.page.on("console", of_console)
        self.page.on("pageerror", lambda error: self.errors.append(f"script: {error}"))

    def open(self, target: str | Path) -> None:
        """Opens an address or a file, and waits until it has loaded."""
        self.page.goto(target.resolve().as_uri() if isinstance(target, Path) else target)

    def text(self) -> str:
        """Returns what a reader sees, shadow roots left out."""
        return self.page.locator("body").inner_text()

    def screenshot(self, path: Path) -> Path:
        """Writes a PNG of what the window shows."""
        self.page.screenshot(path=path)
        return path


def chromium() -> str | None:
    """Returns the path of a Chromium or Chrome that is installed, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def open_browser(size: tuple[int, int] = _SIZE) -> Iterator[BrowserPage]:
    """Opens a page of `size` pixels, as a context manager; needs `chromium()` and Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_ARGUMENTS)
        width, height = size
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="light",
            reduced_motion="reduce",
        )
        yield BrowserPage(page)
        browser.close()


@pytest.fixture
def browser_page() -> Iterator[BrowserPage]:
    """A page in a headless Chromium; a test that takes it is skipped where there is none."""
    if chromium() is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    pytest.importorskip("playwright", reason="playwright, of the extra dev, is not installed")
    with open_browser() as page:
        yield page


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Serves the event files under `logdir`, as a context manager with the address."""
    # by its name, which the page shows: a picture of it has no path of this machine
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir.name, "--port", "0"]
    # read by Python as the files are now, not by the data server that follows them
    command += ["--host", "127.0.0.1", "--load_fast", "false"]
    server = subprocess.Popen(
        command, cwd=logdir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    try:
        assert server.stdout is not None
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                break
        else:
            raise RuntimeError(f"TensorBoard has not started:\n{''.join(lines)}")
        yield found[0]
    finally:
        server.terminate()
        server.communicate()

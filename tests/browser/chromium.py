"""Chromium for browser tests: launch, and checks of a page by axe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import axe_playwright_python
from playwright.sync_api import Browser, Page, sync_playwright

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING: Final = (
    "no Chromium: as root, apt-get install chromium; elsewhere install Chromium or Chrome, and put it on the PATH or "
    "name it in KITH_BROWSER"
)
AXE: Final = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
RUN: Final = """axe.run({ rules: { "target-size": { enabled: true } } }).then(({ violations }) => {
  const { scrollWidth, clientWidth } = document.documentElement;
  const said = ({ impact, id, nodes }) => nodes.map((one) => `${impact} ${id}: ${one.target} ${one.failureSummary}`);
  const found = violations.filter((one) => one.impact !== "minor").flatMap(said);
  return scrollWidth > clientWidth ? [...found, `${scrollWidth - clientWidth} pixels wider than the window`] : found;
})"""


def executable() -> str | None:
    named = os.environ.get("KITH_BROWSER")
    return next(filter(None, map(shutil.which, (named,) if named else NAMES)), None)


@contextmanager
def chromium(path: str, webcam: Path | None = None) -> Iterator[Browser]:
    """Launch Chromium. ``webcam``: an MJPEG file that its only camera plays in a loop."""
    camera = () if webcam is None else (f"--use-file-for-fake-video-capture={webcam}",)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            args=["--use-fake-device-for-media-stream", *camera],
            chromium_sandbox=os.getuid() != 0,  # root cannot use the sandbox
        )
        try:
            yield browser
        finally:
            browser.close()


def main() -> None:
    """Print the browser for make, or what is missing."""
    print(executable() or sys.exit(MISSING))


def faults(page: Page) -> list[str]:
    """Return axe's findings, but minor ones, as rule, element and explanation, and whether the page is too wide."""
    # Injected through the debugger, because the page's content security policy blocks scripts.
    session = page.context.new_cdp_session(page)
    try:
        session.send("Runtime.evaluate", {"expression": AXE})
        run = {"expression": RUN, "awaitPromise": True, "returnByValue": True}
        found: list[str] = session.send("Runtime.evaluate", run)["result"]["value"]
    finally:
        session.detach()
    return found


if __name__ == "__main__":
    main()

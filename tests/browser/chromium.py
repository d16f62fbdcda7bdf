"""A real browser at a real service: which Chromium, what it must not complain of, and what axe says."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import axe_playwright_python
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING: Final = (
    "no Chromium: as root, apt-get install chromium; elsewhere install Chromium or Chrome, and put it on the PATH or "
    "name it in KITH_BROWSER"
)
PATIENCE_MS: Final = 20_000
AXE: Final = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def executable() -> str | None:
    named = os.environ.get("KITH_BROWSER")
    return next(filter(None, map(shutil.which, (named,) if named else NAMES)), None)


@contextmanager
def chromium(path: str, webcam: Path | None = None) -> Iterator[Browser]:
    """`webcam`: an MJPEG file that the only camera shows, over and over."""
    camera = () if webcam is None else (f"--use-file-for-fake-video-capture={webcam}",)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            args=["--use-fake-device-for-media-stream", *camera],
            chromium_sandbox=os.getuid() != 0,  # root's has none
        )
        try:
            yield browser
        finally:
            browser.close()


def main() -> None:
    """For make: the version of what will be driven, or what is missing."""
    path = executable()
    if path is None:
        sys.exit(MISSING)
    with chromium(path) as browser:
        print(f"{path}: {browser.browser_type.name} {browser.version}")


class Watched:
    """A browser's context of which every page is listened to: what went wrong unseen is told in the end."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.wrong: list[str] = []
        context.on("page", self._listen)
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)

    def _listen(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.wrong.append(f"{page.url}: {error}"))
        page.on("console", lambda message: self._heard(page, message.type, message.text))

    def _heard(self, page: Page, kind: str, text: str) -> None:
        # The service's refusals, which the page tells in its own words, are told by the browser as well.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource:"):
            self.wrong.append(f"{page.url}: {kind}: {text}")


def faults(page: Page, impacts: tuple[str, ...] = ("moderate", "serious", "critical")) -> list[str]:
    """What axe finds on the page as it is, of these impacts: the rule, the elements, and why."""
    # By the debugger, as an extension would: the page's own policy lets nothing in.
    session = page.context.new_cdp_session(page)
    try:
        session.send("Runtime.evaluate", {"expression": AXE})
        answer: dict[str, Any] = session.send(
            "Runtime.evaluate",
            {"expression": "axe.run({resultTypes: ['violations']})", "awaitPromise": True, "returnByValue": True},
        )
    finally:
        session.detach()
    return [
        f"{found['impact']} {found['id']}: {node['target']} {node['failureSummary']}"
        for found in answer["result"]["value"]["violations"]
        if found["impact"] in impacts
        for node in found["nodes"]
    ]


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wider


if __name__ == "__main__":
    main()

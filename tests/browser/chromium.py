"""Chromium for browser tests: launch, page error collection and axe checks."""

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

ANSWERS: Final = Path(__file__).with_name("answers.js").read_text(encoding="utf-8")


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
    """Print the browser version for make, or what is missing."""
    path = executable()
    if path is None:
        sys.exit(MISSING)
    with chromium(path) as browser:
        print(f"{path}: {browser.browser_type.name} {browser.version}")


class Watched:
    """Browser context that collects errors of all its pages, and the fields that answers lack."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.wrong: list[str] = []
        self.missing: list[str] = []
        context.add_init_script(ANSWERS)
        context.on("page", self._listen)
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)

    def _listen(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.wrong.append(f"{page.url}: {error}"))
        page.on("console", lambda message: self._heard(page, message.type, message.text))

    def _heard(self, page: Page, kind: str, text: str) -> None:
        if text.startswith("no field "):
            self.missing.append(text.removeprefix("no field "))
        # Chromium also logs each refused request, which the page reports itself.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource:"):
            self.wrong.append(f"{page.url}: {kind}: {text}")


def faults(page: Page, impacts: tuple[str, ...] = ("moderate", "serious", "critical")) -> list[str]:
    """Return axe's findings of these impacts: rule, elements and explanation."""
    # Injected through the debugger, because the page's content security policy blocks scripts.
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
    """Return by how many pixels the page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wider


if __name__ == "__main__":
    main()

"""Fixtures of the browser tests: Chromium, a real service and real photos."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, JSHandle, Page, Route, ViewportSize, expect

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.browser.answers import documented
from tests.browser.chromium import MISSING, chromium, executable
from tests.conftest import jpeg

Pixels = NDArray[np.uint8]
Photos = dict[str, Path]
Opener = Callable[..., Page]
KEY = "the-operator-s-key-of-more-than-enough-characters"
LONG = "i" * 128
DESK: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
PATIENCE_MS = 20_000
ANSWERS = Path(__file__).with_name("answers.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def photos(
    tmp_path_factory: pytest.TempPathFactory, astronaut: Pixels, actor: Pixels, group: Pixels, nobody: Pixels
) -> Photos:
    """Photo files by content: `ada` and `tom`, and both `again`, `party` (six people), `coffee`."""
    folder = tmp_path_factory.mktemp("photos")
    portrait = Image.fromarray(astronaut)
    shown = {
        "ada": portrait,
        "ada again": portrait.crop((40, 0, 460, 420)).rotate(4, Image.Resampling.BICUBIC),
        "tom": Image.fromarray(actor),
        "tom again": Image.fromarray(actor).rotate(4, Image.Resampling.BICUBIC),
        "party": Image.fromarray(group),
        "coffee": Image.fromarray(nobody),
    }
    for name, image in shown.items():
        (folder / f"{name}.jpg").write_bytes(jpeg(image))
    return {name: folder / f"{name}.jpg" for name in shown}


@pytest.fixture(scope="session")
def webcam(tmp_path_factory: pytest.TempPathFactory, astronaut: Pixels) -> Path:
    """Motion JPEG for the browser's camera: the astronaut, 640x480."""
    picture = ImageOps.pad(Image.fromarray(astronaut), (640, 480))
    path = tmp_path_factory.mktemp("webcam") / "astronaut.mjpeg"
    path.write_bytes(jpeg(picture) * 4)
    return path


@pytest.fixture(scope="session")
def browser(webcam: Path) -> Iterator[Browser]:
    with chromium(executable() or pytest.skip(MISSING), webcam) as opened:
        yield opened


@pytest.fixture
def visit(browser: Browser, shared: str) -> Iterator[Opener]:
    """``visit(place, url, **options of Browser.new_context)``: open a page of the console with a fresh profile.

    The test fails at its end if a page raised an exception, logged an error, violated the security policy, or read a
    field of an answer that the OpenAPI document lacks.
    """
    opened, wrong, read = list[BrowserContext](), list[str](), set[str]()

    def heard(message: ConsoleMessage) -> None:
        if message.text.startswith("no field "):
            read.add(message.text.removeprefix("no field "))
        # Chromium also logs each refused request, which the page reports itself.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource:"):
            wrong.append(message.text)

    def open_page(place: str = "", url: str = shared, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESK, **options})
        opened.append(context)
        context.add_init_script(ANSWERS)
        context.on("console", heard)
        context.on("weberror", lambda error: wrong.append(str(error.error)))
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(f"{url}/console{place and '#'}{place}")
        return page

    document = httpx.get(f"{shared}/openapi.json").json()
    expect.set_options(timeout=PATIENCE_MS)
    yield open_page
    for context in opened:
        context.close()
    assert wrong == []
    assert sorted(line for line in read if not documented(document, *line.split(" "))) == []


@contextmanager
def started(folder: Path, **settings: Any) -> Iterator[tuple[str, Kith]]:
    """Start an empty service; yield its address and a client."""
    with (
        embedded(load_settings(data_dir=folder, log_level="ERROR", **settings)) as url,
        Kith(url, settings.get("api_key")) as kith,
    ):
        yield url, kith


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the service that the tests of a worker share."""
    with started(tmp_path_factory.mktemp("shared")) as (url, _):
        yield url


@pytest.fixture
def kith(shared: str) -> Iterator[Kith]:
    """Client of the shared service, without the galleries of earlier tests."""
    with Kith(shared) as client:
        for name in client.gallery_names():
            client.delete_gallery(name)
        yield client


@pytest.fixture(scope="session")
def populated(tmp_path_factory: pytest.TempPathFactory, photos: Photos) -> Iterator[str]:
    """Galleries `family` of three subjects, one person enrolled twice, `long`, and `empty`. Read-only."""
    with started(tmp_path_factory.mktemp("populated")) as (url, kith):
        for name in ("empty", "long"):
            kith.create_gallery(name)
        kith.put_subject("long", LONG, name=LONG)
        kith.enroll("long", LONG, photos["ada"])
        populate(kith, "family", photos)
        yield url


def go(page: Page, place: str) -> None:
    page.goto(f"{page.url.split('#')[0]}#{place}")


def give_key(page: Page, key: str = KEY, remember: bool = False) -> None:
    """Answer the dialog that asks for the key."""
    dialog = page.get_by_role("dialog", name="Your key")
    dialog.get_by_label("Key", exact=True).fill(key)
    dialog.get_by_label("Remember it").set_checked(remember)
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_have_count(0)


def populate(kith: Kith, gallery: str, photos: Photos, **options: Any) -> None:
    """Create a gallery, and enroll three people, one of them twice."""
    kith.create_gallery(gallery, **options)
    people = (("ada", "Ada Lovelace", "ada"), ("countess", "The countess", "ada again"), ("tom", "Tom", "tom"))
    for subject, name, photo in people:
        kith.put_subject(gallery, subject, name=name, tags=["engine"], metadata={"room": 12})
        kith.enroll(gallery, subject, photos[photo], allow_duplicate=True)


def held_back(page: Page, pattern: str, method: str) -> list[Route]:
    """Requests that wait until the test releases them."""
    held = list[Route]()
    page.route(
        re.compile(pattern), lambda route: held.append(route) if route.request.method == method else route.fallback()
    )
    return held


def caught(page: Page, held: list[Route]) -> Route:
    """Return the first request that is held back, once it is there."""
    for _ in range(PATIENCE_MS // 50):
        if held:
            return held[0]
        page.wait_for_timeout(50)
    pytest.fail("no request came")


def choose(page: Page, *files: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(list(files))


def name_someone(page: Page, name: str) -> None:
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Enroll", exact=True).click()


def transfer(page: Page, photo: Path) -> JSHandle:
    """Return a DataTransfer with this file, as of a drop or a paste."""
    return page.evaluate_handle(
        """([name, content]) => {
          const hand = new DataTransfer();
          const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
          hand.items.add(new File([bytes], name, { type: "image/jpeg" }));
          return hand;
        }""",
        [photo.name, base64.b64encode(photo.read_bytes()).decode()],
    )

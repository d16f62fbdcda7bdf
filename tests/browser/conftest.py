"""Fixtures of the browser tests: Chromium, a real service and real photos."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, JSHandle, Page, Route, ViewportSize, expect

from kith import Kith
from service.app import create_app
from service.server import embedded
from service.settings import load_settings
from tests.browser.answers import documented
from tests.browser.chromium import MISSING, Watched, chromium, executable
from tests.conftest import jpeg

Pixels = NDArray[np.uint8]
KEY = "the-operator-s-key-of-more-than-enough-characters"
DESK: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def photos(
    tmp_path_factory: pytest.TempPathFactory, astronaut: Pixels, actor: Pixels, group: Pixels, nobody: Pixels
) -> dict[str, Path]:
    """Photo files by content: `ada` and `ada again`, `tom`, `party` (six people), `coffee`."""
    folder = tmp_path_factory.mktemp("photos")
    portrait = Image.fromarray(astronaut)
    shown = {
        "ada": portrait,
        "ada again": portrait.crop((40, 0, 460, 420)).rotate(4, Image.Resampling.BICUBIC),
        "tom": Image.fromarray(actor),
        "party": Image.fromarray(group),
        "coffee": Image.fromarray(nobody),
    }
    for name, image in shown.items():
        (folder / f"{name}.jpg").write_bytes(jpeg(image))
    return {name: folder / f"{name}.jpg" for name in shown}


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    return create_app(load_settings(log_level="ERROR")).openapi()


@pytest.fixture(scope="session")
def webcam(tmp_path_factory: pytest.TempPathFactory, astronaut: Pixels) -> Path:
    """Motion JPEG for the browser's camera: the astronaut, 640x480."""
    picture = Image.new("RGB", (640, 480), (120, 120, 120))
    picture.paste(Image.fromarray(astronaut).resize((480, 480)), (80, 0))
    path = tmp_path_factory.mktemp("webcam") / "astronaut.mjpeg"
    path.write_bytes(jpeg(picture) * 4)
    return path


@pytest.fixture(scope="session")
def browser(webcam: Path) -> Iterator[Browser]:
    path = executable()
    if path is None:
        pytest.skip(MISSING)
    with chromium(path, webcam) as opened:
        yield opened


Opener = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, document: dict[str, Any]) -> Iterator[Opener]:
    """``visit(url, place, **options of Browser.new_context)``: open a page of the console with a fresh profile.

    The test fails at its end if a page raised an exception, logged an error, violated the security policy, or read a
    field of an answer that the OpenAPI document lacks.
    """
    opened: list[Watched] = []

    def open_page(url: str, place: str = "", **options: object) -> Page:
        watched = Watched(browser.new_context(**{"viewport": DESK, **options}))  # type: ignore[arg-type]
        opened.append(watched)
        page = watched.context.new_page()
        page.goto(f"{url}/console{place and '#'}{place}")
        return page

    yield open_page
    for watched in opened:
        watched.context.close()
    assert [line for watched in opened for line in watched.wrong] == []
    read = {line for watched in opened for line in watched.missing}
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


@pytest.fixture
def service(shared: str, kith: Kith) -> str:
    """Address of the shared service, without the galleries of earlier tests."""
    return shared


@pytest.fixture(scope="session")
def populated(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, Path]) -> Iterator[str]:
    """Service with two galleries: `family` of three subjects, one person enrolled twice, and `empty`. Read-only."""
    with started(tmp_path_factory.mktemp("populated")) as (url, kith):
        kith.create_gallery("empty")
        populate(kith, "family", photos)
        yield url


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, Path]) -> Iterator[str]:
    """Service that requires a key, with the galleries `staff`, which is empty, and `family` of three subjects."""
    with started(tmp_path_factory.mktemp("locked"), api_key=KEY) as (url, kith):
        kith.create_gallery("staff")
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


def populate(kith: Kith, gallery: str, photos: dict[str, Path], **options: Any) -> None:
    """Create a gallery, unless it exists, and enroll three people, one of them twice."""
    if gallery not in kith.gallery_names():
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


def choose(page: Page, *files: Path, button: str = "Choose") -> None:
    """Select files through the file button."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name=button).first.click()
    chooser.value.set_files(list(files))


def transfer(page: Page, *files: Path) -> JSHandle:
    """Return a DataTransfer with these files, as of a drop or a paste."""
    held = [(file.name, base64.b64encode(file.read_bytes()).decode()) for file in files]
    return page.evaluate_handle(
        """(held) => {
          const hand = new DataTransfer();
          for (const [name, content] of held) {
            const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
            hand.items.add(new File([bytes], name, { type: "image/jpeg" }));
          }
          return hand;
        }""",
        held,
    )

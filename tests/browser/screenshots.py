"""Screenshots for docs/images, with photos in the public domain.

The photos are portraits by the US government: Eileen Collins (NASA; included in scikit-image), and the official ones of
Barack Obama and Joe Biden, from the tests in the sdist of face_recognition. pip downloads that by its hash, to a
temporary folder.

  python -m tests.browser.screenshots [NAME...]
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final, Literal

from PIL import Image, ImageOps
from playwright.sync_api import Browser, Page, expect

from kith import Kith
from service.cli.tools.demo import package_file
from tests.browser.chromium import MISSING, chromium, executable
from tests.browser.conftest import DESK, PHONE, started

FOLDER: Final = Path(__file__).parents[2] / "docs" / "images"
SDIST: Final = "face_recognition==1.3.0 --hash=sha256:5e5efdd1686aa566af0d3cc1313b131e4b197657a8ffd03669e6d3fad92705ec"
INSIDE: Final = Path("face_recognition-1.3.0", "tests", "test_images")
PEOPLE: Final = {"collins": "Eileen Collins", "obama": "Barack Obama", "biden": "Joe Biden"}


def main(chosen: list[str]) -> None:
    path = executable() or sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(fetch(folder), folder)
        with started(folder / "data") as (url, kith), chromium(path) as browser:
            populate(kith, folder)
            for name in chosen or SCENES:
                take(browser, url, name, folder)


def fetch(folder: Path) -> dict[str, Image.Image]:
    (folder / "requirements.txt").write_text(f"{SDIST}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        + ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "--dest", str(folder)]
        + ["--requirement", str(folder / "requirements.txt")],
        check=True,
    )
    portraits = {"collins": Image.open(package_file("skimage", "data", "astronaut.png")).convert("RGB")}
    with tarfile.open(next(folder.glob("face_recognition-*.tar.gz"))) as sdist:
        sdist.extractall(folder, filter="data")
    return portraits | {name: Image.open(folder / INSIDE / f"{name}.jpg").convert("RGB") for name in ("obama", "biden")}


def write(portraits: dict[str, Image.Image], folder: Path) -> None:
    """Write each portrait, a variant from another camera, an archive of both, and a photo of all people."""
    width, height = 420, 560
    reception = Image.new("RGB", (len(portraits) * width, height))
    with zipfile.ZipFile(folder / "people.zip", "w") as archive:
        for i, (name, portrait) in enumerate(portraits.items()):
            wide, high = portrait.size
            again = portrait.rotate(3, Image.Resampling.BICUBIC)
            again = again.crop((wide // 12, high // 24, wide - wide // 12, high - high // 8))
            reception.paste(ImageOps.fit(again, (width, height), centering=(0.5, 0.1)), (i * width, 0))
            for file, photo in ((f"{name}.jpg", portrait), (f"{name} again.jpg", again)):
                photo.save(folder / file, quality=90)
                archive.write(folder / file, f"{PEOPLE[name]}/{file}")
    reception.save(folder / "reception.jpg", quality=92)


def populate(kith: Kith, folder: Path) -> None:
    for gallery, fpir in (("guests", 0.001), ("crew", 0.0001), ("visitors", 0.01)):
        kith.create_gallery(gallery, risk={"fpir": fpir}, keep_crops=gallery == "guests")
    for subject in ("collins", "obama"):
        for gallery in ("guests", "crew"):
            kith.put_subject(gallery, subject, name=PEOPLE[subject], tags=["invited"], metadata={"table": 4})
            kith.enroll(gallery, subject, folder / f"{subject}.jpg")
    kith.put_subject("guests", "e-collins", name="E. Collins", tags=["press"])
    kith.enroll("guests", "e-collins", folder / "collins again.jpg", allow_duplicate=True)
    kith.calibrate("guests")
    kith.wait_for(kith.enroll_archive("visitors", folder / "people.zip").id)
    kith.wait_for(kith.create_album("crew", folder / "people.zip").id)


def take(browser: Browser, url: str, name: str, folder: Path) -> None:
    size = PHONE if name == "phone" else DESK
    place, inputs, shown = SCENES[name]
    theme: Literal["dark", "light"] = "dark" if name == "dark" else "light"
    with browser.new_page(viewport=size, reduced_motion="reduce", color_scheme=theme) as page:
        page.goto(f"{url}/console#{place}")
        for number, photos in reversed(list(enumerate(inputs))):  # an input goes when it has its photos
            page.locator("input[type=file]").nth(number).set_input_files([folder / f"{photo}.jpg" for photo in photos])
        act(page, name)
        expect(page.locator(shown).first).to_be_visible()
        expect(page.locator(".waiting, .spinner")).to_have_count(0)
        path = FOLDER / f"console-{name}.png"
        with Image.open(io.BytesIO(page.screenshot())) as image:
            image.convert("RGB").quantize(128, Image.Quantize.MEDIANCUT).save(path, optimize=True)


def act(page: Page, name: str) -> None:
    if name == "enroll":
        expect(page.get_by_text("photo of a face")).to_have_count(2)
        page.get_by_label("Name", exact=True).fill("Joe Biden")
        page.get_by_label("Tags").fill("invited")
    elif name == "album":
        page.get_by_role("link", name="Album of").click()
    elif name == "risk":
        page.get_by_role("slider").press("ArrowLeft")


IDENTIFIED: Final = ("/identify?gallery=crew", [["reception"]], "h3:has-text('Eileen Collins')")
SCENES: Final[dict[str, tuple[str, list[list[str]], str]]] = {
    "identify": IDENTIFIED,
    "dark": IDENTIFIED,
    "phone": IDENTIFIED,
    "enroll": ("/enroll?gallery=crew", [["biden", "biden again"]], "main"),
    "compare": ("/compare", [["collins"], ["collins again"]], "section.verdict h2"),
    "galleries": ("/galleries", [], ".gallery-card img.thumb"),
    "gallery": ("/galleries/guests", [], "tbody img.thumb"),
    "person": ("/galleries/guests/subjects/collins", [], "img.thumb"),
    "album": ("/galleries/crew/albums", [], ".album-face img.thumb"),
    "risk": ("/galleries/guests/risk", [], "text=Use this risk"),
    "hygiene": ("/galleries/guests/hygiene", [], "article img.thumb"),
    "jobs": ("/jobs", [], "li.job"),
    "health": ("/health", [], "table"),
}
"""Page, photos for each of its inputs, and selector of what it shows then."""

if __name__ == "__main__":
    main(sys.argv[1:])

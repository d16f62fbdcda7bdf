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
from collections.abc import Callable
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, expect

from kith import Kith
from service.cli.tools.demo import package_file
from service.server import embedded
from service.settings import load_settings
from tests.browser.chromium import MISSING, chromium, executable
from tests.browser.conftest import DESK, PHONE, choose, go

FOLDER: Final = Path(__file__).parents[2] / "docs" / "images"
SDIST: Final = "face_recognition==1.3.0 --hash=sha256:5e5efdd1686aa566af0d3cc1313b131e4b197657a8ffd03669e6d3fad92705ec"
INSIDE: Final = "face_recognition-1.3.0/tests/test_images"
MAX_BYTES: Final = 150_000
PEOPLE: Final = {"collins": "Eileen Collins", "obama": "Barack Obama", "biden": "Joe Biden"}
Portraits = dict[str, Image.Image]


def main(chosen: list[str]) -> None:
    path = executable()
    if path is None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        portraits = fetch(folder)
        write(portraits, folder)
        settings = load_settings(data_dir=folder / "data", log_level="ERROR")
        with embedded(settings) as url, Kith(url) as kith, chromium(path, folder / "webcam.mjpeg") as browser:
            populate(kith, folder)
            for name, show in SCENES.items():
                if not chosen or name in chosen:
                    take(browser, url, name, show, folder)


# Content


def fetch(folder: Path) -> Portraits:
    (folder / "requirements.txt").write_text(f"{SDIST}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        + ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "--dest", str(folder)]
        + ["--requirement", str(folder / "requirements.txt")],
        check=True,
    )
    with Image.open(package_file("skimage", "data", "astronaut.png")) as image:
        portraits = {"collins": image.convert("RGB")}
    with tarfile.open(next(folder.glob("face_recognition-*.tar.gz"))) as sdist:
        for name in ("obama", "biden"):
            file = sdist.extractfile(f"{INSIDE}/{name}.jpg")
            assert file is not None
            portraits[name] = Image.open(io.BytesIO(file.read())).convert("RGB")
    return portraits


def write(portraits: Portraits, folder: Path) -> None:
    """Write the input files: each portrait, a variant from another camera, a zip of both, and the camera's video."""
    for name, portrait in portraits.items():
        portrait.save(folder / f"{name}.jpg", quality=92)
        again(portrait).save(folder / f"{name} again.jpg", quality=85)
    with zipfile.ZipFile(folder / "people.zip", "w") as archive:
        for name in portraits:
            for photo in (f"{name}.jpg", f"{name} again.jpg"):
                archive.write(folder / photo, f"{PEOPLE[name]}/{photo}")
    camera = again(portraits["collins"]).resize((480, 480))
    frame = Image.new("RGB", (640, 480), camera.getpixel((3, 3)))
    frame.paste(camera, (80, 0))
    frame.save(folder / "frame.jpg")
    (folder / "webcam.mjpeg").write_bytes((folder / "frame.jpg").read_bytes() * 4)


def again(portrait: Image.Image) -> Image.Image:
    width, height = portrait.size
    turned = portrait.rotate(3, Image.Resampling.BICUBIC)
    return turned.crop((width // 12, height // 24, width - width // 12, height - height // 8))


def side_by_side(kith: Kith, folder: Path) -> Image.Image:
    """Combine the three portraits in one photo, with faces of equal size."""
    width, height = 420, 560
    whole = Image.new("RGB", (3 * width, height))
    for i, name in enumerate(PEOPLE):
        with Image.open(folder / f"{name} again.jpg") as photo:
            x0, y0, x1, y1 = kith.detect(folder / f"{name} again.jpg").images[0].faces[0].box
            side = 2.3 * (y1 - y0)
            left, top = (x0 + x1 - side * width / height) / 2, max(0.0, y0 - 0.3 * (y1 - y0))
            part = photo.crop((round(left), round(top), round(left + side * width / height), round(top + side)))
            whole.paste(part.resize((width, height), Image.Resampling.LANCZOS), (i * width, 0))
    return whole


def populate(kith: Kith, folder: Path) -> None:
    side_by_side(kith, folder).save(folder / "reception.jpg", quality=92)
    kith.create_gallery("guests", risk={"fpir": 0.001}, keep_crops=True)
    kith.create_gallery("crew", risk={"fpir": 0.0001})
    kith.create_gallery("visitors", risk={"fpir": 0.01})
    for subject, name in PEOPLE.items():
        if subject == "biden":
            continue
        for gallery in ("guests", "crew"):
            kith.put_subject(gallery, subject, name=name, tags=["invited"], metadata={"table": 4})
            kith.enroll(gallery, subject, folder / f"{subject}.jpg")
    kith.put_subject("guests", "e-collins", name="E. Collins", tags=["press"])
    kith.enroll("guests", "e-collins", folder / "collins again.jpg", allow_duplicate=True)
    kith.calibrate("guests")
    kith.wait_for(kith.enroll_archive("visitors", folder / "people.zip").id)
    with zipfile.ZipFile(folder / "album.zip", "w") as archive:
        for photo in ["reception.jpg", *(f"{name}{suffix}.jpg" for name in PEOPLE for suffix in ("", " again"))]:
            archive.write(folder / photo, photo)
    kith.wait_for(kith.create_album("crew", folder / "album.zip").id)


# Rendering


def take(browser: Browser, url: str, name: str, show: Callable[[Page, Path], None], folder: Path) -> None:
    options = {
        "viewport": PHONE if name.endswith("phone") else DESK,
        "color_scheme": "dark" if name.endswith("dark") else "light",
        "permissions": ["camera"],
        "reduced_motion": "reduce",
    }
    context = browser.new_context(**options)  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.goto(f"{url}/console")
        page.evaluate("localStorage.setItem('kith-gallery', 'crew')")
        show(page, folder)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_text("One moment…")).to_have_count(0)
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        page.mouse.move(2, 2)
        keep(page.screenshot(), FOLDER / f"console-{name}.png")
    finally:
        context.close()


def keep(png: bytes, path: Path) -> None:
    """Save with as many colors as fit into MAX_BYTES."""
    for colors in (256, 192, 128, 96):
        with Image.open(io.BytesIO(png)) as image:
            image.convert("RGB").quantize(colors, Image.Quantize.MEDIANCUT).save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            break
    print(f"{path.name}: {path.stat().st_size // 1000} kB, {colors} colors")


def at(place: str) -> Callable[[Page, Path], None]:
    return lambda page, _folder: go(page, place)


def identified(page: Page, folder: Path) -> None:
    choose(page, folder / "reception.jpg")
    expect(page.get_by_role("heading", name="Eileen Collins")).to_be_visible()


def enrolling(page: Page, folder: Path) -> None:
    at("/enroll?gallery=crew")(page, folder)
    choose(page, folder / "biden.jpg", folder / "biden again.jpg")
    expect(page.get_by_text("photo of a face")).to_have_count(2)
    page.get_by_label("Name", exact=True).fill("Joe Biden")
    page.get_by_label("Tags").fill("invited")


def compared(page: Page, folder: Path) -> None:
    at("/compare")(page, folder)
    for side, photo in (("First", "collins"), ("Second", "collins again")):
        page.get_by_role("group", name=side).locator("input[type=file]").set_input_files(folder / f"{photo}.jpg")
    answer = page.get_by_role("region", name="The answer")
    expect(answer.get_by_role("heading")).to_be_visible()
    answer.scroll_into_view_if_needed()


def dragged(page: Page, folder: Path) -> None:
    at("/galleries/guests/risk")(page, folder)
    page.get_by_role("slider").press("ArrowLeft")
    expect(page.get_by_role("button", name="Use this risk")).to_be_visible()


def tidied(page: Page, folder: Path) -> None:
    at("/galleries/guests/hygiene")(page, folder)
    expect(page.get_by_role("article").first.get_by_role("img")).to_have_count(2)


def health(page: Page, folder: Path) -> None:
    at("/health")(page, folder)
    expect(page.get_by_role("table", name="Recognizers")).to_be_visible()


def remembered(page: Page, folder: Path) -> None:
    at("/galleries/guests/subjects/collins")(page, folder)
    expect(page.get_by_role("img", name="Stored picture")).to_be_visible()


def grouped(page: Page, folder: Path) -> None:
    at("/galleries/crew/albums")(page, folder)
    page.get_by_role("link", name="Album of").click()
    expect(page.get_by_role("heading", name="Group 1")).to_be_visible()
    expect(page.locator("img.thumb").nth(5)).to_be_visible()


SCENES: Final[dict[str, Callable[[Page, Path], None]]] = {
    "identify": identified,
    "dark": identified,
    "phone": identified,
    "enroll": enrolling,
    "compare": compared,
    "galleries": at("/galleries"),
    "gallery": at("/galleries/guests"),
    "person": remembered,
    "album": grouped,
    "risk": dragged,
    "hygiene": tidied,
    "jobs": at("/jobs"),
    "health": health,
}

if __name__ == "__main__":
    main(sys.argv[1:])

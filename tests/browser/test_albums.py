"""Albums at the console: photos without names become groups, which are enrolled with a name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from kith import Kith
from service.cli.tools.demo import alter
from service.usecases import albums as usecase
from tests.browser.chromium import faults, overflow
from tests.browser.conftest import DESK, PHONE, Opener

SLOW_DELETE = """() => {
  const ask = fetch;
  globalThis.fetch = async (url, options) => {
    const answer = await ask(url, options);
    const ms = options.method === "DELETE" ? 1500 : answer.ok ? 0 : 2000;
    await new Promise((done) => setTimeout(done, ms));
    return answer;
  };
}"""
"""The page looks again while a deletion is answered, and learns afterwards that there is nothing."""


def variants(photo: Path, folder: Path, count: int) -> list[Path]:
    """Write photos of the same face: turned, mirrored, darker."""
    made = []
    for number in range(count):
        image = Image.open(io.BytesIO(photo.read_bytes()))
        content = alter(image, number % 2 == 1, 3 * number, 0.9, 0.85 + 0.1 * number, 88)
        made.append(folder / f"{photo.stem} {number}.jpg")
        made[-1].write_bytes(content)
    return made


def test_photos_become_people(
    visit: Opener, service: str, kith: Kith, photos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = variants(photos["ada"], tmp_path, 3) + variants(photos["tom"], tmp_path, 3) + [photos["coffee"]]
    files.append(tmp_path / f"{'a long name ' * 12}.jpg")
    files[-1].write_bytes(photos["party"].read_bytes())
    kith.create_gallery("family")
    page = visit(service, "/galleries/family/albums")
    expect(page.get_by_role("heading", name="No albums yet")).to_be_visible()
    page.get_by_role("button", name="New album").first.click()
    page.get_by_label("Photos").set_input_files(files)
    assert faults(page) == []
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", name="People", exact=True)).to_be_visible(timeout=60_000)
    expect(page.get_by_text("8 photos, 12 faces.")).to_be_visible()
    groups = page.get_by_role("list", name="Groups")
    expect(groups.get_by_role("heading")).to_have_text(["Group 1", "Group 2"])
    expect(groups.locator("img.thumb").first).to_be_visible()
    (line,) = kith.audit("family", event="crop_read")
    assert (line.details["count"], len(line.details["faces"])) == (6, 6), "one request for all"
    for window in (PHONE, DESK):
        page.set_viewport_size(window)
        assert faults(page) == []
        assert overflow(page) == 0

    # Two wrong faces: merge the people, and take them apart again by keyboard.
    groups.get_by_role("button", name="Merge Group 2").click()
    dialog = page.get_by_role("dialog", name="Merge two groups")
    expect(dialog.get_by_label("The same person as")).to_have_value("g1")
    assert faults(page) == []
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(groups.get_by_role("heading")).to_have_text(["Group 1"])
    (album,) = kith.albums("family")
    first = list(kith.album_faces("family", album.id, "g1"))
    stem = first[0].photo.split()[0]
    others = [face.photo for face in first if not face.photo.startswith(stem)]
    assert len(others) == 3
    for photo in others:
        groups.get_by_role("checkbox", name=photo).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Take 3 faces out").focus()
    page.keyboard.press("Enter")
    expect(groups.get_by_role("heading")).to_have_text(["Group 1", "Group 9"])

    # The enrollment, with a name.
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 2)
    groups.get_by_role("button", name="Enroll Group 1", exact=True).click()
    dialog = page.get_by_role("dialog", name="Name this person")
    dialog.get_by_label("Name", exact=True).fill("Ada Lovelace")
    assert faults(page) == []
    dialog.get_by_role("button", name="Enroll").click()
    expect(groups.get_by_role("heading")).to_have_text(["Group 9"])
    ada = kith.subject("family", "ada-lovelace")
    assert (ada.name, ada.template_count) == ("Ada Lovelace", 3)

    page.get_by_text("Single faces", exact=True).click()
    expect(page.get_by_role("list", name="Single faces").get_by_role("heading")).to_have_count(6)
    assert faults(page) == []

    # Another person under the same name is refused, and stays.
    groups.get_by_role("button", name="Enroll Group 9").click()
    dialog.get_by_label("Someone in this gallery").check()
    dialog.get_by_label("Who is it?").fill("Ada Lovelace (ada-lovelace)")
    dialog.get_by_role("button", name="Enroll").click()
    expect(groups.get_by_text("Refused faces")).to_be_visible()
    assert faults(page) == []
    assert kith.subject("family", "ada-lovelace").template_count == 3
    groups.get_by_role("button", name="Enroll them anyway").click()
    page.get_by_role("dialog").get_by_role("button", name="Enroll", exact=True).click()
    expect(groups.get_by_role("heading")).to_have_count(0)
    assert kith.subject("family", "ada-lovelace").template_count == 6

    page.get_by_role("button", name="Delete the album").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("heading", name="The album is deleted.")).to_be_visible()
    assert kith.albums("family") == []
    page.reload()
    expect(page.get_by_role("heading", name="This album is gone")).to_be_visible()


def test_progress_is_shown_and_a_deleted_album_stops(
    visit: Opener, service: str, kith: Kith, photos: dict[str, Path], tmp_path: Path
) -> None:
    kith.create_gallery("party")
    with zipfile.ZipFile(tmp_path / "party.zip", "w") as archive, Image.open(photos["party"]) as party:
        for number in range(60):
            party.save(tmp_path / "one.jpg", quality=80 + number % 15, comment=str(number).encode())
            archive.write(tmp_path / "one.jpg", f"{number}.jpg")
    album = kith.create_album("party", tmp_path / "party.zip").id
    page = visit(service, f"/galleries/party/albums/{album}")
    expect(page.get_by_text("of 60 items")).to_be_visible(timeout=30_000)
    assert faults(page) == []
    page.evaluate(SLOW_DELETE)
    page.get_by_role("button", name="Delete the album").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("heading", name="The album is deleted.")).to_be_visible()
    page.wait_for_timeout(2000)
    expect(page.get_by_role("heading", name="The album is deleted.")).to_be_visible()
    assert kith.albums("party") == [] and list(kith.jobs("party")) == []

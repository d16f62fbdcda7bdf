"""Albums at the console: photos without names become groups, which are enrolled with a name."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from kith import Kith
from service.usecases import albums as usecase
from tests.browser.chromium import faults
from tests.browser.conftest import PHONE, Opener, Photos


def test_photos_become_people(
    visit: Opener, kith: Kith, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [photos[name] for name in ("ada", "ada again", "tom", "tom again", "coffee")]
    files.append(tmp_path / f"{'a long name ' * 12}.jpg")
    files[-1].write_bytes(photos["party"].read_bytes())
    kith.create_gallery("family")
    page = visit("/galleries/family/albums")
    page.get_by_role("button", name="New album").first.click()
    page.get_by_label("Photos").set_input_files(files)
    assert faults(page) == []
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", name="People", exact=True)).to_be_visible(timeout=60_000)
    expect(page.get_by_text("6 photos, 10 faces.")).to_be_visible()
    groups = page.get_by_role("list", name="Groups")
    expect(groups.get_by_role("heading")).to_have_text(["Group 1", "Group 2"])
    expect(groups.locator("img.thumb").first).to_be_visible()
    (line,) = kith.audit("family", event="crop_read")
    assert (line.details["count"], len(line.details["faces"])) == (4, 4), "one request for all"
    page.set_viewport_size(PHONE)
    assert faults(page) == []

    # Two wrong faces: merge the people, and take them apart again by keyboard.
    groups.get_by_role("button", name="Merge Group 2").click()
    dialog = page.get_by_role("dialog", name="Merge two groups")
    expect(dialog.get_by_label("The same person as")).to_have_value("g1")
    assert faults(page) == []
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(groups.get_by_role("heading")).to_have_text(["Group 1"])
    (album,) = kith.albums("family")
    first = list(kith.album_faces("family", album.id, "g1"))
    others = [face.photo for face in first if face.photo[:3] != first[0].photo[:3]]
    assert len(others) == 2
    for photo in others:
        groups.get_by_role("checkbox", name=photo).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Take 2 faces out").focus()
    page.keyboard.press("Enter")
    expect(groups.get_by_role("heading")).to_have_text(["Group 1", "Group 9"])

    # The enrollment, with a name.
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 1)
    groups.get_by_role("button", name="Enroll Group 1", exact=True).click()
    dialog = page.get_by_role("dialog", name="Name this person")
    dialog.get_by_label("Name", exact=True).fill("Ada Lovelace")
    dialog.get_by_role("button", name="Enroll").click()
    expect(groups.get_by_role("heading")).to_have_text(["Group 9"])
    ada = kith.subject("family", "ada-lovelace")
    assert (ada.name, ada.template_count) == ("Ada Lovelace", 2)

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
    groups.get_by_role("button", name="Enroll them anyway").click()
    page.get_by_role("dialog").get_by_role("button", name="Enroll", exact=True).click()
    expect(groups.get_by_role("heading")).to_have_count(0)
    assert kith.subject("family", "ada-lovelace").template_count == 4

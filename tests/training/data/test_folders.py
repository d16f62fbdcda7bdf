"""Folders of photos as macOS, Jupyter, file servers and people leave them: no photo is lost without a word."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.vision.photo_files import list_photos
from models.vision.photo_reading import PhotoReader
from tests.service.inference.image_files import FORMATS, HEIC, SMALL, encode, heic
from tests.training.runs import IMAGES, PEOPLE, SIDE, write_people
from training.config import ConfigError, DataConfig
from training.data.folders import photos_below
from training.data.identities import decode_rgb, list_identities, load_identities
from training.data.preflight import preflight

APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        "
LATIN1 = os.fsdecode(b"Ren\xe9")


def by_folder(root: Path) -> DataConfig:
    return DataConfig(root, manifest=None, crop_px=SIDE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """PEOPLE people with IMAGES photos each, and what else is found in such folders."""
    root = write_people(tmp_path / "people")
    crop = (root / "p0" / "0.png").read_bytes()
    for name, content in {
        "p0/._0.png": APPLE_DOUBLE,
        ".ipynb_checkpoints/0-checkpoint.png": crop,
        "p2/[b]notes.txt": b"text",
        "sheet.png": crop,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_run_sees_the_people_only_and_inspect_names_the_rest(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, clean = by_folder(folder), by_folder(write_people(tmp_path / "clean"))
    found, wanted = (load_identities(each, tmp_path / "cache") for each in (config, clean))
    assert (found.names, found.labels.tolist()) == (wanted.names, wanted.labels.tolist())
    assert np.array_equal(found.crops_NHWC, wanted.crops_NHWC)
    assert f"2 files are not used, first {folder}/p2/[b]notes.txt (not a photo)" in caplog.text
    checked = preflight(config)
    assert (checked.people, checked.images, checked.hidden, checked.unreadable) == (PEOPLE, PEOPLE * IMAGES, 2, ())
    not_used = (f"{folder}/p2/[b]notes.txt (not a photo)", f"{folder}/sheet.png (not in a person's folder)")
    assert checked.ignored == not_used
    assert ("Hidden files and folders", "2") in checked.rows
    assert any("p2/[b]notes.txt" in warning for warning in checked.warnings)


def test_nested_photos_are_of_the_first_folders_person(folder: Path) -> None:
    (folder / "p3" / "2019" / "summer").mkdir(parents=True)
    (folder / "p3" / "0.png").rename(folder / "p3" / "2019" / "summer" / "IMG_0")
    (folder / "p3" / "1.png").rename(folder / "p3" / "1.jfif")  # a PNG all the same
    listed = list_identities(by_folder(folder))
    counts = dict(zip(listed.names, np.bincount(listed.labels).tolist(), strict=True))
    assert counts == {f"p{person}": IMAGES for person in range(PEOPLE)}


@pytest.mark.parametrize("in_manifest", [False, True])
def test_a_name_in_two_unicode_forms_is_refused(tmp_path: Path, in_manifest: bool) -> None:
    """macOS decomposes names, other systems do not: one form is read as any other, two may be one person or two."""
    composed, decomposed = "Jos\xe9", "Jose\u0301"

    def listing(*people: str) -> DataConfig:
        root = tmp_path / str(len(people))
        for number, name in enumerate(people):
            (root / name).mkdir(exist_ok=True, parents=True)
            (root / name / f"{number}.png").write_bytes(b"")
        rows = [f"{name}/{number}.png,{name}" for number, name in enumerate(people)]
        (root / "manifest.csv").write_text("\n".join(["file,identity", *rows]), "utf-8")
        return DataConfig(root, "manifest.csv" if in_manifest else None, min_images=1)

    alone = list_identities(listing(decomposed, "Ada", "Ada"))
    assert (alone.names, sorted(alone.labels.tolist())) == (("Ada", composed), [0, 0, 1])
    for read in (list_identities, preflight):
        with pytest.raises(ConfigError, match=r"look the same, Jose\\u0301 = Jos\\xe9 \(escaped\): rename one"):
            read(listing(composed, decomposed))


def test_a_folder_name_that_is_not_utf_8(folder: Path, tmp_path: Path) -> None:
    (folder / "p3").rename(folder / LATIN1)
    (folder / LATIN1 / "0.png").rename(folder / LATIN1 / f"{LATIN1}.png")
    config = by_folder(folder)
    data = load_identities(config, tmp_path / "cache")
    assert data.names.index("Ren\\xe9") == 0
    assert len(data) == PEOPLE * IMAGES
    assert preflight(config).unreadable == ()
    (folder / "p4").rename(folder / "Ren\\xe9")  # whose name is shown alike
    with pytest.raises(ConfigError, match=r"Ren\\\\xe9 = Ren\\udce9 \(escaped\)"):
        list_identities(config)
    (folder / "Ren\\xe9").rename(folder / "p4")
    (folder / LATIN1 / f"{LATIN1}.png").write_bytes(b"broken")
    with pytest.raises(ConfigError) as raised:
        load_identities(config, tmp_path / "cache")
    assert "Ren\\xe9/Ren\\xe9.png cannot be decoded" in str(raised.value)
    assert str(raised.value).encode()  # can be printed


def test_a_photo_that_cannot_be_read_stops_the_run(folder: Path) -> None:
    (folder / "p0" / "gone.jpg").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"gone\.jpg cannot be read \(not a file, or a link to a missing file\)"):
        list_identities(by_folder(folder))
    with pytest.raises(ConfigError, match="cannot be read"):
        photos_below(folder / "missing")


def test_the_formats_of_the_service_are_decoded() -> None:
    for kind in FORMATS:
        assert decode_rgb(encode(SMALL, kind), f"1.{kind}").shape == (64, 48, 3)
    gray = SMALL.convert("L")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) << 8)
    for image in (gray.convert("RGB"), gray.convert("RGBA"), gray, deep):
        decoded = decode_rgb(heic(image), "1.heic")
        assert np.abs(decoded.astype(int) - np.asarray(SMALL)).max() <= 3, image.mode
    for damaged in (HEIC[:200], HEIC[: len(HEIC) // 2], HEIC[:-40]):
        with pytest.raises(ConfigError, match=r"1\.heic cannot be decoded \(damaged or unsupported HEIC: .+\)"):
            decode_rgb(damaged, "1.heic")


def test_photos_without_names_follow_the_same_rule(folder: Path) -> None:
    """Calibration and INT8 use every photo that is not hidden, and skip damaged ones."""
    photos = list_photos(folder).photos
    assert len(photos) == PEOPLE * IMAGES + 1
    reader = PhotoReader()
    assert all(reader.read(path) is not None for path in reader.find(folder))
    assert reader.describe() == ""
    (folder / "p0" / "9.jpg").write_bytes(HEIC)  # known by its content
    assert reader.read(folder / "p0" / "9.jpg") is not None
    (folder / "empty.png").write_bytes(b"")
    (folder / "gone.png").symlink_to("nowhere")
    (folder / "no.heic").write_bytes(b"text")
    (folder / LATIN1).with_suffix(".jpg").write_bytes(b"text")
    for path in (folder / "missing.png", *reader.find(folder)):
        reader.read(path)
    assert reader.describe() == (
        f"5 photos cannot be read and are left out: {folder}/Ren\\xe9.jpg (damaged, or not a photo), "
        f"{folder}/empty.png (the file is empty), {folder}/gone.png (not a file, or a link to a missing file), ..."
    )
    Image.open(photos[0]).save(folder / "p0" / "9.jpe", "JPEG")
    assert reader.read(folder / "p0" / "9.jpe") is not None

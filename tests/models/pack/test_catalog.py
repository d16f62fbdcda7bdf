"""The default catalog is complete, and errors of a custom catalog name the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from models.errors import PackError
from models.pack.catalog import CATALOG_PATH, read_catalog
from models.pack.loading import BUNDLED_PACK, load_pack

PUBLISHERS = ("github.com", "huggingface.co", "storage.openvinotoolkit.org")
NAMES = [
    "kith-compact", "open-model-zoo", "auraface", "opencv-zoo",
    "buffalo_l", "buffalo_m", "buffalo_s", "buffalo_sc", "antelopev2", "minifasnet",
]  # fmt: skip


def test_every_pack_has_checked_sources_and_terms() -> None:
    catalog = read_catalog()
    assert list(catalog) == NAMES
    for entry in catalog.values():
        assert entry.license.url.startswith("https://")
        assert entry.license.acceptance == ("InsightFace" in entry.license.name)
        for download in entry.downloads:
            assert download.sha256 is not None
            # The sizes of MiniFASNet's files are not published.
            assert (download.size is None) == (entry.kind == "liveness")
            assert download.size is None or 100_000 < download.size < 500_000_000
            assert urlsplit(download.url).scheme == "https"
            assert urlsplit(download.url).netloc in PUBLISHERS
            assert download.url.endswith(f"/{download.file}")
            for member in download.members:
                assert member.sha256 is not None
        if entry.kind == "zip":
            assert len(entry.downloads[0].members) == 2
        if entry.kind == "bundled":
            assert load_pack(BUNDLED_PACK.parent / entry.name).model_id == entry.name
    checksum_of = {(download.file, download.sha256) for entry in catalog.values() for download in entry.downloads}
    assert len({file for file, _ in checksum_of}) == len({checksum for _, checksum in checksum_of}) == len(checksum_of)


def test_a_pack_permits_what_its_least_free_part_permits() -> None:
    catalog = read_catalog()
    free = ["kith-compact", "open-model-zoo", "auraface", "opencv-zoo", "minifasnet"]
    assert [name for name, entry in catalog.items() if entry.commercial_use] == free
    for entry in catalog.values():
        parts = ["liveness"] if entry.kind == "liveness" else ["recognizer", "detector"]
        assert [part.part for part in entry.parts] == parts
    mixed = catalog["open-model-zoo"]
    assert (mixed.license_of("recognizer"), mixed.license_of("detector")) == ("Apache-2.0", "MIT")
    recognizer, detector = mixed.parts
    assert not replace(mixed, parts=(recognizer, replace(detector, commercial_use=False))).commercial_use
    unlisted = replace(mixed, parts=())
    assert unlisted.commercial_use is None
    assert unlisted.license_of("detector") == mixed.license.name


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('name = "kith-compact"', 'name = "../up"', "pack[0].name"),
        ('kind = "bundled"', 'kind = "magic"', "pack[0].kind"),
        ('kind = "bundled"', 'kind = "files"', "pack[0].downloads"),
        ("acceptance = true", 'acceptance = "yes"', "pack[4].license.acceptance"),
        ('file = "det_10g.onnx"', 'file = ".."', "pack[4].downloads[0].members[0].file"),
        ('url = "https://storage', 'address = "https://storage', "pack[1].downloads[0].url"),
        ('part = "recognizer"', "", "pack[0].parts[0].part"),
        ('sha256 = "ce53', 'sha256 = "CE53', "pack[1].downloads[0].sha256"),
        ("[[pack]]", "[pack", "mine.toml"),
        ('name = "open-model-zoo"', 'name = "kith-compact"', "pack"),
    ],
)
def test_errors_name_the_field(old: str, new: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = CATALOG_PATH.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PackError) as raised:
        read_catalog(path)
    assert raised.value.field == field

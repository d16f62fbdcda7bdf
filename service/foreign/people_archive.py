"""Photos and whose they are, as an archive that ``kith enroll`` takes, whatever their people are called."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from service.archives import MANIFESTS
from service.files import replacing

PEOPLE_PER_FOLDER: Final = 1000
BEGINNINGS: Final = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tiff"),
    (b"MM\0*", ".tiff"),
    (b"RIFF", ".webp"),
)
"""Of photos, and how their files are called: an archive's members are photos by their names."""


@dataclass(frozen=True)
class PersonPhoto:
    """``subject``: as Kith will call the person; ``source``: where the photo is from, for who looks it up."""

    subject: str
    source: str
    content: bytes


def suffix_of(content: bytes) -> str:
    """Of a photo by its first bytes; whatever is not known may be one, which enrolment finds out."""
    return next((suffix for beginning, suffix in BEGINNINGS if content.startswith(beginning)), ".jpg")


def write_archive(photos: Iterable[PersonPhoto], path: Path) -> tuple[int, int]:
    """Photos (one in memory at a time) into a zip, and a manifest that says whose each is; only the owner may read it.
    Returns how many people and photos.

    Raises:
        OSError: the file cannot be written; there is none then.
    """
    manifest = io.StringIO(newline="")
    rows = csv.writer(manifest)
    rows.writerow(("file", "subject", "source"))
    people: dict[str, int] = {}
    count = 0
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for photo in photos:
            number = people.setdefault(photo.subject, len(people))
            name = f"{number // PEOPLE_PER_FOLDER:04}/{number:06}/{count:08}{suffix_of(photo.content)}"
            archive.writestr(name, photo.content)
            rows.writerow((name, photo.subject, photo.source))
            count += 1
        archive.writestr(MANIFESTS[0], manifest.getvalue())
    return len(people), count

"""Output of the converters: subject ids that Kith accepts, and photo archives for ``kith enroll``."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kith.wire.identifiers import FORBIDDEN_IN_IDS_PATTERN, MAX_ID_LENGTH, normalize_id, to_nfc
from service.core.atomic_files import atomic_write
from service.inference.archives import MANIFEST

SLASHES: Final = re.compile(r"[/\\]")


@dataclass(frozen=True)
class PersonPhoto:
    """Photo of a person. ``subject`` is the id in Kith; ``source`` names the original photo in the manifest."""

    subject: str
    source: str
    content: bytes


class SubjectIds:
    """Subject ids for names in another service: equal for equal names, different for different names.

    Characters that ids cannot hold are replaced, and a number is appended to ids that would collide.
    """

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._taken: set[str] = set()

    def id_for(self, name: str) -> str:
        """Return the id for a name, at most MAX_ID_LENGTH characters long."""
        if name not in self._ids:
            stem = _sanitize(name)
            subject, number = stem, 2
            while subject in self._taken:
                suffix = f"-{number}"
                subject, number = stem[: MAX_ID_LENGTH - len(suffix)].rstrip() + suffix, number + 1
            self._ids[name] = subject
            self._taken.add(subject)
        return self._ids[name]

    @property
    def changed(self) -> dict[str, str]:
        """Ids by name, where the two differ."""
        return {name: subject for name, subject in self._ids.items() if name != subject}


def write_archive(photos: Iterable[PersonPhoto], path: Path) -> tuple[int, int]:
    """Write a zip of photos and a manifest that names the subject of each. Only the owner can read the file.

    One photo is in memory at a time.

    Returns:
        Number of people and of photos.

    Raises:
        OSError: the file cannot be written. No partial file is left.
    """
    manifest = io.StringIO(newline="")
    rows = csv.writer(manifest)
    rows.writerow(("file", "subject", "source"))
    people, count = set[str](), 0
    with atomic_write(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for count, photo in enumerate(photos, start=1):
            name = f"{count:08}.jpg"  # whatever its format, which enrollment reads from its content
            people.add(photo.subject)
            archive.writestr(name, photo.content)
            rows.writerow((name, photo.subject, photo.source))
        archive.writestr(MANIFEST, manifest.getvalue())
    return len(people), count


def _sanitize(name: str) -> str:
    try:
        text = to_nfc(name)
    except ValueError:  # too many combining marks
        text = "".join(character for character in name if not unicodedata.category(character).startswith("M"))
    text = FORBIDDEN_IN_IDS_PATTERN.sub(" ", SLASHES.sub("-", text)).strip()[:MAX_ID_LENGTH].strip()
    try:
        return normalize_id(text)
    except ValueError:
        return "unnamed"

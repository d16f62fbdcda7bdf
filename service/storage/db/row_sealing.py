"""Encryption of rows: values sealed by the gallery's key, and keyed hashes to look rows up by. Pure.

A value that does not open raises SealBrokenError, which Database translates into StorageDamagedError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

import sqlalchemy as sa

from service.domain.gallery import Crop, Described, SubjectRecord
from service.security.sealing import Seal
from service.storage.db.tables import (
    album_faces,
    albums,
    crops,
    events,
    idempotency,
    job_items,
    jobs,
    subjects,
    vectors,
)

# Purposes: a value sealed or hashed for one purpose is invalid for any other.
SUBJECT: Final = "subject"
CROP: Final = "crop"
ANSWER: Final = "answer"
ITEM: Final = "job item"
PROBLEM: Final = "job problem"
LABEL: Final = "label"
EVENT: Final = "event"
CURSOR: Final = "cursor"
ALBUM_FACE: Final = "album face"
ALBUM_PHOTO: Final = "album photo"
REQUEST: Final = "idempotency key"
DIGEST: Final = "request digest"
VECTOR: Final = "vector"
SEALED: Final[dict[sa.Column[Any], tuple[str, sa.Column[Any] | None]]] = {
    subjects.c.sealed: (SUBJECT, None),
    vectors.c.vector: (VECTOR, vectors.c.generation),
    crops.c.sealed: (CROP, None),
    album_faces.c.sealed: (ALBUM_FACE, None),
    album_faces.c.vector: (VECTOR, albums.c.generation),
    album_faces.c.crop: (CROP, None),
    idempotency.c.sealed: (ANSWER, None),
    jobs.c.problem: (PROBLEM, None),
    job_items.c.sealed: (ITEM, None),
    events.c.sealed: (EVENT, None),
}
"""Columns sealed by the gallery's key: the purpose, and the generation that is part of it."""


def subject_lookup(seal: Seal, subject_id: str) -> str:
    """Return the keyed hash that identifies a subject in its row, in erasures and in the audit."""
    return seal.pseudonym(SUBJECT, subject_id)


def seal_subject(seal: Seal, record: Described) -> bytes:
    return seal.close_json({part.name: getattr(record, part.name) for part in fields(SubjectRecord)}, SUBJECT)


def open_subject(seal: Seal, sealed: bytes) -> SubjectRecord:
    """Raises SealBrokenError."""
    return SubjectRecord(**seal.open_json(sealed, SUBJECT))


def labels_of(seal: Seal, tags: Iterable[str], metadata: Mapping[str, Any]) -> set[str]:
    """Return the labels that a subject is filtered by: one keyed hash for each tag and metadata entry.

    Values compare as JSON: 1 equals 1.0, true equals no number, and the order of an object's keys is irrelevant.
    """
    entries = [["tag", tag] for tag in tags] + [["metadata", key, _canonical(value)] for key, value in metadata.items()]
    return {seal.pseudonym(LABEL, json.dumps(entry, sort_keys=True)) for entry in entries}


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def seal_crop(seal: Seal, crop: Crop) -> bytes:
    """Seal a line with the landmarks as JSON, followed by the image."""
    return seal.close(json.dumps(crop.landmarks_xy).encode() + b"\n" + crop.image, CROP)


def open_crop(seal: Seal, sealed: bytes) -> Crop:
    """Raises SealBrokenError."""
    landmarks, _, image = seal.open(sealed, CROP).partition(b"\n")
    return Crop(image, json.loads(landmarks))


def seal_cursor(seal: Seal, *key: int) -> str:
    """Seal a page cursor: row keys count through all galleries, which callers must not see."""
    return seal.close(",".join(map(str, key)).encode(), CURSOR).hex()


def open_cursor(seal: Seal, text: str) -> tuple[int, ...]:
    """Raises ValueError, SealBrokenError."""
    return tuple(map(int, seal.open(bytes.fromhex(text), CURSOR).split(b",")))

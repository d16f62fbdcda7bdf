"""Reader of InsightFace Server's SQLite database (deepinsight/insightface, server/migrations).

Kith can serve the same packs with the same alignment, so vectors are taken over if the collection's ``model_digest``
matches the pack.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

from kith.wire.identifiers import FORBIDDEN_PATTERN
from models.checksums import sha256_of
from models.pack.manifest import ModelPack
from service.cli.converters.output import SubjectIds
from service.core.errors import ForeignFileError
from service.domain.gallery_items import GalleryFileHeader
from service.storage.transfer.ndjson import header_line

# Fields of every detector in a digest (server/backend/insightface_server/models/manifest.py).
DETECTOR_FIELDS: Final = {
    "input_mean": 127.5,
    "input_size": [640, 640],
    "input_std": 128.0,
    "preprocessing_version": "insightface-scrfd-1",
}


@dataclass(frozen=True)
class InsightFaceCollection:
    """Collection with the digest of its networks. ``people`` and ``faces`` are counts."""

    name: str
    model: str
    digest: str
    preprocessing: str
    dimension: int
    people: int
    faces: int


def read_collections(database: Path) -> list[InsightFaceCollection]:
    """Return all collections. Raises ForeignFileError if the file is not a database of InsightFace Server."""
    with _open(database) as connection:
        try:
            rows = connection.execute(
                "SELECT id, model_id, model_digest, preprocessing_version, embedding_dimension,"
                " (SELECT count(*) FROM persons p WHERE p.collection_id = c.id),"
                " (SELECT count(*) FROM face_samples f WHERE f.collection_id = c.id) FROM collections c ORDER BY id"
            ).fetchall()
        except sqlite3.DatabaseError as error:
            raise ForeignFileError(f"this is not a database of InsightFace Server: {error}") from error
        return [InsightFaceCollection(*row) for row in rows]


def digest_of(pack: ModelPack, preprocessing: str) -> str:
    """Return InsightFace Server's digest of a pack's networks (inference/onnx_engine.py, ``bundle_digest``)."""
    size = pack.recognition.alignment.size_px
    recognizer = {
        "input_mean": 127.5,
        "input_size": [size, size],
        "input_std": 127.5,
        "preprocessing_version": preprocessing,
        "sha256": sha256_of(pack.recognition.path),
    }
    detector = {**DETECTOR_FIELDS, "sha256": sha256_of(pack.detection.path)}
    text = json.dumps([detector, recognizer], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_recognizer(collection: InsightFaceCollection, pack: ModelPack) -> None:
    """Raise ForeignFileError unless the pack's recognizer computed the collection's vectors."""
    if collection.dimension != pack.recognition.dimension or collection.digest != digest_of(
        pack, collection.preprocessing
    ):
        raise ForeignFileError(
            f"collection {collection.name!r} was made with {collection.model!r}, "
            f"whose networks are not those of {pack.model_id!r}",
            remedy="Use the same pack (kith models pull, --pack), or enroll the photos again.",
        )


def lines(database: Path, collection: InsightFaceCollection, recognizer: str, ids: SubjectIds) -> Iterator[bytes]:
    """Yield the collection as lines of NDJSON (docs/galleries.md).

    Args:
        recognizer: fingerprint of the recognizer.

    Raises:
        ForeignFileError: a row cannot be read.
    """
    header = GalleryFileHeader(
        recognizer, collection.dimension, subject_count=collection.people, template_count=collection.faces
    )
    yield header_line(header)
    with _open(database) as connection:
        rows = connection.execute(
            "SELECT p.id, p.name, p.external_id, p.metadata_json, f.embedding, f.detection_score, f.created_at"
            " FROM persons p LEFT JOIN face_samples f ON f.collection_id = p.collection_id AND f.person_id = p.id"
            " WHERE p.collection_id = ? ORDER BY p.id, f.id",
            (collection.name,),
        )
        for person, name, external_id, metadata, vector, score, created in rows:
            item = {
                "subject": ids.id_for(person),
                "name": FORBIDDEN_PATTERN.sub(" ", name) if isinstance(name, str) else name,
                "metadata": _metadata(person, metadata, external_id),
                "detection_score": score,
                "created_at": _time(person, created),
                "embedding": _embedding(person, vector, collection.dimension),
            }
            yield orjson.dumps(
                {key: value for key, value in item.items() if value is not None}, option=orjson.OPT_APPEND_NEWLINE
            )


def _embedding(person: str, vector: bytes | None, dimension: int) -> str | None:
    """Return the vector, little-endian float32, as base64."""
    if vector is None:
        return None
    if len(vector) != 4 * dimension:
        raise ForeignFileError(f"a face of {person!r} has {len(vector)} bytes instead of {4 * dimension}")
    return base64.b64encode(vector).decode()


def _metadata(person: str, text: str, external_id: str | None) -> dict[str, Any]:
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise ForeignFileError(f"the metadata of {person!r} is not JSON") from error
    if not isinstance(metadata, dict):
        raise ForeignFileError(f"the metadata of {person!r} is not a JSON object")
    return {**metadata, **({} if external_id is None else {"external_id": external_id})}


def _time(person: str, text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except (ValueError, TypeError) as error:
        raise ForeignFileError(f"the creation time of a face of {person!r} is not a time: {text!r}") from error


def _open(database: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True))

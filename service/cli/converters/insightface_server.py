"""Reader of InsightFace Server's SQLite database (deepinsight/insightface, server/migrations).

Kith can serve the same packs with the same alignment, so vectors are taken over if the collection's ``model_digest``
matches the pack.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.checksums import sha256_of
from models.pack.manifest import ModelPack
from service.cli.converters.output import SubjectIds
from service.core.errors import ForeignFileError
from service.core.identifiers import FORBIDDEN_PATTERN
from service.domain.gallery_items import GalleryFileHeader, GalleryItems, rows_in_block, to_microseconds
from service.storage.transfer.ndjson import header_line, lines_of

# Fields of every detector in a digest (server/backend/insightface_server/models/manifest.py).
DETECTOR_FIELDS: Final = {
    "input_mean": 127.5,
    "input_size": [640, 640],
    "input_std": 128.0,
    "preprocessing_version": "insightface-scrfd-1",
}
VECTOR_TYPE: Final = np.dtype("<f4")


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
    """Yield the collection as blocks of NDJSON (docs/galleries.md).

    Args:
        recognizer: fingerprint of the recognizer.

    Raises:
        ForeignFileError: a row cannot be read.
    """
    header = GalleryFileHeader(recognizer, collection.dimension, subjects=collection.people, templates=collection.faces)
    yield header_line(header)
    with _open(database) as connection:
        rows = connection.execute(
            "SELECT p.id, p.name, p.external_id, p.metadata_json, f.embedding, f.detection_score, f.created_at"
            " FROM persons p LEFT JOIN face_samples f ON f.collection_id = p.collection_id AND f.person_id = p.id"
            " WHERE p.collection_id = ? ORDER BY p.id, f.id",
            (collection.name,),
        )
        while block := rows.fetchmany(rows_in_block(collection.dimension)):
            yield lines_of(_items(block, collection.dimension, ids))


def _items(rows: list[Any], d: int, ids: SubjectIds) -> GalleryItems:
    n = len(rows)
    vectors = np.zeros((n, d), np.float32)
    has_vector = np.array([row[4] is not None for row in rows])
    for number, row in enumerate(rows):
        if row[4] is None:
            continue
        if len(row[4]) != VECTOR_TYPE.itemsize * d:
            raise ForeignFileError(
                f"a face of {row[0]!r} has {len(row[4])} bytes instead of {VECTOR_TYPE.itemsize * d}"
            )
        vectors[number] = np.frombuffer(row[4], VECTOR_TYPE)
    nothing = [None] * n
    return GalleryItems(
        numbers=range(1, n + 1),
        subjects=[ids.id_for(row[0]) for row in rows],
        names=[FORBIDDEN_PATTERN.sub(" ", row[1]) if isinstance(row[1], str) else row[1] for row in rows],
        metadata=[_metadata(row) for row in rows],
        tags=nothing,
        subject_created_us=nothing,
        subject_updated_us=nothing,
        templates=nothing,
        kinds=nothing,
        qualities=nothing,
        detection_scores=[row[5] for row in rows],
        created_us=[_microseconds(row) for row in rows],
        crops=nothing,
        vectors=vectors,
        given=has_vector,
    )


def _metadata(row: Any) -> dict[str, Any]:
    try:
        metadata = json.loads(row[3])
    except ValueError as error:
        raise ForeignFileError(f"the metadata of {row[0]!r} is not JSON") from error
    if not isinstance(metadata, dict):
        raise ForeignFileError(f"the metadata of {row[0]!r} is not a JSON object")
    return {**metadata, **({} if row[2] is None else {"external_id": row[2]})}


def _microseconds(row: Any) -> int | None:
    if row[6] is None:
        return None
    try:
        created = datetime.fromisoformat(row[6])
    except (ValueError, TypeError) as error:
        raise ForeignFileError(f"the creation time of a face of {row[0]!r} is not a time: {row[6]!r}") from error
    return to_microseconds(created if created.tzinfo else created.replace(tzinfo=UTC))


def _open(database: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True))

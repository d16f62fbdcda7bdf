"""InsightFace Server's collections, out of its SQLite database (deepinsight/insightface, server/migrations).

Kith serves the same packs, cuts the same crops and runs the same recogniser, so that the vectors themselves are taken,
where the collection's ``model_digest`` says that it is the pack at hand.
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

from models.pack import ModelPack, sha256_of
from service.errors import ForeignFileError
from service.foreign.subject_ids import SubjectIds
from service.gallery.ndjson import header_line, lines_of
from service.gallery.transfer import Header, Items, microseconds, rows_in_block
from service.words import CONTROL

DETECTION: Final = {
    "input_mean": 127.5,
    "input_size": [640, 640],
    "input_std": 128.0,
    "preprocessing_version": "insightface-scrfd-1",
}
"""What its digest says of every detector (server/backend/insightface_server/models/manifest.py)."""
VECTOR_TYPE: Final = np.dtype("<f4")


@dataclass(frozen=True)
class Collection:
    name: str
    model: str
    digest: str
    preprocessing: str
    dimension: int
    people: int
    faces: int


def read_collections(database: Path) -> list[Collection]:
    """Raises ForeignFileError: it is no database of InsightFace Server."""
    with _opened(database) as connection:
        rows = _asked(
            connection,
            "SELECT id, model_id, model_digest, preprocessing_version, embedding_dimension,"
            " (SELECT count(*) FROM persons p WHERE p.collection_id = c.id),"
            " (SELECT count(*) FROM face_samples f WHERE f.collection_id = c.id) FROM collections c ORDER BY id",
        )
        return [Collection(*row) for row in rows]


def digest_of(pack: ModelPack, preprocessing: str) -> str:
    """What InsightFace Server would call these networks (inference/onnx_engine.py, ``bundle_digest``)."""
    size = pack.recognition.alignment.size_px
    recogniser = {
        "input_mean": 127.5,
        "input_size": [size, size],
        "input_std": 127.5,
        "preprocessing_version": preprocessing,
        "sha256": sha256_of(pack.recognition.path),
    }
    detector = {**DETECTION, "sha256": sha256_of(pack.detection.path)}
    text = json.dumps([detector, recogniser], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_same(collection: Collection, pack: ModelPack) -> None:
    """Raises ForeignFileError: the collection's vectors are not of this pack's recogniser, or nothing says that they
    are."""
    if collection.dimension != pack.recognition.dimension or collection.digest != digest_of(
        pack, collection.preprocessing
    ):
        raise ForeignFileError(
            f"collection {collection.name!r} was made with {collection.model!r}, "
            f"whose networks are not those of {pack.model_id!r}",
            remedy="Name the same pack (kith models pull, --pack), or enrol the people's photos anew.",
        )


def lines(database: Path, collection: Collection, recogniser: str, ids: SubjectIds) -> Iterator[bytes]:
    """The collection as NDJSON (docs/galleries.md), block by block.

    ``recogniser``: its fingerprint.

    Raises:
        ForeignFileError: a row cannot be read.
    """
    people, faces = collection.people, collection.faces
    yield header_line(Header(recogniser, collection.dimension, subjects=people, templates=faces))
    with _opened(database) as connection:
        rows = connection.execute(
            "SELECT p.id, p.name, p.external_id, p.metadata_json, f.embedding, f.detection_score, f.created_at"
            " FROM persons p LEFT JOIN face_samples f ON f.collection_id = p.collection_id AND f.person_id = p.id"
            " WHERE p.collection_id = ? ORDER BY p.id, f.id",
            (collection.name,),
        )
        while block := rows.fetchmany(rows_in_block(collection.dimension)):
            yield lines_of(_items(block, collection.dimension, ids))


def _items(rows: list[Any], d: int, ids: SubjectIds) -> Items:
    n = len(rows)
    vectors = np.zeros((n, d), np.float32)
    given = np.array([row[4] is not None for row in rows])
    for number, row in enumerate(rows):
        if row[4] is None:
            continue
        if len(row[4]) != VECTOR_TYPE.itemsize * d:
            raise ForeignFileError(f"a face of {row[0]!r} has {len(row[4])} bytes instead of {d} numbers")
        vectors[number] = np.frombuffer(row[4], VECTOR_TYPE)
    nothing = [None] * n
    return Items(
        numbers=range(1, n + 1),
        subjects=[ids.of(row[0]) for row in rows],
        names=[CONTROL.sub(" ", row[1]) if isinstance(row[1], str) else row[1] for row in rows],
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
        given=given,
    )


def _metadata(row: Any) -> dict[str, Any]:
    try:
        said = json.loads(row[3])
    except ValueError as error:
        raise ForeignFileError(f"the metadata of {row[0]!r} are no JSON") from error
    if not isinstance(said, dict):
        raise ForeignFileError(f"the metadata of {row[0]!r} are no JSON object")
    return {**said, **({} if row[2] is None else {"external_id": row[2]})}


def _microseconds(row: Any) -> int | None:
    if row[6] is None:
        return None
    try:
        given = datetime.fromisoformat(row[6])
    except (ValueError, TypeError) as error:
        raise ForeignFileError(f"{row[6]!r}, when a face of {row[0]!r} was enrolled, is no time") from error
    return microseconds(given if given.tzinfo else given.replace(tzinfo=UTC))


def _opened(database: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True))


def _asked(connection: sqlite3.Connection, query: str) -> list[Any]:
    try:
        return connection.execute(query).fetchall()
    except sqlite3.DatabaseError as error:
        raise ForeignFileError(f"this is no database of InsightFace Server: {error}") from error

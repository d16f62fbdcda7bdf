"""Content of a gallery file: a header, and items with a subject and usually a template each. Pure functions.

service.storage.transfer.ndjson reads and writes blocks of items; this module validates them. The rules for subjects are
those of the API.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import numpy as np
import orjson

from kith.wire.identifiers import ID_RULE, TEXT_RULE, normalize_id, normalize_metadata, normalize_text
from models.runtime.network import Float
from service.core.errors import EmbeddingError, ImportFileError, ItemError, KithError
from service.security.sealing import VECTOR_TYPE, Seal

FORMAT_VERSION: Final = 1
TIME_RANGE_TEXT: Final = "must be from 1970 to 2199"
BLOCK_BYTES: Final = 16_000_000
"""Size of the embeddings of one block, which is imported in one transaction."""
MAX_BLOCK_ITEMS: Final = 8192
SIZE_EXEMPT_ITEMS: Final = 100_000
MIN_ITEM_BYTES: Final = 4
"""Mean packed size required of items beyond SIZE_EXEMPT_ITEMS. A subject ID alone is larger."""
TEMPLATE_ID: Final = re.compile("[0-9a-f]{32}")
FINGERPRINT: Final = re.compile("[0-9a-f]{1,64}")
KINDS: Final = frozenset({"photo", "embedding"})
MAX_NAME_LENGTH: Final = 500
MAX_TAG_LENGTH: Final = 64
MAX_TAGS: Final = 100
MAX_METADATA_ENTRIES: Final = 100
MAX_VECTOR_DIMENSION: Final = 65_536
UNIT_NORM_TOLERANCE: Final = 2e-6
"""Vectors with a norm this close to 1 are stored unchanged, so that an export and import round trip is exact."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
MAX_TIME_US: Final = (datetime(2200, 1, 1, tzinfo=UTC) - EPOCH) // MICROSECOND
"""Exclusive upper limit of times in a file."""
SUBJECT_COLUMNS: Final = ("names", "metadata", "tags", "subject_created_us", "subject_updated_us")
"""Columns that describe the subject of an item."""


@dataclass(frozen=True)
class GalleryFileHeader:
    """Header of a gallery file. ``recognizer`` is a fingerprint; ``settings`` has the form of the API."""

    recognizer: str
    dimension: int
    gallery: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    embeddings: bool = True
    subject_count: int | None = None
    template_count: int | None = None

    def document(self) -> dict[str, Any]:
        return {"kith": "gallery", "version": FORMAT_VERSION, **vars(self)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Parse the header. Raises ImportFileError."""
        version = document.get("version")
        if document.get("kith") != "gallery" or version != FORMAT_VERSION:
            raise ImportFileError(f"the header has format version {version!r}; this server reads {FORMAT_VERSION}")
        known = {f.name for f in fields(cls)}
        try:
            header = cls(**{key: value for key, value in document.items() if key in known})
        except TypeError as error:
            raise ImportFileError("the header must name the recognizer and the dimension") from error
        if not isinstance(header.recognizer, str) or not FINGERPRINT.fullmatch(header.recognizer):
            raise ImportFileError("the header's recognizer is not a fingerprint")
        if type(header.dimension) is not int or not 0 < header.dimension <= MAX_VECTOR_DIMENSION:
            raise ImportFileError("the header's dimension is not a positive number")
        if not all(count is None or type(count) is int for count in (header.subject_count, header.template_count)):
            raise ImportFileError("the header's subject_count and template_count are not numbers")
        if not isinstance(header.settings, dict):
            raise ImportFileError("the header's settings are not an object")
        return header


@dataclass(frozen=True, eq=False)
class GalleryItems:
    """Block of items, as columns of length n; None marks a missing value.

    ``subjects`` and ``templates`` are IDs. The columns in SUBJECT_COLUMNS are set on at least one item of a subject;
    :func:`validate_items` copies them to the others. ``vectors`` is (n, d), zero if missing; ``given`` is (n,), False
    if missing. Times are microseconds since 1970 in UTC. ``crops`` are (image, landmarks). ``numbers`` count the items
    of the file from 1. ``malformed`` has the errors of unreadable rows.
    """

    numbers: Sequence[int]
    subjects: list[Any]
    names: list[Any]
    metadata: list[Any]
    tags: list[Any]
    subject_created_us: list[Any]
    subject_updated_us: list[Any]
    templates: list[Any]
    kinds: list[Any]
    qualities: list[Any]
    detection_scores: list[Any]
    created_us: list[Any]
    crops: list[Any]
    vectors: Float
    given: np.ndarray[Any, np.dtype[np.bool_]]
    malformed: dict[int, KithError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.subjects)

    def select(self, rows: Sequence[int]) -> Self:
        if len(rows) == len(self):
            return self
        columns: dict[str, Any] = {}
        for column in fields(self):
            values = getattr(self, column.name)
            if column.name != "malformed":
                columns[column.name] = values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
        return type(self)(**columns)


def max_items(size: int) -> int:
    """Return how many items a file of ``size`` bytes, as sent, may have.

    The limit exists because rejecting an empty item costs the server more than sending it costs the client.
    """
    return SIZE_EXEMPT_ITEMS + size // MIN_ITEM_BYTES


def rows_in_block(dimension: int) -> int:
    return max(64, min(MAX_BLOCK_ITEMS, BLOCK_BYTES // (4 * dimension)))


@dataclass(frozen=True)
class RejectedItem:
    """Rejected item ``number`` of the file."""

    number: int
    error: KithError


class SubjectCarryover:
    """Values of the last subject of a block, whose templates may continue in the next block."""

    def __init__(self) -> None:
        self.subject: str | None = None
        self.values: tuple[Any, ...] = ()


def validate_items(
    items: GalleryItems, dimension: int, carryover: SubjectCarryover | None = None
) -> tuple[GalleryItems, list[RejectedItem]]:
    """Return the valid items, and the errors of the others.

    In the result, vectors have unit norm, every template has a kind, and every item has the values of its subject. The
    values come from all items of the subject, rejected ones too, and from the previous block (``carryover``).
    """
    errors: dict[int, KithError] = dict(items.malformed)
    if len(items) and items.vectors.shape[1] != dimension:
        raise ImportFileError(f"embeddings have {items.vectors.shape[1]} numbers, this gallery's have {dimension}")
    items, subject_errors = _normalize_subject_fields(items)
    items = _spread_subject_fields(items, subject_errors.keys(), carryover or SubjectCarryover())
    for row, error in [*subject_errors.items(), *_invalid_template_fields(items)]:
        errors.setdefault(row, error)
    vectors, sound = normalize_rows(items.vectors)
    for row in np.flatnonzero(items.given & ~sound).tolist():
        errors.setdefault(row, EmbeddingError("an embedding must be finite and must not be zero"))
    rejected = [RejectedItem(items.numbers[row], errors[row]) for row in sorted(errors)]
    valid_rows = [row for row in range(len(items)) if row not in errors]
    valid = items.select(valid_rows)
    stored = vectors[valid_rows] if errors else vectors
    return replace(valid, kinds=[kind or "embedding" for kind in valid.kinds], vectors=stored), rejected


def normalize_rows(vectors: Float) -> tuple[Float, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return (n, d) rows of unit norm, and (n,) whether each row is finite and not zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64, casting="safe"))
    sound = np.isfinite(norms) & (norms >= 1e-12)
    off = np.flatnonzero(sound & (np.abs(norms - 1) > UNIT_NORM_TOLERANCE))
    if len(off):
        vectors = vectors.copy()
        vectors[off] = (vectors[off].astype(np.float64) / norms[off, None]).astype(np.float32)
    return vectors, sound


def derive_template_id(seal: Seal, subject: str, vector: Float) -> str:
    """Return the ID of a template without one in the file, so that a repeated import finds it again.

    Receipts and the audit log contain it in clear text. It is keyed, so it does not reveal who was imported to readers
    without the gallery's key.
    """
    return seal.pseudonym("embedding", f"{subject}\0{hashlib.sha256(vector_bytes(vector)).hexdigest()}")


def vector_bytes(vector: Float) -> bytes:
    """Return the stored bytes of a (d,) vector."""
    return vector.astype(VECTOR_TYPE).tobytes()


def _spread_subject_fields(
    items: GalleryItems, invalid_rows: Collection[int], carryover: SubjectCarryover
) -> GalleryItems:
    """Copy the values of each subject to all of its rows, except for and from ``invalid_rows``."""
    if not len(items):
        return items
    columns = [list(getattr(items, name)) for name in SUBJECT_COLUMNS]
    known: dict[str, list[Any]] = {} if carryover.subject is None else {carryover.subject: list(carryover.values)}
    if len(set(map(str, items.subjects))) < len(items) or carryover.subject in items.subjects:
        rows = [(r, s) for r, s in enumerate(items.subjects) if isinstance(s, str) and r not in invalid_rows]
        for row, subject in rows:
            values = known.setdefault(subject, [None] * len(SUBJECT_COLUMNS))
            for index, column in enumerate(columns):
                if values[index] is None:
                    values[index] = column[row]
        for row, subject in rows:
            for column, value in zip(columns, known[subject], strict=True):
                column[row] = value
    last = items.subjects[-1]
    if isinstance(last, str) and (last in known or len(items) - 1 not in invalid_rows):
        carryover.subject = last
        carryover.values = tuple(known.get(last) or [column[-1] for column in columns])
    spread: dict[str, Any] = dict(zip(SUBJECT_COLUMNS, columns, strict=True))
    return replace(items, **spread)


def _normalize_subject_fields(items: GalleryItems) -> tuple[GalleryItems, dict[int, KithError]]:
    """Return the items with their texts in NFC, and the errors of invalid subjects by row.

    The work goes column by column, because a loop over items is several times slower.
    """
    errors: dict[int, KithError] = {}
    columns: dict[str, Any] = {}
    for name, normalize, rule in SUBJECT_RULES:
        column = columns[name] = list(getattr(items, name))
        for row, value in enumerate(column):
            if value is None and name != "subjects":
                continue
            try:
                column[row] = normalize(value)
            except (TypeError, ValueError, RecursionError):  # another type, not allowed, nested too deeply
                errors.setdefault(row, ItemError(rule))
    for column, name in ((items.subject_created_us, "created"), (items.subject_updated_us, "updated")):
        for row, error in _invalid_rows(column, _is_time, f"subject_{name}_at: {TIME_RANGE_TEXT}"):
            errors.setdefault(row, error)
    return replace(items, **columns), errors


def _invalid_template_fields(items: GalleryItems) -> Iterator[tuple[int, KithError]]:
    yield from _invalid_rows(items.templates, _is_id, "template: must be 32 hexadecimal digits")
    yield from _invalid_rows(items.kinds, lambda kind: kind in KINDS, "kind: must be photo or embedding")
    yield from _invalid_rows(items.qualities, _is_quality, "quality: must be an object of numbers, score from 0 to 1")
    yield from _invalid_rows(items.detection_scores, _is_number, "detection_score: must be a finite number")
    yield from _invalid_rows(items.created_us, _is_time, f"created_at: {TIME_RANGE_TEXT}")
    yield from _invalid_rows(items.crops, _is_crop, "crop: must be WebP with five landmarks, x and y each")
    for row in np.flatnonzero(~items.given).tolist():
        if items.templates[row] is not None:
            yield row, EmbeddingError("a template needs an embedding")


def _invalid_rows(column: list[Any], holds: Callable[[Any], bool], detail: str) -> Iterator[tuple[int, KithError]]:
    if column.count(None) == len(column):
        return  # much sooner than the loop
    for row, value in enumerate(column):
        if value is not None and not holds(value):
            yield row, ItemError(detail)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _normalize_name(name: Any, max_length: int = MAX_NAME_LENGTH) -> str:
    normalized = normalize_text(_text(name))
    if len(normalized) > max_length:
        raise ValueError
    return normalized


def _normalize_metadata(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA_ENTRIES:
        raise TypeError
    if orjson.loads(orjson.dumps(metadata)) != metadata:
        raise ValueError
    return normalize_metadata(metadata)


def _normalize_tags(tags: Any) -> list[str]:
    if not isinstance(tags, list) or len(tags) > MAX_TAGS or "" in tags:
        raise TypeError
    return [_normalize_name(tag, MAX_TAG_LENGTH) for tag in tags]


SUBJECT_RULES: Final[tuple[tuple[str, Callable[[Any], Any], str], ...]] = (
    ("subjects", lambda value: normalize_id(_text(value)), f"subject: {ID_RULE}"),
    ("names", _normalize_name, f"name: must be text of at most {MAX_NAME_LENGTH} characters, and {TEXT_RULE}"),
    ("metadata", _normalize_metadata, f"metadata: must be an object of at most {MAX_METADATA_ENTRIES} entries"),
    ("tags", _normalize_tags, f"tags: must be at most {MAX_TAGS}, of 1 to {MAX_TAG_LENGTH} characters; {TEXT_RULE}"),
)
"""Column, function that normalizes a value or raises an error, and message of the error."""


def _is_id(text: Any) -> bool:
    return isinstance(text, str) and TEMPLATE_ID.fullmatch(text) is not None


def _is_quality(quality: Any) -> bool:
    return (
        isinstance(quality, dict)
        and len(quality) <= 20
        and all(isinstance(name, str) and _is_number(value) for name, value in quality.items())
        # Quality-weighted fusion uses the score: NaN marks a missing one, and null would be an error there.
        and ("score" not in quality or (quality["score"] is not None and 0 <= quality["score"] <= 1))
    )


def _is_crop(crop: Any) -> bool:
    image, landmarks = crop
    return (
        isinstance(image, bytes)
        and image[:4] == b"RIFF"
        and image[8:12] == b"WEBP"
        and isinstance(landmarks, list)
        and len(landmarks) == 5
        and all(
            isinstance(at, list) and len(at) == 2 and None not in at and all(map(_is_number, at)) for at in landmarks
        )
    )


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308)


def _is_time(us: int) -> bool:
    return 0 <= us < MAX_TIME_US


def to_microseconds(time: datetime) -> int:
    return (time - EPOCH) // MICROSECOND


def from_microseconds(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def items_after(items: GalleryItems, number: int) -> GalleryItems:
    """Return the items with a number above ``number``."""
    return items.select([row for row, own in enumerate(items.numbers) if own > number]) if number else items

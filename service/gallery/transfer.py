"""What a file of a gallery says: a header, and items of a subject and mostly a template each. Pure.

The formats (service.gallery.ndjson, service.gallery.parquet) read and write blocks of items; here is what an item may
hold. The rules for subjects are those of the API.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import numpy as np
import orjson

from models.network import Float
from service.errors import EmbeddingError, ImportFileError, ItemError, KithError
from service.security.sealing import VECTOR_TYPE, Seal
from service.words import CONTROL

VERSION: Final = 1
TIMES: Final = "must be from 1970 to 2199"
BLOCK_BYTES: Final = 16_000_000
"""Of embeddings, in one block: what is in memory, and in one transaction."""
MOST_IN_BLOCK: Final = 8192
FREE_ITEMS: Final = 100_000
MIN_ITEM_BYTES: Final = 4
"""Fewest bytes of an item, packed, on average beyond the first FREE_ITEMS. An id alone has more."""
ID: Final = re.compile("[0-9a-f]{32}")
FINGERPRINT: Final = re.compile("[0-9a-f]{1,64}")
KINDS: Final = frozenset({"photo", "embedding"})
LONGEST_ID: Final = 128
LONGEST_NAME: Final = 500
LONGEST_TAG: Final = 64
MOST_TAGS: Final = 100
MOST_METADATA: Final = 100
NO_CONTROLS: Final = ", without control characters"
MOST_DIMENSIONS: Final = 65_536
UNIT_WITHIN: Final = 2e-6
"""A vector whose length is this near to 1 is kept to the last bit: an export comes back as it was."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
END_US: Final = (datetime(2200, 1, 1, tzinfo=UTC) - EPOCH) // MICROSECOND
"""No time in a file is this late, nor before 1970."""
ABOUT: Final = ("names", "metadata", "tags", "subject_created_us", "subject_updated_us")
"""The columns of items that are of their subject."""


@dataclass(frozen=True)
class Header:
    """``recogniser``: the fingerprint of whose vectors these are; ``settings`` as the API gives them."""

    recogniser: str
    dimension: int
    gallery: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    embeddings: bool = True
    subjects: int | None = None
    templates: int | None = None

    def document(self) -> dict[str, Any]:
        return {"kith": "gallery", "version": VERSION, **vars(self)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Raises ImportFileError."""
        version = document.get("version")
        if document.get("kith") != "gallery" or version != VERSION:
            raise ImportFileError(f"the header names version {version!r} of the format; this is version {VERSION}")
        known = {f.name for f in fields(cls)}
        try:
            header = cls(**{key: value for key, value in document.items() if key in known})
        except TypeError as error:
            raise ImportFileError("the header must name the recogniser and the dimension") from error
        if not isinstance(header.recogniser, str) or not FINGERPRINT.fullmatch(header.recogniser):
            raise ImportFileError("the header's recogniser is no fingerprint")
        if type(header.dimension) is not int or not 0 < header.dimension <= MOST_DIMENSIONS:
            raise ImportFileError("the header's dimension is no positive number")
        if not all(count is None or type(count) is int for count in (header.subjects, header.templates)):
            raise ImportFileError("the header's counts of subjects and templates are no numbers")
        if not isinstance(header.settings, dict):
            raise ImportFileError("the header's settings are no object")
        return header


@dataclass(frozen=True, eq=False)
class Items:
    """A block of items, in columns of equal length n; None where an item says nothing.

    ``subjects``: ids. ``names``, ``metadata``, ``tags``, ``subject_created_us``, ``subject_updated_us``: of the
    subject, on one of its items at least (:func:`check` puts them on all). ``templates``: ids. ``vectors``: (n, d),
    rows of zeros where there is none; ``given``: (n,) whether there is one. Times are microseconds since 1970 in UTC.
    ``crops``: (image, landmarks). ``numbers``: of the items in the file, from 1. ``malformed``: rows that could not be
    read.
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

    def chosen(self, rows: Sequence[int]) -> Self:
        if len(rows) == len(self):
            return self
        columns: dict[str, Any] = {}
        for column in fields(self):
            values = getattr(self, column.name)
            if column.name != "malformed":
                columns[column.name] = values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
        return type(self)(**columns)


def max_items(size: int) -> int:
    """Return how many items a file of ``size`` bytes, as sent, may have: refusing an item costs more than sending an
    empty one."""
    return FREE_ITEMS + size // MIN_ITEM_BYTES


def rows_in_block(dimension: int) -> int:
    return max(64, min(MOST_IN_BLOCK, BLOCK_BYTES // (4 * dimension)))


@dataclass(frozen=True)
class Refusal:
    """Item ``number`` of the file was not taken."""

    number: int
    error: KithError


class Told:
    """What the file has said of the subject that it was at when a block ended: its templates may go on in the next."""

    def __init__(self) -> None:
        self.subject: str | None = None
        self.about: tuple[Any, ...] = ()


def check(items: Items, dimension: int, told: Told | None = None) -> tuple[Items, list[Refusal]]:
    """The items that may be stored, and what is wrong with the others.

    Of those that may be, vectors are of unit norm, and every template has a kind. What the block, and the one before
    (``told``), say of a subject stands on all of its items: whichever of them are refused, it is known.
    """
    wrong: dict[int, KithError] = dict(items.malformed)
    if len(items) and items.vectors.shape[1] != dimension:
        raise ImportFileError(f"embeddings have {items.vectors.shape[1]} numbers, this gallery's have {dimension}")
    of_subjects = dict(_faults_of_subjects(items))
    items = _spread(items, of_subjects.keys(), told or Told())
    for row, error in [*of_subjects.items(), *_faults_of_templates(items)]:
        wrong.setdefault(row, error)
    vectors, sound = unit_rows(items.vectors)
    for row in np.flatnonzero(items.given & ~sound).tolist():
        wrong.setdefault(row, EmbeddingError("an embedding must be finite and must not be zero"))
    kept = [row for row in range(len(items)) if row not in wrong] if wrong else list(range(len(items)))
    refused = [Refusal(items.numbers[row], wrong[row]) for row in sorted(wrong)]
    left = items.chosen(kept)
    stored = vectors if len(kept) == len(items) else vectors[kept]
    return replace(left, kinds=[kind or "embedding" for kind in left.kinds], vectors=stored), refused


def unit_rows(vectors: Float) -> tuple[Float, np.ndarray[Any, np.dtype[np.bool_]]]:
    """(n, d) to rows of unit norm, and (n,) whether a row has a direction."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64, casting="safe"))
    sound = np.isfinite(norms) & (norms >= 1e-12)
    off = np.flatnonzero(sound & (np.abs(norms - 1) > UNIT_WITHIN))
    if len(off):
        vectors = vectors.copy()
        vectors[off] = (vectors[off].astype(np.float64) / norms[off, None]).astype(np.float32)
    return vectors, sound


def derived_id(seal: Seal, subject: str, vector: Float) -> str:
    """The id of a template that the file gives none: the same for the same subject and vector, however often it comes.
    Receipts and the audit name it in clear: without the gallery's key nobody can tell by it who was imported."""
    return seal.pseudonym("embedding", f"{subject}\0{hashlib.sha256(vector_bytes(vector)).hexdigest()}")


def earlier_id(subject: str, vector: Float) -> str:
    """As the id was made before it was keyed, and lies in galleries of then."""
    return hashlib.sha256(subject.encode() + b"\0" + vector_bytes(vector)).hexdigest()[:32]


def vector_bytes(vector: Float) -> bytes:
    """(d,) as it is stored."""
    return vector.astype(VECTOR_TYPE).tobytes()


def _spread(items: Items, unsound: Collection[int], told: Told) -> Items:
    """What rows other than ``unsound`` say of a subject, on each of its rows."""
    if not len(items):
        return items
    columns = [list(getattr(items, name)) for name in ABOUT]
    known: dict[str, list[Any]] = {} if told.subject is None else {told.subject: list(told.about)}
    if len(set(map(str, items.subjects))) < len(items) or told.subject in items.subjects:
        for row, subject in enumerate(items.subjects):
            if isinstance(subject, str) and row not in unsound:
                said = known.setdefault(subject, [None] * len(ABOUT))
                for place, column in enumerate(columns):
                    if said[place] is None:
                        said[place] = column[row]
        for row, subject in enumerate(items.subjects):
            if isinstance(subject, str) and row not in unsound:
                for column, value in zip(columns, known[subject], strict=True):
                    column[row] = value
    last = items.subjects[-1]
    if isinstance(last, str) and (last in known or len(items) - 1 not in unsound):
        told.subject, told.about = last, tuple(known.get(last) or [column[-1] for column in columns])
    spread: dict[str, Any] = dict(zip(ABOUT, columns, strict=True))
    return replace(items, **spread)


def _faults_of_subjects(items: Items) -> Iterator[tuple[int, KithError]]:
    """Column by column: a loop over items for each rule is several times slower."""
    yield from _where(items.subjects, is_subject_id, "subject: must be 1 to 128 printable characters, without / and \\")
    yield from _where(items.names, _is_name, f"name: must be text of at most {LONGEST_NAME} characters{NO_CONTROLS}")
    yield from _where(items.metadata, _is_metadata, f"metadata: must be an object of at most {MOST_METADATA} entries")
    yield from _where(
        items.tags, _are_tags, f"tags: must be at most {MOST_TAGS}, of 1 to {LONGEST_TAG} characters{NO_CONTROLS}"
    )
    yield from _where(items.subject_created_us, _is_time, f"subject_created_at: {TIMES}")
    yield from _where(items.subject_updated_us, _is_time, f"subject_updated_at: {TIMES}")


def _faults_of_templates(items: Items) -> Iterator[tuple[int, KithError]]:
    yield from _where(items.templates, _is_id, "template: must be 32 hexadecimal digits")
    yield from _where(items.kinds, lambda kind: kind is None or kind in KINDS, "kind: must be photo or embedding")
    yield from _where(items.qualities, _is_quality, "quality: must be an object of numbers, score from 0 to 1")
    yield from _where(items.detection_scores, _is_number, "detection_score: must be a finite number")
    yield from _where(items.created_us, _is_time, f"created_at: {TIMES}")
    yield from _where(items.crops, _is_crop, "crop: must be WebP with five landmarks, x and y each")
    for row in np.flatnonzero(~items.given).tolist():
        if items.templates[row] is not None:
            yield row, EmbeddingError("a template needs an embedding")


def _where(column: list[Any], holds: Any, detail: str) -> Iterator[tuple[int, KithError]]:
    if column.count(None) == len(column) and holds(None):
        return
    for row, value in enumerate(column):
        if not holds(value):
            yield row, ItemError(detail)


def is_subject_id(text: Any) -> bool:
    return (
        isinstance(text, str)
        and 0 < len(text) <= LONGEST_ID
        and text.isprintable()
        and text == text.strip()
        and "/" not in text
        and "\\" not in text
        and text not in (".", "..")
    )


def _is_name(name: Any) -> bool:
    return name is None or (isinstance(name, str) and len(name) <= LONGEST_NAME and not CONTROL.search(name))


def _is_metadata(metadata: Any) -> bool:
    if metadata is None:
        return True
    if not isinstance(metadata, dict) or len(metadata) > MOST_METADATA:
        return False
    try:
        return bool(orjson.loads(orjson.dumps(metadata)) == metadata)
    except (TypeError, ValueError, RecursionError):  # nested too deeply
        return False


def _are_tags(tags: Any) -> bool:
    return tags is None or (
        isinstance(tags, list)
        and len(tags) <= MOST_TAGS
        and all(isinstance(tag, str) and 0 < len(tag) <= LONGEST_TAG and not CONTROL.search(tag) for tag in tags)
    )


def _is_id(text: Any) -> bool:
    return text is None or (isinstance(text, str) and ID.fullmatch(text) is not None)


def _is_quality(quality: Any) -> bool:
    if quality is None:
        return True
    return (
        isinstance(quality, dict)
        and len(quality) <= 20
        and all(isinstance(name, str) and _is_number(value) for name, value in quality.items())
        # Subjects' vectors are weighted by it: NaN is what a missing one counts as, null would be an error.
        and ("score" not in quality or (quality["score"] is not None and 0 <= quality["score"] <= 1))
    )


def _is_crop(crop: Any) -> bool:
    if crop is None:
        return True
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


def _is_time(us: int | None) -> bool:
    return us is None or 0 <= us < END_US


def microseconds(moment: datetime) -> int:
    return (moment - EPOCH) // MICROSECOND


def moment(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def beyond(items: Items, number: int) -> Items:
    """Those with a larger number."""
    return items.chosen([row for row, own in enumerate(items.numbers) if own > number]) if number else items

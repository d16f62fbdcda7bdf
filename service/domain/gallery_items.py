"""Content of a gallery file: a header, and items with a subject and usually a template each. Pure functions.

service.storage.transfer.ndjson reads and writes them; kith.wire.transfer has their fields, by the rules of the API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import numpy as np
from pydantic import ValidationError

from kith.wire.transfer import GalleryFileHeader, GalleryFileItem, GalleryFileSubject
from models.runtime.network import Float
from service.core.errors import InvalidDataError, KithError
from service.domain.gallery import Crop, Gallery, Item, NewTemplate, Person
from service.security.sealing import VECTOR_TYPE, Seal

FORMAT_VERSION: Final = 1
BLOCK_BYTES: Final = 16_000_000
"""Size of the embeddings of one block, which is imported in one transaction."""
MAX_BLOCK_ITEMS: Final = 8192
SIZE_EXEMPT_ITEMS: Final = 100_000
MIN_ITEM_BYTES: Final = 4
"""Mean packed size required of items beyond SIZE_EXEMPT_ITEMS. A subject ID alone is larger."""
UNIT_NORM_TOLERANCE: Final = 2e-6
"""Vectors with a norm this close to 1 are stored unchanged, so that an export and import round trip is exact."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
NOTHING: Final = Person()
"""What most items say of their subject."""


def read_header(document: Mapping[str, Any]) -> GalleryFileHeader:
    """Parse the header. Unknown fields are ignored. Raises import_invalid."""
    version = document.get("version")
    if document.get("kith") != "gallery" or version != FORMAT_VERSION:
        raise InvalidDataError(
            "import", f"the header has format version {version!r}; this server reads {FORMAT_VERSION}"
        )
    known = {f.name for f in fields(GalleryFileHeader)}
    try:
        return GalleryFileHeader(**{key: value for key, value in document.items() if key in known})
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise InvalidDataError("import", f"the header's {wrong['loc'][0]} is invalid: {wrong['msg']}") from error


@dataclass
class FileRow:
    """Row of a gallery file as read, ``number`` of the file from 1.

    ``about``: its fields; only those of its subject if the row is refused for others; None if neither can be used.
    ``subject``: id that the row gives, unchecked. ``vector``: (4 d) bytes of float32. ``error``: why it is refused.
    """

    number: int
    about: GalleryFileSubject | None
    subject: Any
    vector: bytes | None = None
    error: KithError | None = None


def max_items(size: int) -> int:
    """Return how many items a file of ``size`` bytes, as sent, may have.

    The limit exists because rejecting an empty item costs the server more than sending it costs the client.
    """
    return SIZE_EXEMPT_ITEMS + size // MIN_ITEM_BYTES


def rows_in_block(dimension: int) -> int:
    return max(64, min(MAX_BLOCK_ITEMS, BLOCK_BYTES // (4 * dimension)))


class People:
    """What the items of a file, refused ones too, say of their subjects. The first value of a field stays."""

    def __init__(self) -> None:
        self._last: dict[str, Person] = {}

    def of(self, rows: Sequence[FileRow]) -> dict[str, Person]:
        """Return the subjects of a block. The first one may have begun in the block before."""
        people, last = self._last, None
        for about in (row.about for row in rows if row.about is not None):
            said = Person(about.name, about.metadata, about.tags, about.subject_created_at, about.subject_updated_at)
            known, last = people.get(about.subject, NOTHING), about.subject
            if said != NOTHING or known is NOTHING:
                people[last] = Person._make(map(_first_given, known, said))
        self._last = people if last is None else {last: people[last]}
        return people


def _first_given(known: Any, given: Any) -> Any:
    return given if known is None else known


def checked(rows: Sequence[FileRow], gallery: Gallery) -> tuple[list[Item], dict[int, KithError]]:
    """Return the valid items, with vectors of unit norm and ids of templates, and the errors of others by number."""
    given = [row.vector for row in rows if row.vector is not None]
    normalized, sound = normalize_rows(np.frombuffer(b"".join(given), VECTOR_TYPE).reshape(-1, gallery.dimension))
    vectors = iter(zip(normalized, sound.tolist(), strict=True))
    items, rejected = list[Item](), dict[int, KithError]()
    for row in rows:
        vector, is_sound = next(vectors) if row.vector is not None else (None, True)
        error = row.error
        if error is None and not is_sound:
            error = InvalidDataError("embedding", "an embedding must be finite and must not be zero")
        if error is not None:
            rejected[row.number] = error
            continue
        assert isinstance(row.about, GalleryFileItem)  # noqa: S101 - of every row without an error
        template = None if vector is None else _template(row.about, vector, gallery)
        items.append(Item(row.about.subject, template, row.number))
    return items, rejected


def _template(item: GalleryFileItem, vector: Float, gallery: Gallery) -> NewTemplate:
    crop = None
    if gallery.settings.keep_crops and item.crop is not None and item.landmarks is not None:
        crop = Crop(item.crop, tuple((x, y) for x, y in item.landmarks))
    return NewTemplate(
        item.template or derive_template_id(gallery.seal, item.subject, vector),
        vector,
        item.kind or "embedding",
        cast("dict[str, float] | None", item.quality),  # a missing measure may be null
        item.detection_score,
        crop=crop,
        created_at=item.created_at,
    )


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


def to_microseconds(time: datetime) -> int:
    return (time - EPOCH) // MICROSECOND


def from_microseconds(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)

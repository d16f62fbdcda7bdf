"""Base classes and field types of the models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
)

from kith.wire.identifiers import CONTROL_CHARACTERS, normalize_id, normalize_metadata, normalize_text

OBJECT_ID: Final = "^[0-9a-f]{32}$"
GALLERY_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
SUBJECT_ID_PATTERN: Final = r"^[^/\\]{1,128}$"
"""Part of the rules of ids that JSON Schema can express (:func:`kith.wire.identifiers.normalize_id` has all)."""
SINGLE_LINE: Final = rf"^[^{CONTROL_CHARACTERS}]*$"
MAX_URL_LENGTH: Final = 2048
MAX_NAME_LENGTH: Final = 500
MAX_TAG_LENGTH: Final = 64
MAX_LABELS: Final = 100
"""Maximum number of tags, and of metadata entries, of a subject."""
MAX_FILTER_TAGS: Final = 32
MAX_DECOYS: Final = 50
"""Maximum number of decoys of a subject, by one recognizer."""
MAX_DIMENSION: Final = 65_536
DETAIL: Final = (
    "Effort of face detection (docs/models.md). low: one look; medium: if no face is confident, also the photo "
    "rotated and at half the size; high: also small faces in large photos."
)
MODEL: Final = "Name of the pack, or fingerprint of its recognizer; default: the pack of KITH_PACK."


Item = TypeVar("Item")


class RequestModel(BaseModel):
    """Base of request models. It rejects unknown fields, because a misspelled option would otherwise be ignored."""

    model_config = ConfigDict(extra="forbid", val_json_bytes="base64")


class Page(BaseModel, Generic[Item]):
    """Page of a list."""

    data: list[Item]
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return the name of the page of a model, which it also has in the OpenAPI document: JobsOut of JobOut."""
        return re.sub("(?<![aeo])y$", "ie", params[0].__name__.removesuffix("Out")) + "sOut"


class Problem(BaseModel):
    """Error document (RFC 9457). ``code`` is stable; ``remedy`` says what to do."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    remedy: str
    request_id: str | None = None


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError("must hold finite numbers and valid Unicode, not nested too deeply") from error
    return metadata


def _before_checks(normalize: Callable[[str], str]) -> BeforeValidator:
    """Return a validator that normalizes text before its length and pattern are checked."""
    return BeforeValidator(lambda value: normalize(value) if isinstance(value, str) else value)


def to_utc(at: datetime) -> datetime:
    """Convert a time to UTC; one without a time zone is in UTC. Raise ValueError if it is out of range there."""
    try:
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except OverflowError as error:
        raise ValueError("the time is out of range in UTC") from error


TIMESTAMP: Final = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$"


def rfc3339(at: datetime) -> str:
    """Return the form of all times in answers and exports: RFC 3339 in UTC to the microsecond, with Z.

    ``at`` has a time zone."""
    return f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


Timestamp = Annotated[
    datetime,
    PlainSerializer(rfc3339, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time", "pattern": TIMESTAMP}),
]
"""Time in an answer."""
GalleryName = Annotated[str, StringConstraints(pattern=GALLERY_NAME), Field(examples=["staff"])]
NORMALIZED: Final = _before_checks(normalize_text)
SubjectId = Annotated[
    str, StringConstraints(pattern=SUBJECT_ID_PATTERN), _before_checks(normalize_id), Field(examples=["ada"])
]
PersonName = Annotated[str, StringConstraints(max_length=MAX_NAME_LENGTH, pattern=SINGLE_LINE), NORMALIZED]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TAG_LENGTH, pattern=SINGLE_LINE), NORMALIZED]
Metadata = Annotated[
    dict[str, JsonValue], Field(max_length=MAX_LABELS), AfterValidator(_storable), AfterValidator(normalize_metadata)
]
# Collecting the errors of all 100,000 items takes a quarter of a second, so validation stops at the first.
Embedding = Annotated[list[FiniteFloat], Field(max_length=MAX_DIMENSION, fail_fast=True)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
ObjectId = Annotated[str, Field(pattern=OBJECT_ID, examples=["72c098051f698623421f8da33dba3ec0"])]
"""Random or derived id of a template, face, stranger, album, job or webhook."""
Fingerprint = ObjectId
"""Identity of a recognizer."""

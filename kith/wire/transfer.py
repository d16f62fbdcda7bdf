"""Rows of gallery files, and the result of an import."""

from __future__ import annotations

import binascii
from dataclasses import field
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, PlainValidator
from pydantic.dataclasses import dataclass

from kith.wire.common import TemplateKind
from kith.wire.fields import (
    MAX_DIMENSION,
    MAX_LABELS,
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    Metadata,
    ObjectId,
    PersonName,
    Problem,
    SubjectId,
    Tag,
    to_utc,
)
from kith.wire.identifiers import ID_RULE, TEXT_RULE

RULES: Final = {
    "subject": ID_RULE,
    "name": f"must be text of at most {MAX_NAME_LENGTH} characters, and {TEXT_RULE}",
    "metadata": f"must be an object of at most {MAX_LABELS} entries",
    "tags": f"must be at most {MAX_LABELS}, of 1 to {MAX_TAG_LENGTH} characters; {TEXT_RULE}",
    "template": "must be 32 hexadecimal digits",
    "kind": "must be photo or embedding",
    "quality": "must be an object of numbers, score from 0 to 1",
    "detection_score": "must be a finite number",
    "crop": "must be WebP in base64 with five landmarks, x and y each",
    "landmarks": "must be five points, x and y each",
}
"""What the value of a field must be; of the other fields, TIME_RULE."""
TIME_RULE: Final = "must be a time from 1970 to 2199, such as 2026-01-31T12:00:00Z"
MIN_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)
END_OF_TIMES: Final = datetime(2200, 1, 1, tzinfo=UTC)


def _time(given: Any) -> datetime:
    at = datetime.fromisoformat(given) if isinstance(given, str) else END_OF_TIMES
    at = to_utc(at)
    if not MIN_TIME <= at < END_OF_TIMES:
        raise ValueError("out of range")
    return at


def _webp(given: Any) -> bytes:
    image = binascii.a2b_base64(given, strict_mode=True) if isinstance(given, str) else b""
    if image[:4] != b"RIFF" or image[8:12] != b"WEBP":
        raise ValueError("not WebP")
    return image


def _quality(measures: dict[str, float | None]) -> dict[str, float | None]:
    # Quality-weighted fusion uses the score: NaN marks a missing one, and null would be an error there.
    score = measures.get("score", 0)
    if score is None or not 0 <= score <= 1:
        raise ValueError("score must be from 0 to 1")
    return measures


Time = Annotated[datetime, PlainValidator(_time)]
WebP = Annotated[bytes, PlainValidator(_webp)]
Quality = Annotated[dict[str, FiniteFloat | None], Field(max_length=20), AfterValidator(_quality)]
Point = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
FILE_FINGERPRINT: Final = "^[0-9a-f]{1,64}$"
FileFingerprint = Annotated[str, Field(pattern=FILE_FINGERPRINT)]
"""Identity of a recognizer, perhaps of another version of Kith."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class GalleryFileHeader:
    """Header of a gallery file. ``recognizer`` is a fingerprint; ``settings`` has the form of the API."""

    recognizer: FileFingerprint
    dimension: Annotated[int, Field(gt=0, le=MAX_DIMENSION)]
    gallery: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    embeddings: bool = True
    subject_count: int | None = None
    template_count: int | None = None


class GalleryFileSubject(BaseModel):
    """Part of an item that describes its subject. One item of a subject suffices for all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    subject: SubjectId
    name: PersonName | None = None
    metadata: Metadata | None = None
    tags: list[Tag] | None = Field(None, max_length=MAX_LABELS, fail_fast=True)
    subject_created_at: Time | None = None
    subject_updated_at: Time | None = None


class GalleryFileItem(GalleryFileSubject):
    """Item of a gallery file: a subject, and usually a template with its ``embedding``, which is checked apart.

    ``template``: its id. One without an id gets one that depends on its subject and embedding only.
    """

    template: ObjectId | None = None
    kind: TemplateKind | None = None
    quality: Quality | None = None
    detection_score: FiniteFloat | None = None
    created_at: Time | None = None
    crop: WebP | None = None
    landmarks: list[Point] | None = Field(None, min_length=5, max_length=5)


class ImportRefusalOut(BaseModel):
    item: int = Field(description="Line of the file, from 1.")
    error: Problem


class ImportOut(BaseModel):
    gallery: str
    item_count: int = Field(description="Items read.")
    subject_count: int = Field(description="Subjects created.")
    template_count: int = Field(description="Templates stored durably.")
    present_count: int = Field(description="Templates that existed already.")
    refused_count: int
    refusals: list[ImportRefusalOut] = Field(description="The first thousand.")

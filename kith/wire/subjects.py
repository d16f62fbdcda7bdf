"""Subjects, their templates, and enrollment."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from kith.wire.common import FaceChoice, TemplateKind
from kith.wire.erasures import ReceiptOut
from kith.wire.faces import FaceOut
from kith.wire.fields import MAX_LABELS, Metadata, PersonName, Problem, RequestModel, SubjectId, Tag, Timestamp
from kith.wire.photos import Probes


class SubjectIn(RequestModel):
    name: PersonName | None = None
    metadata: Metadata = Field(default_factory=dict)
    tags: list[Tag] = Field(default_factory=list, max_length=MAX_LABELS)


class SubjectPatch(RequestModel):
    name: PersonName | None = None
    metadata: Metadata | None = None
    tags: list[Tag] | None = Field(None, max_length=MAX_LABELS)


class MergeIn(RequestModel):
    into: SubjectId = Field(description="The subject that remains.")


class TemplatePatch(RequestModel):
    subject: SubjectId = Field(description="The subject that receives the template.")


class ChecksIn(RequestModel):
    """Checks of an enrollment to skip."""

    allow_duplicate: bool = False
    allow_inconsistent: bool = False
    allow_low_quality: bool = False
    allow_not_live: bool = False


class EnrollIn(ChecksIn, Probes):
    """Photos and embeddings of a subject, and the checks to skip."""

    face: FaceChoice = "only"


class DecoyIn(Probes):
    """Exactly one photo or embedding."""

    face: FaceChoice = "only"
    allow_low_quality: bool = False


class DecoyOut(BaseModel):
    """A stranger who was mistaken for the subject."""

    id: str
    kind: TemplateKind
    in_use: bool = Field(description="False: of another recognizer than the one that answers requests.")
    created_at: Timestamp


class SubjectOut(BaseModel):
    id: str
    name: str | None
    metadata: dict[str, Any]
    tags: list[str]
    template_count: int
    created_at: Timestamp
    updated_at: Timestamp


class TemplateOut(BaseModel):
    id: str
    kind: TemplateKind
    quality: dict[str, float] | None
    detection_score: float | None
    created_at: Timestamp


class EnrolledOut(BaseModel):
    image: int | None = None
    embedding: int | None = None
    template: str | None = None
    face: FaceOut | None = None
    face_count: int | None = Field(
        None, description="Faces in the photo. Of several, face is the one that is clearly the largest."
    )
    error: Problem | None = None


class EnrollOut(BaseModel):
    """One result per photo and per embedding, in request order. Each is enrolled or rejected on its own."""

    subject: str
    enrolled_count: int
    results: list[EnrolledOut]


class MergedOut(BaseModel):
    """Result of a merge: the remaining subject, the number of templates it received, and the other's receipt."""

    subject: SubjectOut
    template_count: int
    receipt: ReceiptOut

"""Subjects and templates: requests, and conversion to responses."""

from __future__ import annotations

from pydantic import Field

from kith.wire.common import FaceChoice
from kith.wire.subjects import SubjectOut, TemplateOut
from service.domain.gallery import Subject, Template
from service.schemas.fields import Metadata, PersonName, RequestModel, SubjectId, Tag
from service.schemas.photos import Probes
from service.storage.repositories.subjects import MAX_LABELS


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


class EnrollIn(Probes):
    face: FaceChoice = "only"
    allow_duplicate: bool = False
    allow_inconsistent: bool = False
    allow_low_quality: bool = False
    allow_not_live: bool = False


def to_subject_out(subject: Subject) -> SubjectOut:
    """Convert a subject."""
    return SubjectOut.model_validate(subject, from_attributes=True)


def to_template_out(template: Template) -> TemplateOut:
    """Convert a template, without its vector."""
    return TemplateOut.model_validate(template, from_attributes=True)

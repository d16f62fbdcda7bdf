"""Findings of the gallery hygiene check."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import NEXT_PAGE, HygieneKind


class NamedOut(BaseModel):
    subject: str
    name: str | None = None


class TemplateRefOut(BaseModel):
    template: str
    subject: str


class FindingOut(BaseModel):
    """Possible enrollment error in a gallery."""

    kind: HygieneKind
    subjects: list[NamedOut]
    templates: list[TemplateRefOut] = Field(
        description="The templates in question; for duplicates and lookalikes the two most similar."
    )
    similarity: float | None = Field(
        None, description="Mean over the compared templates; null without another subject nearby."
    )
    chance: float | None = Field(
        None,
        description="Probability by the pack's calibration that two different people are so similar, for one "
        "comparison. A gallery makes many.",
    )
    own_similarity: float | None = Field(
        None, description="Similarity of the templates in question to the nearest other template of their subject."
    )
    belongs_to: str | None = Field(None, description="The subject that a mislabeled template resembles.")
    action: str


class HygieneOut(BaseModel):
    """Findings by kind (duplicate_subjects, mislabeled_template, inconsistent_subject, lookalikes), most certain
    first. ``total`` counts all of them."""

    gallery: str
    total: dict[HygieneKind, int]
    findings: list[FindingOut]
    next: str | None = Field(None, description=NEXT_PAGE)

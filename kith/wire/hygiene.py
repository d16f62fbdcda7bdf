"""Findings of the gallery hygiene check."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import HygieneKind
from kith.wire.fields import Page


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
        description="Share of pairs of different people in this gallery that are so similar. A gallery has many pairs.",
    )
    odds: float | None = Field(
        None,
        description="Odds that two subjects are one person, or that a template shows another person: 3 means 3 to 1, "
        "0.01 means 1 to 100. They assume that 1 in 100 subjects is enrolled twice, and 2 in 100 templates are wrong.",
    )
    own_similarity: float | None = Field(
        None, description="Similarity of the templates in question to the nearest other template of their subject."
    )
    belongs_to: str | None = Field(None, description="The subject that a mislabeled template resembles.")
    action: str


class HygieneOut(Page[FindingOut]):
    """Findings by kind (duplicate_subjects, mislabeled_template, lookalikes), most certain first. ``counts`` has the
    number of all of them."""

    gallery: str
    counts: dict[HygieneKind, int]
    nearest: list[FindingOut] = Field(
        default_factory=list,
        description="The next similar pairs of subjects, at most 10, however small their odds. A person can recognize "
        "duplicates among them that the recognizer cannot find.",
    )
    expected_recall: float | None = Field(
        None,
        description="Expected share of duplicates that this recognizer finds here, from pairs of photos of one person. "
        "Null below two subjects.",
    )
    expected_recall_low: float | None = Field(
        None, description="Together with 'expected_recall_high', the 95 % interval of 'expected_recall'."
    )
    expected_recall_high: float | None = None

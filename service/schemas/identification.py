"""Requests to identify faces."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from service.schemas.fields import Metadata, RequestModel, Tag
from service.schemas.photos import Probes
from service.schemas.risk import RiskIn


class FilterIn(RequestModel):
    """Subjects must have all tags and all metadata entries."""

    tags: list[Tag] = Field(default_factory=list, max_length=32)
    metadata: Metadata = Field(default_factory=dict)


class IdentifyIn(Probes):
    faces: Literal["all", "largest"] = "all"
    top_k: int = Field(5, ge=1, le=100)
    risk: RiskIn | None = Field(None, description="Default: the gallery's risk.")
    filter: FilterIn | None = None
    check_quality: bool = Field(True, description="Answer rejected_quality for faces below the gallery's quality gate.")

"""Result of an import."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import Problem


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

"""Result of an import."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import Problem


class ImportRefusalOut(BaseModel):
    item: int = Field(description="Line of the file, from 1.")
    error: Problem


class ImportOut(BaseModel):
    gallery: str
    items: int = Field(description="Items read.")
    subjects: int = Field(description="Subjects created.")
    templates: int = Field(description="Templates stored durably.")
    present: int = Field(description="Templates that existed already.")
    refused: int
    refusals: list[ImportRefusalOut] = Field(description="The first thousand.")

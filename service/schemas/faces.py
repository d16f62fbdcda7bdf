"""Requests to detect and embed faces."""

from __future__ import annotations

from pydantic import Field

from service.schemas.fields import MODEL, ModelName
from service.schemas.photos import Photos


class DetectIn(Photos):
    """Photos to detect faces in."""


class EmbedIn(Photos):
    model: ModelName | None = Field(None, description=MODEL)

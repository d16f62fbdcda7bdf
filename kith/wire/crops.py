"""Stored face crops, read many at once."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, Field, model_validator

from kith.wire.fields import ObjectId, RequestModel, SubjectId

MAX_CROPS: Final = 200
"""Crops of one request, about 2 MB of base64."""


class CropIn(RequestModel):
    """Owner of a crop: a subject or a stranger (their best crop), one template of the subject, or a face of an
    album."""

    subject: SubjectId | None = None
    template: ObjectId | None = None
    stranger: ObjectId | None = None
    album: ObjectId | None = None
    face: ObjectId | None = None

    @model_validator(mode="after")
    def _names_one(self) -> CropIn:
        owners = [each for each in (self.subject, self.stranger, self.album) if each is not None]
        detached = self.template is not None and self.subject is None
        if len(owners) != 1 or detached or (self.album is None) != (self.face is None):
            raise ValueError("name a subject, a subject and its template, a stranger, or an album and its face")
        return self


class CropsIn(RequestModel):
    crops: list[CropIn] = Field(min_length=1, max_length=MAX_CROPS)


class CropOut(BaseModel):
    image: str | None = Field(description="WebP in base64; null if no crop of it is stored.")


class CropsOut(BaseModel):
    """The crops, in the order of the request."""

    data: list[CropOut]

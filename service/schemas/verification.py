"""Requests to verify that two sides show the same person."""

from __future__ import annotations

from pydantic import Field, model_validator

from models.vision.face_search import Detail
from service.schemas.fields import (
    DETAIL,
    MODEL,
    Embedding,
    Fingerprint,
    GalleryName,
    ModelName,
    RequestModel,
    SubjectId,
)
from service.schemas.photos import PhotoBytes, PhotoUrl
from service.schemas.risk import RiskIn


class SubjectRef(RequestModel):
    gallery: GalleryName
    subject: SubjectId


class SideIn(RequestModel):
    """One side of a comparison: exactly one of image, url, embedding, subject."""

    image: PhotoBytes | None = None
    url: PhotoUrl | None = Field(None, description="URL of a photo on a host in KITH_URL_HOSTS.")
    embedding: Embedding | None = None
    subject: SubjectRef | None = None
    recognizer: Fingerprint | None = Field(None, description="Recognizer of the embedding, as /v1/embed reports it.")

    @model_validator(mode="after")
    def _exactly_one(self) -> SideIn:
        if len(self.model_fields_set - {"recognizer"}) != 1:
            raise ValueError("give exactly one of image, url, embedding, subject")
        return self


class VerifyIn(RequestModel):
    """In multipart requests the photos are file parts named ``a`` and ``b``."""

    a: SideIn
    b: SideIn
    risk: RiskIn | None = Field(
        None,
        description="Default: the gallery's risk if one side is a subject and the risk is an FMR or a threshold; else "
        "the preset standard.",
    )
    detail: Detail | None = Field(None, description=f"{DETAIL} Default: KITH_DETAIL, at least medium.")
    model: ModelName | None = Field(None, description=f"{MODEL[:-1]}, or the pack of a subject's gallery.")
    require_liveness: bool = Field(
        False, description="Require live persons in photos. A subject's gallery may require it as well."
    )

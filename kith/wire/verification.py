"""1:1 verification of two sides: requests and results."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from kith.wire.common import Detail, VerifyOutcome
from kith.wire.faces import FaceOut
from kith.wire.fields import DETAIL, MODEL, Embedding, Fingerprint, GalleryName, ModelName, RequestModel, SubjectId
from kith.wire.identification import RiskOut
from kith.wire.photos import PhotoBytes, PhotoUrl
from kith.wire.risk import RiskIn


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
        given = self.model_fields_set - {"recognizer"}
        if len(given) != 1 or getattr(self, *given) is None:
            raise ValueError("give exactly one of image, url, embedding, subject")
        return self


class VerifyIn(RequestModel):
    """At most one side is a subject. In multipart requests the photos are file parts named ``a`` and ``b``."""

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

    @model_validator(mode="after")
    def _not_two_subjects(self) -> VerifyIn:
        if self.a.subject is not None and self.b.subject is not None:
            raise ValueError("one side may be a subject; GET /v1/galleries/{gallery}/hygiene compares subjects")
        return self


class SideOut(BaseModel):
    face: FaceOut | None = None
    face_count: int | None = Field(None, description="Faces found in the photo.")


class VerifyOut(BaseModel):
    model: str
    outcome: VerifyOutcome
    similarity: float | None = Field(
        None, description="Coarse in a comparison with a subject without the scope vectors (docs/keys.md)."
    )
    threshold: float | None = None
    review_threshold: float | None = None
    false_match_probability: float | None = Field(
        None, description="Probability that two different people are at least this similar."
    )
    probability_is_bound: bool | None = Field(
        None, description="The true probability is this or smaller: the evidence supports none below."
    )
    risk: RiskOut | None = None
    reasons: list[str] = Field(default_factory=list)
    a: SideOut
    b: SideOut

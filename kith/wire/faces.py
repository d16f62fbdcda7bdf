"""Requests to detect and embed faces, and detected faces: box, landmarks, quality, liveness and embedding."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, Field

from kith.wire.common import Verdict
from kith.wire.fields import MODEL, ModelName, Problem
from kith.wire.photos import Photos

MAX_FACES: Final = 100
"""Maximum number of faces of a photo in an answer."""


class DetectIn(Photos):
    """Photos to detect faces in."""


class EmbedIn(Photos):
    model: ModelName | None = Field(None, description=MODEL)


class QualityOut(BaseModel):
    eye_distance_px: float
    sharpness: float
    brightness: float
    contrast: float
    yaw: float
    pitch: float
    roll_deg: float
    score: float = Field(
        description="Usability for recognition, 0 to 1, from size, sharpness, exposure and yaw. Informational only."
    )
    usable: bool = Field(description="The face passes the gallery's quality gate, or the default one.")
    reasons: list[str] = Field(description="The values out of bounds.")


class LivenessOut(BaseModel):
    score: float | None = Field(
        description="Probability of a live person, 0 to 1; null if the photo shows too little around the face."
    )
    verdict: Verdict = Field(description="Result at the gallery's threshold, or the pack's.")


class FaceOut(BaseModel):
    """One face of a photo."""

    box: list[float] = Field(description="x0, y0, x1, y1 in pixels of the upright photo.")
    landmarks: list[list[float]] = Field(description="Left eye, right eye, nose, left and right mouth corner: x, y.")
    score: float = Field(description="Detection score, 0 to 1.")
    quality: QualityOut
    liveness: LivenessOut | None = Field(None, description="Present if the pack has a liveness model.")
    embedding: list[float] | None = Field(None, description="Vector of unit length; only from /v1/embed.")


class FaceCountOut(BaseModel):
    """Number of faces in a photo; missing if the photo is rejected."""

    face_count: int | None = Field(None, description="Faces found in the photo.")
    truncated: bool | None = Field(
        None, description=f"Faces are left out: only the {MAX_FACES} largest are in the answer."
    )


class PhotoOut(FaceCountOut):
    width: int | None = None
    height: int | None = None
    min_face_px: float | None = Field(
        None,
        description="Width in pixels of the smallest face that the detection usually finds in this photo. "
        "detail=high finds smaller faces in large photos.",
    )
    faces: list[FaceOut] = Field(default_factory=list)
    error: Problem | None = Field(None, description="Reason for which this photo was rejected.")


class FacesOut(BaseModel):
    model: str
    recognizer: str | None = Field(None, description="Fingerprint of the recognizer that made the embeddings.")
    images: list[PhotoOut]

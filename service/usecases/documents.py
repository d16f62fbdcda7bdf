"""Response documents about faces, built as dictionaries and encoded once.

Validating and walking a pydantic model per face costs more than the rest of the response (docs/decisions.md, 33).
Fields without a value are left out. tests/service/api/test_openapi.py checks the documents against the models.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson

from models.runtime.network import Float
from models.vision.quality import QualityGate
from service.core.errors import KithError
from service.domain.outcomes import RiskTarget
from service.inference.photo_pipeline import Face, Photo
from service.risk.threshold import Thresholds

DEFAULT_GATE: Final = QualityGate()

Document = dict[str, Any]


def encode_json(document: Document) -> bytes:
    """Encode to JSON. A float32 gets the fewest digits that decode to the same float32."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def without_none(**fields: Any) -> Document:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def photo_document(result: Photo | KithError) -> Document:
    """Return the ``PhotoOut`` document of a photo, or of the error that its processing raised."""
    if isinstance(result, KithError):
        return {"faces": [], "error": problem_document(result)}
    faces = [face_document(face) for face in result.faces]
    for document, face in zip(faces, result.faces, strict=True):
        if face.vector is not None:
            document["embedding"] = face.vector
    size = {"width": result.width, "height": result.height, "min_face_px": round(result.min_face_px, 1)}
    return {**size, **count_document(result), "faces": faces}


def count_document(photo: Photo) -> Document:
    """Return how many faces were found in a photo, and whether the answer leaves some out."""
    return {"face_count": photo.face_count, "truncated": photo.truncated}


def face_document(face: Face, gate: QualityGate = DEFAULT_GATE, liveness_threshold: float | None = None) -> Document:
    """Return the ``FaceOut`` document of a face, without the embedding.

    Args:
        face: the face.
        gate: bounds of usable quality.
        liveness_threshold: minimum score of a live face; None: the model pack's threshold.
    """
    reasons = gate.reasons(face.quality)
    document = {
        "box": _round_pixels(face.box_xyxy),
        "landmarks": _round_pixels(face.landmarks_xy),
        "score": round(face.score, 4),
        "quality": {**face.quality.as_dict(), "usable": not reasons, "reasons": reasons},
    }
    if face.liveness is not None:
        document["liveness"] = {"score": face.liveness.score, "verdict": face.liveness.verdict(liveness_threshold)}
    return document


def risk_document(target: RiskTarget, thresholds: Thresholds) -> Document:
    """Return a ``RiskOut`` document."""
    return {target.kind: target.value, "source": thresholds.source, "extrapolated": thresholds.extrapolated}


def problem_document(error: KithError) -> Document:
    """Return a ``Problem`` document."""
    return without_none(**error.document())


def _round_pixels(pixels: Float) -> Any:
    """Round to a tenth of a pixel, in the type that orjson encodes."""
    return np.round(pixels, 1).astype(np.float32, copy=False)

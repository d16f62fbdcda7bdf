"""Liveness check of a face, if the gallery requires it."""

from __future__ import annotations

from models.vision.quality_gate import LivenessVerdict
from service.core.errors import LivenessUnavailableError
from service.domain.gallery import Gallery
from service.inference.photo_pipeline import Face


def verdict_of(gallery: Gallery, face: Face | None) -> LivenessVerdict | None:
    """Return the verdict on a face, or on an embedding (None). None: the gallery does not require liveness.

    Raises:
        LivenessUnavailableError: the gallery requires liveness, and no model is served.
    """
    if gallery.settings.liveness == "off":
        return None
    if face is None:
        return "not_judged"
    if face.liveness is None:
        raise LivenessUnavailableError(f"gallery {gallery.name!r} requires liveness; the pack has no model for it")
    return face.liveness.verdict(gallery.settings.liveness_threshold)

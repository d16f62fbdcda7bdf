"""Whether a person was before the camera, where a gallery asks."""

from __future__ import annotations

from models.gate import Verdict
from service.errors import LivenessUnavailableError
from service.gallery.subjects import Gallery
from service.pipeline import Face


def verdict_of(gallery: Gallery, face: Face | None) -> Verdict | None:
    """Of a face, or of an embedding (None), which nobody saw; None where the gallery does not ask.

    Raises:
        LivenessUnavailableError: the gallery asks, and no model here can tell.
    """
    if gallery.settings.liveness == "off":
        return None
    if face is None:
        return "not_judged"
    if face.liveness is None:
        raise LivenessUnavailableError(f"gallery {gallery.name!r} requires liveness, which the pack served cannot tell")
    return face.liveness.verdict(gallery.settings.liveness_threshold)

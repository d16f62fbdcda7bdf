"""Response documents with CompreFace's names. The field ``kith`` holds the decision of Kith's own API."""

from __future__ import annotations

import uuid
from typing import Final

import numpy as np

from service.api.compreface.requests import FaceOptions
from service.api.compreface.similarity import level_of, level_of_candidate, to_client, to_probability
from service.domain.gallery import Gallery, Template
from service.inference.photo_pipeline import Face
from service.usecases.backend import Backend
from service.usecases.documents import Document
from service.usecases.identify import EVENT_FIELDS

UNKNOWN_SUBJECT: Final = {"subject": "unknown", "similarity": 0.0}
"""Stands for candidates that the key may not see. Clients read the first subject without checking that there is one."""
DECISION_FIELDS: Final = tuple(name for name in EVENT_FIELDS if name != "name")


def face_fields(face: Face, options: FaceOptions) -> Document:
    """Return the box, and the landmarks and the embedding if they are requested."""
    x_min, y_min, x_max, y_max = (round(value) for value in face.box_xyxy.tolist())
    document: Document = {
        "box": {
            "probability": to_probability(face.score),
            "x_max": x_max,
            "y_max": y_max,
            "x_min": max(0, x_min),
            "y_min": max(0, y_min),
        }
    }
    if options.has_plugin("landmarks"):
        document["landmarks"] = np.rint(face.landmarks_xy).astype(np.int64)
    if options.has_plugin("calculator") and face.vector is not None:
        document["embedding"] = face.vector
    return document


def with_versions(document: Document, options: FaceOptions, backend: Backend, gallery: Gallery) -> Document:
    """Add the names of the networks if the request has status=true."""
    if options.status:
        recognizers = backend.recognizers
        served = recognizers.for_gallery(gallery)
        names = {"detector": recognizers.default.pack.model_id, "calculator": served.pack.model_id}
        document["plugins_versions"] = names
    return document


def decision_fields(document: Document) -> Document:
    """Return the field ``kith``: the decision in an ``IdentityOut`` document."""
    return {"kith": {name: document[name] for name in DECISION_FIELDS if name in document}}


def similar_subjects(document: Document, gallery: Gallery, count: int) -> list[Document]:
    """Return up to ``count`` candidates of an ``IdentityOut`` document, most similar first.

    The list is empty only if the gallery is: a face without a candidate gets UNKNOWN_SUBJECT.
    """
    found, best = [], level_of(document["outcome"])
    for rank, candidate in enumerate(document["candidates"][:count]):
        accept, review, similarity = document["threshold"], document["review_threshold"], candidate["similarity"]
        level = best if rank == 0 else level_of_candidate(similarity, review, best)
        mapped = to_client(similarity, accept, review, level)
        found.append({"subject": candidate["subject"], "similarity": mapped})
    return found or [dict(UNKNOWN_SUBJECT)] * bool(gallery.templates)


def example(template: Template) -> Document:
    return {"image_id": str(uuid.UUID(hex=template.id)), "subject": template.subject}

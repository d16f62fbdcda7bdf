"""Open-set identification (1:N) of faces and embeddings in a gallery."""

from __future__ import annotations

from fastapi import Request, Response

from kith.wire.identification import IdentifyIn, IdentifyOut
from service.api.http.bodies import read_photos
from service.api.http.parameters import GalleryPath
from service.api.http.route_errors import SEARCH
from service.api.http.routing import IDENTIFY, PHOTO, BackendDep, CallerDep, Routes, json_response
from service.core.errors import EmbeddingError, LivenessUnavailableError
from service.usecases import identify as usecase

routes = Routes("", "identify")


@routes.add(
    "POST",
    "/v1/galleries/{gallery}/identify",
    IDENTIFY,
    response_model=IdentifyOut,
    photos=IdentifyIn,
    example={"images": [PHOTO], "risk": {"fpir": 0.001}, "top_k": 3, "filter": {"tags": ["staff"]}},
    errors=(*SEARCH, EmbeddingError, LivenessUnavailableError),
)
async def identify(gallery: GalleryPath, request: Request, backend: BackendDep, caller: CallerDep) -> Response:
    """Decide for each face of the photos, for the largest face of each photo, or for given embeddings.

    Embeddings and a risk other than the gallery's need the scope vectors. Without it, similarities are coarse, and
    candidates below the review threshold are left out.
    """
    with backend.operations.metrics.stage("read"):
        body = await read_photos(request, IdentifyIn, backend.settings, backend.faces.recognizers.largest_dimension)
    found = await backend.find_gallery(gallery)
    served, counts, items = await usecase.identify(backend, found, body, caller)
    return json_response(
        {
            "gallery": found.name,
            "model": served.pack.model_id,
            "recognizer": served.fingerprint,
            "images": counts,
            "results": [item.document for item in items],
        }
    )

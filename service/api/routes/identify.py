"""Open-set identification (1:N) of faces and embeddings in a gallery."""

from __future__ import annotations

from fastapi import Response

from kith.wire.identification import IdentifyIn, IdentifyOut
from service.api.http.access import IDENTIFY, BackendDep, CallerDep, GalleryDep, json_response, router
from service.api.http.bodies import PhotosBody
from service.api.http.openapi import PHOTO, example
from service.usecases import identify as usecase

routes = router("", "identify")


@routes.post(
    "/v1/galleries/{gallery}/identify",
    dependencies=[IDENTIFY],
    response_model=IdentifyOut,
    openapi_extra=example({"images": [PHOTO], "risk": {"fpir": 0.001}, "top_k": 3, "filter": {"tags": ["staff"]}}),
)
async def identify(
    gallery: GalleryDep, body: PhotosBody[IdentifyIn], backend: BackendDep, caller: CallerDep
) -> Response:
    """Decide for each face of the photos, for the largest face of each photo, or for given embeddings.

    Embeddings and a risk other than the gallery's need the scope vectors. Without it, similarities are coarse, and
    candidates below the review threshold are left out.
    """
    served, counts, items = await usecase.identify(backend, gallery, body, caller)
    return json_response(
        {
            "gallery": gallery.name,
            "model": served.pack.model_id,
            "recognizer": served.fingerprint,
            "images": counts,
            "results": [item.document for item in items],
        }
    )

"""Recognition of photos in the key's gallery."""

from __future__ import annotations

from fastapi import Response

from kith.wire.identification import IdentifyIn
from service.api.compreface.access import IDENTIFY, RECOGNITION, BoundGallery
from service.api.compreface.requests import FileDep, OptionsDep, PredictionCount, max_predictions
from service.api.compreface.responses import decision_fields, face_fields, similar_subjects, with_versions
from service.api.compreface.similarity import CLIENT_DETECTION
from service.api.http.access import BackendDep, CallerDep, json_response, router
from service.usecases.identify import identify

routes = router(f"{RECOGNITION}/recognize")


@routes.post("", dependencies=[IDENTIFY])
async def recognize(
    gallery: BoundGallery,
    backend: BackendDep,
    caller: CallerDep,
    photo: FileDep,
    options: OptionsDep,
    prediction_count: PredictionCount = 1,
) -> Response:
    """Identify the faces of a photo at the gallery's risk."""
    largest = "largest" if options.limit == 1 and (options.det_prob_threshold or 0) <= CLIENT_DETECTION else "all"
    count = max_predictions(prediction_count)
    body = IdentifyIn(faces=largest, top_k=count, detail=options.detail).model_copy(update={"images": [photo]})
    current = await backend.reload_gallery(gallery)
    _, _, items = await identify(backend, current, body, caller)
    documents = {id(item.face): item.document for item in items}
    results = [
        face_fields(face, options)
        | {"subjects": similar_subjects(documents[id(face)], current, count)}
        | decision_fields(documents[id(face)])
        for face in options.choose([item.face for item in items if item.face is not None])
    ]
    return json_response(with_versions({"result": results}, options, backend, current))

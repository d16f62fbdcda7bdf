"""Detection of faces, and recognition of photos and embeddings in the key's gallery."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kith.wire.identification import IdentifyIn
from service.api.compreface.access import PREFIX, RECOGNITION, BoundGallery, CompreFaceRoute
from service.api.compreface.requests import (
    CutoffsDep,
    EmbeddingsBody,
    OptionsDep,
    PredictionCount,
    max_predictions,
    read_embeddings,
    read_file,
)
from service.api.compreface.responses import decision_fields, face_fields, similar_subjects, with_versions
from service.api.compreface.similarity import CLIENT_DETECTION
from service.api.http.backend import BackendDep
from service.api.http.permissions import IDENTIFY, permitted
from service.api.http.responses import json_response
from service.api.http.routing import CallerDep
from service.usecases.identify import identify

router = APIRouter(route_class=CompreFaceRoute, include_in_schema=False)


@router.post(f"{PREFIX}/detection/detect")
@permitted(IDENTIFY)
async def detect(gallery: BoundGallery, request: Request, backend: BackendDep, options: OptionsDep) -> Response:
    """Detect faces."""
    payload = await read_file(request, backend)
    served, photos = backend.faces.recognizers.for_gallery(gallery), backend.faces.photos
    detail = options.detail or backend.settings.detail
    if options.has_plugin("calculator"):
        photo = await photos.embed(payload, served, detail=detail)
    else:
        photo = await photos.detect(payload, detail)
    min_score = backend.settings.detection_score
    faces = options.choose(photo.faces, min_score)
    document = {"result": [face_fields(face, options, min_score) for face in faces]}
    return json_response(with_versions(document, options, backend.faces.recognizers.default.pack.model_id, served))


@router.post(f"{RECOGNITION}/recognize")
@permitted(IDENTIFY)
async def recognize(
    gallery: BoundGallery,
    request: Request,
    backend: BackendDep,
    caller: CallerDep,
    options: OptionsDep,
    cutoffs: CutoffsDep,
    prediction_count: PredictionCount = 1,
) -> Response:
    """Identify the faces of a photo at the gallery's risk."""
    photo = await read_file(request, backend)
    largest = "largest" if options.limit == 1 and (options.det_prob_threshold or 0) <= CLIENT_DETECTION else "all"
    count = max_predictions(prediction_count)
    body = IdentifyIn(faces=largest, top_k=count, detail=options.detail).model_copy(update={"images": [photo]})
    current = await backend.reload_gallery(gallery)
    served, items = await identify(backend, current, body, caller)
    min_score = backend.settings.detection_score
    documents = {id(item.face): item.document for item in items}
    results = [
        face_fields(face, options, min_score)
        | {"subjects": similar_subjects(documents[id(face)], current, count, cutoffs)}
        | decision_fields(documents[id(face)])
        for face in options.choose([item.face for item in items if item.face is not None], min_score)
    ]
    return json_response(
        with_versions({"result": results}, options, backend.faces.recognizers.default.pack.model_id, served)
    )


@router.post(f"{RECOGNITION}/embeddings/recognize")
@permitted(IDENTIFY)
async def recognize_embeddings(
    gallery: BoundGallery,
    request: Request,
    backend: BackendDep,
    caller: CallerDep,
    cutoffs: CutoffsDep,
    prediction_count: PredictionCount = 1,
) -> Response:
    """Identify embeddings of the gallery's recognizer. Needs the scope vectors."""
    count = max_predictions(prediction_count)
    embeddings = (await read_embeddings(request, backend, gallery, EmbeddingsBody)).embeddings
    body = IdentifyIn(top_k=count).model_copy(update={"embeddings": embeddings})
    current = await backend.reload_gallery(gallery)
    _, items = await identify(backend, current, body, caller)
    results = [
        {"embedding": embedding, "similarities": similar_subjects(item.document, current, count, cutoffs)}
        | decision_fields(item.document)
        for embedding, item in zip(embeddings, items, strict=True)
    ]
    return json_response({"result": results})

"""Detection of faces, and recognition of photos and embeddings in the key's gallery."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Response

from kith.wire.identification import IdentifyIn
from service.api.compreface.access import PREFIX, RECOGNITION, AskDep, CompreFaceRoute
from service.api.compreface.requests import (
    EmbeddingsBody,
    OptionsDep,
    PredictionCount,
    max_predictions,
    read_embeddings,
    read_file,
)
from service.api.compreface.responses import decision_fields, face_fields, similar_subjects, with_versions
from service.api.compreface.similarity import CLIENT_DETECTION
from service.api.http.routing import IDENTIFY, Routes, json_response
from service.usecases.identify import identify

routes = Routes(route_class=CompreFaceRoute)


@routes.add("POST", f"{PREFIX}/detection/detect", IDENTIFY, body="photos")
async def detect(ask: AskDep, options: OptionsDep) -> Response:
    """Detect faces."""
    payload, backend = await read_file(ask), ask.backend
    served, photos = backend.faces.recognizers.for_gallery(ask.gallery), backend.faces.photos
    detail = options.detail or backend.settings.detail
    if options.has_plugin("calculator"):
        photo = await photos.embed(payload, served, detail=detail)
    else:
        photo = await photos.detect(payload, detail)
    min_score = backend.settings.detection_score
    faces = options.choose(photo.faces, min_score)
    document = {"result": [face_fields(face, options, min_score) for face in faces]}
    return json_response(with_versions(document, options, ask))


@routes.add("POST", f"{RECOGNITION}/recognize", IDENTIFY, body="photos")
async def recognize(ask: AskDep, options: OptionsDep, prediction_count: PredictionCount = 1) -> Response:
    """Identify the faces of a photo at the gallery's risk."""
    photo, backend = await read_file(ask), ask.backend
    largest = "largest" if options.limit == 1 and (options.det_prob_threshold or 0) <= CLIENT_DETECTION else "all"
    count = max_predictions(prediction_count)
    body = IdentifyIn(faces=largest, top_k=count, detail=options.detail).model_copy(update={"images": [photo]})
    current = await backend.reload_gallery(ask.gallery)
    _, _, items = await identify(backend, current, body, ask.caller)
    min_score = backend.settings.detection_score
    documents = {id(item.face): item.document for item in items}
    results = [
        face_fields(face, options, min_score)
        | {"subjects": similar_subjects(documents[id(face)], current, count, ask.cutoffs)}
        | decision_fields(documents[id(face)])
        for face in options.choose([item.face for item in items if item.face is not None], min_score)
    ]
    return json_response(with_versions({"result": results}, options, replace(ask, gallery=current)))


@routes.add("POST", f"{RECOGNITION}/embeddings/recognize", IDENTIFY)
async def recognize_embeddings(ask: AskDep, prediction_count: PredictionCount = 1) -> Response:
    """Identify embeddings of the gallery's recognizer. Needs the scope vectors."""
    count = max_predictions(prediction_count)
    embeddings = (await read_embeddings(ask, EmbeddingsBody)).embeddings
    body = IdentifyIn(top_k=count).model_copy(update={"embeddings": embeddings})
    current = await ask.backend.reload_gallery(ask.gallery)
    _, _, items = await identify(ask.backend, current, body, ask.caller)
    results = [
        {"embedding": embedding, "similarities": similar_subjects(item.document, current, count, ask.cutoffs)}
        | decision_fields(item.document)
        for embedding, item in zip(embeddings, items, strict=True)
    ]
    return json_response({"result": results})

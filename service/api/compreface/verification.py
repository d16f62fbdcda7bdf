"""Verification of a photo with another photo or with a stored template, and of embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastapi import Response

from kith.wire.verification import SideIn, SubjectRef, VerifyIn
from models.runtime.network import Float
from service.api.compreface.access import PREFIX, RECOGNITION, Ask, AskDep, CompreFaceRoute
from service.api.compreface.requests import (
    EmbeddingPairBody,
    EmbeddingsBody,
    FaceOptions,
    ImageId,
    OptionsDep,
    PairBody,
    read_embeddings,
    read_file,
    read_files,
)
from service.api.compreface.responses import decision_fields, face_fields, pair_similarity, with_versions
from service.api.http.routing import IDENTIFY, Routes, json_response
from service.core.errors import TemplateNotFoundError
from service.core.photo_errors import SeveralFacesError
from service.domain.gallery import Template
from service.inference.photo_pipeline import Face, Photo, verdict_of
from service.inference.recognizers import check_recognizer, check_vectors
from service.risk.decision import EnrolledSubject, refuse_presentation
from service.usecases.documents import Document
from service.usecases.verify import Verification, compare_sides

routes = Routes(route_class=CompreFaceRoute)


@dataclass(frozen=True, eq=False)
class _Comparer:
    """Compares faces or embeddings with ``reference``. ``template``: the stored one, None for a photo or embedding."""

    ask: Ask
    reference: Float | EnrolledSubject
    template: Template | None = None

    async def of_face(self, face: Face) -> Document:
        """Return the similarity and the decision of a face."""
        assert face.vector is not None  # noqa: S101 - embed sets the vector of every face
        quality = self.ask.gallery.settings.quality_gate.reasons(face.quality)
        liveness = None if self.template is None else verdict_of(self.ask.gallery, face)
        return await self._compare(face.vector, quality, liveness is None or liveness == "live")

    async def of_embedding(self, vector: Float) -> Document:
        """Return the similarity and the decision of a (d,) vector."""
        return await self._compare(vector, [], self.template is None or verdict_of(self.ask.gallery, None) is None)

    async def _compare(self, vector: Float, quality: list[str], live: bool) -> Document:
        backend, gallery, template = self.ask.backend, self.ask.gallery, self.template
        side = photo = SideIn.model_construct({"image"})
        if template is not None:
            subject = SubjectRef.model_construct(gallery=gallery.name, subject=template.subject)
            side = SideIn.model_construct({"subject"}, subject=subject)
        body = VerifyIn.model_construct(a=side, b=photo)
        served = backend.faces.recognizers.for_gallery(gallery)
        verification = Verification(body, None if template is None else gallery, served, None)
        refusal, reasons = refuse_presentation(quality, None if live else "not_live")
        document: Document = {"reasons": reasons}
        await compare_sides(backend, verification, self.ask.caller, (self.reference, vector), document)
        document["outcome"] = refusal or document["outcome"]
        backend.operations.metrics.count_verification(document["outcome"])
        if template is not None:
            await backend.operations.audit.verified(gallery, template.subject, document["outcome"])
        return {"similarity": pair_similarity(document, self.ask.cutoffs), **decision_fields(document)}


@routes.add("POST", f"{PREFIX}/verification/verify", IDENTIFY, body="photos")
async def verify_photos(ask: AskDep, options: OptionsDep) -> Response:
    """Compare the only face of ``source_image``, or the clearly largest one, with each face of ``target_image``."""
    source, target = [await _embed(ask, options, payload) for payload in await read_files(ask, PairBody)]
    min_score = ask.backend.settings.detection_score
    sources, targets = (options.choose(photo.faces, min_score) for photo in (source, target))
    if len(sources) > 1:
        row, rivaled = source.main_face(ask.gallery.settings.quality_gate)
        if rivaled:
            raise SeveralFacesError(f"source_image shows {len(sources)} faces, and none is clearly the largest")
        sources = [source.faces[row]]
    assert sources[0].vector is not None  # noqa: S101 - embed sets the vector of every face
    comparer = _Comparer(ask, sources[0].vector)
    matches = [face_fields(face, options, min_score) | await comparer.of_face(face) for face in targets]
    matches.sort(key=lambda match: -match["similarity"])
    document = {"source_image_face": face_fields(sources[0], options, min_score), "face_matches": matches}
    return json_response({"result": [with_versions(document, options, ask)]})


@routes.add("POST", f"{PREFIX}/verification/embeddings/verify", IDENTIFY)
async def verify_embeddings(ask: AskDep) -> Response:
    """Compare an embedding with others. None of them is enrolled."""
    body = await read_embeddings(ask, EmbeddingPairBody)
    source, *targets = check_vectors([body.source, *body.targets], ask.gallery.dimension)
    results = await _compare_embeddings(_Comparer(ask, source), body.targets, targets)
    return json_response({"result": sorted(results, key=lambda result: -result["similarity"])})


@routes.add("POST", f"{RECOGNITION}/faces/{{image_id}}/verify", IDENTIFY, body="photos")
async def verify_with_template(ask: AskDep, image_id: ImageId, options: OptionsDep) -> Response:
    """Compare each face of a photo with a stored template."""
    payload = await read_file(ask)
    current = await _reloaded(ask)
    comparer, subject = await _stored(current, image_id.hex)
    photo = await _embed(current, options, payload)
    min_score = ask.backend.settings.detection_score
    results = [
        face_fields(face, options, min_score) | {"subject": subject} | await comparer.of_face(face)
        for face in options.choose(photo.faces, min_score)
    ]
    return json_response(with_versions({"result": results}, options, current))


@routes.add("POST", f"{RECOGNITION}/embeddings/faces/{{image_id}}/verify", IDENTIFY)
async def verify_embeddings_with_template(ask: AskDep, image_id: ImageId) -> Response:
    """Compare embeddings with a stored template. Needs the scope vectors."""
    body = await read_embeddings(ask, EmbeddingsBody)
    ask.caller.check_vectors("embeddings")
    current = await _reloaded(ask)
    check_recognizer(current.gallery, None)
    vectors = check_vectors(body.embeddings, current.gallery.dimension)
    comparer, _ = await _stored(current, image_id.hex)
    return json_response({"result": await _compare_embeddings(comparer, body.embeddings, vectors)})


async def _reloaded(ask: Ask) -> Ask:
    return replace(ask, gallery=await ask.backend.reload_gallery(ask.gallery))


async def _embed(ask: Ask, options: FaceOptions, payload: bytes) -> Photo:
    served = ask.backend.faces.recognizers.for_gallery(ask.gallery)
    detail = options.detail or ask.backend.settings.expected_face_detail
    return await ask.backend.faces.photos.embed(payload, served, detail=detail)


async def _compare_embeddings(
    comparer: _Comparer, given: list[list[float]], vectors: Iterable[Float]
) -> list[Document]:
    pairs = zip(given, vectors, strict=True)
    return [{"embedding": embedding} | await comparer.of_embedding(vector) for embedding, vector in pairs]


async def _stored(ask: Ask, template_id: str) -> tuple[_Comparer, str]:
    """Return a comparer with a stored template, and its subject. Raises TemplateNotFoundError."""
    backend, gallery = ask.backend, ask.gallery
    template = await backend.run(backend.galleries.store.templates.find, gallery, template_id)
    vectors, qualities = await backend.run(backend.galleries.store.templates.vector, gallery, template)
    if not len(vectors):
        raise TemplateNotFoundError(f"template {template_id!r} was deleted, or has no vector of this recognizer")
    model, settings = backend.galleries.risks.current(gallery), gallery.settings
    reference = EnrolledSubject(vectors, qualities, settings.fusion, model, settings.review_factor)
    return _Comparer(ask, reference, template), template.subject

"""Verification of a photo with another photo or with a stored template, and of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from kith.wire.verification import SideIn, SubjectRef, VerifyIn
from models.runtime.network import Float
from service.api.compreface.access import PREFIX, RECOGNITION, BoundGallery, CompreFaceRoute
from service.api.compreface.requests import (
    CutoffsDep,
    EmbeddingPairBody,
    EmbeddingsBody,
    ImageId,
    OptionsDep,
    PairBody,
    read_embeddings,
    read_file,
    read_files,
)
from service.api.compreface.responses import decision_fields, face_fields, pair_similarity, with_versions
from service.api.compreface.similarity import Cutoffs
from service.api.http.backend import BackendDep
from service.api.http.permissions import IDENTIFY, permitted
from service.api.http.responses import json_response
from service.api.http.routing import CallerDep
from service.core.errors import TemplateNotFoundError
from service.core.photo_errors import SeveralFacesError
from service.domain.gallery import Gallery, Template
from service.inference.photo_pipeline import Face, verdict_of
from service.inference.recognizers import check_recognizer, check_vectors
from service.risk.decision import refuse_presentation
from service.risk.verification import EnrolledSubject
from service.security.callers import Caller
from service.usecases.backend import Backend
from service.usecases.documents import Document
from service.usecases.verify import Verification, compare_sides

router = APIRouter(route_class=CompreFaceRoute, include_in_schema=False)


@dataclass(frozen=True, eq=False)
class _Comparer:
    """Compares faces or embeddings with ``reference``. ``template``: the stored one, None for a photo or embedding."""

    backend: Backend
    caller: Caller
    gallery: Gallery
    cutoffs: Cutoffs
    reference: Float | EnrolledSubject
    template: Template | None = None

    async def of_face(self, face: Face) -> Document:
        """Return the similarity and the decision of a face."""
        assert face.vector is not None  # noqa: S101 - embed sets the vector of every face
        quality = self.gallery.settings.quality_gate.reasons(face.quality)
        liveness = None if self.template is None else verdict_of(self.gallery, face)
        return await self._compare(face.vector, quality, liveness is None or liveness == "live")

    async def of_embedding(self, vector: Float) -> Document:
        """Return the similarity and the decision of a (d,) vector."""
        return await self._compare(vector, [], self.template is None or verdict_of(self.gallery, None) is None)

    async def _compare(self, vector: Float, quality: list[str], live: bool) -> Document:
        stored = self.template is not None
        side = SideIn.model_construct({"image"})
        if self.template is not None:
            reference = SubjectRef.model_construct(gallery=self.gallery.name, subject=self.template.subject)
            side = SideIn.model_construct({"subject"}, subject=reference)
        body = VerifyIn.model_construct(a=side, b=SideIn.model_construct({"image"}))
        served = self.backend.faces.recognizers.for_gallery(self.gallery)
        verification = Verification(body, {self.gallery.name: self.gallery} if stored else {}, served, None)
        refusal, reasons = refuse_presentation(quality, None if live else "not_live")
        document: Document = {"reasons": reasons}
        compare_sides(self.backend, verification, self.caller, (self.reference, vector), document)
        document["outcome"] = refusal or document["outcome"]
        self.backend.operations.metrics.count_verification(document["outcome"])
        if self.template is not None:
            await self.backend.operations.audit.verified(self.gallery, self.template.subject, document["outcome"])
        return {"similarity": pair_similarity(document, self.cutoffs), **decision_fields(document)}


@router.post(f"{PREFIX}/verification/verify")
@permitted(IDENTIFY)
async def verify_photos(
    gallery: BoundGallery,
    request: Request,
    backend: BackendDep,
    caller: CallerDep,
    options: OptionsDep,
    cutoffs: CutoffsDep,
) -> Response:
    """Compare the only face of ``source_image`` with each face of ``target_image``."""
    payloads = await read_files(request, backend, PairBody)
    served = backend.faces.recognizers.for_gallery(gallery)
    detail = options.detail or backend.settings.expected_face_detail
    source, target = [await backend.faces.photos.embed(payload, served, detail=detail) for payload in payloads]
    min_score = backend.settings.detection_score
    sources, targets = (options.choose(photo.faces, min_score) for photo in (source, target))
    if len(sources) > 1:
        raise SeveralFacesError(f"source_image shows {len(sources)} faces")
    assert sources[0].vector is not None  # noqa: S101 - embed sets the vector of every face
    comparer = _Comparer(backend, caller, gallery, cutoffs, sources[0].vector)
    matches = [face_fields(face, options, min_score) | await comparer.of_face(face) for face in targets]
    matches.sort(key=lambda match: -match["similarity"])
    document = {"source_image_face": face_fields(sources[0], options, min_score), "face_matches": matches}
    default = backend.faces.recognizers.default.pack.model_id
    return json_response({"result": [with_versions(document, options, default, served)]})


@router.post(f"{PREFIX}/verification/embeddings/verify")
@permitted(IDENTIFY)
async def verify_embeddings(
    gallery: BoundGallery, request: Request, backend: BackendDep, caller: CallerDep, cutoffs: CutoffsDep
) -> Response:
    """Compare an embedding with others. None of them is enrolled."""
    body = await read_embeddings(request, backend, gallery, EmbeddingPairBody)
    source, *targets = check_vectors([body.source, *body.targets], gallery.dimension)
    comparer = _Comparer(backend, caller, gallery, cutoffs, source)
    results = [
        {"embedding": given} | await comparer.of_embedding(vector)
        for given, vector in zip(body.targets, targets, strict=True)
    ]
    return json_response({"result": sorted(results, key=lambda result: -result["similarity"])})


@router.post(f"{RECOGNITION}/faces/{{image_id}}/verify")
@permitted(IDENTIFY)
async def verify_with_template(
    gallery: BoundGallery,
    image_id: ImageId,
    request: Request,
    backend: BackendDep,
    caller: CallerDep,
    options: OptionsDep,
    cutoffs: CutoffsDep,
) -> Response:
    """Compare each face of a photo with a stored template."""
    payload = await read_file(request, backend)
    current = await backend.reload_gallery(gallery)
    comparer = await _stored(backend, caller, current, cutoffs, image_id.hex)
    served = backend.faces.recognizers.for_gallery(current)
    detail = options.detail or backend.settings.expected_face_detail
    photo = await backend.faces.photos.embed(payload, served, detail=detail)
    min_score = backend.settings.detection_score
    subject = "" if comparer.template is None else comparer.template.subject
    results = [
        face_fields(face, options, min_score) | {"subject": subject} | await comparer.of_face(face)
        for face in options.choose(photo.faces, min_score)
    ]
    default = backend.faces.recognizers.default.pack.model_id
    return json_response(with_versions({"result": results}, options, default, served))


@router.post(f"{RECOGNITION}/embeddings/faces/{{image_id}}/verify")
@permitted(IDENTIFY)
async def verify_embeddings_with_template(
    gallery: BoundGallery,
    image_id: ImageId,
    request: Request,
    backend: BackendDep,
    caller: CallerDep,
    cutoffs: CutoffsDep,
) -> Response:
    """Compare embeddings with a stored template. Needs the scope vectors."""
    body = await read_embeddings(request, backend, gallery, EmbeddingsBody)
    caller.check_vectors("embeddings")
    current = await backend.reload_gallery(gallery)
    check_recognizer(current, None)
    vectors = check_vectors(body.embeddings, current.dimension)
    comparer = await _stored(backend, caller, current, cutoffs, image_id.hex)
    results = [
        {"embedding": given} | await comparer.of_embedding(vector)
        for given, vector in zip(body.embeddings, vectors, strict=True)
    ]
    return json_response({"result": results})


async def _stored(backend: Backend, caller: Caller, gallery: Gallery, cutoffs: Cutoffs, template_id: str) -> _Comparer:
    """Return a comparer with a stored template. Raises TemplateNotFoundError."""
    template = await backend.run(backend.galleries.store.templates.find, gallery, template_id)
    vectors, qualities = await backend.run(backend.galleries.store.templates.vector, gallery, template)
    if not len(vectors):
        raise TemplateNotFoundError(f"template {template_id!r} was deleted, or has no vector of this recognizer")
    model, settings = backend.galleries.risks.current(gallery), gallery.settings
    reference = EnrolledSubject(vectors, qualities, settings.fusion, model, settings.review_factor)
    return _Comparer(backend, caller, gallery, cutoffs, reference, template)

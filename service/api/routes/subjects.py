"""Subjects and their templates: create, edit, enroll, merge, delete."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import TypeAdapter, ValidationError

from kith.wire.erasures import DeletedOut
from kith.wire.subjects import EnrollOut, MergedOut, SubjectOut, SubjectsOut, TemplateOut, TemplatesOut
from models.runtime.network import Float
from service.api.http.bodies import read_photos
from service.api.http.context import Context, ContextDep
from service.api.http.openapi import PROBLEMS, request_body
from service.api.http.parameters import Cursor, GalleryPath, PageLimit, open_cursor, paginate
from service.api.http.permissions import Caller
from service.api.http.photos import process_photos
from service.api.http.responses import Document, encode_json, face_document, problem_document, stored_problem_document
from service.api.http.routing import CallerDep, GallerySnapshot, GallerySnapshotRoute
from service.core import deadlines
from service.core.errors import (
    DuplicateSubjectError,
    GalleryChangedError,
    GalleryMovedError,
    InconsistentTemplateError,
    InvalidRequestError,
    KithError,
    SubjectExistsError,
)
from service.domain.gallery import Gallery, IdempotentResponse, NewTemplate, SubjectFilter
from service.inference.photo_pipeline import Photo
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.schemas.erasures import to_deleted_out, to_receipt_out
from service.schemas.fields import Metadata, SubjectId, Tag
from service.schemas.subjects import (
    EnrollIn,
    MergeIn,
    SubjectIn,
    SubjectPatch,
    TemplatePatch,
    to_subject_out,
    to_template_out,
)
from service.services.enrollment import (
    Overrides,
    check_identities,
    choose_face,
    embed_for,
    needs_identity_check,
    new_template,
    template_from_face,
)

router = APIRouter(
    route_class=GallerySnapshotRoute, prefix="/v1/galleries/{gallery}/subjects", tags=["subjects"], responses=PROBLEMS
)
SubjectPath = Annotated[SubjectId, Path(examples=["ada"])]
TemplatePath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=255, description="A repeated request gets the first response."
    ),
]
METADATA_ADAPTER: Final[TypeAdapter[dict[str, Any]]] = TypeAdapter(Metadata)
METADATA_HELP: Final = "Only subjects with all of these metadata: a JSON object, compared as in a search filter."

OnlyNew = Annotated[
    Literal["*"] | None,
    Header(alias="If-None-Match", description="Only if the subject does not exist yet; else 412 `subject_exists`."),
]


@router.get("")
async def list_subjects(
    gallery: GalleryPath,
    context: ContextDep,
    cursor: Cursor = None,
    limit: PageLimit = 100,
    tag: Annotated[list[Tag], Query(max_length=32, description="Only subjects with all of these tags.")] = [],  # noqa: B006
    metadata: Annotated[str | None, Query(description=METADATA_HELP, examples=['{"floor": 3}'])] = None,
) -> SubjectsOut:
    """List the subjects, oldest first."""
    found_gallery = await context.run(context.store.galleries.get, gallery)
    seal, chosen = found_gallery.seal, SubjectFilter(tuple(tag), _metadata(metadata))
    found = await context.run(
        context.store.subjects.list_page, found_gallery, open_cursor(seal, cursor), limit + 1, chosen
    )
    page, more = paginate(found, limit, seal, lambda row: row.pk)
    return SubjectsOut(subjects=[to_subject_out(s) for s in page], next=more)


@router.put("/{subject}", responses={201: {"model": SubjectOut, "description": "The subject was created."}})
async def put_subject(
    snapshot: GallerySnapshot,
    subject: SubjectPath,
    body: SubjectIn,
    response: Response,
    context: ContextDep,
    only_new: OnlyNew = None,
) -> SubjectOut:
    """Create a subject, or replace its name, metadata and tags. Its templates stay."""
    fields = body.name, body.metadata, body.tags, only_new is not None
    put, created = await context.run_on_gallery(snapshot, context.store.subjects.put, subject, *fields)
    response.status_code = 201 if created else 200
    return to_subject_out(put)


@router.get("/{subject}")
async def get_subject(gallery: GalleryPath, subject: SubjectPath, context: ContextDep) -> SubjectOut:
    """Return a subject."""
    found = await context.run(context.store.galleries.get, gallery)
    return to_subject_out(await context.run(context.store.subjects.get, found, subject))


@router.patch("/{subject}")
async def patch_subject(
    snapshot: GallerySnapshot, subject: SubjectPath, body: SubjectPatch, context: ContextDep
) -> SubjectOut:
    """Change the given fields. The others stay."""
    # Null removes a name. Metadata and tags are emptied by {} and [].
    given = {k: v for k, v in body.model_dump(exclude_unset=True).items() if k == "name" or v is not None}
    return to_subject_out(await context.run_on_gallery(snapshot, context.store.subjects.patch, subject, given))


@router.delete("/{subject}")
async def delete_subject(gallery: GalleryPath, subject: SubjectPath, context: ContextDep) -> DeletedOut:
    """Erase a subject with its templates and all its other data.

    The response is a receipt. A repeated request gets 404 with the first receipt.
    """
    receipt = await context.run_on_gallery(gallery, context.store.subjects.delete, subject)
    context.pipeline.risks.follow(await context.find_gallery(gallery))
    return to_deleted_out(receipt)


@router.post("/{subject}/merge")
async def merge_subject(
    snapshot: GallerySnapshot, subject: SubjectPath, body: MergeIn, context: ContextDep
) -> MergedOut:
    """Merge a subject into another one that is the same person, and erase it, in one transaction.

    Templates and tags move; metadata and the name move where the other subject has none. The response has the receipt,
    and a repeated request gets the same. A merge cannot be undone.
    """
    done = await context.run_on_gallery(snapshot, context.store.subjects.merge, subject, body.into)
    context.pipeline.risks.follow(await context.find_gallery(snapshot.name))
    return MergedOut(subject=to_subject_out(done.into), templates=done.templates, receipt=to_receipt_out(done.receipt))


@router.get("/{subject}/templates")
async def list_templates(
    gallery: GalleryPath, subject: SubjectPath, context: ContextDep, cursor: Cursor = None, limit: PageLimit = 100
) -> TemplatesOut:
    """List the templates of a subject, oldest first."""
    found = await context.run(context.store.galleries.get, gallery)
    listed = await context.run(
        context.store.templates.list_page, found, subject, open_cursor(found.seal, cursor), limit + 1
    )
    page, more = paginate(listed, limit, found.seal, lambda row: row.pk)
    return TemplatesOut(subject=subject, templates=[to_template_out(t) for t in page], next=more)


@router.get("/{subject}/templates/{template}")
async def get_template(
    gallery: GalleryPath, subject: SubjectPath, template: TemplatePath, context: ContextDep
) -> TemplateOut:
    """Return a template, without its embedding."""
    found = await context.run(context.store.galleries.get, gallery)
    return to_template_out(await context.run(context.store.templates.get, found, subject, template))


@router.patch("/{subject}/templates/{template}")
async def move_template(
    snapshot: GallerySnapshot, subject: SubjectPath, template: TemplatePath, body: TemplatePatch, context: ContextDep
) -> TemplatesOut:
    """Move a template to another subject. The response is the first page of that subject's templates."""
    await context.run_on_gallery(snapshot, context.store.templates.move, subject, template, body.subject)
    context.pipeline.risks.follow(await context.find_gallery(snapshot.name))
    return await list_templates(snapshot.name, body.subject, context)


@router.delete("/{subject}/templates/{template}")
async def delete_template(
    gallery: GalleryPath, subject: SubjectPath, template: TemplatePath, context: ContextDep
) -> DeletedOut:
    """Erase a template. The response is a receipt."""
    receipt = await context.run_on_gallery(gallery, context.store.templates.delete, subject, template)
    context.pipeline.risks.follow(await context.find_gallery(gallery))
    return to_deleted_out(receipt)


@router.post("/{subject}/templates", status_code=201, response_model=EnrollOut, openapi_extra=request_body(EnrollIn))
async def enroll(
    snapshot: GallerySnapshot,
    subject: SubjectPath,
    request: Request,
    context: ContextDep,
    caller: CallerDep,
    key: IdempotencyKey = None,
    only_new: OnlyNew = None,
) -> Response:
    """Enroll photos or embeddings of one subject.

    Each is accepted or rejected separately; the rejection of a single one fails the call. The templates are on disk
    when the response is sent.
    """
    with context.metrics.stage("read"):
        body = await read_photos(request, EnrollIn, context.settings, context.recognizers.largest_dimension)
    return await enroll_in(context, snapshot, caller, subject, body, key, only_new is not None)


async def enroll_in(
    context: Context,
    snapshot: Gallery,
    caller: Caller,
    subject: str,
    body: EnrollIn,
    key: str | None,
    only_new: bool,
) -> Response:
    """Enroll the photos and embeddings of ``body``. ``key``: an Idempotency-Key. Returns an ``EnrollOut``.

    Raises the rejection of a single photo or embedding.
    """
    gallery = await context.reload_gallery(snapshot)
    if body.embeddings and body.recognizer is None and not gallery.moved:
        body.recognizer = gallery.fingerprint  # the embeddings stay this recognizer's if the gallery moves now
    enrollment = _Enrollment(context, caller, subject, body, key, only_new)
    while True:
        try:
            return await enrollment.run(gallery)
        except GalleryMovedError:
            gallery = await context.reload_gallery(gallery)


@dataclass(frozen=True)
class _Enrollment:
    """Enrollment request. ``run`` may be repeated after the gallery moved to another recognizer."""

    context: Context
    caller: Caller
    subject: str
    body: EnrollIn
    key: str | None
    only_new: bool

    async def run(self, gallery: Gallery) -> Response:
        context, body = self.context, self.body
        served = context.recognizers.for_gallery(gallery)
        if earlier := await self._stored_answer(gallery):
            return _json(earlier, 201)
        if self.only_new:  # before the photos are compared with the templates of an existing subject
            try:
                await context.run(context.store.subjects.refuse_existing, gallery, self.subject)
            except SubjectExistsError:  # perhaps created by the first attempt of this request
                if earlier := await self._stored_answer(gallery):
                    return _json(earlier, 201)
                raise
        if body.recognizer is not None or body.embeddings:
            check_recognizer(gallery, body.recognizer)

        async with context.probes.taken(self.caller, gallery, len(body.embeddings)):
            results, templates = await self._examine(gallery, served)
            if not needs_identity_check(gallery, context.pipeline, self._overrides):
                await self._report_rejections(gallery, results, results)
                return await self._store(gallery, results, templates, checked=False)
            async with context.pipeline.enrolling.of(gallery.pk):
                return await self._check_and_store(gallery, results, templates)

    async def _stored_answer(self, gallery: Gallery) -> str | None:
        if self.key is None:
            return None
        return await self.context.run(self.context.store.templates.stored_answer, gallery, self.key, self._digest)

    @cached_property
    def _digest(self) -> str:
        """Digest that is equal for repetitions of the request. It reads all photos."""
        digest = hashlib.sha256(self.subject.encode())
        digest.update(self.body.model_dump_json(exclude={"images", "recognizer"}).encode())
        for payload in self.body.images:
            digest.update(hashlib.sha256(payload).digest())
        return digest.hexdigest()

    @property
    def _overrides(self) -> Overrides:
        body = self.body
        return Overrides(body.allow_duplicate, body.allow_inconsistent, body.allow_low_quality, body.allow_not_live)

    async def _examine(
        self, gallery: Gallery, served: ServedRecognizer
    ) -> tuple[list[Document], dict[int, NewTemplate]]:
        """Return a result per photo and embedding, whose ``error`` is its rejection, and templates by result."""
        context, body = self.context, self.body
        detail = body.detail or context.settings.expected_face_detail

        async def embed(payload: bytes) -> Photo:
            return await embed_for(gallery, payload, context.pipeline, context.recognizers, detail)

        vectors = check_vectors(body.embeddings, served.dimension)
        photos = await process_photos(context, body.photos, embed) if body.photos else []
        results: list[Document] = [{"image": i} for i in range(len(photos))]
        results += [{"embedding": i} for i in range(len(vectors))]
        items: list[Photo | KithError | Float] = [*photos, *vectors]
        templates: dict[int, NewTemplate] = {}
        for i, item in enumerate(items):
            try:
                templates[i] = self._new_template(gallery, item, results[i])
            except KithError as rejection:
                results[i]["error"] = rejection
        return results, templates

    async def _check_and_store(
        self, gallery: Gallery, results: list[Document], templates: dict[int, NewTemplate]
    ) -> Response:
        """Compare the templates with the gallery and store them; again if its templates changed in between.

        The writes of other processes are found only then, since a turn is among the requests of this process.

        Raises the rejection of a single photo or embedding.
        """
        context, reported = self.context, [result for result in results if "error" in result]
        while True:
            current = await context.reload_gallery(gallery)
            if current.generation != gallery.generation:
                raise GalleryMovedError(f"gallery {gallery.name!r} moved to another recognizer meanwhile")
            if not self.body.allow_duplicate:
                await context.pipeline.caught_up(current)  # the duplicate check searches the index
            with context.metrics.stage("check"):
                stores = (context.store, context.followers, context.pipeline)
                new = list(templates.values())
                rejections = await context.run(
                    partial(check_identities, new, current, self.subject, *stores, self._overrides)
                )
            for i, rejection in zip(list(templates), rejections, strict=True):
                if rejection is not None:
                    del templates[i]
                    results[i].pop("template", None)
                    results[i]["error"] = rejection
                    reported.append(results[i])
            await self._report_rejections(gallery, results, reported)
            try:
                return await self._store(current, results, templates, checked=True)
            except GalleryChangedError:
                reported = []
                if (deadline := deadlines.current_deadline()) is not None:
                    deadline.check()

    async def _store(
        self, gallery: Gallery, results: list[Document], templates: dict[int, NewTemplate], checked: bool
    ) -> Response:
        """Store the templates. Raises GalleryChangedError: ``checked``, and the checks must be repeated."""
        context, key = self.context, self.key
        for i, template in templates.items():
            results[i]["template"] = template.id

        def encode(describe_error: Callable[[KithError], Document]) -> str:
            documents = [r | {"error": describe_error(r["error"])} if "error" in r else r for r in results]
            return encode_json({"subject": self.subject, "enrolled": len(templates), "results": documents}).decode()

        if not templates:
            return _json(encode(problem_document), 200)
        idempotent = IdempotentResponse(key, self._digest, encode(stored_problem_document)) if key else None
        new = list(templates.values())
        with context.metrics.stage("write"):
            earlier = await context.run(
                context.store.templates.enroll, gallery, self.subject, new, idempotent, self.only_new, checked
            )
        context.metrics.count_enrollment("enrolled", len(new))
        context.pipeline.risks.follow(gallery)
        return _json(earlier or encode(problem_document), 201)

    def _new_template(self, gallery: Gallery, item: Photo | KithError | Float, result: Document) -> NewTemplate:
        """Create a template and add the face to ``result``. Raises the photo's own error, or why it is rejected."""
        if isinstance(item, KithError):
            raise item
        if not isinstance(item, Photo):
            return new_template(item, gallery, self._overrides)
        face, settings = choose_face(item, self.body.face), gallery.settings
        result["face"] = face_document(face, settings.quality_gate, settings.liveness_threshold)
        return template_from_face(face, gallery, self._overrides)

    async def _report_rejections(self, gallery: Gallery, results: list[Document], new: list[Document]) -> None:
        """Count and audit new rejections, charge near misses, and hide what the caller may not know.

        Raises the rejection of a single photo or embedding.
        """
        refused = [result for result in new if "error" in result]
        for result in refused:
            self.context.metrics.count_enrollment(result["error"].code)
        of_identity = (InconsistentTemplateError, DuplicateSubjectError)
        identity_errors = [result for result in refused if isinstance(result["error"], of_identity)]
        for code, count in Counter(result["error"].code for result in identity_errors).items():
            await self.context.audit.enrollment_refused(gallery, self.subject, code, count)
        near_misses = sum("embedding" in result for result in identity_errors)
        await self.context.probes.charge_near_misses(self.caller, gallery, near_misses)
        for result in refused:
            result["error"] = await self._redact(gallery, result["error"])
        if len(results) == 1 and (error := results[0].get("error")) is not None:
            raise error

    async def _redact(self, gallery: Gallery, rejection: KithError) -> KithError:
        """Return the rejection as the caller may know it, and audit which subject a duplicate revealed.

        The scopes identify and read show the subject of a duplicate, admin also exact similarities.
        """
        if isinstance(rejection, InconsistentTemplateError) and not self.caller.may_export:
            return InconsistentTemplateError("the face is unlike the subject's other templates")
        if not isinstance(rejection, DuplicateSubjectError):
            return rejection
        subject = rejection.extra["subject"]
        await self.context.audit.searched(gallery, [{"outcome": "identified", "subject": subject}])
        if self.caller.may_export:
            return rejection
        if self.caller.rights.may("identify") or self.caller.rights.may("read"):
            return DuplicateSubjectError(rejection.detail, subject=subject)
        return DuplicateSubjectError("the face resembles another subject")


def _metadata(text: str | None) -> tuple[tuple[str, Any], ...]:
    """Parse a metadata filter. Raises InvalidRequestError."""
    try:
        return () if text is None else tuple(METADATA_ADAPTER.validate_json(text).items())
    except ValidationError as error:
        raise InvalidRequestError(f"metadata: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


def _json(document: str, status: int) -> Response:
    return Response(document, status, media_type="application/json")

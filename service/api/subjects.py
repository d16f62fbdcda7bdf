"""Subjects and their templates: name, edit, enrol, delete."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import TypeAdapter, ValidationError

from models.network import Float
from service.api import answers
from service.api.answers import Document, encoded
from service.api.beginnings import Begun, Noted
from service.api.context import Context, Kith
from service.api.galleries import GalleryPath, Limit, PlaceCursor, place_in
from service.api.openapi import PROBLEMS, body_of
from service.api.permissions import Caller, caller_of
from service.api.photos import gather_photos
from service.api.requests import read_photos
from service.api.schemas import (
    DeletedOut,
    EnrolIn,
    EnrolOut,
    MergedOut,
    MergeIn,
    Metadata,
    ReceiptOut,
    SubjectId,
    SubjectIn,
    SubjectOut,
    SubjectPatch,
    SubjectsOut,
    TemplateOut,
    TemplatePatch,
    TemplatesOut,
)
from service.enrolment import (
    Overrides,
    check_identity,
    choose_face,
    embed_for,
    new_template,
    template_from_face,
)
from service.errors import (
    DuplicateSubjectError,
    GalleryMovedError,
    InconsistentTemplateError,
    InvalidRequestError,
    KithError,
    SubjectExistsError,
)
from service.gallery.sealed_rows import close_place
from service.gallery.subjects import Gallery, Idempotent, NewTemplate, SubjectFilter
from service.pipeline import Photo
from service.recognisers import Served, check_recogniser, check_vectors

router = APIRouter(route_class=Noted, prefix="/v1/galleries/{gallery}/subjects", tags=["subjects"], responses=PROBLEMS)
SubjectPath = Annotated[SubjectId, Path(examples=["ada"])]
TemplatePath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, description="Repeats get the first answer."),
]
Entries: Final[TypeAdapter[dict[str, Any]]] = TypeAdapter(Metadata)
METADATA: Final = "Only subjects whose metadata have all of these: a JSON object, compared as a search's filter is."


OnlyNew = Annotated[
    Literal["*"] | None,
    Header(alias="If-None-Match", description="Only if there is no such subject yet; else 412 `subject_exists`."),
]


@router.get("")
async def list_subjects(
    gallery: GalleryPath,
    kith: Kith,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
    tag: Annotated[list[str], Query(max_length=32, description="Only subjects that bear all of these.")] = [],  # noqa: B006
    metadata: Annotated[str | None, Query(description=METADATA, examples=['{"floor": 3}'])] = None,
) -> SubjectsOut:
    """The oldest first."""
    found_gallery = await kith.run(kith.store.gallery, gallery)
    seal, chosen = found_gallery.seal, SubjectFilter(tuple(tag), _metadata(metadata))
    found = await kith.run(kith.store.list_subjects, found_gallery, place_in(seal, cursor), limit + 1, chosen)
    page = found[:limit]
    more = close_place(seal, page[-1].pk) if len(found) > limit else None
    return SubjectsOut(subjects=[SubjectOut.of(s) for s in page], next=more)


@router.put("/{subject}", responses={201: {"model": SubjectOut, "description": "It was created."}})
async def put_subject(
    begun: Begun, subject: SubjectPath, body: SubjectIn, response: Response, kith: Kith, only_new: OnlyNew = None
) -> SubjectOut:
    """Create a subject, or replace its name, metadata and tags; its templates stay."""
    about = body.name, body.metadata, body.tags, only_new is not None
    put, created = await kith.change(begun, kith.store.put_subject, subject, *about)
    response.status_code = 201 if created else 200
    return SubjectOut.of(put)


@router.get("/{subject}")
async def get_subject(gallery: GalleryPath, subject: SubjectPath, kith: Kith) -> SubjectOut:
    found = await kith.run(kith.store.gallery, gallery)
    return SubjectOut.of(await kith.run(kith.store.subject, found, subject))


@router.patch("/{subject}")
async def patch_subject(begun: Begun, subject: SubjectPath, body: SubjectPatch, kith: Kith) -> SubjectOut:
    """Change what is given; the rest stays."""
    # A name may be taken away; metadata and tags are emptied, not nulled.
    given = {k: v for k, v in body.model_dump(exclude_unset=True).items() if k == "name" or v is not None}
    return SubjectOut.of(await kith.change(begun, kith.store.patch_subject, subject, given))


@router.delete("/{subject}")
async def delete_subject(gallery: GalleryPath, subject: SubjectPath, kith: Kith) -> DeletedOut:
    """Erase a subject: its templates and everything else that is stored of it. The answer is a receipt; a repeated
    request gets 404 with the receipt of the first."""
    receipt = await kith.change(gallery, kith.store.delete_subject, subject)
    kith.pipeline.risks.follow(await kith.gallery(gallery))
    return DeletedOut.of(receipt)


@router.post("/{subject}/merge")
async def merge_subject(begun: Begun, subject: SubjectPath, body: MergeIn, kith: Kith) -> MergedOut:
    """File everything of a subject under another one, who is the same person, and erase it, all or nothing: templates,
    tags, and metadata of keys that the other one does not have; its name where that one has none. The answer has the
    receipt; a repeated request gets the same. Nothing takes it back."""
    done = await kith.change(begun, kith.store.merge_subject, subject, body.into)
    kith.pipeline.risks.follow(await kith.gallery(begun.name))
    return MergedOut(subject=SubjectOut.of(done.into), templates=done.templates, receipt=ReceiptOut.of(done.receipt))


@router.get("/{subject}/templates")
async def list_templates(
    gallery: GalleryPath, subject: SubjectPath, kith: Kith, cursor: PlaceCursor = None, limit: Limit = 100
) -> TemplatesOut:
    """The oldest first."""
    found = await kith.run(kith.store.gallery, gallery)
    listed = await kith.run(kith.store.list_templates, found, subject, place_in(found.seal, cursor), limit + 1)
    page = listed[:limit]
    more = close_place(found.seal, page[-1].pk) if len(listed) > limit else None
    return TemplatesOut(subject=subject, templates=[TemplateOut.of(t) for t in page], next=more)


@router.get("/{subject}/templates/{template}")
async def get_template(gallery: GalleryPath, subject: SubjectPath, template: TemplatePath, kith: Kith) -> TemplateOut:
    found = await kith.run(kith.store.gallery, gallery)
    return TemplateOut.of(await kith.run(kith.store.template, found, subject, template))


@router.patch("/{subject}/templates/{template}")
async def move_template(
    begun: Begun, subject: SubjectPath, template: TemplatePath, body: TemplatePatch, kith: Kith
) -> TemplatesOut:
    """File a template under another subject; the answer is the first page of that one's templates."""
    await kith.change(begun, kith.store.move_template, subject, template, body.subject)
    kith.pipeline.risks.follow(await kith.gallery(begun.name))
    return await list_templates(begun.name, body.subject, kith)


@router.delete("/{subject}/templates/{template}")
async def delete_template(gallery: GalleryPath, subject: SubjectPath, template: TemplatePath, kith: Kith) -> DeletedOut:
    receipt = await kith.change(gallery, kith.store.delete_template, subject, template)
    kith.pipeline.risks.follow(await kith.gallery(gallery))
    return DeletedOut.of(receipt)


@router.post(
    "/{subject}/templates",
    status_code=201,
    response_model=EnrolOut,
    openapi_extra=body_of(EnrolIn),
)
async def enrol(
    begun: Begun, subject: SubjectPath, request: Request, kith: Kith, key: Key = None, only_new: OnlyNew = None
) -> Response:
    """Enrol photos or embeddings of one person. Each is taken or refused alone; a lone one refused fails the call.

    Nothing is answered before it is on disk.
    """
    with kith.measures.stage("read"):
        body = await read_photos(request, EnrolIn, kith.settings, kith.recognisers.largest_dimension)
    found = await kith.gallery_again(begun)
    if body.embeddings and body.recogniser is None and not found.moved:
        body.recogniser = found.fingerprint  # whose they are does not change if the gallery moves meanwhile
    while True:
        try:
            return await _enrol(kith, found, subject, body, key, only_new is not None, caller_of(request))
        except GalleryMovedError:
            found = await kith.gallery_again(found)


async def _enrol(
    kith: Context, found: Gallery, subject: str, body: EnrolIn, key: str | None, only_new: bool, caller: Caller
) -> Response:
    by = kith.recognisers.of(found)
    digest = _digest(subject, body)
    if key and (earlier := await kith.run(kith.store.answered, found, key, digest)):
        return _json(earlier, 201)
    if only_new:  # before the photos are compared with those of whoever that is
        try:
            await kith.run(kith.store.refuse_known, found, subject)
        except SubjectExistsError:  # made by the first of this very request perhaps, meanwhile
            if key and (earlier := await kith.run(kith.store.answered, found, key, digest)):
                return _json(earlier, 201)
            raise
    if body.recogniser is not None or body.embeddings:
        check_recogniser(found, body.recogniser)

    async with kith.probes.taken(caller, found, len(body.embeddings)):
        results, templates = await _examine(kith, found, by, subject, body, caller)

    def told(error: Callable[[KithError], Document]) -> str:
        each = [r | {"error": error(r["error"])} if "error" in r else r for r in results]
        return encoded({"subject": subject, "enrolled": len(templates), "results": each}).decode()

    answer = told(answers.problem)
    if templates:
        keyed = Idempotent(key, digest, told(answers.kept_problem)) if key else None
        with kith.measures.stage("write"):
            earlier = await kith.run(kith.store.enrol, found, subject, templates, keyed, only_new)
        kith.measures.enrolled.add("enrolled", len(templates))
        kith.pipeline.risks.follow(found)
        answer = earlier or answer
    return _json(answer, 201 if templates else 200)


async def _examine(
    kith: Context, gallery: Gallery, by: Served, subject: str, body: EnrolIn, caller: Caller
) -> tuple[list[Document], list[NewTemplate]]:
    """Decide on each photo and embedding; a lone refusal is raised, the others' ``error`` is the refusal."""
    overrides = Overrides(body.allow_duplicate, body.allow_inconsistent, body.allow_low_quality, body.allow_not_live)

    async def embed(payload: bytes) -> Photo:
        return await embed_for(gallery, payload, kith.pipeline, kith.recognisers)

    vectors = check_vectors(body.embeddings, by.dimension)
    photos = await gather_photos(kith, body.photos, embed) if body.photos else []
    results: list[Document] = []
    templates: list[NewTemplate] = []
    refused: Counter[str] = Counter()
    near_misses = 0
    if not overrides.allow_duplicate and kith.pipeline.risks.calibration(gallery) is not None:
        await kith.pipeline.caught_up(gallery)  # each is searched for
    items: list[tuple[Document, Photo | KithError | Float]] = [
        *(({"image": i}, photo) for i, photo in enumerate(photos)),
        *(({"embedding": i}, vector) for i, vector in enumerate(vectors)),
    ]
    for result, item in items:
        try:
            if isinstance(item, KithError):
                raise item
            if isinstance(item, Photo):
                face = choose_face(item, body.face)
                result["face"] = answers.face(face, gallery.settings.quality_gate, gallery.settings.liveness_threshold)
                template = template_from_face(face, gallery, overrides)
            else:
                template = new_template(item, gallery, overrides)
            with kith.measures.stage("check"):
                await kith.run(
                    check_identity,
                    template,
                    templates,
                    gallery,
                    subject,
                    kith.store,
                    kith.followers,
                    kith.pipeline,
                    overrides,
                )
            templates.append(template)
            result["template"] = template.id
        except KithError as refusal:
            kith.measures.enrolled.add(refusal.code)
            if isinstance(refusal, InconsistentTemplateError | DuplicateSubjectError):
                refused[refusal.code] += 1
                near_misses += "embedding" in result
            result["error"] = refusal
        results.append(result)
    for code, count in refused.items():
        await kith.audit.enrolment_refused(gallery, subject, code, count)
    await kith.probes.settle(caller, gallery, near_misses)
    for result in results:
        if isinstance(error := result.get("error"), KithError):
            result["error"] = await _told(kith, gallery, error, caller)
    if len(results) == 1 and (alone := results[0].get("error")) is not None:
        raise alone
    return results, templates


async def _told(kith: Context, gallery: Gallery, refusal: KithError, caller: Caller) -> KithError:
    """Return the refusal as the caller may know it: a duplicate by name with the scope identify or read, exact
    similarities with admin. The audit records who was found."""
    if isinstance(refusal, InconsistentTemplateError) and not caller.may_export:
        return InconsistentTemplateError("the face is unlike the subject's other templates")
    if not isinstance(refusal, DuplicateSubjectError):
        return refusal
    await kith.audit.searched(gallery, [{"outcome": "identified", "subject": refusal.extra["subject"]}])
    if caller.may_export:
        return refusal
    if caller.rights.may("identify") or caller.rights.may("read"):
        return DuplicateSubjectError(refusal.detail, subject=refusal.extra["subject"])
    return DuplicateSubjectError("the face resembles another subject")


def _metadata(asked: str | None) -> tuple[tuple[str, Any], ...]:
    """Raises InvalidRequestError: it is no JSON object that metadata could be."""
    try:
        return () if asked is None else tuple(Entries.validate_json(asked).items())
    except ValidationError as error:
        raise InvalidRequestError(f"metadata: {error.errors()[0]['msg']}") from error


def _digest(subject: str, body: EnrolIn) -> str:
    """Tells whether a repeated key repeats the request."""
    digest = hashlib.sha256(subject.encode())
    # Without these it is as it was when there were none: the key may be older.
    left_out = {"images", "recogniser"} | {name for name in ("urls", "allow_not_live") if not getattr(body, name)}
    digest.update(body.model_dump_json(exclude=left_out).encode())
    for payload in body.images:
        digest.update(hashlib.sha256(payload).digest())
    return digest.hexdigest()


def _json(document: str, status: int) -> Response:
    return Response(document, status, media_type="application/json")

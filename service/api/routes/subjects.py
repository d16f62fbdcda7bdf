"""Subjects, their templates and decoys: create, edit, enroll, merge, delete."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import Header, Query, Response
from pydantic import StringConstraints, TypeAdapter, ValidationError

from kith.wire.erasures import DeletedOut
from kith.wire.fields import MAX_FILTER_TAGS, NORMALIZED, SINGLE_LINE, Metadata, ObjectId, Page, Tag
from kith.wire.subjects import (
    DecoyIn,
    DecoyOut,
    EnrollIn,
    EnrollOut,
    MergedOut,
    MergeIn,
    SubjectIn,
    SubjectOut,
    SubjectPatch,
    TemplateOut,
    TemplatePatch,
)
from service.api.http.access import ENROLL, READ, BackendDep, CallerDep, GalleryDep, router
from service.api.http.bodies import JsonBody, PhotosBody
from service.api.http.openapi import PHOTO, example
from service.api.http.parameters import (
    GalleryPath,
    IdempotencyKey,
    PageDep,
    PageQuery,
    SubjectPath,
)
from service.api.routes.erasures import to_deleted_out
from service.core.errors import InvalidRequestError
from service.domain.gallery import SubjectFilter
from service.domain.person_search import words_of
from service.storage.db.row_sealing import seal_cursor
from service.storage.repositories.subjects import MAX_OPENED
from service.usecases import enroll as enrollment
from service.usecases.decoys import add_decoy as store_decoy

routes = router("/v1/galleries/{gallery}/subjects", "subjects")
METADATA_ADAPTER: Final[TypeAdapter[dict[str, Any]]] = TypeAdapter(Metadata)
METADATA_HELP: Final = "Only subjects with all of these metadata: a JSON object, compared as in a search filter."
SEARCH_HELP: Final = (
    "Only subjects whose id or name has each of these words or parts of words, whatever the case and accents. A page "
    f"looks at {MAX_OPENED:,} subjects, so it can have few or none: continue with 'next'."
)
SearchText = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=SINGLE_LINE), NORMALIZED]
OnlyNew = Annotated[
    Literal["*"] | None,
    Header(alias="If-None-Match", description="Only if the subject does not exist yet; else 412 `subject_exists`."),
]


@routes.get("", dependencies=[READ])
async def list_subjects(
    gallery: GalleryDep,
    backend: BackendDep,
    page: PageDep,
    tag: Annotated[
        list[Tag], Query(max_length=MAX_FILTER_TAGS, description="Only subjects with all of these tags.")
    ] = [],  # noqa: B006
    metadata: Annotated[str | None, Query(description=METADATA_HELP, examples=['{"floor": 3}'])] = None,
    q: Annotated[SearchText | None, Query(description=SEARCH_HELP, examples=["lovel"])] = None,
) -> Page[SubjectOut]:
    """List the subjects, oldest first."""
    store, seal = backend.store.subjects, gallery.seal
    chosen = SubjectFilter(tuple(tag), _metadata(metadata))
    if q is None:
        return await page.read(
            Page[SubjectOut], backend.threads, seal, lambda after, limit: store.list_page(gallery, after, limit, chosen)
        )
    matching, rest = await backend.threads.run(
        store.find_page, gallery, page.after(seal), page.limit, chosen, _words(q)
    )
    return Page[SubjectOut](data=[*matching], next=None if rest is None else seal_cursor(seal, rest))


@routes.put(
    "/{subject}",
    dependencies=[ENROLL],
    responses={201: {"model": SubjectOut, "description": "The subject was created."}},
    openapi_extra=example({"name": "Ada Lovelace", "tags": ["staff"], "metadata": {"room": 12}}),
)
async def put_subject(
    gallery: GalleryDep,
    subject: SubjectPath,
    body: JsonBody[SubjectIn],
    response: Response,
    backend: BackendDep,
    only_new: OnlyNew = None,
) -> SubjectOut:
    """Create a subject, or replace its name, metadata and tags. Its templates stay."""
    fields = body.name, body.metadata, body.tags, only_new is not None
    put, created = await backend.run_on_gallery(gallery, backend.store.subjects.put, subject, *fields)
    response.status_code = 201 if created else 200
    return put


@routes.get("/{subject}", dependencies=[READ])
async def get_subject(gallery: GalleryDep, subject: SubjectPath, backend: BackendDep) -> SubjectOut:
    """Return a subject."""
    return await backend.threads.run(backend.store.subjects.get, gallery, subject)


@routes.patch("/{subject}", dependencies=[ENROLL], openapi_extra=example({"name": "Countess of Lovelace"}))
async def patch_subject(
    gallery: GalleryDep,
    subject: SubjectPath,
    body: JsonBody[SubjectPatch],
    backend: BackendDep,
) -> SubjectOut:
    """Change the given fields. The others stay."""
    # Null removes a name. Metadata and tags are emptied by {} and [].
    given = {k: v for k, v in body.model_dump(exclude_unset=True).items() if k == "name" or v is not None}
    patch = backend.store.subjects.patch
    return await backend.run_on_gallery(gallery, patch, subject, given)


@routes.delete("/{subject}", dependencies=[ENROLL])
async def delete_subject(gallery: GalleryPath, subject: SubjectPath, backend: BackendDep) -> DeletedOut:
    """Erase a subject with its templates and all its other data.

    The response is a receipt. A repeated request gets the same receipt.
    """
    return to_deleted_out(await backend.change_templates(gallery, backend.store.subjects.delete, subject))


@routes.post("/{subject}/merge", dependencies=[ENROLL], openapi_extra=example({"into": "ada"}))
async def merge_subject(
    gallery: GalleryDep, subject: SubjectPath, body: JsonBody[MergeIn], backend: BackendDep
) -> MergedOut:
    """Merge a subject into another one that is the same person, and erase it, in one transaction.

    Templates and tags move; metadata and the name move where the other subject has none. The response has the receipt,
    and a repeated request gets the same. A merge cannot be undone.
    """
    return await backend.change_templates(gallery, backend.store.subjects.merge, subject, body.into)


@routes.get("/{subject}/templates", dependencies=[READ])
async def list_templates(
    gallery: GalleryDep, subject: SubjectPath, backend: BackendDep, page: PageDep
) -> Page[TemplateOut]:
    """List the templates of a subject, oldest first."""
    listed = partial(backend.store.templates.list_page, gallery, subject)
    return await page.read(Page[TemplateOut], backend.threads, gallery.seal, listed)


@routes.get("/{subject}/templates/{template}", dependencies=[READ])
async def get_template(
    gallery: GalleryDep, subject: SubjectPath, template: ObjectId, backend: BackendDep
) -> TemplateOut:
    """Return a template, without its embedding."""
    return await backend.threads.run(backend.store.templates.get, gallery, subject, template)


@routes.patch("/{subject}/templates/{template}", dependencies=[ENROLL], openapi_extra=example({"subject": "grace"}))
async def move_template(
    gallery: GalleryDep,
    subject: SubjectPath,
    template: ObjectId,
    body: JsonBody[TemplatePatch],
    backend: BackendDep,
) -> Page[TemplateOut]:
    """Move a template to another subject. The response is the first page of that subject's templates."""
    await backend.change_templates(gallery, backend.store.templates.move, subject, template, body.subject)
    return await list_templates(await backend.find_gallery(gallery.name), body.subject, backend, PageQuery())


@routes.delete("/{subject}/templates/{template}", dependencies=[ENROLL])
async def delete_template(
    gallery: GalleryPath, subject: SubjectPath, template: ObjectId, backend: BackendDep
) -> DeletedOut:
    """Erase a template. The response is a receipt. A repeated request gets the same receipt."""
    return to_deleted_out(await backend.change_templates(gallery, backend.store.templates.delete, subject, template))


@routes.post(
    "/{subject}/templates",
    dependencies=[ENROLL],
    status_code=201,
    response_model=EnrollOut,
    openapi_extra=example({"images": [PHOTO], "face": "largest"}),
)
async def enroll(
    gallery: GalleryDep,
    subject: SubjectPath,
    body: PhotosBody[EnrollIn],
    backend: BackendDep,
    caller: CallerDep,
    key: IdempotencyKey = None,
    only_new: OnlyNew = None,
) -> Response:
    """Enroll photos or embeddings of one subject.

    Each is accepted or rejected separately; the rejection of a single one fails the call. The templates are on disk
    when the response is sent.
    """
    done = await enrollment.enroll(backend, gallery, caller, subject, body, key, only_new is not None)
    headers = {"Idempotency-Replayed": "true"} if done.replayed else None
    return Response(done.document, 201 if done.stored else 200, headers=headers, media_type="application/json")


@routes.post(
    "/{subject}/decoys",
    dependencies=[ENROLL],
    status_code=201,
    response_model=DecoyOut,
    responses={200: {"model": DecoyOut, "description": "The picture was a decoy already."}},
    openapi_extra=example({"images": [PHOTO], "face": "largest"}),
)
async def add_decoy(
    gallery: GalleryDep,
    subject: SubjectPath,
    body: PhotosBody[DecoyIn],
    response: Response,
    backend: BackendDep,
    caller: CallerDep,
) -> DecoyOut:
    """Store that the person of a photo is not this subject.

    A face more similar to the decoy than to the subject is not identified as the subject any more. Repeat the request
    as often as needed: the same picture is stored once.
    """
    decoy, created = await store_decoy(backend, gallery, caller, subject, body)
    response.status_code = 201 if created else 200
    return decoy


@routes.get("/{subject}/decoys", dependencies=[READ])
async def list_decoys(gallery: GalleryDep, subject: SubjectPath, backend: BackendDep) -> Page[DecoyOut]:
    """List the decoys of a subject, oldest first."""
    return Page[DecoyOut](data=await backend.threads.run(backend.store.decoys.list_all, gallery, subject))


@routes.delete("/{subject}/decoys/{decoy}", dependencies=[ENROLL])
async def delete_decoy(gallery: GalleryPath, subject: SubjectPath, decoy: ObjectId, backend: BackendDep) -> DeletedOut:
    """Erase a decoy. The response is a receipt. A repeated request gets the same receipt."""
    receipt = await backend.run_on_gallery(gallery, backend.store.decoys.delete, subject, decoy)
    return to_deleted_out(receipt)


def _metadata(text: str | None) -> tuple[tuple[str, Any], ...]:
    """Parse a metadata filter. Raises InvalidRequestError."""
    try:
        return () if text is None else tuple(METADATA_ADAPTER.validate_json(text).items())
    except ValidationError as error:
        raise InvalidRequestError(f"metadata: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


def _words(text: str) -> tuple[str, ...]:
    """Parse a search for names. Raises InvalidRequestError."""
    if words := words_of(text):
        return words
    raise InvalidRequestError("q: it has no letters or digits. Send a part of a name or id")

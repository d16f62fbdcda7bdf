"""Subjects of the key's gallery: list, add, rename, delete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from fastapi import APIRouter

from service.api.compreface.access import RECOGNITION, BoundGallery, CompreFaceRoute
from service.api.compreface.requests import MAX_ERASED, SubjectBody, SubjectPath
from service.api.http.context import Context, ContextDep
from service.core.errors import SubjectExistsError
from service.domain.gallery import Gallery, SubjectFilter

PAGE: Final = 1000
router = APIRouter(route_class=CompreFaceRoute, prefix=f"{RECOGNITION}/subjects", include_in_schema=False)


@router.get("")
@router.get("/")
async def list_subjects(gallery: BoundGallery, context: ContextDep) -> dict[str, Any]:
    """List the ids of all subjects, oldest first."""
    return {"subjects": await context.run(list, _subject_ids(context, gallery))}


@router.post("", status_code=201)
async def add_subject(gallery: BoundGallery, body: SubjectBody, context: ContextDep) -> dict[str, Any]:
    """Add a subject without templates."""
    await context.run_on_gallery(gallery, context.store.subjects.put, body.subject, None, {}, [], True)
    return {"subject": body.subject}


@router.put("/{subject}")
async def rename_subject(
    gallery: BoundGallery, subject: SubjectPath, body: SubjectBody, context: ContextDep
) -> dict[str, Any]:
    """Rename a subject: merge it into the subject of the new name, which is created if it does not exist."""
    if body.subject == subject:
        return {"updated": False}
    subjects = context.store.subjects
    await context.run_on_gallery(gallery, subjects.get, subject)
    with suppress(SubjectExistsError):
        await context.run_on_gallery(gallery, subjects.put, body.subject, None, {}, [], True)
    await context.run_on_gallery(gallery, subjects.merge, subject, body.subject)
    context.pipeline.risks.follow(await context.find_gallery(gallery.name))
    return {"updated": True}


@router.delete("/{subject}")
async def delete_subject(gallery: BoundGallery, subject: SubjectPath, context: ContextDep) -> dict[str, Any]:
    """Erase a subject."""
    await context.run_on_gallery(gallery, context.store.subjects.delete, subject)
    context.pipeline.risks.follow(await context.find_gallery(gallery.name))
    return {"subject": subject}


@router.delete("")
async def delete_all_subjects(gallery: BoundGallery, context: ContextDep) -> dict[str, Any]:
    """Erase all subjects, in transactions of MAX_ERASED. Each has its receipt."""
    deleted = 0
    ids = await context.run(list, _subject_ids(context, gallery))
    for start in range(0, len(ids), MAX_ERASED):
        some = ids[start : start + MAX_ERASED]
        deleted += await context.run_on_gallery(gallery, context.store.subjects.delete_many, some)
    context.pipeline.risks.follow(await context.find_gallery(gallery.name))
    return {"deleted": deleted}


def _subject_ids(context: Context, gallery: Gallery) -> Iterator[str]:
    """Yield the ids of all subjects. Blocks."""
    after = None
    while page := context.store.subjects.list_page(gallery, after, PAGE, SubjectFilter((), ())):
        yield from (subject.id for subject in page)
        after = page[-1].pk

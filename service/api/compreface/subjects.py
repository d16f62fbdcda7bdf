"""Subjects of the key's gallery: list, add, rename, delete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from service.api.compreface.access import ENROLL, READ, RECOGNITION, BoundGallery
from service.api.compreface.requests import MAX_ERASED, SubjectBody
from service.api.http.access import BackendDep, router
from service.api.http.bodies import JsonBody
from service.api.http.parameters import SubjectPath
from service.core.errors import SubjectExistsError, SubjectNotFoundError
from service.domain.gallery import Gallery, SubjectFilter
from service.usecases.backend import Backend

PAGE: Final = 1000
routes = router(f"{RECOGNITION}/subjects")


@routes.get("", dependencies=[READ])
@routes.get("/", dependencies=[READ])
async def list_subjects(gallery: BoundGallery, backend: BackendDep) -> dict[str, Any]:
    """List the ids of all subjects, oldest first."""
    return {"subjects": await backend.threads.run(list, _subject_ids(backend, gallery))}


@routes.post("", dependencies=[ENROLL], status_code=201)
async def add_subject(gallery: BoundGallery, body: JsonBody[SubjectBody], backend: BackendDep) -> dict[str, Any]:
    """Add a subject without templates."""
    await backend.run_on_gallery(gallery, backend.store.subjects.put, body.subject, None, {}, [], True)
    return {"subject": body.subject}


@routes.put("/{subject}", dependencies=[ENROLL])
async def rename_subject(
    gallery: BoundGallery, subject: SubjectPath, body: JsonBody[SubjectBody], backend: BackendDep
) -> dict[str, Any]:
    """Rename a subject: merge it into the subject of the new name, which is created if it does not exist."""
    if body.subject == subject:
        return {"updated": False}
    subjects = backend.store.subjects
    await backend.run_on_gallery(gallery, subjects.get, subject)
    with suppress(SubjectExistsError):
        await backend.run_on_gallery(gallery, subjects.put, body.subject, None, {}, [], True)
    await backend.change_templates(gallery, subjects.merge, subject, body.subject)
    return {"updated": True}


@routes.delete("/{subject}", dependencies=[ENROLL])
async def delete_subject(gallery: BoundGallery, subject: SubjectPath, backend: BackendDep) -> dict[str, Any]:
    """Erase a subject."""
    subjects = backend.store.subjects
    if await backend.change_templates(gallery, subjects.delete_many, [subject]) == 0:
        raise SubjectNotFoundError(f"there is no subject {subject!r}")
    return {"subject": subject}


@routes.delete("", dependencies=[ENROLL])
async def delete_all_subjects(gallery: BoundGallery, backend: BackendDep) -> dict[str, Any]:
    """Erase all subjects, in transactions of MAX_ERASED. Each has its receipt."""
    deleted = 0
    ids = await backend.threads.run(list, _subject_ids(backend, gallery))
    for start in range(0, len(ids), MAX_ERASED):
        some = ids[start : start + MAX_ERASED]
        deleted += await backend.change_templates(gallery, backend.store.subjects.delete_many, some)
    return {"deleted": deleted}


def _subject_ids(backend: Backend, gallery: Gallery) -> Iterator[str]:
    """Yield the ids of all subjects. Blocks."""
    after = None
    while page := backend.store.subjects.list_page(gallery, after, PAGE, SubjectFilter((), ())):
        yield from (subject.id for subject in page)
        after = page[-1].pk

"""Migration of a gallery to another recognizer: start, progress, roll back, finish."""

from __future__ import annotations

from typing import Final

from kith.wire.hygiene import TemplateRefOut
from kith.wire.migration import (
    FinishIn,
    GenerationOut,
    MigrateIn,
    MigrationOut,
    MigrationState,
    MigrationThresholdOut,
)
from service.api.http.access import ADMIN, BackendDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.api.http.parameters import GalleryPath
from service.core.errors import (
    RiskUncalibratedError,
)
from service.domain.gallery import Gallery, Generation
from service.risk.threshold import thresholds_for
from service.storage.repositories.generations import DROP, FILL
from service.usecases.backend import Backend

routes = router("/v1/galleries/{gallery}/migrate", "migration")
MAX_LISTED: Final = 1000
"""Templates without a crop in an answer."""


@routes.post("", dependencies=[ADMIN], status_code=202, openapi_extra=example({"to": "open-model-zoo"}))
async def start_migration(gallery: GalleryPath, body: JsonBody[MigrateIn], backend: BackendDep) -> MigrationOut:
    """Start a migration to another served pack's recognizer. A job embeds the stored crops, then switches."""
    to = backend.recognizers.by_name(body.to)
    about = to.fingerprint, to.dimension, to.pack.model_id
    await backend.run_on_gallery(gallery, backend.store.generations.start, *about, body.force)
    backend.jobs.wake()
    return await _report(backend, gallery)


@routes.get("", dependencies=[ADMIN])
async def get_migration(gallery: GalleryPath, backend: BackendDep) -> MigrationOut:
    """Return each recognizer's coverage and thresholds, and the templates that another one cannot embed."""
    return await _report(backend, gallery)


@routes.post("/roll-back", dependencies=[ADMIN])
async def roll_back_migration(gallery: GalleryPath, backend: BackendDep) -> MigrationOut:
    """Answer with the previous recognizer again, or stop the job. Nothing is deleted."""
    await backend.run_on_gallery(gallery, backend.store.generations.roll_back)
    backend.jobs.wake()
    return await _report(backend, gallery)


@routes.post("/finish", dependencies=[ADMIN], openapi_extra=example({"force": False}))
async def finish_migration(gallery: GalleryPath, body: JsonBody[FinishIn], backend: BackendDep) -> MigrationOut:
    """Delete the vectors of the other recognizer. This cannot be undone."""
    await backend.run_on_gallery(gallery, backend.store.generations.finish, body.force)
    backend.jobs.wake()
    return await _report(backend, gallery)


async def _report(backend: Backend, name: str) -> MigrationOut:
    return await backend.run_on_gallery(name, _read_migration, backend)


def _read_migration(gallery: Gallery, backend: Backend) -> MigrationOut:
    current, *rest = backend.store.generations.list_live(gallery)
    other = rest[0] if rest else None
    unfinished = [
        job
        for job in backend.store.jobs.list_jobs(gallery, ("queued", "running"), None, 100)
        if job.kind in (FILL, DROP)
    ]
    cropless, listed = backend.store.generations.without_crop(gallery, MAX_LISTED)
    fills = [job.parameters["generation"] for job in unfinished if job.kind == FILL and not job.cancel]
    waiting: MigrationState = "running" if other is not None and other.number in fills else "stopped"
    return MigrationOut(
        gallery=gallery.name,
        state="none" if other is None else "switched" if other.state == "previous" else waiting,
        current=_generation(backend, gallery, current),
        other=None if other is None else _generation(backend, gallery, other),
        without_crop_count=cropless,
        without_crop=[TemplateRefOut(subject=subject, template=template) for subject, template in listed],
        jobs=[job.id for job in unfinished],
    )


def _generation(backend: Backend, gallery: Gallery, generation: Generation) -> GenerationOut:
    served = backend.recognizers.get(generation.fingerprint)
    view = gallery.at_generation(generation.number)
    return GenerationOut(
        recognizer=generation.fingerprint,
        model=generation.model if served is None else served.pack.model_id,
        served=served is not None,
        dimension=generation.dimension,
        template_count=gallery.templates,
        embedded_count=backend.store.generations.embedded_count(view),
        threshold=None if served is None else _threshold(backend, view),
    )


def _threshold(backend: Backend, view: Gallery) -> MigrationThresholdOut | None:
    target = view.settings.risk
    try:
        found = thresholds_for(target, backend.risks.current(view), max(1, view.subjects), view.settings.review_factor)
    except RiskUncalibratedError:
        return None
    return MigrationThresholdOut(
        risk={target.kind: target.value},
        threshold=round(found.accept, 4),
        review_threshold=round(found.review, 4),
        source=found.source,
        extrapolated=found.extrapolated,
    )

"""Migration of a gallery to another recognizer: start, progress, cut over, roll back, finish."""

from __future__ import annotations

from typing import Final

from kith.wire.migration import (
    CutOverIn,
    FinishIn,
    GenerationOut,
    MigrateIn,
    MigrationOut,
    MigrationThresholdOut,
)
from service.api.http.parameters import GalleryPath
from service.api.http.route_errors import Errors
from service.api.http.routing import ADMIN, BackendDep, Routes
from service.core.errors import (
    MigrationIncompleteError,
    MigrationStateError,
    ModelNotServedError,
    RecognizerMismatchError,
    RiskUncalibratedError,
)
from service.domain.gallery import Gallery, Generation
from service.domain.outcomes import to_risk_target
from service.risk.decision import thresholds_for
from service.storage.repositories.generations import DROP, FILL
from service.usecases.backend import Backend

routes = Routes("/v1/galleries/{gallery}/migrate", "migration")
MIGRATION: Final[Errors] = (MigrationStateError, ModelNotServedError, RecognizerMismatchError, RiskUncalibratedError)


@routes.add("POST", "", ADMIN, status_code=202, example={"to": "open-model-zoo"}, errors=MIGRATION)
async def start_migration(gallery: GalleryPath, body: MigrateIn, backend: BackendDep) -> MigrationOut:
    """Start a migration to another served pack's recognizer. A job embeds the stored crops."""
    to = backend.faces.recognizers.by_name(body.to)
    await backend.run_on_gallery(
        gallery, backend.galleries.generations.start, to.fingerprint, to.dimension, to.pack.model_id
    )
    backend.jobs.runner.wake()
    return await _report(backend, gallery)


@routes.add("GET", "", ADMIN, errors=MIGRATION)
async def get_migration(gallery: GalleryPath, backend: BackendDep) -> MigrationOut:
    """Return each recognizer's coverage and thresholds."""
    return await _report(backend, gallery)


@routes.add("POST", "/cut-over", ADMIN, example={"min_share": 0.99}, errors=(*MIGRATION, MigrationIncompleteError))
async def cut_over_migration(gallery: GalleryPath, body: CutOverIn, backend: BackendDep) -> MigrationOut:
    """Answer with the new recognizer from the next request on."""
    share = 0.0 if body.force else body.min_share
    risk = to_risk_target(body.risk, "fpir") if body.risk else None
    await backend.run_on_gallery(gallery, backend.galleries.generations.cut_over, share, risk)
    backend.galleries.risks.derive_later(await backend.find_gallery(gallery))
    return await _report(backend, gallery)


@routes.add("POST", "/roll-back", ADMIN, errors=MIGRATION)
async def roll_back_migration(gallery: GalleryPath, backend: BackendDep) -> MigrationOut:
    """Answer with the previous recognizer again, or set the new one aside. Nothing is deleted."""
    await backend.run_on_gallery(gallery, backend.galleries.generations.roll_back)
    backend.jobs.runner.wake()
    return await _report(backend, gallery)


@routes.add("POST", "/finish", ADMIN, example={"force": False}, errors=(*MIGRATION, MigrationIncompleteError))
async def finish_migration(gallery: GalleryPath, body: FinishIn, backend: BackendDep) -> MigrationOut:
    """Delete the vectors of the other recognizer. This cannot be undone."""
    await backend.run_on_gallery(gallery, backend.galleries.generations.finish, body.force)
    backend.jobs.runner.wake()
    return await _report(backend, gallery)


async def _report(backend: Backend, name: str) -> MigrationOut:
    return await backend.run_on_gallery(name, _read_migration, backend)


def _read_migration(gallery: Gallery, backend: Backend) -> MigrationOut:
    current, *rest = backend.galleries.generations.list_live(gallery)
    other = rest[0] if rest else None
    unfinished = backend.jobs.runner.store.list_jobs(gallery, ("queued", "running"), None, 100)
    return MigrationOut(
        gallery=gallery.name,
        state="none" if other is None else "cut_over" if other.state == "previous" else other.state,
        current=_generation(backend, gallery, current),
        other=None if other is None else _generation(backend, gallery, other),
        jobs=[job.id for job in unfinished if job.kind in (FILL, DROP)],
    )


def _generation(backend: Backend, gallery: Gallery, generation: Generation) -> GenerationOut:
    served = backend.faces.recognizers.get(generation.fingerprint)
    covered = backend.galleries.generations.coverage(gallery, generation.number)
    return GenerationOut(
        recognizer=generation.fingerprint,
        model=generation.model if served is None else served.pack.model_id,
        served=served is not None,
        dimension=generation.dimension,
        template_count=covered.templates,
        embedded_count=covered.embedded,
        by_crop_count=generation.details.get("counts", {}).get("by_crop", 0),
        waiting_with_crop_count=covered.with_crop,
        waiting_without_crop_count=covered.without_crop,
        threshold=None if served is None else _threshold(backend, gallery.at_generation(generation.number)),
    )


def _threshold(backend: Backend, view: Gallery) -> MigrationThresholdOut | None:
    target = view.settings.risk
    try:
        found = thresholds_for(
            target, backend.galleries.risks.current(view), max(1, view.subjects), view.settings.review_factor
        )
    except RiskUncalibratedError:
        return None
    return MigrationThresholdOut(
        risk={target.kind: target.value},
        threshold=round(found.accept, 4),
        review_threshold=round(found.review, 4),
        source=found.source,
        extrapolated=found.extrapolated,
    )

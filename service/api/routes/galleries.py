"""Galleries: create, list, configure, inspect, delete."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from fastapi import APIRouter

from kith.wire.common import LivenessSetting
from kith.wire.erasures import DeletedOut
from kith.wire.galleries import (
    GalleriesOut,
    GalleryOut,
    GalleryStatsOut,
    IndexOut,
    RetentionAppliedOut,
    RetentionOut,
)
from kith.wire.hygiene import FindingOut, HygieneOut, NamedOut, TemplateRefOut
from service.api.http.backend import BackendDep
from service.api.http.openapi import PROBLEMS
from service.api.http.parameters import Cursor, GalleryPath, NameCursor, PageLimit, open_cursor_numbers
from service.api.http.permissions import ADMIN, ADMIN_ALL, READ, permitted
from service.api.http.routing import CallerDep, PermittedRoute
from service.core.errors import GalleryMovedError, LivenessUnavailableError, RiskUncalibratedError
from service.domain.findings import KINDS, HygieneFinding, HygieneReport
from service.domain.gallery import Gallery, GallerySettings, Subject, Template
from service.risk.hygiene import SIMILARITY_DIGITS, find_problems, sort_key
from service.schemas.erasures import to_deleted_out
from service.schemas.galleries import GalleryIn, GallerySettingsIn, RetentionIn, to_drift_out, to_gallery_out
from service.storage.db.row_sealing import seal_cursor
from service.storage.repositories.store import Store
from service.usecases.backend import Backend

router = APIRouter(route_class=PermittedRoute, prefix="/v1/galleries", tags=["galleries"], responses=PROBLEMS)


@router.post("", status_code=201)
@permitted(
    ADMIN_ALL, example={"name": "staff", "risk": {"fpir": 0.001}, "retention_days": 365}
)  # a 409 reveals that a name is taken
async def create_gallery(body: GalleryIn, backend: BackendDep) -> GalleryOut:
    """Create a gallery. Its vectors come from the recognizer of KITH_PACK."""
    settings = body.over(GallerySettings())
    _check_liveness(backend, body.liveness)
    recognizer = backend.faces.recognizers.default
    created = await backend.run(
        backend.galleries.store.galleries.create, body.name, recognizer.fingerprint, recognizer.dimension, settings
    )
    return to_gallery_out(created)


def _check_liveness(backend: Backend, setting: LivenessSetting | None) -> None:
    """Raises LivenessUnavailableError: liveness is required and the served pack has no liveness model."""
    if setting == "required" and backend.faces.photos.judge is None:
        raise LivenessUnavailableError("the served model pack has no liveness model")


@router.get("")
@permitted(READ)
async def list_galleries(
    backend: BackendDep, caller: CallerDep, cursor: NameCursor = None, limit: PageLimit = 100
) -> GalleriesOut:
    """List the galleries that the key is for, by name."""
    found = await backend.run(backend.galleries.store.galleries.list_page, cursor, limit + 1, caller.rights.galleries)
    page = found[:limit]
    more = page[-1].name if len(found) > limit else None
    return GalleriesOut(galleries=[to_gallery_out(g) for g in page], next=more)


@router.get("/{gallery}")
@permitted(READ)
async def get_gallery(gallery: GalleryPath, backend: BackendDep) -> GalleryOut:
    """Return a gallery's settings, counts, and drift of its decisions from the calibration."""
    found = await backend.find_gallery(gallery)
    drift = await backend.run(backend.galleries.watches.drift_of, found.pk, found.name, found.fingerprint)
    return to_gallery_out(found).model_copy(update={"drift": to_drift_out(drift)})


@router.get("/{gallery}/stats")
@permitted(READ)
async def get_statistics(gallery: GalleryPath, backend: BackendDep, caller: CallerDep) -> GalleryStatsOut:
    """Return statistics of the gallery's index: its kind and why, recall, size and position in the change log."""
    found = await backend.find_gallery(gallery)
    follower = await backend.galleries.search.caught_up(found)
    stats = await backend.run(follower.stats)
    index = IndexOut(**asdict(stats))
    if caller.rights.galleries is not None:
        index.sequence = None
    return GalleryStatsOut(gallery=found.name, subjects=found.subjects, templates=found.templates, index=index)


@router.get("/{gallery}/retention")
@permitted(READ)
async def get_retention(gallery: GalleryPath, backend: BackendDep) -> RetentionOut:
    """Count the templates and subjects whose retention has expired, and tell if erasure awaits confirmation."""
    found, now = await backend.find_gallery(gallery), datetime.now(UTC)
    due = await backend.run(backend.galleries.retention.due, found, now)
    return RetentionOut(
        gallery=found.name,
        retention_days=found.settings.retention_days,
        now=now,
        due_templates=due.templates,
        due_subjects=due.subjects,
        templates=due.of_templates,
        subjects=due.of_subjects,
        held=backend.galleries.retention.needs_confirmation(due),
    )


@router.post("/{gallery}/retention")
@permitted(ADMIN, example={"templates": 12, "subjects": 3})
async def apply_retention(gallery: GalleryPath, body: RetentionIn, backend: BackendDep) -> RetentionAppliedOut:
    """Erase expired templates and subjects once, if there are no more than the request confirms."""
    now = datetime.now(UTC)
    swept = await backend.run_on_gallery(
        gallery, backend.galleries.retention.erase_due, now, body.templates, body.subjects
    )
    for changed in swept.galleries:
        backend.galleries.risks.derive_later(changed)
    return RetentionAppliedOut(templates=swept.templates, subjects=swept.subjects)


@router.patch("/{gallery}")
@permitted(ADMIN, example={"risk": {"fpir": 0.0001}})
async def update_gallery(gallery: GalleryPath, body: GallerySettingsIn, backend: BackendDep) -> GalleryOut:
    """Change the given settings of the gallery. The others stay."""
    _check_liveness(backend, body.liveness)
    updated = await backend.run(backend.galleries.store.galleries.update, gallery, body.over)
    backend.galleries.risks.derive_later(updated)
    return to_gallery_out(updated)


@router.delete("/{gallery}")
@permitted(ADMIN)
async def delete_gallery(gallery: GalleryPath, backend: BackendDep) -> DeletedOut:
    """Delete the gallery with all its subjects and templates."""
    deleted, receipt = await backend.run_on_gallery(
        gallery, lambda found: backend.galleries.store.galleries.delete(found.name)
    )
    await backend.run(backend.galleries.followers.drop, deleted)
    if backend.galleries.shared_engine is not None:
        await backend.run(backend.galleries.shared_engine.forget, deleted)
    backend.galleries.risks.forget(deleted)
    backend.galleries.search.windows.forget(deleted)
    backend.galleries.watches.drop(deleted.pk, deleted.name)
    return to_deleted_out(receipt)


@router.get("/{gallery}/hygiene")
@permitted(ADMIN)  # similarities between templates, which a caller may have made up
async def check_hygiene(
    gallery: GalleryPath, backend: BackendDep, cursor: Cursor = None, limit: PageLimit = 100
) -> HygieneOut:
    """Find duplicate subjects, mislabeled templates and lookalikes, with the odds of each. Changes nothing.

    The first request after a change of the gallery takes seconds for 10,000 templates. Concurrent requests share it,
    and other requests are served meanwhile.
    """
    found = await backend.find_gallery(gallery)
    after = open_cursor_numbers(found.seal, cursor, 4)
    backend.faces.recognizers.for_gallery(found)
    calibration = backend.galleries.risks.calibration(found)
    if calibration is None:
        raise RiskUncalibratedError("hygiene needs a calibrated recognizer")

    def inspect() -> HygieneReport:
        current = backend.galleries.store.galleries.get(gallery)
        if (current.pk, current.fingerprint) != (found.pk, found.fingerprint):
            raise GalleryMovedError(f"gallery {gallery!r} was replaced or moved to another recognizer meanwhile")
        report = backend.galleries.store.cache.findings(current)
        if report is None:
            report = find_problems(backend.galleries.store.changes.snapshot(current), calibration)
            backend.galleries.store.cache.add_findings(current, report)
        return report

    report = backend.galleries.store.cache.findings(found)
    if report is None:
        report = await backend.jobs.heavy.run(("hygiene", found.pk, found.fingerprint), inspect)
    return await backend.run(_hygiene_page, backend.galleries.store, found, report, after, limit)


def _hygiene_page(
    store: Store, gallery: Gallery, report: HygieneReport, after: tuple[int, ...] | None, limit: int
) -> HygieneOut:
    findings, recall = report.findings, report.recall
    start = 0 if after is None else bisect_right(findings, after, key=sort_key)
    shown = findings[start : start + limit]
    more = start + limit < len(findings)
    named = [*shown, *report.nearest]
    subjects = store.subjects.by_pk(gallery, sorted({pk for finding in named for pk in finding.subjects}))
    templates = store.templates.by_pk(gallery, sorted({pk for finding in named for pk in finding.templates}))

    def present(part: Sequence[HygieneFinding]) -> list[FindingOut]:
        # Leave out subjects and templates that were deleted since the snapshot.
        return [
            _finding_out(finding, subjects, templates)
            for finding in part
            if subjects.keys() >= set(finding.subjects) and templates.keys() >= set(finding.templates)
        ]

    counts = Counter(finding.kind for finding in findings)
    return HygieneOut(
        gallery=gallery.name,
        total={kind: counts[kind] for kind in KINDS},
        findings=present(shown),
        nearest=present(report.nearest),
        expected_recall=None if recall is None else round(recall.value, 3),
        expected_recall_low=None if recall is None else round(recall.low, 3),
        expected_recall_high=None if recall is None else round(recall.high, 3),
        next=seal_cursor(gallery.seal, *sort_key(shown[-1])) if more else None,
    )


def _finding_out(finding: HygieneFinding, subjects: dict[int, Subject], templates: dict[int, Template]) -> FindingOut:
    return FindingOut(
        kind=finding.kind,
        subjects=[NamedOut(subject=subjects[pk].id, name=subjects[pk].name) for pk in finding.subjects],
        templates=[
            TemplateRefOut(template=templates[pk].id, subject=templates[pk].subject) for pk in finding.templates
        ],
        similarity=_round_similarity(finding.similarity),
        chance=finding.chance,
        odds=None if finding.odds is None else float(f"{finding.odds:.3g}"),
        own_similarity=_round_similarity(finding.own_similarity),
        belongs_to=None if finding.belongs_to is None else subjects[finding.belongs_to].id,
        action=finding.action,
    )


def _round_similarity(similarity: float | None) -> float | None:
    return None if similarity is None else round(similarity, SIMILARITY_DIGITS)

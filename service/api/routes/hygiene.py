"""Gallery hygiene: duplicate subjects, mislabeled templates and lookalikes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter

from kith.wire.hygiene import FindingOut, HygieneOut, NamedOut, TemplateRefOut
from models.risk.calibration import Calibration
from service.api.http.context import ContextDep
from service.api.http.openapi import PROBLEMS
from service.api.http.parameters import Cursor, GalleryPath, PageLimit, open_cursor_numbers
from service.api.http.routing import PermittedRoute
from service.core.errors import RiskUncalibratedError
from service.domain.decision import thresholds_for
from service.domain.gallery import Gallery, Subject, Template
from service.domain.hygiene import KINDS, SIMILARITY_DIGITS, HygieneFinding, HygieneThresholds, find_problems, sort_key
from service.services.gallery_risks import GalleryRisks
from service.storage.db.row_sealing import seal_cursor
from service.storage.repositories.store import Store

router = APIRouter(route_class=PermittedRoute, tags=["galleries"], responses=PROBLEMS)


@router.get("/v1/galleries/{gallery}/hygiene")
async def hygiene(
    gallery: GalleryPath, context: ContextDep, cursor: Cursor = None, limit: PageLimit = 100
) -> HygieneOut:
    """Find duplicate subjects, mislabeled templates and lookalikes. Changes nothing.

    The first request after a change of the gallery takes seconds for 10,000 templates.
    """
    found = await context.run(context.store.galleries.get, gallery)
    after = open_cursor_numbers(found.seal, cursor, 4)
    context.recognizers.for_gallery(found)
    risks = context.pipeline.risks
    calibration = risks.calibration(found)
    if calibration is None:
        raise RiskUncalibratedError("hygiene needs a calibrated recognizer")

    def page() -> HygieneOut:
        findings = context.store.cache.findings(found, lambda: _inspect(context.store, found, risks, calibration))
        return _page(context.store, found, findings, after, limit)

    return await context.run(page)


def _inspect(store: Store, gallery: Gallery, risks: GalleryRisks, calibration: Calibration) -> Sequence[HygieneFinding]:
    snapshot = store.changes.snapshot(gallery)
    size = len(np.unique(snapshot.subject_pks))
    accept = thresholds_for(gallery.settings.risk, risks.of(gallery), max(1, size)).accept
    return find_problems(snapshot, calibration, HygieneThresholds.of(calibration, size, accept))


def _page(
    store: Store, gallery: Gallery, findings: Sequence[HygieneFinding], after: tuple[int, ...] | None, limit: int
) -> HygieneOut:
    start = 0 if after is None else bisect_right(findings, after, key=sort_key)
    shown = findings[start : start + limit]
    more = start + limit < len(findings)
    subjects = store.subjects.by_pk(gallery, sorted({pk for finding in shown for pk in finding.subjects}))
    templates = store.templates.by_pk(gallery, sorted({pk for finding in shown for pk in finding.templates}))
    counts = Counter(finding.kind for finding in findings)
    return HygieneOut(
        gallery=gallery.name,
        total={kind: counts[kind] for kind in KINDS},
        # Leave out subjects and templates that were deleted since the snapshot.
        findings=[
            _out(finding, subjects, templates)
            for finding in shown
            if subjects.keys() >= set(finding.subjects) and templates.keys() >= set(finding.templates)
        ],
        next=seal_cursor(gallery.seal, *sort_key(shown[-1])) if more else None,
    )


def _out(finding: HygieneFinding, subjects: dict[int, Subject], templates: dict[int, Template]) -> FindingOut:
    return FindingOut(
        kind=finding.kind,
        subjects=[NamedOut(subject=subjects[pk].id, name=subjects[pk].name) for pk in finding.subjects],
        templates=[
            TemplateRefOut(template=templates[pk].id, subject=templates[pk].subject) for pk in finding.templates
        ],
        similarity=_rounded(finding.similarity),
        chance=finding.chance,
        own_similarity=_rounded(finding.own_similarity),
        belongs_to=None if finding.belongs_to is None else subjects[finding.belongs_to].id,
        action=finding.action,
    )


def _rounded(similarity: float | None) -> float | None:
    return None if similarity is None else round(similarity, SIMILARITY_DIGITS)

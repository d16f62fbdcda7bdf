"""What deserves a look in a gallery: duplicates, mislabelled templates, lookalikes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter

from models.risk import Calibration
from service.api.context import Kith
from service.api.galleries import GalleryPath, Limit, PlaceCursor, places_in
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import FindingOut, HygieneOut, NamedOut, TemplateRefOut
from service.decision import thresholds_for
from service.errors import RiskUncalibratedError
from service.gallery.hygiene import DIGITS, KINDS, Finding, Levels, inspect, place
from service.gallery.risks import GalleryRisks
from service.gallery.sealed_rows import close_place
from service.gallery.store import Store
from service.gallery.subjects import Gallery, Subject, Template

router = APIRouter(route_class=Permitted, tags=["galleries"], responses=PROBLEMS)


@router.get("/v1/galleries/{gallery}/hygiene")
async def hygiene(gallery: GalleryPath, kith: Kith, cursor: PlaceCursor = None, limit: Limit = 100) -> HygieneOut:
    """Who seems enrolled twice, filed under the wrong subject, or easily taken for another. Changes nothing; takes
    seconds for ten thousand templates, once after each change of the gallery."""
    found = await kith.run(kith.store.gallery, gallery)
    after = places_in(found.seal, cursor, 4)
    kith.recognisers.of(found)
    risks = kith.pipeline.risks
    calibration = risks.calibration(found)
    if calibration is None:
        raise RiskUncalibratedError("without calibration no similarity says that two subjects are one person")

    def page() -> HygieneOut:
        findings = kith.store.findings(found, lambda: _inspected(kith.store, found, risks, calibration))
        return _page(kith.store, found, findings, after, limit)

    return await kith.run(page)


def _inspected(store: Store, gallery: Gallery, risks: GalleryRisks, calibration: Calibration) -> Sequence[Finding]:
    snapshot = store.snapshot(gallery)
    size = len(np.unique(snapshot.subject_pks))
    accept = thresholds_for(gallery.settings.risk, risks.of(gallery), max(1, size)).accept
    return inspect(snapshot, calibration, Levels.of(calibration, size, accept))


def _page(
    store: Store, gallery: Gallery, findings: Sequence[Finding], after: tuple[int, ...] | None, limit: int
) -> HygieneOut:
    start = 0 if after is None else bisect_right(findings, after, key=place)
    shown = findings[start : start + limit]
    more = start + limit < len(findings)
    subjects = store.subjects_by_pk(gallery, sorted({pk for finding in shown for pk in finding.subjects}))
    templates = store.templates_by_pk(gallery, sorted({pk for finding in shown for pk in finding.templates}))
    counts = Counter(finding.kind for finding in findings)
    return HygieneOut(
        gallery=gallery.name,
        total={kind: counts[kind] for kind in KINDS},
        # What was deleted since the snapshot needs no look.
        findings=[
            _out(finding, subjects, templates)
            for finding in shown
            if subjects.keys() >= set(finding.subjects) and templates.keys() >= set(finding.templates)
        ],
        next=close_place(gallery.seal, *place(shown[-1])) if more else None,
    )


def _out(finding: Finding, subjects: dict[int, Subject], templates: dict[int, Template]) -> FindingOut:
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
    return None if similarity is None else round(similarity, DIGITS)

"""What deserves a look in a gallery: duplicates, mislabelled templates, lookalikes."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query

from models.risk import Calibration
from service.api.context import Kith
from service.api.galleries import GalleryPath
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import FindingOut, HygieneOut, NamedOut, TemplateRefOut
from service.decision import thresholds_for
from service.errors import RiskUncalibratedError
from service.gallery.hygiene import KINDS, Finding, Levels, inspect
from service.gallery.risks import GalleryRisks
from service.gallery.store import Store
from service.gallery.subjects import Gallery, Subject, Template

router = APIRouter(route_class=Permitted, tags=["galleries"], responses=PROBLEMS)


@router.get("/v1/galleries/{gallery}/hygiene")
async def hygiene(gallery: GalleryPath, kith: Kith, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> HygieneOut:
    """Who seems enrolled twice, filed under the wrong subject, or easily taken for another. Changes nothing; takes
    seconds for ten thousand templates."""
    found = await kith.run(kith.store.gallery, gallery)
    kith.recognisers.of(found)
    risks = kith.pipeline.risks
    calibration = risks.calibration(found)
    if calibration is None:
        raise RiskUncalibratedError("without calibration no similarity says that two subjects are one person")
    return await kith.run(_report, kith.store, found, risks, calibration, limit)


def _report(store: Store, gallery: Gallery, risks: GalleryRisks, calibration: Calibration, limit: int) -> HygieneOut:
    snapshot = store.snapshot(gallery)
    size = len(np.unique(snapshot.subject_pks))
    accept = thresholds_for(gallery.settings.risk, risks.of(gallery), max(1, size)).accept
    findings = inspect(snapshot, calibration, Levels.of(calibration, size, accept))
    shown = findings[:limit]
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
    return None if similarity is None else round(similarity, 4)

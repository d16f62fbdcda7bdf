"""A gallery's risk: thresholds for targets, the curve, what they rest on, and how they moved."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from service import risk_report
from service.api.context import Context, Kith
from service.api.galleries import GalleryPath
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import (
    CheckOut,
    EvidenceOut,
    GalleryRiskOut,
    PointOut,
    Probability,
    TargetOut,
    ThresholdOut,
)
from service.decision import thresholds_for
from service.errors import RiskUncalibratedError
from service.gallery.subjects import Gallery

router = APIRouter(route_class=Permitted, prefix="/v1/galleries/{gallery}", tags=["risk"], responses=PROBLEMS)
Targets = Annotated[list[Probability], Query(max_length=20, description="FPIRs to give thresholds for; repeatable.")]


@router.get("/risk")
async def get_risk(gallery: GalleryPath, kith: Kith, fpir: Targets = list(risk_report.TARGETS)) -> GalleryRiskOut:  # noqa: B006
    """FPIR by threshold, thresholds for targets today and at ten times today's size, with 95 % intervals, and the
    evidence behind them."""
    found = await kith.run(kith.store.gallery, gallery)
    kith.recognisers.of(found)
    return await kith.run(_report, kith, found, fpir)


@router.post("/calibrate")
async def calibrate(gallery: GalleryPath, kith: Kith, fpir: Targets = list(risk_report.TARGETS)) -> GalleryRiskOut:  # noqa: B006
    """Derive the gallery's evidence anew, at once, from all its templates; answer as GET risk."""
    kith.recognisers.of(await kith.gallery(gallery))
    await kith.change(gallery, lambda found: kith.pipeline.risks.refresh(found.name, True))
    return await kith.run(_report, kith, await kith.gallery(gallery), fpir)


def _report(kith: Context, gallery: Gallery, targets: list[float]) -> GalleryRiskOut:
    risks = kith.pipeline.risks
    stored = kith.store.evidence(gallery)
    risk = risks.gallery_risk(gallery, stored)
    known = risks.known(gallery, risk)
    if known is None:
        raise RiskUncalibratedError(f"nothing is known of strangers in gallery {gallery.name!r}")
    subjects = max(1, stored.scores.subjects if stored else gallery.subjects)
    target = gallery.settings.risk
    own = thresholds_for(target, known, subjects, gallery.settings.review_factor)
    calibration = risks.calibration(gallery)
    return GalleryRiskOut(
        gallery=gallery.name,
        fusion=gallery.settings.fusion,
        subjects=subjects,
        risk={target.kind: target.value},
        threshold=round(own.accept, 4),
        review_threshold=round(own.review, 4),
        evidence=EvidenceOut(
            source=known.source,
            gallery_share=round(risk.gallery_share, 4) if risk else 0.0,
            pairs=stored.scores.pairs if stored else 0,
            probes=stored.scores.probes if stored else 0,
            duplicate_pairs=round(risk.duplicate_pairs, 1) if risk else 0.0,
            pack_pairs=calibration.impostor_pairs if calibration else 0,
            derived_at=stored.derived_at if stored else None,
            up_to_date=stored is not None and not risks.is_stale(gallery, stored),
        ),
        targets=[
            TargetOut(fpir=today.fpir, today=ThresholdOut.of(today), grown=ThresholdOut.of(grown))
            for today, grown in risk_report.thresholds(targets, known.comparisons(subjects), known.curve, calibration)
        ],
        curve=[PointOut(**vars(point)) for point in risk_report.fpir_curve(known.comparisons(subjects), known.curve)],
        check=CheckOut(**vars(risk_report.check_maxima(risk.evidence, known.curve))) if risk else None,
    )

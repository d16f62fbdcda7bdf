"""Report of a gallery's risk, and its calibration on demand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kith.wire.risk import EvidenceOut, GalleryRiskOut, MostResembledOut, MoveOut
from models.risk.impostor_evidence import Levels
from service.core.errors import GalleryMovedError, RiskUncalibratedError
from service.domain.gallery import Gallery
from service.risk import risk_report
from service.risk.threshold import thresholds_for
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.repositories.evidence import THRESHOLD_MOVED
from service.usecases.backend import Backend


async def report_risk(backend: Backend, gallery: str, targets: Sequence[float]) -> GalleryRiskOut:
    """Report the thresholds of a gallery for FPIR targets, and the evidence behind them.

    Raises:
        GalleryNotFoundError: there is no such gallery.
        RecognizerMismatchError: its recognizer is not served.
        RiskUncalibratedError: neither its pack nor the gallery has enough evidence.
    """
    found = await backend.find_gallery(gallery)
    backend.recognizers.for_gallery(found)
    return await backend.threads.run(_report, backend, found, targets)


async def derive_and_report(backend: Backend, gallery: str, targets: Sequence[float]) -> GalleryRiskOut:
    """Derive the gallery's evidence from all its templates, then report. Raises as :func:`report_risk`."""
    found = await backend.find_gallery(gallery)
    backend.recognizers.for_gallery(found)
    refresh = partial(backend.risks.refresh, gallery, exact=True)
    with suppress(GalleryMovedError):  # the move derives the evidence of the new recognizer
        await backend.heavy.run(refresh)
    return await backend.threads.run(_report, backend, await backend.find_gallery(gallery), targets)


def _report(backend: Backend, gallery: Gallery, targets: Sequence[float]) -> GalleryRiskOut:
    risks = backend.risks
    stored = backend.store.evidence.get(gallery)
    risk = risks.fit(gallery, stored)
    model = risks.with_pack(gallery, risk)
    if model is None:
        raise RiskUncalibratedError(f"gallery {gallery.name!r} has no calibration")
    subjects = max(1, stored.evidence.subjects if stored else gallery.subjects)
    target = gallery.settings.risk
    own = thresholds_for(target, model, subjects, gallery.settings.review_factor)
    calibration, curve = risks.calibration(gallery), model.curve_of(subjects)
    ratio = risk.fmr_over_pack() if risk else None
    rival = model.rival_of(subjects) if own.of_scores else None
    return GalleryRiskOut(
        gallery=gallery.name,
        subject_count=subjects,
        risk={target.kind: target.value},
        threshold=round(own.accept, 4),
        review_threshold=round(own.review, 4),
        rival=None if rival is None else round(rival, 4),
        most_resembled=_most_resembled(model.search.levels) if own.of_scores and model.search else None,
        evidence=EvidenceOut(
            source=model.source,
            gallery_share=round(risk.gallery_share, 4) if risk else 0.0,
            pair_count=stored.evidence.pair_count if stored else 0,
            probe_count=stored.evidence.probes if stored else 0,
            duplicate_pair_count=round(risk.duplicate_pairs, 1) if risk else 0.0,
            pack_pair_count=calibration.impostor_pairs if calibration else 0,
            fmr_over_pack=None if ratio is None else float(f"{ratio.value:.3g}"),
            derived_at=stored.derived_at if stored else None,
            up_to_date=stored is not None and not risks.is_stale(gallery, stored),
        ),
        targets=risk_report.target_thresholds(targets, subjects, model, risk.evidence if risk else None, calibration),
        curve=risk_report.fpir_curve(model.comparisons_among(subjects), curve),
        check=risk_report.check_maxima(risk.evidence, curve) if risk else None,
        last_move=_last_move(backend, gallery),
        warnings=risk_report.warnings(risk),
    )


def _most_resembled(levels: Levels | None) -> MostResembledOut | None:
    if levels is None:
        return None
    return MostResembledOut(level=round(levels.of_most_resembled, 4), share=round(levels.share, 4))


def _last_move(backend: Backend, gallery: Gallery) -> MoveOut | None:
    moved = AuditFilter(gallery.pk, event=THRESHOLD_MOVED)
    for line in listed_lines(backend.store.database, moved, None, limit=1):
        before, after = ((line.details.get(when) or {}).get("threshold") for when in ("before", "after"))
        return MoveOut(before=before, after=after, reason=line.details["reason"])
    return None

"""Gallery risk: thresholds for FPIR targets, the FPIR curve and the evidence behind them."""

from __future__ import annotations

from kith.wire.risk import GalleryRiskOut
from service.api.http.access import ADMIN, READ, BackendDep, router
from service.api.http.parameters import GalleryPath, Targets
from service.risk import risk_report
from service.usecases.risk import derive_and_report, report_risk

routes = router("/v1/galleries/{gallery}", "risk")


@routes.get("/risk", dependencies=[READ])
async def get_risk(
    gallery: GalleryPath,
    backend: BackendDep,
    fpir: Targets = list(risk_report.TARGETS),  # noqa: B006
) -> GalleryRiskOut:
    """Return the FPIR curve, thresholds for FPIR targets with 95 % intervals, and the evidence.

    Thresholds are for the gallery's current size and for ten times as many subjects.
    """
    return await report_risk(backend, gallery, fpir)


@routes.post("/calibrate", dependencies=[ADMIN])
async def calibrate(
    gallery: GalleryPath,
    backend: BackendDep,
    fpir: Targets = list(risk_report.TARGETS),  # noqa: B006
) -> GalleryRiskOut:
    """Bring the gallery's evidence up to date with all its templates. The response is that of GET risk."""
    return await derive_and_report(backend, gallery, fpir)

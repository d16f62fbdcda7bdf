"""Gallery risk: thresholds for FPIR targets, the FPIR curve and the evidence behind them."""

from __future__ import annotations

from fastapi import APIRouter

from kith.wire.risk import GalleryRiskOut
from service.api.http.backend import BackendDep
from service.api.http.openapi import PROBLEMS
from service.api.http.parameters import GalleryPath, Targets
from service.api.http.permissions import ADMIN, READ, permitted
from service.api.http.routing import PermittedRoute
from service.risk import risk_report
from service.usecases.risk import derive_and_report, report_risk

router = APIRouter(route_class=PermittedRoute, prefix="/v1/galleries/{gallery}", tags=["risk"], responses=PROBLEMS)


@router.get("/risk")
@permitted(READ)
async def get_risk(
    gallery: GalleryPath,
    backend: BackendDep,
    fpir: Targets = list(risk_report.TARGETS),  # noqa: B006
) -> GalleryRiskOut:
    """Return the FPIR curve, thresholds for FPIR targets with 95 % intervals, and the evidence.

    Thresholds are for the gallery's current size and for ten times as many subjects.
    """
    return await report_risk(backend, gallery, fpir)


@router.post("/calibrate")
@permitted(ADMIN)
async def calibrate(
    gallery: GalleryPath,
    backend: BackendDep,
    fpir: Targets = list(risk_report.TARGETS),  # noqa: B006
) -> GalleryRiskOut:
    """Bring the gallery's evidence up to date with all its templates. The response is that of GET risk."""
    return await derive_and_report(backend, gallery, fpir)

"""Health, readiness, and what is being served."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from models.network import Network
from models.pack import ModelPack
from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import DriftOut, HealthOut, ModelOut, ModelsOut, NetworkOut
from service.api.status_schemas import (
    AuditBacklogOut,
    CheckOut,
    DiskOut,
    LagOut,
    QueueOut,
    RetentionStatusOut,
    StatusOut,
)
from service.recognisers import Served
from service.telemetry import CONTENT_TYPE

router = APIRouter(route_class=Permitted, tags=["system"], responses=PROBLEMS)


@router.get("/healthz")
async def health() -> HealthOut:
    """The process answers."""
    return HealthOut(version=version("kith-face"))


@router.get("/readyz")
async def ready(kith: Kith) -> HealthOut:
    """The networks are loaded, on the GPU where one is wanted; the database answers, and so does Milvus where it is
    used; no line of the audit is lost. 503 otherwise, and where one of them hangs; 500 where a device's thread has
    ended by an error."""
    # Not in the threads of requests: a node that is busy is ready all the same.
    await kith.readiness.check()
    return HealthOut(version=version("kith-face"))


@router.get("/v1/status")
async def status(kith: Kith) -> StatusOut:
    """How the process that answers is, in one document: readiness part by part, queues, jobs, drift, and how far its
    indexes have followed."""
    sample = await asyncio.to_thread(kith.samples.latest)
    drifts = await asyncio.to_thread(kith.watches.drifts)
    waiting, lost = kith.audit.backlog()
    began = kith.measures.began
    return StatusOut(
        version=version("kith-face"),
        model=kith.recognisers.default.pack.model_id,
        started_at=datetime.fromtimestamp(began, UTC),
        uptime_s=time.time() - began,
        ready=await kith.readiness.holds() and sample is not None and sample.ready,
        looked_at=None if sample is None else datetime.fromtimestamp(sample.taken, UTC),
        checks=[] if sample is None else [CheckOut.of(*each) for each in sample.checks.items()],
        requests_in_progress=kith.measures.in_progress,
        queues=[QueueOut.of(batcher) for batcher in kith.batchers],
        audit=AuditBacklogOut(waiting=waiting, lost=lost),
        jobs=None if sample is None or sample.jobs is None else dict(sample.jobs),
        drift={name: DriftOut.of(drift) for name, drift in drifts.items()},
        index_lag=None
        if sample is None or sample.lags is None
        else {name: LagOut.of(lag) for name, lag in sample.lags.items()},
        disk=None
        if sample is None or sample.disk is None
        else DiskOut(free_bytes=sample.disk[0], size_bytes=sample.disk[1]),
        retention=None if sample is None else RetentionStatusOut.of(sample),
    )


@router.get("/v1/models")
async def models(kith: Kith) -> ModelsOut:
    """The packs being served, and the execution providers they run on. All use the detector of the first."""
    served = [_model(kith, one) for one in kith.recognisers]
    return ModelsOut(**vars(served[0]), models=served)


def _model(kith: Context, served: Served) -> ModelOut:
    first, judge = kith.recognisers.default, kith.pipeline.judge
    return ModelOut(
        model=served.pack.model_id,
        display_name=served.pack.display_name,
        recogniser=served.fingerprint,
        dimension=served.dimension,
        calibrated=served.calibration is not None,
        detection=_network(first.pack, kith.detection_network),
        recognition=_network(served.pack, served.network),
        liveness=None if judge is None or first is not served else _network(first.pack, judge.network),
        metrics=dict(served.pack.metrics),
    )


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(kith: Kith) -> Response:
    """For Prometheus: of this process, since it started."""
    # Not in the threads of requests: a node that is busy tells so.
    return Response(await asyncio.to_thread(kith.telemetry.text), media_type=CONTENT_TYPE)


def _network(pack: ModelPack, network: Network) -> NetworkOut:
    return NetworkOut(
        file=pack.name_of(network.path),
        engine=network.engine,
        precision=network.precision,
        why=network.why,
        providers=network.providers,
    )

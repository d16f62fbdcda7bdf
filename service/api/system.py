"""Health, readiness, and what is being served."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from models.network import Network
from models.pack import ModelPack
from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.schemas import HealthOut, ModelOut, ModelsOut, NetworkOut
from service.batching import FAILING
from service.errors import GpuUnavailableError, KithError
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
    used; no line of the audit is lost. 503 otherwise; 500 where a device's thread has ended by an error."""
    if kith.shortfalls and not kith.settings.allow_cpu:
        raise GpuUnavailableError(kith.shortfalls[0])
    if kith.gpus is not None and kith.gpus.failing():
        raise GpuUnavailableError(f"a GPU failed in each of its last {FAILING} batches: see nvidia-smi")
    if not kith.recognisers.default.batcher.alive:
        raise KithError("a device's thread has ended by an error, which the log has; start the service again")
    # Not in the threads of requests: a node that is busy is ready all the same.
    await asyncio.to_thread(kith.store.check)
    if kith.shared_engine is not None:
        await asyncio.to_thread(kith.shared_engine.check)
    kith.audit.check()
    return HealthOut(version=version("kith-face"))


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
    """Decisions and drift by gallery, for Prometheus: of this process, since it started."""
    return Response(await kith.run(kith.telemetry.text), media_type=CONTENT_TYPE)


def _network(pack: ModelPack, network: Network) -> NetworkOut:
    return NetworkOut(
        file=pack.name_of(network.path),
        engine=network.engine,
        precision=network.precision,
        why=network.why,
        providers=network.providers,
    )

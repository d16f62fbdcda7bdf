"""Health, readiness, status, served models and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from starlette.responses import PlainTextResponse, Response

from kith.wire.risk import PRESETS
from kith.wire.status import (
    AuditBacklogOut,
    CheckOut,
    HealthOut,
    ModelOut,
    ModelsOut,
    NetworkOut,
    QueueOut,
    SampleOut,
    StatusOut,
)
from models.pack.evidence import read_measured
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.runtime.network import Network
from service.api.http.access import ANY_KEY, READ_ALL, BackendDep, router
from service.api.http.parameters import Targets
from service.core.errors import (
    MasterKeyError,
)
from service.inference.batcher import Batcher
from service.inference.recognizers import ServedRecognizer
from service.observability.metrics import CONTENT_TYPE
from service.operations.status import to_check_out
from service.risk.risk_report import expected_misses
from service.security.master_keys import MasterKeys
from service.usecases.backend import Backend

routes = router("", "system")
DEFAULT_TARGETS: Final = list(PRESETS.values())


@routes.head("/healthz", include_in_schema=False)
@routes.get("/healthz")
async def get_health() -> HealthOut:
    """Return 200 while the process runs."""
    return HealthOut(version=version("kith-face"))


@routes.head("/readyz", include_in_schema=False)
@routes.get("/readyz")
async def get_readiness(backend: BackendDep) -> HealthOut:
    """Return 200 if the service can process requests, else 503.

    Checks: the networks are loaded, on the configured GPU; the database and, if used, Milvus respond in time; no audit
    entry was lost. A device thread that has crashed gives 500.
    """
    # The checks have their own threads: a busy node is ready as well.
    await backend.readiness.check()
    return HealthOut(version=version("kith-face"))


@routes.get("/v1/status", dependencies=[READ_ALL])  # names every gallery
async def get_status(backend: BackendDep) -> StatusOut:
    """Return the state of this process: readiness checks, queues, jobs, drift, and lag of its indexes."""
    sample = await asyncio.to_thread(backend.recent_state.latest)
    drifts = await asyncio.to_thread(backend.watches.drifts)
    waiting, lost = backend.audit.backlog()
    began = backend.metrics.started_at_s
    return StatusOut(
        version=version("kith-face"),
        model=backend.recognizers.default.pack.model_id,
        started_at=datetime.fromtimestamp(began, UTC),
        uptime_s=time.time() - began,
        ready=sample.ready and await backend.readiness.holds(),  # a sample may be some seconds old
        master_key=await asyncio.to_thread(to_master_key_out, backend.store.database.vault.master),
        request_count=backend.metrics.in_progress,
        queues=[_queue(batcher) for batcher in backend.networks],
        audit=AuditBacklogOut(waiting_count=waiting, lost_count=lost),
        drift=drifts,
        **{name: getattr(sample, name) for name in SampleOut.model_fields},
    )


@routes.get("/v1/models", dependencies=[ANY_KEY])
async def list_models(backend: BackendDep, fpir: Targets = DEFAULT_TARGETS) -> ModelsOut:
    """List the served model packs, their execution providers, and the people that each misses at some FPIRs. All use
    the detector of the first."""
    measured = await asyncio.to_thread(read_measured)
    served = [_model(backend, recognizer, fpir, measured) for recognizer in backend.recognizers]
    return ModelsOut(**vars(served[0]), models=served)


def _model(
    backend: Backend, served: ServedRecognizer, targets: Sequence[float], measured: Mapping[str, Calibration]
) -> ModelOut:
    first, judge = backend.recognizers.default, backend.photos.judge
    return ModelOut(
        model=served.pack.model_id,
        display_name=served.pack.display_name,
        recognizer=served.fingerprint,
        dimension=served.dimension,
        calibrated=served.calibration is not None,
        detection=_network(first.pack, next(iter(backend.networks.values()))),
        recognition=_network(served.pack, served.network),
        liveness=None if judge is None or first is not served else _network(first.pack, judge.network),
        metrics=dict(served.pack.metrics),
        misses=[]
        if served.calibration is None
        else [expected_misses(target, served.calibration, measured) for target in targets],
    )


@routes.get(
    "/metrics", dependencies=[READ_ALL], response_class=PlainTextResponse
)  # names every gallery and counts its subjects
async def get_metrics(backend: BackendDep) -> Response:
    """Return Prometheus metrics of this process since its start."""
    # Not in the threads of requests, so that a busy node can report it.
    return Response(await asyncio.to_thread(backend.telemetry.text), media_type=CONTENT_TYPE)


def _network(pack: ModelPack, network: Network) -> NetworkOut:
    return NetworkOut(
        file=pack.name_of(network.path),
        engine=network.engine,
        precision=network.precision,
        why=network.reason,
        providers=network.providers,
    )


def to_master_key_out(master: MasterKeys) -> CheckOut | None:
    """Convert the state of the master key's backup. Blocks: it reads files."""
    try:
        backed_up = master.is_backed_up()
    except MasterKeyError as error:
        return to_check_out("master_key", error)
    if backed_up is None:
        return None
    never = MasterKeyError(
        "The master key was never backed up. Without it all stored data is lost.",
        "On the server, run 'kith master backup FILE', and keep FILE on another machine.",
    )
    return to_check_out("master_key", None if backed_up else never)


def _queue(batcher: Batcher[object, object]) -> QueueOut:
    return QueueOut(
        network=batcher.name,
        waiting_count=batcher.queue.count(background=False),
        background_count=batcher.queue.count(background=True),
        batch_count=batcher.metrics.batches,
        seconds_per_item=batcher.seconds_per_item,
        refused_count=batcher.metrics.refused,
    )

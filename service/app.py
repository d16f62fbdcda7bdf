"""The wiring, all of it: settings in, application out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, get_args

import cv2
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.telemetry import TelemetryConfig

from models.cuda_network import CudaNetwork
from models.detection import Detector
from models.engines import Opened, open_networks
from models.liveness import Liveness
from models.pack import LivenessSpec, ModelPack
from models.recognition import Recogniser
from models.risk import Calibration
from models.runtime import BATCH_BUCKETS, available_cores
from service.api import (
    audit,
    console,
    documents,
    enrolments,
    erasures,
    faces,
    galleries,
    hygiene,
    identify,
    jobs,
    keys,
    migrate,
    permissions,
    problems,
    risk,
    subjects,
    system,
    transfer,
    verify,
)
from service.api.context import Context
from service.api.deadlines import Deadlines
from service.api.middleware import Gate
from service.api.openapi import complete
from service.archives import ArchiveLimits
from service.audit_writer import AuditWriter
from service.batching import Batcher, Devices
from service.bulk import KIND, BulkEnrolment
from service.catching_up import CatchingUp
from service.decision import VerifyOutcome
from service.drift import Watches
from service.engines import open_milvus, open_own_database, open_tracing
from service.errors import all_errors
from service.fetching import Fetcher
from service.gallery.erasure import Erasures
from service.gallery.follower import Followers
from service.gallery.generations import Generations
from service.gallery.index_files import forget_earlier, forget_files
from service.gallery.job_store import JobStore
from service.gallery.key_store import KeyStore
from service.gallery.replicas import InProcess, in_process
from service.gallery.risks import GalleryRisks
from service.gallery.store import Store
from service.gallery.subject_access import SubjectAccess
from service.imaging import ImageLimits
from service.jobs import Runner
from service.key_uses import KeyUses
from service.measures import Measures, Spans
from service.migration import Migrations
from service.pipeline import Pipeline
from service.readiness import readiness
from service.recognisers import Judge, Recognisers, Served, read_packs
from service.retention import Housekeeping
from service.samples import Looking, Samples
from service.settings import Settings
from service.shadow import Shadow
from service.spool import Spool
from service.telemetry import About, Telemetry
from service.transfers import Transfers

SMALL_BATCHES = BATCH_BUCKETS[:4]
"""Of photos, and of crops on processors: larger ones are no faster there, and keep the others waiting."""
BLOCKING_THREADS_PER_CORE = 2
log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Build the service. Networks and database are opened when the application starts, once."""
    measures = Measures((error.code for error in all_errors()), get_args(VerifyOutcome))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Photos are many: a pool of OpenCV's own for each would only take cores from the others.
        cv2.setNumThreads(1)
        packs = read_packs(settings.pack_paths)
        pack = packs[0]
        detection = open_networks(pack.detection, settings.wish)
        recognition = [open_networks(each.recognition, settings.wish) for each in packs]
        networks = [detection, *recognition]
        # In fp32: what other numbers would make of its threshold nobody measured, and it is small.
        judging = (
            None if pack.liveness is None else open_networks(pack.liveness, replace(settings.wish, precision="fp32"))
        )
        if judging is not None:
            networks.append(judging)
        shortfalls = [each.shortfall for each in networks if each.shortfall is not None]
        # Where one of the networks had to stay on the CPU, the others' further GPUs would wait for it.
        count = min(len(each.networks) for each in networks)
        detectors = [
            Detector(network, pack.detection, settings.detection_score) for network in detection.networks[:count]
        ]
        detector = detectors[0]
        measures.spans = tracing = open_tracing(settings)
        database = open_own_database(settings)
        store = Store(database)
        milvus = open_milvus(settings, database)
        forget_earlier(settings.index_path)
        if milvus is None:
            here = InProcess(settings.index_device, settings.index_path)
            followers = Followers(
                in_process(store, here), settings.index_memory, partial(forget_files, settings.index_path)
            )
        else:
            milvus.start()
            followers = Followers(milvus.replica)
        workers = max(4, BLOCKING_THREADS_PER_CORE * available_cores())
        with ThreadPoolExecutor(workers, thread_name_prefix="blocking") as threads, Devices(count) as devices:
            async with (
                Batcher(
                    f"detector/{pack.model_id}",
                    devices,
                    [each.run for each in detectors],
                    SMALL_BATCHES,
                    max(settings.queue_size, settings.max_images),
                    lambda laid: laid.planes.shape,
                    tracing,
                ) as detecting,
                CatchingUp(settings.queue_size) as catching_up,
                AsyncExitStack() as opened,
            ):
                recognisers = Recognisers(
                    *[
                        await opened.enter_async_context(_serve(each, on_each, settings, devices, tracing))
                        for each, on_each in zip(packs, recognition, strict=True)
                    ]
                )
                judge = None
                if pack.liveness is not None and judging is not None:
                    judge = await opened.enter_async_context(_judge(pack.liveness, judging, settings, devices, tracing))
                calibrations = {served.fingerprint: served.calibration for served in recognisers}
                risks, watches = GalleryRisks(store, calibrations), Watches(calibrations)
                opened.callback(risks.close)
                audit_writer = AuditWriter(database, settings.audit_searches)
                opened.callback(audit_writer.close)
                transfers = Transfers(database)
                opened.callback(transfers.close)
                limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
                pipeline = Pipeline(
                    detector,
                    detecting,
                    followers,
                    catching_up,
                    risks,
                    limits,
                    settings.max_faces,
                    threads,
                    # Those that the threads work on, and a batch of the detector's beside them.
                    workers + SMALL_BATCHES[-1],
                    judge,
                    measures,
                )
                generations = Generations(database)
                shadow = await opened.enter_async_context(Shadow(recognisers, pipeline, generations))
                keys_known = KeyStore(database)
                key_uses = await opened.enter_async_context(KeyUses(keys_known))
                spool = Spool(settings.data_dir / "spool")
                archives = ArchiveLimits(
                    settings.max_archive_photos, settings.max_image_bytes, settings.max_unpacked_bytes
                )
                kinds = {
                    **Migrations(store, generations, recognisers, risks).kinds(),
                    KIND: BulkEnrolment(spool, archives, store, followers, pipeline, recognisers).kind(),
                }
                hosts = settings.url_host_list
                if hosts.are_all:
                    log.warning(
                        "photos are fetched from every public host: KITH_URL_HOSTS can name those that are meant"
                    )
                fetcher = await opened.enter_async_context(Fetcher(hosts, settings.max_image_bytes, settings.url_http))
                await opened.enter_async_context(
                    Housekeeping(database, store, settings.retention_answers_days, risks.follow)
                )
                ready = readiness(
                    shortfalls,
                    settings.allow_cpu,
                    devices,
                    devices if isinstance(detection.networks[0], CudaNetwork) else None,
                    store,
                    milvus,
                    audit_writer,
                )
                jobs_known = JobStore(database)
                most = settings.metrics_galleries
                samples = Samples(Looking(ready, store, jobs_known, followers, settings.data_dir, most, watches))
                batchers: list[Batcher[Any, Any]] = [
                    detecting,
                    *(served.batcher for served in recognisers),
                    *([] if judge is None else [judge.batcher]),
                ]
                running = {detecting.name: detection.networks[0]}
                running |= {served.batcher.name: served.network for served in recognisers}
                running |= {} if judge is None else {judge.batcher.name: judge.network}
                about = About(version("kith-face"), pack.model_id, running)
                async with Runner(jobs_known, kinds, kept_days=settings.retention_jobs_days) as runner:
                    app.state.context = Context(
                        settings,
                        detection.networks[0],
                        recognisers,
                        store,
                        Erasures(database),
                        SubjectAccess(database),
                        generations,
                        shadow,
                        followers,
                        milvus,
                        pipeline,
                        watches,
                        Telemetry(about, measures, watches, batchers, audit_writer.backlog, samples, most),
                        runner,
                        spool,
                        transfers,
                        audit_writer,
                        keys_known,
                        key_uses,
                        fetcher,
                        measures,
                        ready,
                        samples,
                        batchers,
                    )
                    for served in recognisers:
                        log.info("serving %s", served.pack.model_id)
                    for of, each in zip([pack, *packs, pack], networks, strict=False):
                        for network in each.networks:
                            file = of.name_of(network.path)
                            log.info("%s by %s in %s: %s", file, network.engine, network.precision, network.why)
                    yield
        followers.close()
        if milvus is not None:
            milvus.close()
        store.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="Kith",
        version=version("kith-face"),
        summary="Who is this, and how sure may I be?",
        lifespan=lifespan,
        openapi_url=None,  # service.api.documents has it, behind the gate like all else
        redirect_slashes=False,  # to wherever the header Host says
        # Its own, which an environment variable switches on, tells of paths and of what was wrong with their values.
        telemetry=TelemetryConfig(
            tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
        ),
    )
    app.state.measures = measures  # for what is refused before it is a request
    problems.install(app)
    for module in (
        faces,
        verify,
        galleries,
        subjects,
        enrolments,
        erasures,
        identify,
        hygiene,
        risk,
        jobs,
        migrate,
        transfer,
        audit,
        keys,
        system,
        documents,
        console,
    ):
        app.include_router(permissions.check(module.router))
    app.add_middleware(Deadlines, settings=settings)
    app.add_middleware(Gate, settings=settings, measures=measures)
    _document(app)
    return app


@asynccontextmanager
async def _serve(
    pack: ModelPack, opened: Opened, settings: Settings, devices: Devices, spans: Spans | None
) -> AsyncIterator[Served]:
    each = [Recogniser(network, pack.recognition) for network in opened.networks[: devices.count]]
    calibration = None if pack.calibration is None else Calibration.from_document(pack.calibration)
    # A request alone has room for all its faces.
    name, most = f"recogniser/{pack.model_id}", max(4 * settings.queue_size, settings.max_images * settings.max_faces)
    sizes = BATCH_BUCKETS if isinstance(opened.networks[0], CudaNetwork) else SMALL_BATCHES
    async with Batcher(name, devices, [one.embed_each for one in each], sizes, most, spans=spans) as embed:
        yield Served(pack, opened.networks[0], each[0], calibration, embed)


@asynccontextmanager
async def _judge(
    spec: LivenessSpec, opened: Opened, settings: Settings, devices: Devices, spans: Spans | None
) -> AsyncIterator[Judge]:
    each = [Liveness(network, spec) for network in opened.networks[: devices.count]]
    most = max(4 * settings.queue_size, settings.max_images * settings.max_faces)
    async with Batcher(
        "liveness", devices, [one.score_each for one in each], SMALL_BATCHES, most, spans=spans
    ) as scoring:
        yield Judge(spec, opened.networks[0], scoring)


def _document(app: FastAPI) -> None:
    """Add what no signature says."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            complete(document)
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            }
            document["security"] = [{"bearer": []}, {"header": []}, {}]  # none: where the server has no keys
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

"""Wiring: one builder per subsystem, from the settings to the ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, get_args

import cv2
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.telemetry import TelemetryConfig
from pydantic.alias_generators import to_camel

from models.engines.selection import OpenedNetworks, open_networks
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.runtime.cuda_network import CudaNetwork
from models.runtime.network import Network
from models.runtime.onnx_runtime import BATCH_BUCKETS, available_cores
from models.vision.detection import Detector
from models.vision.liveness import LivenessClassifier
from models.vision.recognition import Recognizer
from models.vision.specs import LivenessSpec
from service.api.compreface.mount import mount_compreface
from service.api.http.context import Context
from service.api.http.deadlines import Deadlines
from service.api.http.gate import Gate, RefusalPacing
from service.api.http.openapi import TAGS, install_openapi
from service.api.http.probe_budget import ProbeBudget
from service.api.http.problems import install_error_handlers
from service.api.http.routing import check_routes
from service.api.routes import (
    api_reference,
    audit,
    console,
    enrollments,
    erasures,
    faces,
    galleries,
    identify,
    jobs,
    keys,
    migrate,
    pictures,
    risk,
    subjects,
    system,
    transfer,
    webhooks,
)
from service.builders import keep_nothing, open_milvus, open_own_database, open_tracing
from service.core.clock import Clock
from service.core.error_catalog import all_errors
from service.core.memory_limit import memory_limit_bytes
from service.domain.outcomes import VerifyOutcome
from service.index.catch_up import CatchUp
from service.index.follower import Followers
from service.index.replicas import IndexOptions, in_process
from service.inference.archives import ArchiveLimits
from service.inference.batcher import Batcher, DevicePool
from service.inference.decode_budget import DecodeBudget
from service.inference.images import ImageLimits
from service.inference.photo_pipeline import PhotoPipeline
from service.inference.recognizers import LivenessJudge, Recognizers, ServedRecognizer, read_packs
from service.inference.url_fetching import UrlFetcher
from service.observability.metrics import Metrics
from service.risk.drift import Watches
from service.risk.drift_reports import DriftReports
from service.risk.gallery_risks import GalleryRisks
from service.security.outbound_http import OutboundHttp
from service.services.bulk_enrollment import KIND, BulkEnrollment
from service.services.heavy_work import HeavyWork
from service.services.housekeeping import Housekeeping
from service.services.job_runner import Runner
from service.services.key_usage import KeyUses
from service.services.metrics_export import BuildInfo, MetricsExport
from service.services.migration import Migrations
from service.services.pipeline import Pipeline
from service.services.readiness import readiness
from service.services.shadow import Shadow
from service.services.spool import Spool
from service.services.status import RecentState, StateReader
from service.services.transfers import Transfers
from service.services.webhook_delivery import WebhookDelivery, Webhooks, WebhookSender
from service.settings import Settings
from service.storage.audit.writer import AuditWriter
from service.storage.db.leases import Lease
from service.storage.events.deliveries import DeliveryStore
from service.storage.privacy.retention import Retention
from service.storage.privacy.subject_access import SubjectAccess
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore

SMALL_BATCHES: Final = BATCH_BUCKETS[:4]
"""Batch sizes of photos, and of crops on a CPU. Larger batches are no faster there and delay other requests."""
BLOCKING_THREADS_PER_CORE: Final = 2
DECODE_MEMORY_SHARE: Final = 0.25
"""Default of KITH_DECODE_MEMORY as a share of the memory limit. Networks, bodies and indexes need the rest."""
EXPOSED_HEADERS: Final = ("ETag", "RateLimit", "RateLimit-Policy", "Retry-After", "X-Request-Id")
"""Response headers that scripts of other origins may read."""
log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Build the application. Networks and database are opened once, when it starts."""
    metrics = Metrics((error.code for error in all_errors()), get_args(VerifyOutcome))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            own = settings
            if settings.stateless:
                own = keep_nothing(settings, Path(stack.enter_context(TemporaryDirectory(prefix="kith-"))))
            app.state.context = await _ContextBuilder(own, metrics, stack).build()
            yield

    app = FastAPI(
        title="Kith",
        version=version("kith-face"),
        summary="Open-set face recognition with a stated risk of false identification.",
        openapi_tags=TAGS,
        generate_unique_id_function=lambda route: to_camel(route.name),  # the methods' names in generated clients
        lifespan=lifespan,
        openapi_url=None,  # service.api.routes.api_reference serves it, behind the gate
        redirect_slashes=False,  # a redirect would lead to the host in the Host header
        # FastAPI's own telemetry, enabled by an environment variable, would record paths and invalid values.
        telemetry=TelemetryConfig(
            tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
        ),
    )
    app.state.metrics = metrics  # the server counts connections that it refuses
    install_error_handlers(app)
    stateful = (
        *(galleries, subjects, pictures, enrollments, erasures, identify, risk),
        *(jobs, migrate, transfer, audit, keys, webhooks, console),
    )
    for module in (faces, *(() if settings.stateless else stateful), system, api_reference):
        app.include_router(check_routes(module.router))
    mount_compreface(app, settings)
    app.add_middleware(Deadlines, settings=settings)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    app.add_middleware(RefusalPacing)
    if settings.cors_origin_list:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin_list,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    install_openapi(app)
    for route in app.routes:  # FastAPI prepares a route at its first match, which would delay the first request
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    return app


class _ContextBuilder:
    """Builds one subsystem per method, and from them the context.

    Each registers its closing on ``stack``, so that all close in reverse order, also if a later one fails to open.
    """

    def __init__(self, settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> None:
        self.settings = settings
        self.metrics = metrics
        self.stack = stack

    async def build(self) -> Context:
        """Build the subsystems in order of dependency."""
        cv2.setNumThreads(1)  # photos are processed in parallel; OpenCV's own threads would compete for the cores
        self.networks = _open_networks(self.settings)
        self.open_tracing()
        self.open_storage()
        await self.open_index()
        await self.open_inference()
        self.open_pipeline()
        await self.open_services()
        self.build_observability()
        await self.start_jobs()
        return Context(
            settings=self.settings,
            detection_network=self.networks.detection.networks[0],
            recognizers=self.recognizers,
            store=self.store,
            retention=self.retention,
            erasures=ErasureStore(self.database),
            subject_access=SubjectAccess(self.database),
            generations=self.generations,
            shadow=self.shadow,
            followers=self.followers,
            shared_engine=self.milvus,
            pipeline=self.pipeline,
            watches=self.watches,
            telemetry=self.telemetry,
            heavy=HeavyWork(),
            jobs=self.runner,
            spool=self.spool,
            transfers=self.transfers,
            audit=self.audit,
            probes=ProbeBudget(self.settings.embedding_rate, self.audit, self.metrics),
            keys=self.keys,
            key_uses=self.key_uses,
            fetcher=self.fetcher,
            webhooks=self.webhooks,
            metrics=self.metrics,
            readiness=self.readiness,
            recent_state=self.recent_state,
            batchers=list(self.networks_by_batcher),
        )

    def open_tracing(self) -> None:
        self.metrics.spans = tracing = open_tracing(self.settings)
        if tracing is not None:
            self.stack.push_async_callback(asyncio.to_thread, tracing.close)

    def open_storage(self) -> None:
        self.database = open_own_database(self.settings)
        self.store = Store(self.database)
        self.stack.callback(self.store.close)
        self.job_store = JobStore(self.database)

    async def open_index(self) -> None:
        self.milvus = open_milvus(self.settings, self.database)
        if self.milvus is None:
            in_memory = in_process(self.store, IndexOptions(self.settings.index_device))
            self.followers = Followers(in_memory, self.settings.index_memory)
        else:
            self.stack.callback(self.milvus.close)
            self.milvus.start()
            self.followers = Followers(self.milvus.replica)
        self.stack.callback(self.followers.close)
        self.catch_up = await self.stack.enter_async_context(CatchUp(self.settings.queue_size))

    async def open_inference(self) -> None:
        settings, networks, stack = self.settings, self.networks, self.stack
        self.workers = max(4, BLOCKING_THREADS_PER_CORE * available_cores())
        self.threads = stack.enter_context(ThreadPoolExecutor(self.workers, thread_name_prefix="blocking"))
        self.devices = devices = stack.enter_context(DevicePool(networks.devices))
        detectors = [
            Detector(network, networks.pack.detection, settings.detection_score)
            for network in networks.detection.networks[: networks.devices]
        ]
        self.detector = detectors[0]
        self.detection = await stack.enter_async_context(
            Batcher(
                f"detector/{networks.pack.model_id}",
                devices,
                [detector.run for detector in detectors],
                SMALL_BATCHES,
                max(settings.queue_size, settings.max_images),
                lambda canvas: canvas.planes.shape,
                self.metrics,
            )
        )
        # A request alone has room for all of its faces.
        max_faces = max(4 * settings.queue_size, settings.max_images * settings.max_faces)
        served = [
            await stack.enter_async_context(_serve(pack, opened, devices, max_faces, self.metrics))
            for pack, opened in zip(networks.packs, networks.recognition, strict=True)
        ]
        self.recognizers = Recognizers(*served)
        self.networks_by_batcher: dict[Batcher[Any, Any], Network] = {
            self.detection: networks.detection.networks[0],
            **{each.batcher: each.network for each in served},
        }
        self.judge = None
        if networks.pack.liveness is not None and networks.liveness is not None:
            liveness = _serve_liveness(networks.pack.liveness, networks.liveness, devices, max_faces, self.metrics)
            self.judge = await stack.enter_async_context(liveness)
            self.networks_by_batcher[self.judge.batcher] = self.judge.network

    def open_pipeline(self) -> None:
        calibrations = {served.fingerprint: served.calibration for served in self.recognizers}
        self.watches = Watches(calibrations)
        self.risks = GalleryRisks(self.store, calibrations)
        self.stack.callback(self.risks.close)
        photos = PhotoPipeline(
            detector=self.detector,
            detecting=self.detection,
            limits=ImageLimits(self.settings.max_image_bytes, self.settings.max_image_pixels),
            max_faces=self.settings.max_faces,
            threads=self.threads,
            budget=self.decode_budget(),
            judge=self.judge,
            metrics=self.metrics,
        )
        self.pipeline = Pipeline(photos, self.followers, self.catch_up, self.risks)

    def decode_budget(self) -> DecodeBudget:
        memory = self.settings.decode_memory or int(DECODE_MEMORY_SHARE * memory_limit_bytes())
        log.info("photos are decoded in at most %d MB", memory // 1_000_000)
        return DecodeBudget(self.workers + SMALL_BATCHES[-1], memory)  # one photo per thread, and a batch

    async def open_services(self) -> None:
        settings, database, stack = self.settings, self.database, self.stack
        self.audit = AuditWriter(database, settings.audit_searches)
        stack.callback(self.audit.close)
        self.transfers = Transfers(database)
        stack.callback(self.transfers.close)
        self.generations = GenerationStore(database)
        self.shadow = await stack.enter_async_context(Shadow(self.recognizers, self.pipeline, self.generations))
        self.keys = KeyStore(database)
        self.key_uses = await stack.enter_async_context(KeyUses(self.keys))
        hosts = settings.url_host_list
        if hosts.are_all:
            log.warning("photos may be fetched from every public host; list the allowed hosts in KITH_URL_HOSTS")
        self.fetcher = await stack.enter_async_context(UrlFetcher(hosts, settings.max_image_bytes, settings.url_http))
        await self.open_webhooks()
        self.spool = Spool(settings.data_dir / "spool")
        self.clock, self.retention = Clock(), Retention(database, settings.retention_max_share)
        days, follow = settings.retention_answers_days, self.risks.follow
        self.housekeeping = await stack.enter_async_context(
            Housekeeping(database, self.store, self.retention, days, follow, self.clock)
        )

    async def open_webhooks(self) -> None:
        public, origins = self.settings.webhook_targets
        http = await self.stack.enter_async_context(OutboundHttp(public, origins=origins))
        deliveries, sender = DeliveryStore(self.database), WebhookSender(http)
        delivery = WebhookDelivery(deliveries, Lease(self.database, "webhooks"), sender)
        await self.stack.enter_async_context(delivery)
        await self.stack.enter_async_context(DriftReports(self.store, self.watches))
        self.webhooks = Webhooks(WebhookStore(self.database), deliveries, sender, delivery)

    def build_observability(self) -> None:
        settings, devices = self.settings, self.devices
        on_gpu = isinstance(self.networks.detection.networks[0], CudaNetwork)
        self.readiness = readiness(
            *(self.networks.shortfalls, settings.allow_cpu, devices, devices if on_gpu else None),
            *(self.store, self.milvus, self.audit),
        )
        max_galleries = settings.metrics_galleries
        looking = StateReader(
            *(self.readiness, self.store, self.job_store, self.followers, settings.data_dir),
            *(max_galleries, self.watches, self.retention),
        )
        looking.paused = lambda: self.housekeeping.paused
        self.recent_state = RecentState(looking)
        networks = {batcher.name: network for batcher, network in self.networks_by_batcher.items()}
        self.telemetry = MetricsExport(
            build=BuildInfo(version("kith-face"), self.networks.pack.model_id, networks),
            metrics=self.metrics,
            watches=self.watches,
            batchers=list(self.networks_by_batcher),
            audit_backlog=self.audit.backlog,
            recent_state=self.recent_state,
            max_galleries=max_galleries,
            windows=self.pipeline.windows,
        )

    async def start_jobs(self) -> None:
        settings = self.settings
        limits = ArchiveLimits(settings.max_archive_photos, settings.max_image_bytes, settings.max_unpacked_bytes)
        enrollment = BulkEnrollment(self.spool, limits, self.store, self.followers, self.pipeline, self.recognizers)
        migrations = Migrations(self.store, self.generations, self.recognizers, self.risks)
        kinds = {**migrations.kinds(), KIND: enrollment.kind()}
        runner = Runner(self.job_store, kinds, retention_days=settings.retention_jobs_days, clock=self.clock)
        self.runner = await self.stack.enter_async_context(runner)


@dataclass(frozen=True)
class _Networks:
    """Networks of the served packs: a recognizer of each; the detector and the liveness model of the first."""

    packs: list[ModelPack]
    detection: OpenedNetworks
    recognition: list[OpenedNetworks]
    liveness: OpenedNetworks | None

    @property
    def pack(self) -> ModelPack:
        return self.packs[0]

    @property
    def with_packs(self) -> list[tuple[ModelPack, OpenedNetworks]]:
        liveness = [] if self.liveness is None else [(self.pack, self.liveness)]
        return [(self.pack, self.detection), *zip(self.packs, self.recognition, strict=True), *liveness]

    @property
    def devices(self) -> int:
        """Number of devices that every network runs on.

        If one network runs on the CPU only, further GPUs would wait for it.
        """
        return min(len(opened.networks) for _, opened in self.with_packs)

    @property
    def shortfalls(self) -> list[str]:
        """Reasons why networks do not run on the requested GPU."""
        return [opened.gpu_error for _, opened in self.with_packs if opened.gpu_error is not None]


def _open_networks(settings: Settings) -> _Networks:
    packs = read_packs(settings.pack_paths, settings.models_path)
    detection = open_networks(packs[0].detection, settings.wish)
    recognition = [open_networks(pack.recognition, settings.wish) for pack in packs]
    # fp32: the liveness threshold was measured in it only, and the network is small.
    in_fp32, spec = replace(settings.wish, precision="fp32"), packs[0].liveness
    networks = _Networks(packs, detection, recognition, None if spec is None else open_networks(spec, in_fp32))
    for pack in packs:
        log.info("serving %s", pack.model_id)
        for name, reason in pack.ignored.items():
            log.warning("ignored %s of %s: %s", name, pack.model_id, reason)
    for pack, opened in networks.with_packs:
        for network in opened.networks:
            file = pack.name_of(network.path)
            log.info("%s by %s in %s: %s", file, network.engine, network.precision, network.reason)
    return networks


@asynccontextmanager
async def _serve(
    pack: ModelPack, opened: OpenedNetworks, devices: DevicePool, max_waiting: int, metrics: Metrics
) -> AsyncIterator[ServedRecognizer]:
    recognizers = [Recognizer(network, pack.recognition) for network in opened.networks[: devices.count]]
    calibration = None if pack.calibration is None else Calibration.from_document(pack.calibration)
    sizes = BATCH_BUCKETS if isinstance(opened.networks[0], CudaNetwork) else SMALL_BATCHES
    run = [recognizer.embed_each for recognizer in recognizers]
    async with Batcher(f"recognizer/{pack.model_id}", devices, run, sizes, max_waiting, metrics=metrics) as batcher:
        yield ServedRecognizer(pack, opened.networks[0], recognizers[0], calibration, batcher)


@asynccontextmanager
async def _serve_liveness(
    spec: LivenessSpec, opened: OpenedNetworks, devices: DevicePool, max_waiting: int, metrics: Metrics
) -> AsyncIterator[LivenessJudge]:
    run = [LivenessClassifier(network, spec).score_each for network in opened.networks[: devices.count]]
    async with Batcher("liveness", devices, run, SMALL_BATCHES, max_waiting, metrics=metrics) as batcher:
        yield LivenessJudge(spec, opened.networks[0], batcher)

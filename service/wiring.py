"""Wiring: one function per group of the backend, from the settings to objects that serve.

Each registers its closing on ``stack``, so that all close in reverse order, also if a later one fails to open.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Final

import cv2

from kith.wire.faces import MAX_FACES
from models.engines.selection import PHOTO_BATCH_SIZES, OpenedNetworks, open_networks
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.runtime.cuda_network import CudaNetwork
from models.runtime.network import Network
from models.runtime.onnx_runtime import available_cores
from models.vision.detection import Detector
from models.vision.liveness import LivenessClassifier
from models.vision.recognition import Recognizer
from service.core.actor import RequestThreads
from service.core.clock import Clock
from service.core.memory_limit import memory_limit_bytes
from service.core.periodic import PeriodicTask
from service.index.faiss_structures import finds_gpu
from service.index.follower import Followers, in_process
from service.inference.archives import MAX_ENTRIES, ArchiveLimits
from service.inference.batcher import Batcher, DevicePool
from service.inference.images import ImageLimits, PhotoDecoder
from service.inference.photo_pipeline import DecodeBudget, PhotoPipeline
from service.inference.recognizers import LivenessJudge, Recognizers, ServedRecognizer, read_packs
from service.inference.url_fetching import UrlFetcher
from service.jobs.heavy_work import HeavyWork
from service.jobs.runner import Runner
from service.jobs.spool import Spool
from service.observability.metrics import Metrics
from service.operations.event_streams import EventStreams
from service.operations.housekeeping import Housekeeping, KeyUses
from service.operations.metrics_export import MetricsExport
from service.operations.status import RecentState, StateReader, readiness
from service.operations.transfers import Transfers
from service.operations.webhook_delivery import WebhookDelivery, Webhooks, WebhookSender
from service.resources import open_milvus, open_own_database
from service.risk.drift import DriftReports, Watches
from service.risk.gallery_risks import GalleryRisks
from service.risk.search import GallerySearch
from service.security.outbound_http import OutboundHttp
from service.settings import Settings
from service.storage.audit.writer import AuditWriter
from service.storage.db.engine import Database
from service.storage.db.leases import Lease
from service.storage.events.log import EventLog
from service.storage.privacy.retention import Retention
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from service.usecases.albums import KIND as ALBUM
from service.usecases.albums import AlbumJobs
from service.usecases.backend import Backend, Faces, Galleries, Jobs, Operations
from service.usecases.bulk_enrollment import KIND, BulkEnrollment
from service.usecases.migration import Migrations

BLOCKING_THREADS_PER_CORE: Final = 2
MAX_DECODER_PROCESSES: Final = 4
"""Processes for formats other than JPEG, PNG and WebP. Each takes 26 MB when idle, and is started when it is needed."""
QUEUE_SIZE: Final = 64
"""Maximum queue length per network, and of requests that wait for a gallery to load."""
METRICS_GALLERIES: Final = 100
"""Maximum number of galleries with their own series in /metrics; the others are counted together."""
DECODE_MEMORY_SHARE: Final = 0.25
"""Largest share of the memory limit for decoding photos. Networks, bodies and indexes need the rest."""
DECODE_BYTES_PER_CORE: Final = 400_000_000
"""Memory for decoding photos for each core, which decodes one photo at a time: 48 MP of PNG or WebP fit in it."""
log = logging.getLogger(__name__)


@asynccontextmanager
async def open_backend(settings: Settings, metrics: Metrics) -> AsyncIterator[Backend]:
    """Open the networks, the database and all that works beside requests."""
    async with AsyncExitStack() as stack:
        networks = _open_networks(settings)
        threads = stack.enter_context(RequestThreads(max(4, BLOCKING_THREADS_PER_CORE * available_cores())))
        devices = stack.enter_context(DevicePool(networks.devices))
        database = open_own_database(settings)
        faces = await _open_faces(stack, settings, networks, devices, threads, metrics)
        galleries = _open_galleries(stack, settings, database, faces.recognizers, threads, metrics)
        jobs = await _open_jobs(stack, settings, database, faces, galleries, metrics)
        operations = await _open_operations(
            stack, settings, networks, devices, threads, faces, galleries, jobs, metrics
        )
        yield Backend(
            settings=settings, threads=threads, faces=faces, galleries=galleries, jobs=jobs, operations=operations
        )


async def _open_faces(
    stack: AsyncExitStack,
    settings: Settings,
    networks: _Networks,
    devices: DevicePool,
    threads: RequestThreads,
    metrics: Metrics,
) -> Faces:
    cv2.setNumThreads(1)  # photos are processed in parallel; OpenCV's own threads would compete for the cores
    detectors = [
        Detector(network, networks.pack.detection, buckets=networks.detection.canvas_sides_px)
        for network in networks.detection.networks[: networks.devices]
    ]
    detecting = await stack.enter_async_context(
        Batcher(
            f"detector/{networks.pack.model_id}",
            devices,
            [detector.run for detector in detectors],
            networks.detection.photo_batch_sizes,
            max(QUEUE_SIZE, settings.max_images),
            attrgetter("planes.shape"),
            metrics,
        )
    )
    # A request alone has room for all of its faces.
    max_faces = max(4 * QUEUE_SIZE, settings.max_images * MAX_FACES)
    served = [
        await stack.enter_async_context(_serve(pack, opened, devices, max_faces, metrics))
        for pack, opened in zip(networks.packs, networks.recognition, strict=True)
    ]
    by_batcher: dict[Batcher[Any, Any], Network] = {
        detecting: networks.detection.networks[0],
        **{each.batcher: each.network for each in served},
    }
    judge = None
    if networks.pack.liveness is not None and networks.liveness is not None:
        used = networks.liveness.networks[: devices.count]
        run = [LivenessClassifier(network, networks.pack.liveness).score_each for network in used]
        judging = Batcher("liveness", devices, run, networks.liveness.photo_batch_sizes, max_faces, metrics=metrics)
        judge = LivenessJudge(networks.pack.liveness, used[0], await stack.enter_async_context(judging))
        by_batcher[judge.batcher] = judge.network
    decode_memory = min(int(DECODE_MEMORY_SHARE * memory_limit_bytes()), DECODE_BYTES_PER_CORE * available_cores())
    log.info("photos are decoded in at most %d MB", decode_memory // 1_000_000)
    limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
    decoder = PhotoDecoder(limits, min(threads.count, MAX_DECODER_PROCESSES))
    stack.callback(decoder.close)
    photos = PhotoPipeline(
        detector=detectors[0],
        detecting=detecting,
        decoder=decoder,
        threads=threads,
        budget=DecodeBudget(threads.count + PHOTO_BATCH_SIZES[-1], decode_memory),  # one photo per thread, and a batch
        judge=judge,
        metrics=metrics,
    )
    hosts = settings.url_host_list
    if hosts.are_all:
        log.warning("photos may be fetched from every public host; list the allowed hosts in KITH_URL_HOSTS")
    fetcher = await stack.enter_async_context(UrlFetcher(hosts, settings.max_image_bytes))
    return Faces(photos=photos, recognizers=Recognizers(*served), fetcher=fetcher, networks=by_batcher)


def _open_galleries(
    stack: AsyncExitStack,
    settings: Settings,
    database: Database,
    recognizers: Recognizers,
    threads: RequestThreads,
    metrics: Metrics,
) -> Galleries:
    store = Store(database)
    stack.callback(store.close)
    milvus = open_milvus(settings, database)
    in_memory = in_process(store, "gpu" if milvus is None and settings.wish.wants_gpu and finds_gpu() else "cpu")
    if milvus is None:
        followers = Followers(in_memory, settings.index_memory, QUEUE_SIZE)
    else:
        stack.callback(milvus.close)
        milvus.start()
        shared = milvus.follower
        # Strangers are few: a server compares them by itself.
        followers = Followers(lambda one: (shared if one.companion_of is None else in_memory)(one), None, QUEUE_SIZE)
    stack.callback(followers.close)
    calibrations = {served.fingerprint: served.calibration for served in recognizers}
    risks = GalleryRisks(store, calibrations)
    stack.callback(risks.close)
    search = GallerySearch(threads, followers, risks, metrics)
    transfers = Transfers(database)
    stack.callback(transfers.close)
    return Galleries(
        store=store,
        followers=followers,
        shared_engine=milvus,
        search=search,
        risks=risks,
        watches=Watches(calibrations),
        generations=GenerationStore(database),
        retention=Retention(database),
        erasures=ErasureStore(database),
        transfers=transfers,
    )


async def _open_jobs(
    stack: AsyncExitStack, settings: Settings, database: Database, faces: Faces, galleries: Galleries, metrics: Metrics
) -> Jobs:
    limits = ArchiveLimits(MAX_ENTRIES, settings.max_image_bytes, settings.max_unpacked_bytes)
    spool = Spool(settings.data_dir / "spool")
    migrations = Migrations(galleries.store, galleries.generations, faces.recognizers, galleries.risks)
    heavy = HeavyWork()
    kinds = {
        **migrations.kinds(),
        KIND: BulkEnrollment(spool, limits, faces, galleries, metrics).kind(),
        ALBUM: AlbumJobs(spool, limits, faces, galleries, heavy).kind(),
    }
    clock = Clock()
    housekeeping = await stack.enter_async_context(
        Housekeeping(
            database,
            galleries.store,
            galleries.retention,
            galleries.risks.derive_later,
            clock,
            settings.audit_days,
        )
    )
    runner = Runner(JobStore(database), kinds, retention_days=settings.retention_jobs_days, clock=clock)
    return Jobs(runner=await stack.enter_async_context(runner), spool=spool, heavy=heavy, housekeeping=housekeeping)


async def _open_operations(
    stack: AsyncExitStack,
    settings: Settings,
    networks: _Networks,
    devices: DevicePool,
    threads: RequestThreads,
    faces: Faces,
    galleries: Galleries,
    jobs: Jobs,
    metrics: Metrics,
) -> Operations:
    database = galleries.store.database
    audit = AuditWriter(database, settings.audit_searches)
    stack.callback(audit.close)
    keys = KeyStore(database)
    webhooks = await _open_webhooks(stack, settings, database, galleries, threads, metrics)
    on_gpu = isinstance(networks.detection.networks[0], CudaNetwork)
    checks = readiness(
        networks.shortfalls,
        devices,
        devices if on_gpu else None,
        galleries.store,
        galleries.shared_engine,
        audit,
    )
    reader = StateReader(
        readiness=checks,
        store=galleries.store,
        jobs=jobs.runner.store,
        followers=galleries.followers,
        folder=settings.data_dir,
        max_galleries=METRICS_GALLERIES,
        watches=galleries.watches,
        paused=lambda: jobs.housekeeping.paused,
    )
    recent_state = RecentState(reader)
    telemetry = MetricsExport(
        version=version("kith-face"),
        model_id=networks.pack.model_id,
        networks=faces.networks,
        metrics=metrics,
        watches=galleries.watches,
        audit_backlog=audit.backlog,
        recent_state=recent_state,
        max_galleries=METRICS_GALLERIES,
    )
    return Operations(
        keys=keys,
        key_uses=await stack.enter_async_context(KeyUses(keys)),
        audit=audit,
        webhooks=webhooks,
        metrics=metrics,
        telemetry=telemetry,
        readiness=checks,
        recent_state=recent_state,
    )


async def _open_webhooks(
    stack: AsyncExitStack,
    settings: Settings,
    database: Database,
    galleries: Galleries,
    threads: RequestThreads,
    metrics: Metrics,
) -> Webhooks:
    public, origins = settings.webhook_targets
    http = await stack.enter_async_context(OutboundHttp(public, origins=origins))
    events, receivers, sender = EventLog(database), ReceiverStore(database), WebhookSender(http)
    delivery = WebhookDelivery(events, receivers, Lease(database, "webhooks"), sender, metrics)
    await stack.enter_async_context(delivery)
    await stack.enter_async_context(DriftReports(galleries.store, galleries.watches))
    streams = await stack.enter_async_context(
        EventStreams(events, receivers, KeyStore(database).ring, threads, metrics)
    )
    mqtt = _mqtt_delivery(settings, database, events, receivers, metrics)
    if mqtt is not None:
        await stack.enter_async_context(mqtt)
    return Webhooks(WebhookStore(database), receivers, sender, delivery, streams, mqtt)


def _mqtt_delivery(
    settings: Settings, database: Database, events: EventLog, receivers: ReceiverStore, metrics: Metrics
) -> PeriodicTask | None:
    if settings.mqtt_url is None:
        return None
    from service.operations.mqtt_delivery import Broker, MqttDelivery  # needs the extra mqtt

    password = settings.mqtt_password
    broker = Broker.of_url(settings.mqtt_url, password, settings.mqtt_discovery)
    names = KeyStore(database).gallery_names
    return MqttDelivery(broker, events, receivers, Lease(database, "mqtt"), names, metrics)


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
        """Number of devices. A network that has fewer runs on the first ones."""
        return max(len(opened.networks) for _, opened in self.with_packs)

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
    run = [recognizer.embed_each for recognizer in recognizers]
    async with Batcher(
        f"recognizer/{pack.model_id}", devices, run, opened.crop_batch_sizes, max_waiting, metrics=metrics
    ) as batcher:
        yield ServedRecognizer(pack, opened.networks[0], recognizers[0], calibration, batcher)

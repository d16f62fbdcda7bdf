"""Wiring: from the settings to the objects that serve.

Each registers its closing on one stack, so that all close in reverse order, also if a later one fails to open.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

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
from service.core.actor import Threads
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
from service.operations.housekeeping import Housekeeping
from service.operations.metrics_export import MetricsExport
from service.operations.status import RecentState, StateReader, readiness
from service.operations.transfers import Transfers
from service.operations.webhook_delivery import WebhookDelivery, Webhooks, WebhookSender
from service.resources import open_milvus, open_own_database
from service.risk.drift import DriftReports, Watches
from service.risk.gallery_risks import GalleryRisks
from service.risk.search import GallerySearch
from service.security.addresses import Hosts
from service.security.outbound_http import OutboundHttp
from service.settings import Settings
from service.storage.audit.writer import AuditWriter
from service.storage.db.leases import Lease
from service.storage.privacy.retention import Retention
from service.storage.repositories.store import Store
from service.usecases.albums import KIND as ALBUM
from service.usecases.albums import AlbumJobs
from service.usecases.backend import Backend
from service.usecases.bulk_enrollment import KIND as ENROLLMENT
from service.usecases.bulk_enrollment import BulkEnrollment
from service.usecases.migration import Migrations

if TYPE_CHECKING:
    from service.index.milvus_follower import MilvusEngine  # optional dependency, slow to import

BLOCKING_THREADS_PER_CORE: Final = 2
MAX_DECODER_PROCESSES: Final = 4
"""Processes for formats other than JPEG, PNG and WebP. Each takes 26 MB when idle, and is started when it is needed."""
QUEUE_SIZE: Final = 64
"""Maximum queue length per network, and of requests that wait for a gallery to load."""
DECODE_MEMORY_SHARE: Final = 0.25
"""Largest share of the memory limit for decoding photos. Networks, bodies and indexes need the rest."""
DECODE_BYTES_PER_CORE: Final = 400_000_000
"""Memory for decoding photos for each core, which decodes one photo at a time: 48 MP of PNG or WebP fit in it."""
log = logging.getLogger(__name__)


@asynccontextmanager
async def open_backend(settings: Settings, metrics: Metrics) -> AsyncIterator[Backend]:
    """Open the networks, the database and all that works beside requests."""
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(Threads(max(4, BLOCKING_THREADS_PER_CORE * available_cores()), "blocking"))
        photos = await _open_photos(stack, settings, threads, metrics)
        store = Store(open_own_database(settings))
        stack.callback(store.close)
        shared_engine = open_milvus(settings, store.database)
        followers = await _open_followers(stack, settings, store, shared_engine)
        calibrations = {served.fingerprint: served.calibration for served in photos.recognizers}
        risks, watches = GalleryRisks(store, calibrations), Watches(calibrations)
        stack.callback(risks.close)
        transfers, retention = Transfers(store.database), Retention(store.database)
        stack.callback(transfers.close)
        spool, ages = Spool(settings.data_dir / "spool"), (settings.audit_days, settings.retention_jobs_days)
        housekeeping = await stack.enter_async_context(
            Housekeeping(store, retention, *ages, risks.derive_later, spool.tidy)
        )
        audit = await stack.enter_async_context(AuditWriter(store.database, settings.audit_searches))
        webhooks = await _open_webhooks(stack, settings, store, threads, metrics)
        await stack.enter_async_context(DriftReports(store, watches))
        kinds = Migrations(store, store.generations, photos.recognizers, risks).kinds()
        jobs = Runner(store.jobs, kinds)
        checks = readiness(photos.shortfalls, photos.devices, photos.gpus, store, shared_engine, audit)
        reader = StateReader(checks, store, followers, settings.data_dir, watches, lambda: housekeeping.paused)
        recent_state = RecentState(reader)
        telemetry = MetricsExport(
            model_id=photos.recognizers.default.pack.model_id,
            networks=photos.networks,
            metrics=metrics,
            watches=watches,
            audit_backlog=audit.backlog,
            recent_state=recent_state,
        )
        backend = Backend(
            settings=settings,
            metrics=metrics,
            threads=threads,
            networks=photos.networks,
            photos=photos.pipeline,
            recognizers=photos.recognizers,
            store=store,
            retention=retention,
            transfers=transfers,
            shared_engine=shared_engine,
            followers=followers,
            risks=risks,
            search=GallerySearch(threads, followers, risks, metrics),
            watches=watches,
            spool=spool,
            heavy=HeavyWork(),
            jobs=jobs,
            housekeeping=housekeeping,
            webhooks=webhooks,
            audit=audit,
            readiness=checks,
            recent_state=recent_state,
            telemetry=telemetry,
        )
        limits = ArchiveLimits(MAX_ENTRIES, settings.max_image_bytes, settings.max_unpacked_bytes)
        kinds |= {ENROLLMENT: BulkEnrollment(backend, limits).kind(), ALBUM: AlbumJobs(backend, limits).kind()}
        await stack.enter_async_context(jobs)
        yield backend


@dataclass(frozen=True)
class _Photos:
    """Networks of the served packs: a recognizer of each; the detector and the liveness model of the first.

    ``shortfalls``: reasons why networks do not run on the requested GPU. ``gpus``: the devices if they are GPUs.
    """

    pipeline: PhotoPipeline
    recognizers: Recognizers
    networks: Mapping[Batcher[Any, Any], Network]
    devices: DevicePool
    gpus: DevicePool | None
    shortfalls: list[str]


async def _open_photos(stack: AsyncExitStack, settings: Settings, threads: Threads, metrics: Metrics) -> _Photos:
    cv2.setNumThreads(1)  # photos are processed in parallel; OpenCV's own threads would compete for the cores
    packs = read_packs(settings.pack_paths, settings.models_path)
    pack = packs[0]
    detection = open_networks(pack.detection, settings.wish)
    recognition = [open_networks(each.recognition, settings.wish) for each in packs]
    # fp32: the liveness threshold was measured in it only, and the network is small.
    in_fp32 = replace(settings.wish, precision="fp32")
    liveness = None if pack.liveness is None else open_networks(pack.liveness, in_fp32)
    opened = [(pack, detection), *zip(packs, recognition, strict=True), *([(pack, liveness)] if liveness else [])]
    _log_networks(packs, opened)
    # A network that has fewer devices than another runs on the first ones.
    devices = stack.enter_context(DevicePool(max(len(each.networks) for _, each in opened)))
    detectors = [Detector(network, pack.detection, buckets=detection.canvas_sides_px) for network in detection.networks]
    detecting = await stack.enter_async_context(
        Batcher(
            f"detector/{pack.model_id}",
            devices,
            [detector.run for detector in detectors],
            detection.photo_batch_sizes,
            max(QUEUE_SIZE, settings.max_images),
            attrgetter("planes.shape"),
            metrics,
        )
    )
    # A request alone has room for all of its faces.
    max_faces = max(4 * QUEUE_SIZE, settings.max_images * MAX_FACES)
    served = list[ServedRecognizer]()
    for each, networks in zip(packs, recognition, strict=True):
        recognizers = [Recognizer(network, each.recognition) for network in networks.networks]
        calibration = None if each.calibration is None else Calibration.from_document(each.calibration)
        run = [recognizer.embed_each for recognizer in recognizers]
        name, sizes = f"recognizer/{each.model_id}", networks.crop_batch_sizes
        batcher = await stack.enter_async_context(Batcher(name, devices, run, sizes, max_faces, metrics=metrics))
        served.append(ServedRecognizer(each, networks.networks[0], recognizers[0], calibration, batcher))
    by_batcher: dict[Batcher[Any, Any], Network] = {
        detecting: detection.networks[0],
        **{each.batcher: each.network for each in served},
    }
    judge = None
    if pack.liveness is not None and liveness is not None:
        scoring = [LivenessClassifier(network, pack.liveness).score_each for network in liveness.networks]
        judging = Batcher("liveness", devices, scoring, liveness.photo_batch_sizes, max_faces, metrics=metrics)
        judge = LivenessJudge(pack.liveness, liveness.networks[0], await stack.enter_async_context(judging))
        by_batcher[judge.batcher] = judge.network
    decode_memory = min(int(DECODE_MEMORY_SHARE * memory_limit_bytes()), DECODE_BYTES_PER_CORE * available_cores())
    log.info("photos are decoded in at most %d MB", decode_memory // 1_000_000)
    limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
    decoder = PhotoDecoder(limits, min(threads.count, MAX_DECODER_PROCESSES))
    stack.callback(decoder.close)
    hosts = settings.url_hosts or Hosts()
    pipeline = PhotoPipeline(
        detector=detectors[0],
        detecting=detecting,
        decoder=decoder,
        threads=threads,
        fetcher=UrlFetcher(await stack.enter_async_context(OutboundHttp(hosts)), settings.max_image_bytes),
        budget=DecodeBudget(threads.count + PHOTO_BATCH_SIZES[-1], decode_memory),  # one photo per thread, and a batch
        judge=judge,
        metrics=metrics,
    )
    return _Photos(
        pipeline,
        Recognizers(*served),
        by_batcher,
        devices,
        devices if isinstance(detection.networks[0], CudaNetwork) else None,
        [each.gpu_error for _, each in opened if each.gpu_error is not None],
    )


def _log_networks(packs: Sequence[ModelPack], opened: Sequence[tuple[ModelPack, OpenedNetworks]]) -> None:
    for pack in packs:
        log.info("serving %s", pack.model_id)
        for name, reason in pack.ignored.items():
            log.warning("ignored %s of %s: %s", name, pack.model_id, reason)
    for pack, networks in opened:
        for network in networks.networks:
            file = pack.name_of(network.path)
            log.info("%s by %s in %s: %s", file, network.engine, network.precision, network.reason)


async def _open_followers(
    stack: AsyncExitStack, settings: Settings, store: Store, milvus: MilvusEngine | None
) -> Followers:
    in_memory = in_process(store, "gpu" if milvus is None and settings.wish.wants_gpu and finds_gpu() else "cpu")
    if milvus is None:
        followers = Followers(in_memory, settings.index_memory, QUEUE_SIZE)
    else:
        stack.callback(milvus.close)
        await stack.enter_async_context(milvus)
        shared = milvus.follower
        # Strangers are few: a server compares them by itself.
        followers = Followers(lambda one: (shared if one.companion_of is None else in_memory)(one), None, QUEUE_SIZE)
    stack.callback(followers.close)
    return followers


async def _open_webhooks(
    stack: AsyncExitStack, settings: Settings, store: Store, threads: Threads, metrics: Metrics
) -> Webhooks:
    public, origins = settings.webhook_hosts or (Hosts(), [])
    http = await stack.enter_async_context(OutboundHttp(public, origins=origins))
    sender = WebhookSender(http)
    lease = Lease(store.database, "webhooks")
    delivery = WebhookDelivery(store.events, store.receivers, lease, sender, metrics)
    await stack.enter_async_context(delivery)
    streams = await stack.enter_async_context(
        EventStreams(store.events, store.receivers, store.keys.ring, threads, metrics)
    )
    mqtt = _mqtt_delivery(settings, store, metrics)
    if mqtt is not None:
        await stack.enter_async_context(mqtt)
    return Webhooks(sender, delivery, streams, mqtt)


def _mqtt_delivery(settings: Settings, store: Store, metrics: Metrics) -> PeriodicTask | None:
    if settings.mqtt_url is None:
        return None
    from service.operations.mqtt_delivery import Broker, MqttDelivery  # needs the extra mqtt

    password = settings.mqtt_password
    broker = Broker.of_url(settings.mqtt_url, password, settings.mqtt_discovery)
    lease = Lease(store.database, "mqtt")
    return MqttDelivery(broker, store.events, store.receivers, lease, store.keys.gallery_names, metrics)

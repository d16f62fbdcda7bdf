"""The wiring, all of it: settings in, application out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

import cv2
from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from models.cuda_network import CudaNetwork
from models.detection import Detector
from models.engines import Opened, open_networks
from models.liveness import Liveness
from models.network import Network
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
    openapi,
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
from service.api.pacing import RefusalPacing
from service.api.probes import ProbeBudget
from service.archives import ArchiveLimits
from service.audit_writer import AuditWriter
from service.batching import Batcher, Devices
from service.bulk import KIND, BulkEnrolment
from service.catching_up import CatchingUp
from service.clock import Clock
from service.decision import VerifyOutcome
from service.drift import Watches
from service.errors import all_errors
from service.fetching import Fetcher
from service.gallery.erasure import Erasures
from service.gallery.follower import Followers
from service.gallery.generations import Generations
from service.gallery.index_files import forget_earlier, forget_files
from service.gallery.job_store import JobStore
from service.gallery.key_store import KeyStore
from service.gallery.replicas import InProcess, in_process
from service.gallery.retention import Retention
from service.gallery.risks import GalleryRisks
from service.gallery.store import Store
from service.gallery.subject_access import SubjectAccess
from service.imaging import ImageLimits
from service.jobs import Runner
from service.key_uses import KeyUses
from service.measures import Measures, Spans
from service.migration import Migrations
from service.opening import open_milvus, open_own_database, open_tracing
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

if TYPE_CHECKING:
    from service.gallery.milvus_replica import MilvusEngine

SMALL_BATCHES = BATCH_BUCKETS[:4]
"""Of photos, and of crops on processors: larger ones are no faster there, and keep the others waiting."""
BLOCKING_THREADS_PER_CORE = 2
log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Build the service. Networks and database are opened when the application starts, once."""
    measures = Measures((error.code for error in all_errors()), get_args(VerifyOutcome))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            app.state.context = await _open(settings, measures, opened)
            yield

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
    app.add_middleware(RefusalPacing)
    openapi.install(app)
    for route in app.routes:  # FastAPI makes what they need at the first request otherwise, which then waits for it
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    return app


async def _open(settings: Settings, measures: Measures, opened: AsyncExitStack) -> Context:
    """What requests need. ``opened`` closes each part before those that it was made of, and where a later one cannot be
    opened, too."""
    # Photos are many: a pool of OpenCV's own for each would only take cores from the others.
    cv2.setNumThreads(1)
    networks = _open_networks(settings)
    measures.spans = tracing = open_tracing(settings)
    if tracing is not None:
        opened.push_async_callback(asyncio.to_thread, tracing.close)
    database = open_own_database(settings)
    store = Store(database)
    opened.callback(store.close)
    milvus = open_milvus(settings, database)
    if milvus is not None:
        opened.callback(milvus.close)
        milvus.start()
    forget_earlier(settings.index_path)
    followers = _make_followers(settings, store, milvus)
    opened.callback(followers.close)
    workers = max(4, BLOCKING_THREADS_PER_CORE * available_cores())
    threads = opened.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="blocking"))
    devices = opened.enter_context(Devices(networks.devices))
    detectors = [
        Detector(network, networks.pack.detection, settings.detection_score)
        for network in networks.detection.networks[: networks.devices]
    ]
    detecting = await opened.enter_async_context(
        Batcher(
            f"detector/{networks.pack.model_id}",
            devices,
            [each.run for each in detectors],
            SMALL_BATCHES,
            max(settings.queue_size, settings.max_images),
            lambda laid: laid.planes.shape,
            tracing,
        )
    )
    catching_up = await opened.enter_async_context(CatchingUp(settings.queue_size))
    recognisers = Recognisers(
        *[
            await opened.enter_async_context(_serve(pack, on_each, settings, devices, tracing))
            for pack, on_each in zip(networks.packs, networks.recognition, strict=True)
        ]
    )
    judge = None
    if networks.pack.liveness is not None and networks.liveness is not None:
        judging = _judge(networks.pack.liveness, networks.liveness, settings, devices, tracing)
        judge = await opened.enter_async_context(judging)
    calibrations = {served.fingerprint: served.calibration for served in recognisers}
    risks, watches = GalleryRisks(store, calibrations), Watches(calibrations)
    opened.callback(risks.close)
    audit_writer = AuditWriter(database, settings.audit_searches)
    opened.callback(audit_writer.close)
    transfers = Transfers(database)
    opened.callback(transfers.close)
    pipeline = Pipeline(
        detector=detectors[0],
        detecting=detecting,
        followers=followers,
        catching_up=catching_up,
        risks=risks,
        limits=ImageLimits(settings.max_image_bytes, settings.max_image_pixels),
        max_faces=settings.max_faces,
        threads=threads,
        # Those that the threads work on, and a batch of the detector's beside them.
        at_once=workers + SMALL_BATCHES[-1],
        judge=judge,
        measures=measures,
    )
    generations = Generations(database)
    shadow = await opened.enter_async_context(Shadow(recognisers, pipeline, generations))
    keys_known = KeyStore(database)
    key_uses = await opened.enter_async_context(KeyUses(keys_known))
    hosts = settings.url_host_list
    if hosts.are_all:
        log.warning("photos are fetched from every public host: KITH_URL_HOSTS can name those that are meant")
    fetcher = await opened.enter_async_context(Fetcher(hosts, settings.max_image_bytes, settings.url_http))
    clock, retention = Clock(), Retention(database, settings.retention_max_share)
    housekeeping = await opened.enter_async_context(
        Housekeeping(database, store, retention, settings.retention_answers_days, risks.follow, clock)
    )
    ready = readiness(
        networks.shortfalls,
        settings.allow_cpu,
        devices,
        devices if isinstance(networks.detection.networks[0], CudaNetwork) else None,
        store,
        milvus,
        audit_writer,
    )
    jobs_known = JobStore(database)
    most = settings.metrics_galleries
    looking = Looking(ready, store, jobs_known, followers, settings.data_dir, most, watches, retention)
    looking.paused = lambda: housekeeping.paused
    samples = Samples(looking)
    running: dict[Batcher[Any, Any], Network] = {detecting: networks.detection.networks[0]}
    running |= {served.batcher: served.network for served in recognisers}
    running |= {} if judge is None else {judge.batcher: judge.network}
    named = {batcher.name: network for batcher, network in running.items()}
    telemetry = Telemetry(
        about=About(version("kith-face"), networks.pack.model_id, named),
        measures=measures,
        watches=watches,
        batchers=list(running),
        audit_backlog=audit_writer.backlog,
        samples=samples,
        most_galleries=most,
    )
    spool = Spool(settings.data_dir / "spool")
    archives = ArchiveLimits(settings.max_archive_photos, settings.max_image_bytes, settings.max_unpacked_bytes)
    kinds = {
        **Migrations(store, generations, recognisers, risks).kinds(),
        KIND: BulkEnrolment(spool, archives, store, followers, pipeline, recognisers).kind(),
    }
    runner = await opened.enter_async_context(
        Runner(jobs_known, kinds, kept_days=settings.retention_jobs_days, clock=clock)
    )
    return Context(
        settings=settings,
        detection_network=networks.detection.networks[0],
        recognisers=recognisers,
        store=store,
        retention=retention,
        erasures=Erasures(database),
        subject_access=SubjectAccess(database),
        generations=generations,
        shadow=shadow,
        followers=followers,
        shared_engine=milvus,
        pipeline=pipeline,
        watches=watches,
        telemetry=telemetry,
        jobs=runner,
        spool=spool,
        transfers=transfers,
        audit=audit_writer,
        probes=ProbeBudget(settings.embedding_rate, audit_writer, measures),
        keys=keys_known,
        key_uses=key_uses,
        fetcher=fetcher,
        measures=measures,
        readiness=ready,
        samples=samples,
        batchers=list(running),
    )


@dataclass(frozen=True)
class _Networks:
    """Of the packs served: each one's recogniser, and the first one's detector and, where it has one, liveness."""

    packs: list[ModelPack]
    detection: Opened
    recognition: list[Opened]
    liveness: Opened | None

    @property
    def pack(self) -> ModelPack:
        return self.packs[0]

    @property
    def by_pack(self) -> list[tuple[ModelPack, Opened]]:
        """All of them, with the pack that each is of."""
        judging = [] if self.liveness is None else [(self.pack, self.liveness)]
        return [(self.pack, self.detection), *zip(self.packs, self.recognition, strict=True), *judging]

    @property
    def devices(self) -> int:
        """How many of them all networks run on: where one had to stay on the CPU, the others' further GPUs would wait
        for it."""
        return min(len(opened.networks) for _, opened in self.by_pack)

    @property
    def shortfalls(self) -> list[str]:
        """Why some do not run on the GPU that is wanted."""
        return [opened.shortfall for _, opened in self.by_pack if opened.shortfall is not None]


def _open_networks(settings: Settings) -> _Networks:
    packs = read_packs(settings.pack_paths)
    detection = open_networks(packs[0].detection, settings.wish)
    recognition = [open_networks(each.recognition, settings.wish) for each in packs]
    # In fp32: what other numbers would make of its threshold nobody measured, and it is small.
    in_fp32, spec = replace(settings.wish, precision="fp32"), packs[0].liveness
    networks = _Networks(packs, detection, recognition, None if spec is None else open_networks(spec, in_fp32))
    for pack in packs:
        log.info("serving %s", pack.model_id)
    for pack, opened in networks.by_pack:
        for network in opened.networks:
            file = pack.name_of(network.path)
            log.info("%s by %s in %s: %s", file, network.engine, network.precision, network.why)
    return networks


def _make_followers(settings: Settings, store: Store, milvus: MilvusEngine | None) -> Followers:
    if milvus is not None:
        return Followers(milvus.replica)
    here = InProcess(settings.index_device, settings.index_path)
    return Followers(in_process(store, here), settings.index_memory, partial(forget_files, settings.index_path))


@asynccontextmanager
async def _serve(
    pack: ModelPack, opened: Opened, settings: Settings, devices: Devices, spans: Spans | None
) -> AsyncIterator[Served]:
    each = [Recogniser(network, pack.recognition) for network in opened.networks[: devices.count]]
    calibration = None if pack.calibration is None else Calibration.from_document(pack.calibration)
    name, most = f"recogniser/{pack.model_id}", _most_faces(settings)
    sizes = BATCH_BUCKETS if isinstance(opened.networks[0], CudaNetwork) else SMALL_BATCHES
    async with Batcher(name, devices, [one.embed_each for one in each], sizes, most, spans=spans) as embed:
        yield Served(pack, opened.networks[0], each[0], calibration, embed)


@asynccontextmanager
async def _judge(
    spec: LivenessSpec, opened: Opened, settings: Settings, devices: Devices, spans: Spans | None
) -> AsyncIterator[Judge]:
    each = [Liveness(network, spec) for network in opened.networks[: devices.count]]
    most = _most_faces(settings)
    async with Batcher(
        "liveness", devices, [one.score_each for one in each], SMALL_BATCHES, most, spans=spans
    ) as scoring:
        yield Judge(spec, opened.networks[0], scoring)


def _most_faces(settings: Settings) -> int:
    """That may wait for a network. A request alone has room for all of its own."""
    return max(4 * settings.queue_size, settings.max_images * settings.max_faces)

"""The wiring, all of it: settings in, application out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from models.detection import Detector
from models.pack import load_pack
from models.recognition import Recogniser
from models.risk import Calibration
from models.runtime import BATCH_BUCKETS, Network, available_cores
from service.api import enrolments, faces, galleries, hygiene, identify, jobs, problems, risk, subjects, system
from service.api.context import Context
from service.api.middleware import Gate
from service.api.openapi import component_schemas
from service.archives import ArchiveLimits
from service.batching import Batcher
from service.bulk import KIND, BulkEnrolment
from service.drift import Watches
from service.gallery.database import Database, open_engine
from service.gallery.faiss_index import exact_index
from service.gallery.follower import Followers
from service.gallery.job_store import JobStore
from service.gallery.risks import GalleryRisks
from service.gallery.store import Store
from service.imaging import ImageLimits
from service.jobs import Runner
from service.pipeline import Pipeline
from service.settings import Settings
from service.spool import Spool
from service.telemetry import Telemetry

DETECTOR_BATCH = 8
BLOCKING_THREADS_PER_CORE = 2
log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Build the service. Networks and database are opened when the application starts, once."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pack = load_pack(settings.pack_path)
        pack.verify()
        detection = Network(pack.detection.path, settings.provider, settings.threads)
        recognition = Network(pack.recognition.path, settings.provider, settings.threads)
        detector = Detector(detection, pack.detection, settings.detection_score)
        recogniser = Recogniser(recognition, pack.recognition)
        calibration = None if pack.calibration is None else Calibration.from_document(pack.calibration)
        database = Database(open_engine(settings.sql_url))
        store = Store(database)
        followers = Followers(store, exact_index)
        risks = GalleryRisks(store, recogniser.fingerprint, calibration)
        watches = Watches(calibration)
        workers = max(4, BLOCKING_THREADS_PER_CORE * available_cores())
        with ThreadPoolExecutor(workers, thread_name_prefix="blocking") as threads:
            async with (
                Batcher("detector", detector.detect, DETECTOR_BATCH, settings.queue_size) as detect,
                Batcher("recogniser", recogniser.embed_each, BATCH_BUCKETS[-1], 4 * settings.queue_size) as embed,
            ):
                limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
                pipeline = Pipeline(
                    detect,
                    embed,
                    recogniser.alignment,
                    followers,
                    risks,
                    limits,
                    settings.max_faces,
                    threads,
                )
                spool = Spool(settings.data_dir / "spool")
                archives = ArchiveLimits(
                    settings.max_archive_photos, settings.max_image_bytes, settings.max_unpacked_bytes
                )
                bulk = BulkEnrolment(spool, archives, store, followers, pipeline, recogniser.fingerprint)
                kinds = {KIND: bulk.kind()}
                async with Runner(JobStore(database), kinds) as runner:
                    app.state.context = Context(
                        settings,
                        pack,
                        detection,
                        recognition,
                        recogniser,
                        store,
                        followers,
                        pipeline,
                        watches,
                        Telemetry(watches),
                        runner,
                        spool,
                    )
                    log.info("serving %s on %s", pack.model_id, recognition.providers[0])
                    yield
        risks.close()
        store.close()

    app = FastAPI(
        title="Kith", version=version("kith-face"), summary="Who is this, and how sure may I be?", lifespan=lifespan
    )
    problems.install(app)
    for module in (faces, galleries, subjects, enrolments, identify, hygiene, risk, jobs, system):
        app.include_router(module.router)
    app.add_middleware(Gate, settings=settings)
    _document(app)
    return app


def _document(app: FastAPI) -> None:
    """Add the schemas of bodies that are read by hand."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            document["components"]["schemas"] |= component_schemas()
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

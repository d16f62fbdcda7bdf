"""The largest of several faces is chosen alone, each recognizer gets the crops it was trained on, and few photos are
held decoded at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.detection import Detector, PreparedPhoto, RawOutputs
from models.vision.face_search import search_bytes
from models.vision.quality import Quality, QualityGate
from service import wiring
from service.app import create_app
from service.core.deadlines import Deadline
from service.core.errors import DeadlineExceededError, GalleryNotFoundError, ImageError
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.inference.decoding import DecodedPhoto
from service.inference.images import SHORT_BYTES, PhotoDecoder, PhotoHeader
from service.inference.photo_pipeline import DecodeBudget, Face, Photo
from service.settings import load_settings
from service.storage.repositories.store import Store
from service.usecases.backend import Backend
from service.usecases.identify import search_gallery
from tests.conftest import jpeg
from tests.databases import open_database

read_header = PhotoDecoder.read_header


@pytest.mark.parametrize(
    ("others", "main", "rivaled"),
    [
        ([{}], 0, True),
        ([{"side": 74}], 0, False),
        ([{"side": 76}], 0, True),
        ([{"side": 76, "sharpness": 7}], 0, False),
        ([{"side": 30, "sharpness": 60}], 0, False),
        ([{"eyes": 11}], 0, False),
        ([{"score": 0.69}], 0, False),  # weaker than confident: such as a blurred background
        ([{"side": 110, "score": 0.55}], 0, True),  # or a person: in doubt, no one is enrolled
        ([{"side": 200, "score": 0.55, "sharpness": 3}], 0, False),
        ([{"side": 110, "yaw": 0.9}], 1, False),  # a profile beside a bystander is not enrolled as the bystander
        ([{"side": 110, "sharpness": 1.9}], 0, False),
        ([{"side": 200}, {"side": 140}], 1, False),
        ([{"side": 200}, {"side": 160}], 1, True),
    ],
)
def test_the_main_face_is_rivaled_only_by_faces_as_large_and_as_sharp(
    others: list[dict[str, float]], main: int, rivaled: bool
) -> None:
    faces = []
    for one in ({}, *others):
        measured = Quality(
            one.get("eyes", 40.0), one.get("sharpness", 15.0), 125.0, 55.0, one.get("yaw", 0.0), 0.0, 0.0
        )
        box = np.array([0, 0, one.get("side", 100.0), one.get("side", 100.0)], np.float32)
        faces.append(Face(box, np.zeros((5, 2), np.float32), one.get("score", 0.75), measured))
    assert Photo(999, 999, faces, 16.0, 0.7, 2).main_face(QualityGate()) == (main, rivaled)
    weak = [replace(face, score=face.score - 0.3) for face in faces]  # of weak faces alone, all count
    assert Photo(999, 999, weak[:1], 16.0, 0.7, 1).main_face(QualityGate()) == (0, False)


def test_a_search_ends_though_its_gallery_is_replaced_meanwhile(tmp_path: Path, rng: np.random.Generator) -> None:
    """Another process restores the gallery, or deletes it and creates one of the same name."""
    served = load_settings(data_dir=tmp_path, log_level="WARNING")
    other = Store(open_database(served.sql_url))

    async def search(backend: Backend) -> None:
        by = backend.recognizers.default
        (vector,) = np.eye(1, by.dimension, dtype=np.float32)

        def made(subject: str) -> Gallery:
            gallery = other.galleries.create("g", by.fingerprint, by.dimension, GallerySettings())
            other.templates.enroll(gallery, subject, [NewTemplate(uuid.uuid4().hex, vector, "embedding")], None)
            return other.galleries.get("g")

        async def found(gallery: Gallery) -> set[str]:
            async with asyncio.timeout(60):
                _, named = await search_gallery(backend, gallery, vector[None], gallery.settings.risk, 5, None)
            return {subject.id for subject in named.values()}

        first = made("before")
        assert await found(first) == {"before"}
        other.galleries.delete("g")
        second = made("after")
        # Names that are still cached are those of the version that the request read. Housekeeping may evict them.
        with suppress(GalleryNotFoundError):
            assert await found(first) == {"before"}
        await backend.threads.run(backend.store.galleries.evict_changed)
        with pytest.raises(GalleryNotFoundError):
            await found(first)
        assert len(backend.followers) == 0
        assert await found(second) == {"after"}
        # A subject that is deleted meanwhile is another matter: an answer is as of when the gallery was read, or later.
        other.subjects.delete(second, "after")
        assert await found(second) <= {"after"}
        assert await found(await backend.find_gallery("g")) == set()

    async def main() -> None:
        app = create_app(served)
        async with app.router.lifespan_context(app):
            await search(app.state.backend)

    asyncio.run(main())
    other.close()


AT_ONCE = 12
"""Two cores: four threads, and a batch of eight."""


@asynccontextmanager
async def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> AsyncIterator[Backend]:
    monkeypatch.setattr(wiring, "available_cores", lambda: 2)
    app = create_app(load_settings(data_dir=tmp_path, log_level="WARNING", **settings))
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        yield app.state.backend


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def test_only_short_work_of_requests_runs_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    whole, short = jpeg(astronaut, 60), jpeg(np.ascontiguousarray(astronaut[::2, ::2]))
    ran: list[bool] = []

    def noting(decoder: PhotoDecoder, payload: bytes) -> PhotoHeader:
        ran.append(threading.current_thread() is threading.main_thread())
        header = read_header(decoder, payload)
        return replace(header, _decode=partial(note, header))

    def note(header: PhotoHeader, scale: float) -> DecodedPhoto:
        ran.append(threading.current_thread() is threading.main_thread())
        return header.decode(scale)

    monkeypatch.setattr(PhotoDecoder, "read_header", noting)

    async def main() -> None:
        async with serving(tmp_path, monkeypatch) as backend:
            photos, served = backend.photos, backend.recognizers.default
            assert len((await photos.embed(short, served)).faces) == 1
            assert len((await photos.embed(short, served, background=True)).faces) == 1
            assert len((await photos.embed(whole, served)).faces) == 1

    asyncio.run(main())
    assert len(whole) <= SHORT_BYTES
    assert ran == [True, True, False, False, True, False]  # of each photo, its header and its pixels


def test_the_memory_of_tiles_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detector: Detector) -> None:
    photo, reserved, share = jpeg(np.zeros((1500, 2000, 3), np.uint8)), list[int](), DecodeBudget.share

    def recorded(budget: DecodeBudget, size: int) -> AbstractAsyncContextManager[Callable[[int], None]]:
        reserved.append(size)
        return share(budget, size)

    monkeypatch.setattr(DecodeBudget, "share", recorded)

    async def main() -> None:
        async with serving(tmp_path, monkeypatch) as backend:
            for detail in ("medium", "high"):
                await backend.photos.detect(photo, detail)

    asyncio.run(main())
    medium, high = reserved
    assert high - medium == search_bytes(detector, 1500, 2000, "high") > 5_000_000


def test_few_photos_are_held_decoded_and_who_waits_for_a_thread_is_answered_by_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    photo, decoded, read, found = jpeg(astronaut), list[int](), threading.Event(), threading.Event()

    def counting(decoder: PhotoDecoder, payload: bytes) -> PhotoHeader:
        assert read.wait(60)
        decoded.append(len(payload))
        return read_header(decoder, payload)

    class Held(Detector):
        def run(self, canvases: Sequence[PreparedPhoto]) -> list[RawOutputs]:
            assert found.wait(60)
            return super().run(canvases)

    monkeypatch.setattr(PhotoDecoder, "read_header", counting)
    monkeypatch.setattr(wiring, "Detector", Held)

    async def main() -> None:
        async with serving(tmp_path, monkeypatch) as backend:
            try:
                await scene(backend)
            finally:
                read.set()
                found.set()

    async def scene(backend: Backend) -> None:
        def ask(count: int) -> list[asyncio.Task[Photo]]:
            return [asyncio.create_task(backend.photos.detect(photo)) for _ in range(count)]

        asked = ask(AT_ONCE - 1)
        await asyncio.sleep(0)
        with Deadline(0.05) as deadline:
            late = ask(2)  # the first has a place and waits for a thread, the second waits for a place
        await asyncio.sleep(0)
        asked += ask(19)
        await until(lambda: deadline.remaining_s < 0)
        asked.pop().cancel()
        read.set()
        await until(lambda: len(decoded) >= AT_ONCE)
        # Let the threads finish all earlier work.
        await asyncio.gather(*(backend.threads.run(int) for _ in range(100)))
        assert len(decoded) == AT_ONCE
        found.set()
        assert all(len(photo.faces) for photo in await asyncio.gather(*asked))
        assert len(decoded) == 29
        ended = await asyncio.gather(*late, return_exceptions=True)
        assert [type(each) for each in ended] == [DeadlineExceededError] * 2

    asyncio.run(main())


def test_a_refused_photo_is_not_held_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: NDArray[np.uint8]
) -> None:
    """A cycle of an error and the frames of its traceback would hold it until a garbage collection."""

    async def main() -> None:
        async with serving(tmp_path, monkeypatch) as backend:
            gc.collect()
            gc.disable()
            try:
                await backend.photos.detect(jpeg(group)[:60_000], "low")
            except ImageError as error:
                held = weakref.ref(error)
            await until(lambda: held() is None)

    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_full_queues_end_no_admitted_search_and_have_room_for_all_faces_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: NDArray[np.uint8]
) -> None:
    photo, faces = jpeg(np.pad(group, ((500, 1000), (400, 1000), (0, 0)))), [np.zeros((112, 112, 3), np.uint8)] * 6
    monkeypatch.setattr(wiring, "QUEUE_SIZE", 1)

    async def main() -> None:
        async with serving(tmp_path, monkeypatch, max_images=4) as backend:
            asked = [asyncio.create_task(backend.photos.detect(photo, "high")) for _ in range(4)]
            assert [len(found.faces) for found in await asyncio.gather(*asked)] == [6] * 4
            batcher = backend.recognizers.default.batcher
            submitted = [asyncio.create_task(batcher.submit(faces)) for _ in range(10)]
            assert [len(vectors) for vectors in await asyncio.gather(*submitted)] == [6] * 10

    asyncio.run(main())

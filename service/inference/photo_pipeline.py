"""Photo pipeline: decode, detect, align, check liveness, embed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from kith.wire.faces import MAX_FACES
from models.runtime.network import Float
from models.vision import quality
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment, align
from models.vision.detection import Detections, Detector, PreparedPhoto, RawOutputs
from models.vision.face_search import Detail, FaceSearch, finest_scale, search_bytes
from models.vision.liveness import LivenessResult, LivenessVerdict, cut_crops, largest_scale
from models.vision.main_face import find_main_face
from models.vision.quality import Quality, QualityGate
from models.vision.specs import BoxCrops, LivenessSpec
from service.core import deadlines
from service.core.actor import Threads, gather_or_cancel
from service.core.deadlines import FairSemaphore
from service.core.errors import DeadlineExceededError, ImageError, OverloadedError, RefusedError
from service.domain.gallery import Crop, Gallery
from service.inference import crops
from service.inference.batcher import Batcher
from service.inference.decoding import OVERHEAD_BYTES, DecodedPhoto
from service.inference.images import PhotoDecoder, PhotoHeader, has_short_header
from service.inference.recognizers import LivenessJudge, ServedRecognizer
from service.inference.url_fetching import UrlFetcher
from service.observability.metrics import Metrics

BACKGROUND_THREADS: Final = 2
KeptCrops = Literal["none", "largest", "all"] | QualityGate
"""Faces of a photo whose crops are cut as templates store them. A quality gate: the main face by it."""
DECODE_SCALE: Final = 1.5
"""A photo is decoded at this multiple of its detector canvas scale, at most at full size. Crops of larger faces then
need no second decoding (docs/decisions.md, 33)."""
Image = NDArray[np.uint8]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class Face:
    """One detected face.

    Attributes:
        vector: (d,) unit vector of the requested recognizer.
        kept: crop to store with a template.
        liveness: None without a liveness model.
    """

    box_xyxy: Float
    landmarks_xy: Float
    score: float
    quality: Quality
    vector: Float | None = None
    kept: Crop | None = None
    liveness: LivenessResult | None = None


@dataclass(frozen=True, eq=False)
class Photo:
    """Size of an upright photo in pixels, and its faces by descending detection score.

    ``min_face_px``: width of the smallest face that the detection usually finds at the requested detail.
    ``confident_score``: score of an upright face. ``face_count``: faces found. ``truncated``: ``faces`` are only the
    largest of those wanted, MAX_FACES. ``is_confident``: a face has the ``confident_score``: the
    photo is upright.
    """

    width: int
    height: int
    faces: list[Face]
    min_face_px: float
    confident_score: float
    face_count: int
    truncated: bool = False
    is_confident: bool = True

    def main_face(self, gate: QualityGate) -> tuple[int, bool]:
        """Return the index of the main face, and whether another face rivals it; see `find_main_face`.

        The photo must have a face.
        """
        boxes = np.stack([face.box_xyxy for face in self.faces])
        scores = np.array([face.score for face in self.faces], np.float32)
        return find_main_face(boxes, scores, [face.quality for face in self.faces], gate, self.confident_score)


class DecodeBudget:
    """Number and memory of photos that are decoded at once.

    Args:
        max_photos: photos of requests.
        max_bytes: memory of the photos of requests and jobs.
    """

    def __init__(self, max_photos: int, max_bytes: int) -> None:
        self.places = FairSemaphore(max_photos)
        self._memory = FairSemaphore(max_bytes)
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def share(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Reserve ``size`` bytes within the block, in order of arrival. A photo that needs more than all gets all.

        The function that the block gets returns the memory above a smaller size. A holder must not reserve another
        share, because two of them could wait for each other.

        Raises:
            OverloadedError: the deadline of the request ends first.
            ClientGoneError: the client disconnects first.
        """
        held = min(size, self._max_bytes)

        def shrink(size: int) -> None:
            nonlocal held
            self._memory.release(max(0, held - size))
            held = min(held, size)

        try:
            await self._memory.acquire(held)
        except DeadlineExceededError as error:
            raise OverloadedError(
                f"other photos used the {self._max_bytes} bytes for decoding photos until the deadline"
            ) from error
        try:
            yield shrink
        finally:
            self._memory.release(held)


class PhotoPipeline:
    """Stages from the bytes of a photo to face vectors."""

    def __init__(
        self,
        detector: Detector,
        detecting: Batcher[PreparedPhoto, RawOutputs],
        decoder: PhotoDecoder,
        threads: Threads,
        fetcher: UrlFetcher,
        budget: DecodeBudget,
        judge: LivenessJudge | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._detector = detector
        self._detecting = detecting
        self._decoder = decoder
        self._threads = threads
        self._fetcher = fetcher
        self._undecoded = 0
        self._budget = budget
        self._background = asyncio.Semaphore(BACKGROUND_THREADS)
        self.judge = judge
        self.metrics = Metrics() if metrics is None else metrics

    async def detect(self, source: bytes | str, detail: Detail = "low") -> Photo:
        """Decode a photo, given as bytes or a URL, and detect its faces. Raises ImageError."""
        payload = await self._fetched(source)
        return (await self._faces(payload, STANDARD_ALIGNMENT, time.monotonic(), detail))[0]

    async def embed(
        self,
        source: bytes | str,
        recognizer: ServedRecognizer,
        detail: Detail = "low",
        largest_only: bool = False,
        keep: KeptCrops = "none",
        background: bool = False,
    ) -> Photo:
        """Decode a photo, detect its faces, and embed each of them.

        Args:
            source: bytes of the photo, or a URL to fetch it from.
            detail: effort of face detection.
            keep: faces to cut the crop of that is stored with a template.
            background: yield to requests.

        Raises:
            ImageError: the photo cannot be decoded.
        """
        payload = await self._fetched(source)
        if not background:
            recognizer.batcher.admit(1)
        admitted = time.monotonic()
        alignment = recognizer.recognizer.alignment
        photo, aligned = await self._faces(payload, alignment, admitted, detail, largest_only, keep, background)
        with self.metrics.stage("embed"):
            vectors = await recognizer.batcher.submit(list(aligned), background, admitted)
        faces = [replace(face, vector=vector) for face, vector in zip(photo.faces, vectors, strict=True)]
        return replace(photo, faces=faces)

    async def _fetched(self, source: bytes | str) -> bytes:
        """Raises as :meth:`service.inference.url_fetching.UrlFetcher.fetch`."""
        if isinstance(source, bytes):
            return source
        with self.metrics.stage("fetch"):
            return await self._fetcher.fetch(source)

    async def _faces(
        self,
        payload: bytes,
        alignment: Alignment,
        admitted: float,
        detail: Detail,
        largest_only: bool = False,
        keep: KeptCrops = "none",
        background: bool = False,
    ) -> tuple[Photo, Image]:
        in_thread = self._in_background_thread if background else self._threads.run
        reading = _here if has_short_header(payload) and not background else in_thread
        if not background:
            # Reject before decoding if the network's queue cannot take the photo in time.
            self._detecting.admit(1, self._undecoded)
        async with AsyncExitStack() as place:
            self._undecoded += not background
            try:
                if not background:
                    await place.enter_async_context(self._budget.places)
                header = await reading(self._read_header, payload)
                working = _here if header.is_short and not background else in_thread
                further_bytes = search_bytes(self._detector, header.height, header.width, detail)
                shrink = await place.enter_async_context(self._budget.share(header.peak_bytes + further_bytes))
                with self.metrics.stage("decode"):
                    picture, canvas = await _until_done(working(self._decode, header, detail))
                if picture.reduction == 1.0:  # otherwise, it may be decoded again
                    shrink(picture.pixels.nbytes + OVERHEAD_BYTES + further_bytes)
            finally:
                self._undecoded -= not background
            with self.metrics.stage("detect"):
                search = FaceSearch(self._detector, canvas, picture.shrunk, detail)
                search.take(await self._detecting.submit([canvas], background, admitted))
                while search.unfinished:
                    views = await _until_done(in_thread(search.next_views))
                    search.take(await self._detecting.submit(views, background, admitted))
            with self.metrics.stage("align"):
                photo, aligned, liveness_crops = await _until_done(
                    working(self._align, picture, search, alignment, largest_only, keep)
                )
            del picture, search  # before their share of the budget is returned
        self.metrics.observe_photo([face.quality.score for face in photo.faces])
        return await self._check_liveness(photo, liveness_crops, background, admitted), aligned

    async def _check_liveness(
        self, photo: Photo, face_crops: Sequence[Image | None], background: bool, admitted: float
    ) -> Photo:
        """Return the photo with liveness judgments. A face without a crop gets a judgment without a score."""
        if self.judge is None or not photo.faces:
            return photo
        present = [crop for crop in face_crops if crop is not None]
        with self.metrics.stage("judge"):
            scores = iter(await self.judge.batcher.submit(present, background, admitted) if present else [])
        threshold = self.judge.spec.threshold
        judgments = [LivenessResult(None if crop is None else next(scores), threshold) for crop in face_crops]
        faces = [replace(face, liveness=one) for face, one in zip(photo.faces, judgments, strict=True)]
        return replace(photo, faces=faces)

    def _read_header(self, payload: bytes) -> PhotoHeader:
        deadlines.check()  # the wait for a thread may have been long
        return self._decoder.read_header(payload)

    def _decode(self, header: PhotoHeader, detail: Detail) -> tuple[DecodedPhoto, PreparedPhoto]:
        deadlines.check()
        scale = self._detector.canvas(header.height, header.width).scale
        finest = finest_scale(self._detector, header.height, header.width, detail)
        picture = header.decode(min(1.0, max(DECODE_SCALE * scale, finest)))
        size = picture.height, picture.width
        return picture, self._detector.place_on_canvas(picture.shrunk(scale), self._detector.canvas(*size), *size)

    def _align(
        self,
        picture: DecodedPhoto,
        search: FaceSearch,
        alignment: Alignment,
        largest_only: bool,
        keep: KeptCrops,
    ) -> tuple[Photo, Image, list[Image | None]]:
        """Return the photo's faces, their (n, h, w, 3) aligned crops, and the crops for liveness."""
        found = search.faces()
        detected = found.largest_of(MAX_FACES)
        if largest_only and len(detected):
            row = detected.largest()
            detected = detected[row : row + 1]
        # The main face is the largest one in nearly all photos, and is known once the quality is measured.
        kept = [] if keep in ("none", "all") or not len(detected) else [detected.largest()]
        kept = list(range(len(detected))) if keep == "all" else kept
        if picture.reduction < 1.0:
            judged = [] if self.judge is None else [self.judge.spec.crop]
            picture = picture.at_least(_required_scale(detected, [alignment, *judged], kept))
        aligned, qualities = _align_crops(picture, detected, alignment)
        columns = (detected.boxes_xyxy, detected.landmarks_xy, detected.scores.tolist(), qualities)
        faces = list(map(Face, *columns))
        size, confident = (picture.width, picture.height), self._detector.confident_score
        truncated = len(found) > MAX_FACES and not largest_only
        upright = bool((found.scores >= confident).any())
        photo = Photo(*size, faces, search.min_face_px, confident, len(found), truncated, upright)
        if isinstance(keep, QualityGate) and faces:
            kept = [photo.main_face(keep)[0]]
            picture = picture.at_least(crops.min_decode_scale(faces[kept[0]].box_xyxy))
        for row in kept:
            faces[row] = replace(faces[row], kept=_crop_to_keep(picture, faces[row]))
        face_crops: list[Image | None] = []
        if self.judge is not None:
            face_crops = _cut_for_liveness(picture, detected, self.judge.spec)
        return photo, aligned, face_crops

    async def _in_background_thread(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run in one of BACKGROUND_THREADS, so that requests find free threads."""
        async with self._background:
            return await self._threads.run(function, *arguments)


async def each_photo(photos: Sequence[Coroutine[Any, Any, Photo]]) -> list[Photo | ImageError]:
    """Process photos concurrently. The error of a single photo is raised, that of one of several is its result."""
    if len(photos) == 1:
        return [await photos[0]]

    async def photo_or_error(photo: Coroutine[Any, Any, Photo]) -> Photo | ImageError:
        try:
            return await photo
        except ImageError as error:
            return error

    return await gather_or_cancel([photo_or_error(photo) for photo in photos])


async def _here(function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run short work on the event loop. Threads would wait for each other's turn to run Python for ten times as long
    (docs/decisions.md, 31)."""
    return function(*arguments)


async def _until_done(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of work in a thread. If canceled, end with the thread, which uses memory until then."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
    finally:
        del task  # which has its error, whose traceback has this frame


def _required_scale(faces: Detections, wanted: Sequence[Alignment | BoxCrops], kept: Sequence[int]) -> float:
    """Return the scale of the photo (0 to 1) from which no crop has to be enlarged."""
    required = [largest_scale(faces.boxes_xyxy, faces.landmarks_xy, crop) for crop in {STANDARD_ALIGNMENT, *wanted}]
    required += [crops.min_decode_scale(faces.boxes_xyxy[row]) for row in kept]
    return float(max(required))


def _align_crops(picture: DecodedPhoto, faces: Detections, alignment: Alignment) -> tuple[Image, list[Quality]]:
    """Return (n, h, w, 3) crops, and the quality of each face."""
    points = picture.points(faces.landmarks_xy)
    # Quality is measured on the standard crop, so that its values do not depend on the recognizer.
    standard = align(picture.pixels, points)
    qualities = [
        quality.measure_quality(crop, points) for crop, points in zip(standard, faces.landmarks_xy, strict=True)
    ]
    return standard if alignment == STANDARD_ALIGNMENT else align(picture.pixels, points, alignment), qualities


def _cut_for_liveness(picture: DecodedPhoto, faces: Detections, spec: LivenessSpec) -> list[Image | None]:
    """Return the crop of each face, or None; see `cut_crops`."""
    corners, points = (picture.points(xy) for xy in (faces.boxes_xyxy.reshape(-1, 2, 2), faces.landmarks_xy))
    return cut_crops(picture.pixels, corners.reshape(-1, 4), points, spec.crop, spec.max_outside)


def _crop_to_keep(picture: DecodedPhoto, face: Face) -> Crop:
    (corners, points) = (picture.points(xy) for xy in (face.box_xyxy.reshape(2, 2), face.landmarks_xy))
    return crops.cut_crop(picture.pixels, corners.ravel(), points)


def verdict_of(gallery: Gallery, face: Face | None) -> LivenessVerdict | None:
    """Return the verdict on a face, or on an embedding (None). None: the gallery does not require liveness.

    Raises:
        liveness_unavailable: the gallery requires liveness, and no model is served.
    """
    if gallery.settings.liveness == "off":
        return None
    if face is None:
        return "not_judged"
    if face.liveness is None:
        raise RefusedError(
            "liveness_unavailable", f"gallery {gallery.name!r} requires liveness; the pack has no model for it"
        )
    return face.liveness.verdict(gallery.settings.liveness_threshold)

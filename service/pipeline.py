"""The request, readable on one screen: photo, faces, crops, vectors, decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from models import quality
from models.alignment import STANDARD, Alignment, align, scales
from models.detection import Answer, Detector, Faces, Laid, largest_box
from models.liveness import Judgement, outside
from models.liveness import cut as cut_with_surroundings
from models.network import Float
from models.pack import LivenessSpec
from models.quality import Quality
from service import crops, patience
from service.batching import Batcher
from service.catching_up import CatchingUp
from service.decision import (
    Candidate,
    Decision,
    KnownRisk,
    RiskTarget,
    Thresholds,
    coarse_candidates,
    decide,
    false_alarm_probabilities,
    lowest_review,
    thresholds_for,
)
from service.gallery.follower import Follower, Followers
from service.gallery.index import Keys
from service.gallery.risks import GalleryRisks
from service.gallery.subjects import Crop, Gallery
from service.imaging import ImageLimits, Picture, open_photo
from service.measures import Measures
from service.patience import Patience, Places
from service.recognisers import Judge, Served
from service.security.acting import in_context

BACKGROUND_THREADS: Final = 2
DECODED_OF_CANVAS: Final = 1.5
"""A photo is decoded at this many times the scale of its canvas, or the whole: crops of larger faces then need no
second decoding (docs/decisions/0030)."""
SEARCHED_AT_ONCE: Final = 500_000
"""Numbers to be compared, up to which a search is done on the event loop: a tenth of a millisecond, twice the way to an
idle thread and back (bench/searches.py), which is longer where threads are busy."""
ANSWERED_AT_ONCE: Final = 50
"""Candidates of all probes together, up to which their decisions are made there, too."""
Image = NDArray[np.uint8]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class Face:
    """One face of a photo; where they were asked for, ``vector`` (d,), ``other_crop`` cut for a second recogniser,
    ``others`` by further generations' recognisers, and ``kept``, to be kept with a template."""

    box_xyxy: Float
    landmarks_xy: Float
    score: float
    quality: Quality
    vector: Float | None = None
    other_crop: Image | None = None
    others: Mapping[int, Float] = field(default_factory=dict)
    kept: Crop | None = None
    liveness: Judgement | None = None
    """None: no model tells it."""


@dataclass(frozen=True, eq=False)
class Photo:
    """An upright photo's size in pixels and its faces, best score first."""

    width: int
    height: int
    faces: list[Face]

    def largest_row(self) -> int:
        """Row of the face with the largest box, as :meth:`Faces.largest`; call only where there is a face."""
        return largest_box(np.stack([face.box_xyxy for face in self.faces]))

    def largest(self) -> Face:
        return self.faces[self.largest_row()]


@dataclass(frozen=True)
class Found:
    """The answer to one probe: the decision, the best subjects by key, and the thresholds that decided.

    ``near_miss``: the probe reaches the gallery's own review threshold and is not identified. ``known`` and
    ``comparisons``: what the probabilities come from.
    """

    decision: Decision
    candidates: list[Candidate]
    thresholds: Thresholds
    near_miss: bool = False
    known: KnownRisk | None = None
    comparisons: int = 0

    def coarse(self, photo: bool) -> Found:
        """Return the answer to a caller that may not export templates; of an embedding it says no more than the
        outcome does."""
        decision, candidates = self.decision, self.candidates
        first = [candidate for candidate in (decision.best, decision.runner_up) if candidate is not None]
        if not photo and decision.outcome == "identified":
            first, candidates = first[:1], candidates[:1]  # whether others reach a threshold would be told for free
        first, candidates = (
            coarse_candidates(some, self.thresholds, self.known, self.comparisons, photo)
            for some in (first, candidates)
        )
        if not photo:  # the order of those that are told the same would be their exact order
            for some in (first, candidates):
                some.sort(key=lambda candidate: (-candidate.similarity, candidate.subject_pk))
        best, runner_up, *_ = (*first, None, None)
        return replace(self, decision=Decision(decision.outcome, best, runner_up), candidates=candidates)


class Pipeline:
    """The stages in order. Each takes the previous one's value; none knows HTTP or settings.

    Of the requests' photos, ``at_once`` at most are held decoded.
    """

    def __init__(
        self,
        detector: Detector,
        detecting: Batcher[Laid, Answer],
        followers: Followers,
        catching_up: CatchingUp,
        risks: GalleryRisks,
        limits: ImageLimits,
        max_faces: int,
        threads: ThreadPoolExecutor,
        at_once: int,
        judge: Judge | None = None,
        measures: Measures | None = None,
    ) -> None:
        self._detector = detector
        self._detecting = detecting
        self._followers = followers
        self._catching_up = catching_up
        self._limits = limits
        self._max_faces = max_faces
        self._threads = threads
        self._coming = 0
        self._places = Places(at_once)
        self._background = asyncio.Semaphore(BACKGROUND_THREADS)
        self.risks = risks
        self.judge = judge
        self.measures = Measures() if measures is None else measures

    async def detect(self, payload: bytes) -> Photo:
        """Decode a photo and find its faces. Raises ImageError."""
        return (await self._faces(payload, []))[0]

    async def embed(
        self,
        payload: bytes,
        by: Served,
        also: Served | None = None,
        largest_only: bool = False,
        keep: bool = False,
        background: bool = False,
    ) -> Photo:
        """Decode a photo, find its faces, and give each a vector by one recogniser; cut their crops for another one
        (``also``), and of the largest face one that can be kept. ``background``: behind the requests. Raises
        ImageError."""
        if not background:
            by.batcher.admit(1)
        alignments = [served.recogniser.alignment for served in (by, also) if served is not None]
        photo, cut = await self._faces(payload, alignments, largest_only, keep, background)
        with self.measures.stage("embed"):
            vectors = await by.batcher.submit(list(cut[0]), background)
        others = cut[1] if also is not None else [None] * len(vectors)
        return replace(
            photo,
            faces=[
                replace(face, vector=vector, other_crop=other)
                for face, vector, other in zip(photo.faces, vectors, others, strict=True)
            ],
        )

    async def identify(
        self,
        gallery: Gallery,
        probes: Float,
        target: RiskTarget,
        k: int,
        among: Keys | None = None,
        limited: bool = False,
    ) -> list[Found]:
        """Search (q, d) unit vectors and decide each; subjects are named by their key. ``limited``: no
        threshold is below the review threshold of the gallery's own risk.

        Raises:
            RiskUncalibratedError: there is no threshold for this risk.
            OverloadedError, StorageError, IndexUnavailableError: the gallery cannot be searched at the moment.
        """
        follower = await self.caught_up(gallery)
        small = len(probes) * gallery.templates * gallery.dimension <= SEARCHED_AT_ONCE
        few = len(probes) * min(gallery.templates, max(2, k)) <= ANSWERED_AT_ONCE
        with self.measures.stage("search"):
            if small and few and among is None and follower.is_at(gallery.version) and self.risks.at_hand(gallery):
                return self._identify(follower, gallery, probes, target, k, among, limited)
            return await self.in_thread(self._identify, follower, gallery, probes, target, k, among, limited)

    async def caught_up(self, gallery: Gallery) -> Follower:
        """A gallery's follower, which is done with whatever takes long: a search from here on holds its thread only
        shortly, although it catches up with what came since. Raises OverloadedError, StorageError,
        IndexUnavailableError."""
        follower = self._followers.of(gallery)
        if not follower.is_at(gallery.version):
            with self.measures.stage("follow"):
                await self._catching_up.of(follower, gallery)
        return follower

    async def _faces(
        self,
        payload: bytes,
        alignments: Sequence[Alignment],
        largest_only: bool = False,
        keep: bool = False,
        background: bool = False,
    ) -> tuple[Photo, list[Image]]:
        in_thread = self._aside if background else self.in_thread
        asking = None if background else patience.current()
        if not background:
            # What could not wait for the network is not decoded either.
            self._detecting.admit(1, self._coming)
        async with AsyncExitStack() as place:
            self._coming += not background
            try:
                if not background:
                    await place.enter_async_context(self._places)
                with self.measures.stage("decode"):
                    picture, laid = await in_thread(self._prepare, payload, asking)
            finally:
                self._coming -= not background
            with self.measures.stage("detect"):
                (answer,) = await self._detecting.submit([laid], background)
            with self.measures.stage("align"):
                photo, cut, shown = await in_thread(self._read, picture, laid, answer, alignments, largest_only, keep)
        self.measures.photo([face.quality.score for face in photo.faces])
        return await self._judged(photo, shown, background), cut

    async def _judged(self, photo: Photo, shown: Sequence[Image | None], background: bool) -> Photo:
        """Tell of each face whether a person was there, where a model can. ``shown``: their crops, None where the photo
        shows too little."""
        if self.judge is None or not photo.faces:
            return photo
        crops = [crop for crop in shown if crop is not None]
        with self.measures.stage("judge"):
            scores = iter(await self.judge.batcher.submit(crops, background) if crops else [])
        threshold = self.judge.spec.threshold
        judgements = [Judgement(None if crop is None else next(scores), threshold) for crop in shown]
        faces = [replace(face, liveness=one) for face, one in zip(photo.faces, judgements, strict=True)]
        return replace(photo, faces=faces)

    def _prepare(self, payload: bytes, asking: Patience | None) -> tuple[Picture, Laid]:
        if asking is not None:
            asking.check()
        photo = open_photo(payload, self._limits)
        canvas = self._detector.canvas(photo.height, photo.width)
        picture = photo.decode(min(1.0, DECODED_OF_CANVAS * canvas.scale))
        return picture, self._detector.place(picture.shrunk(canvas.scale), canvas, photo.height, photo.width)

    def _read(
        self,
        picture: Picture,
        laid: Laid,
        answer: Answer,
        alignments: Sequence[Alignment],
        largest_only: bool,
        keep: bool,
    ) -> tuple[Photo, list[Image], list[Image | None]]:
        faces = self._detector.select(laid, answer)[: self._max_faces]
        if largest_only and len(faces):
            row = faces.largest()
            faces = faces[row : row + 1]
        kept = faces.largest() if keep and len(faces) else None
        if picture.reduction < 1.0:
            judged = [] if self.judge is None else [self.judge.spec.alignment]
            picture = picture.at_least(_scale_wanted(faces, [*alignments, *judged], kept))
        cut, qualities = _cut(picture, faces, alignments)
        found = _as_list(faces, qualities)
        if kept is not None:
            found[kept] = replace(found[kept], kept=_keep(picture, found[kept]))
        shown = [] if self.judge is None else _surroundings(picture, faces, self.judge.spec)
        return Photo(picture.photo.width, picture.photo.height, found), cut, shown

    def _identify(
        self,
        follower: Follower,
        gallery: Gallery,
        probes: Float,
        target: RiskTarget,
        k: int,
        among: Keys | None,
        limited: bool,
    ) -> list[Found]:
        # Two at least: the runner-up is needed to tell lookalikes.
        results, comparisons = follower.search(probes, max(2, k), among, gallery.version)
        known = self.risks.of(gallery)
        settings = gallery.settings
        thresholds = thresholds_for(target, known, comparisons, settings.review_factor)
        floor = lowest_review(settings.risk, known, comparisons, settings.review_factor)
        if limited:
            thresholds = thresholds.at_least(floor)
        alarms = iter(false_alarm_probabilities([h.similarity for hits in results for h in hits], known, comparisons))
        found = []
        for hits in results:
            candidates = [Candidate(hit.subject_pk, hit.similarity, next(alarms)) for hit in hits]
            decision = decide(candidates, thresholds, settings.min_margin)
            near_miss = bool(candidates) and candidates[0].similarity >= floor and decision.outcome != "identified"
            found.append(Found(decision, candidates[:k], thresholds, near_miss, known, comparisons))
        return found

    async def _aside(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """In few of the threads, so that requests find one free."""
        async with self._background:
            return await self.in_thread(function, *arguments)

    async def in_thread(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        return await in_context(self._threads, function, *arguments)


def _scale_wanted(faces: Faces, alignments: Sequence[Alignment], kept: int | None) -> float:
    """Of the photo: crops cut from less would be enlarged."""
    wanted = [scales(faces.landmarks_xy, alignment).max(initial=0) for alignment in {STANDARD, *alignments}]
    if kept is not None:
        wanted.append(crops.wanted_scale(faces.boxes_xyxy[kept]))
    return float(max(wanted))


def _cut(picture: Picture, faces: Faces, alignments: Sequence[Alignment]) -> tuple[list[Image], list[Quality]]:
    """Crops by each alignment."""
    points = picture.points_stored(faces.landmarks_xy)
    # Quality is measured on the standard crop, so that its figures mean the same whatever the recogniser.
    standard = align(picture.pixels, points)
    qualities = [quality.measure(crop, points) for crop, points in zip(standard, faces.landmarks_xy, strict=True)]
    return [standard if a == STANDARD else align(picture.pixels, points, a) for a in alignments], qualities


def _surroundings(picture: Picture, faces: Faces, spec: LivenessSpec) -> list[Image | None]:
    """Crops by which liveness is judged; None where too much would lie outside of the photo."""
    points = picture.points_stored(faces.landmarks_xy)
    height, width = picture.pixels.shape[:2]
    shares = outside(points, spec.alignment, width, height)
    crops = cut_with_surroundings(picture.pixels, points, spec.alignment)
    return [crop if share <= spec.max_outside else None for crop, share in zip(crops, shares, strict=True)]


def _keep(picture: Picture, face: Face) -> Crop:
    (corners, points) = (picture.points_upright(xy) for xy in (face.box_xyxy.reshape(2, 2), face.landmarks_xy))
    return crops.cut(picture.upright, corners.ravel(), points)


def _as_list(faces: Faces, qualities: Sequence[Quality]) -> list[Face]:
    return [
        Face(box, points, float(score), measured)
        for box, points, score, measured in zip(
            faces.boxes_xyxy, faces.landmarks_xy, faces.scores, qualities, strict=True
        )
    ]

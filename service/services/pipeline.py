"""Identification pipeline: search a gallery for face vectors and decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar, TypeVarTuple

import numpy as np

from models.risk.panel import MIN_PANEL_SUBJECTS, Panel, row_levels
from models.runtime.network import Float
from service.core.actor import current_actor
from service.core.deadlines import Turns
from service.domain.gallery import Gallery, Keys
from service.domain.outcomes import RiskTarget
from service.index.catch_up import CatchUp
from service.index.follower import Follower, Followers
from service.inference.photo_pipeline import PhotoPipeline
from service.risk.decision import (
    Candidate,
    Decision,
    ImpostorRisk,
    Thresholds,
    coarse_candidates,
    decide,
    review_floor,
    score_candidates,
    shown_probability,
    thresholds_for,
)
from service.risk.gallery_risks import GalleryRisks
from service.risk.probe_windows import ProbeWindows

MAX_INLINE_PRODUCTS: Final = 500_000
"""Multiplications up to which a search runs on the event loop: 0.1 ms, twice the round trip to an idle thread
(bench/searches.py)."""
MAX_INLINE_CANDIDATES: Final = 50
"""Candidates of all probes together up to which the decisions are made on the event loop."""
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Identification:
    """Answer to one probe. Candidates carry the primary keys of subjects.

    Attributes:
        thresholds: for scores of candidates.
        near_miss: the probe reaches the gallery's own review threshold and is not identified.
        known, comparisons: the risk model and the number of comparisons behind the probabilities.
    """

    decision: Decision
    candidates: list[Candidate]
    thresholds: Thresholds
    near_miss: bool = False
    known: ImpostorRisk | None = None
    comparisons: int = 0
    exact: bool = True

    @property
    def shown_thresholds(self) -> Thresholds:
        """Return the thresholds for the response: exact ones apply to the similarity of the best candidate."""
        runner_up = self.decision.runner_up
        return self.thresholds.of_search(runner_up.similarity if self.exact and runner_up else None)

    def shown_probability(self, candidate: Candidate) -> float | None:
        """Return the false alarm probability of a candidate for the response."""
        return shown_probability(candidate.false_alarm_probability, self.known, self.comparisons)

    def coarse(self, photo: bool) -> Identification:
        """Return the answer for a caller who may not export templates.

        For an embedding (``photo`` is false) it reveals no more than the outcome, because the caller could
        otherwise approximate a template by hill climbing.
        """
        decision, candidates = self.decision, self.candidates
        first = [candidate for candidate in (decision.best, decision.runner_up) if candidate is not None]
        if not photo and decision.outcome == "identified":
            # More candidates would reveal whether other subjects reach a threshold.
            first, candidates = first[:1], candidates[:1]
        first, candidates = (
            coarse_candidates(some, self.thresholds, self.known, self.comparisons, photo)
            for some in (first, candidates)
        )
        if not photo:  # among equal rounded similarities, the original order would reveal the exact one
            for some in (first, candidates):
                some.sort(key=lambda candidate: (-candidate.similarity, candidate.subject_pk))
        best, runner_up, *_ = (*first, None, None)
        decision = Decision(decision.outcome, best, runner_up)
        return replace(self, decision=decision, candidates=candidates, exact=False)


class Pipeline:
    """Photo pipeline and identification."""

    def __init__(self, photos: PhotoPipeline, followers: Followers, catch_up: CatchUp, risks: GalleryRisks) -> None:
        self.photos = photos
        self.metrics = photos.metrics
        self.risks = risks
        self.windows = ProbeWindows()
        self.enrolling = Turns()
        """Turns by gallery key, to check the identity of templates and store them. Without turns, concurrent requests
        would each be checked before the others are stored. Writes of other processes are detected when storing."""
        self._followers = followers
        self._catch_up = catch_up

    async def identify(
        self,
        gallery: Gallery,
        probes: Float,
        target: RiskTarget,
        k: int,
        among: Keys | None = None,
        limited: bool = False,
        watched: int = 0,
    ) -> list[Identification]:
        """Search for (q, d) unit vectors and decide on each.

        Args:
            among: ascending keys of the subjects to search; None: all.
            limited: raise thresholds to the review threshold of the gallery's own risk at least.
            watched: number of probes, the first ones, that count as recent probes of the caller.

        Raises:
            RiskUncalibratedError: there is no threshold for this risk.
            OverloadedError, StorageError, IndexUnavailableError: the gallery cannot be searched now.
        """
        follower = await self.caught_up(gallery)
        small = len(probes) * gallery.templates * gallery.dimension <= MAX_INLINE_PRODUCTS
        few = len(probes) * min(gallery.templates, max(2, k)) <= MAX_INLINE_CANDIDATES
        with self.metrics.stage("search"):
            if small and few and among is None and follower.is_at(gallery.version) and self.risks.is_cached(gallery):
                found = self._identify(follower, gallery, probes, target, k, among, limited)
            else:
                found = await self.in_thread(self._identify, follower, gallery, probes, target, k, among, limited)
            known = found[0].known if found else None
            panel = None if known is None or known.search is None else known.search.panel
            if panel is not None and (wanted := self.windows.wanted(gallery, current_actor().name, watched)):
                await self.in_thread(self._watch, follower, gallery, panel, probes[:wanted])
            return found

    async def caught_up(self, gallery: Gallery) -> Follower:
        """Return the gallery's follower after it has applied all earlier writes, so that a search is short.

        Raises:
            OverloadedError, StorageError, IndexUnavailableError: it cannot catch up now.
        """
        follower = self._followers.of(gallery)
        if not follower.is_at(gallery.version):
            with self.metrics.stage("follow"):
                await self._catch_up.of(follower, gallery)
        return follower

    async def in_thread(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in the threads of requests."""
        return await self.photos.in_thread(function, *arguments)

    def _identify(
        self,
        follower: Follower,
        gallery: Gallery,
        probes: Float,
        target: RiskTarget,
        k: int,
        among: Keys | None,
        limited: bool,
    ) -> list[Identification]:
        # At least two: the runner-up is needed to detect lookalikes.
        results, comparisons = follower.search(probes, max(2, k), among, gallery.version)
        known, caller = self.risks.of(gallery), current_actor().name
        if known is not None:
            known = known.for_probes(self.windows.levels(gallery, caller))
        settings = gallery.settings
        thresholds = thresholds_for(target, known, comparisons, settings.review_factor)
        if target == settings.risk:
            self.windows.mark(gallery, caller, thresholds.unlike_gallery)
        floor = review_floor(settings.risk, known, comparisons, settings.review_factor)
        if limited:
            thresholds = thresholds.at_least(floor)
        identifications = []
        for hits in results:
            candidates = score_candidates(
                [(hit.subject_pk, hit.similarity) for hit in hits], thresholds, known, comparisons
            )
            decision = decide(candidates, thresholds)
            near_miss = bool(candidates) and candidates[0].score >= floor and decision.outcome != "identified"
            identifications.append(Identification(decision, candidates[:k], thresholds, near_miss, known, comparisons))
        return identifications

    def _watch(self, follower: Follower, gallery: Gallery, panel: Panel, probes: Float) -> None:
        """Compare probes with the panel, and add them to the caller's window."""
        results, _ = follower.search(probes, len(panel.subjects), panel.subjects, gallery.version)
        rows = [[[hit.similarity for hit in hits]] for hits in results if len(hits) >= MIN_PANEL_SUBJECTS]
        if rows:
            levels = np.concatenate([row_levels(np.array(row)) for row in rows])
            self.windows.add(gallery, current_actor().name, levels)

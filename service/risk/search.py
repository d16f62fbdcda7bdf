"""Search of a gallery for face vectors, and the decision on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

import numpy as np

from kith.wire.fields import MAX_DECOYS
from models.runtime.network import Float
from service.core.actor import Threads
from service.domain.gallery import Gallery, Hit, Keys
from service.domain.outcomes import RiskTarget
from service.index.follower import Follower, Followers
from service.observability.metrics import Metrics
from service.risk.decision import Decision, coarse_candidates, decide, score_candidates, without_known_stranger
from service.risk.gallery_risks import GalleryRisks
from service.risk.threshold import (
    Candidate,
    ImpostorRisk,
    Thresholds,
    false_alarm_probability,
    thresholds_for,
)

MAX_INLINE_FLOATS: Final = 1_000_000
"""Numbers in a gallery's vectors up to which it is searched on the event loop: 0.15 ms a probe. A thread takes longer:
0.1 ms without other requests, and milliseconds beside them (docs/decisions.md, 31)."""
DEPTH: Final = 10
"""Least subjects found. The best two by score are among the ten most similar in 99.7 % of searches of 300 to 2,000
people, and the best in every one that reaches the threshold of 10 %."""
MAX_INLINE_CANDIDATES: Final = 250
"""Candidates of all probes together up to which they are searched for on the event loop."""


@dataclass(frozen=True)
class Identification:
    """Answer to one probe. Candidates carry the primary keys of subjects.

    Attributes:
        candidates: those for the response, best first.
        thresholds: for scores of candidates.
        model, subjects: the risk model and the number of subjects behind the probabilities.
        reasons, other_face: effect of another face of the photo, and its position (:mod:`service.risk.one_face`).
    """

    decision: Decision
    candidates: list[Candidate]
    thresholds: Thresholds
    model: ImpostorRisk | None = None
    subjects: int = 0
    exact: bool = True
    reasons: tuple[str, ...] = ()
    other_face: int | None = None

    @property
    def shown_thresholds(self) -> Thresholds:
        """Return the thresholds for the response: exact ones apply to the similarity of the best candidate."""
        return self.thresholds.of_similarity(self.decision.best if self.exact else None)

    @property
    def first(self) -> list[Candidate]:
        """Return the best candidate and the runner-up, if there are any."""
        return [one for one in (self.decision.best, self.decision.runner_up) if one is not None]

    def shown_probability(self, candidate: Candidate) -> tuple[float | None, bool | None]:
        """Return the false alarm probability of a candidate for the response, and whether it is a bound."""
        of_search = self.exact or self.thresholds.of_scores
        return false_alarm_probability(candidate.score, self.model, self.subjects, of_search)

    def coarse(self) -> Identification:
        """Return the answer for a caller without the scope vectors."""
        first, candidates = (coarse_candidates(some, self.thresholds) for some in (self.first, self.candidates))
        best, runner_up, *_ = (*first, None, None)
        decision = Decision(self.decision.outcome, best, runner_up)
        return replace(self, decision=decision, candidates=candidates, exact=False)


class GallerySearch:
    """Searches of all galleries, at the risk of each."""

    def __init__(self, threads: Threads, followers: Followers, risks: GalleryRisks, metrics: Metrics) -> None:
        self._threads = threads
        self._followers = followers
        self._risks = risks
        self._metrics = metrics

    async def identify(
        self,
        gallery: Gallery,
        probes: Float,
        target: RiskTarget,
        k: int,
        among: Keys | None = None,
    ) -> list[Identification]:
        """Search for (q, d) unit vectors and decide on each.

        Args:
            among: ascending keys of the subjects to search; None: all.

        Raises:
            RiskUncalibratedError: there is no threshold for this risk.
            OverloadedError, StorageError, IndexUnavailableError: the gallery cannot be searched now.
        """
        follower = await self.catch_up(gallery)
        if among is not None and gallery.outsiders:
            gallery, among = _with_their_outsiders(gallery, among)
        depth = depth_of(gallery, k)
        small = gallery.templates * gallery.dimension <= MAX_INLINE_FLOATS
        # A follower in Milvus is never at the version: its searches wait for a server.
        current = follower.is_at(gallery.version) and self._risks.is_cached(gallery)
        short = current and among is None and len(probes) * depth <= MAX_INLINE_CANDIDATES

        def search() -> list[Identification]:
            hits, subjects = follower.search(probes, depth, among)
            return self._decide(gallery, self._risks.current(gallery), hits, subjects, target, k)

        with self._metrics.stage("search"):
            if not short:
                return await self._threads.run(search)
            if small:
                return search()
            model = self._risks.current(gallery)  # it may be evicted during the search
            hits, subjects = await follower.joint.run(self._threads, follower.search, probes, depth)
            return self._decide(gallery, model, hits, subjects, target, k)

    async def catch_up(self, gallery: Gallery) -> Follower:
        """Return the gallery's follower after it has applied all earlier writes, so that a search is short.

        Raises as `Followers.catch_up`.
        """
        follower = self._followers.of(gallery)
        if follower.is_at(gallery.version):
            return follower
        with self._metrics.stage("follow"):
            return await self._followers.catch_up(gallery)

    def _decide(
        self,
        gallery: Gallery,
        model: ImpostorRisk | None,
        hits_of: Sequence[Sequence[Hit]],
        subjects: int,
        target: RiskTarget,
        k: int,
    ) -> list[Identification]:
        """Decide on each probe from its hits among ``subjects``, outsiders included."""
        subjects -= len(gallery.outsiders)
        thresholds = thresholds_for(target, model, subjects, gallery.settings.review_factor)
        identifications = []
        for hits in hits_of:
            people = [(hit.subject_pk, hit.similarity) for hit in hits if hit.subject_pk not in gallery.outsiders]
            candidates = score_candidates(people, thresholds, model, subjects)
            decision, reasons = without_known_stranger(decide(candidates, thresholds), hits, gallery.outsiders)
            found = Identification(decision, candidates[:k], thresholds, model, subjects, reasons=reasons)
            identifications.append(found)
        return identifications


def depth_of(gallery: Gallery, k: int = 1) -> int:
    """Return how many subjects a search must find, so that ``k`` of them, and the best two, are no outsiders."""
    return max(DEPTH, k) + min(len(gallery.outsiders), MAX_DECOYS)


def _with_their_outsiders(gallery: Gallery, among: Keys) -> tuple[Gallery, Keys]:
    """Return the gallery with the outsiders of the subjects to search only, and the keys of all of them."""
    chosen = np.isin(list(gallery.outsiders.values()), among).tolist()
    outsiders = dict(compress(gallery.outsiders.items(), chosen))
    return replace(gallery, outsiders=outsiders), np.union1d(among, np.array(list(outsiders), np.int64))

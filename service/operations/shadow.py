"""Shadow mode: repeat searches with the recognizer that a gallery migrates to, and compare the answers.

Runs in the background; it neither delays nor changes an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from models.runtime.network import Float
from service.core.actor import Actor, RequestThreads, acting_as, current_actor
from service.core.errors import GalleryMovedError, KithError
from service.domain.gallery import Gallery, Keys
from service.domain.outcomes import RiskTarget
from service.inference.photo_pipeline import Face
from service.inference.recognizers import Recognizers
from service.risk.decision import Decision
from service.risk.search import GallerySearch, Identification
from service.storage.repositories.generations import Disagreement, GenerationStore

MAX_WAITING: Final = 64
"""Faces in the queue; further ones are counted as skipped."""
WRITE_INTERVAL_S: Final = 10.0
"""Time between writes of the counts; a killed process loses those in memory."""
MAX_SUBSTITUTE_RISK: Final = 1e-4
"""Maximum false alarm probability at which a probe may replace a missing crop of its subject."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AnsweredFace:
    """Face of good quality, and its answer by itself. ``stays``: the answer about the whole photo is the same."""

    face: Face
    found: Identification
    stays: bool = True


@dataclass
class _Tally:
    gallery: Gallery
    generation: int
    counts: Counter[str] = field(default_factory=Counter)
    disagreements: list[Disagreement] = field(default_factory=list)


class Shadow:
    """Shadow searches on one event loop; use as an async context manager. Leaving it finishes queued work."""

    def __init__(
        self, threads: RequestThreads, recognizers: Recognizers, search: GallerySearch, generations: GenerationStore
    ) -> None:
        self._recognizers = recognizers
        self._threads = threads
        self._search = search
        self._generations = generations
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._tallies: dict[tuple[int, int], _Tally] = {}
        self._written_s = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.settle()

    async def settle(self) -> None:
        """Wait until all observed faces are compared and the counts written."""
        await asyncio.gather(*self._tasks)
        await self._write_counts()

    def observe(
        self, gallery: Gallery, answered: Sequence[AnsweredFace], target: RiskTarget, among: Keys | None
    ) -> None:
        """Queue a comparison of these answers; return at once."""
        other = gallery.other
        if other is None or other.state != "shadow" or not answered:
            return
        tally = self._tally(gallery, other.number)
        if target.kind == "threshold":
            tally.counts["skipped_bare_similarity"] += len(answered)
        elif self._waiting + len(answered) > MAX_WAITING:
            tally.counts["skipped_overload"] += len(answered)
        else:
            self._waiting += len(answered)
            with acting_as(Actor(current_actor().name)):  # background lane: the request does not wait
                task = asyncio.create_task(self._answer(gallery, answered, target, among))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _tally(self, gallery: Gallery, generation: int) -> _Tally:
        return self._tallies.setdefault((gallery.pk, generation), _Tally(gallery, generation))

    async def _answer(
        self, gallery: Gallery, answered: Sequence[AnsweredFace], target: RiskTarget, among: Keys | None
    ) -> None:
        assert gallery.other is not None  # noqa: S101 - checked in observe
        shadow = gallery.other.number
        counts: Counter[str] = Counter()
        differing: list[Disagreement] = []
        try:
            view = gallery.at_generation(shadow)
            served = self._recognizers.for_gallery(view)
            cut = [one.face.other_crop for one in answered if one.face.other_crop is not None]
            vectors = np.stack(await served.batcher.submit(cut, background=True))
            found = await self._search.identify(view, vectors, target, 1, among, watch=False)
            for one, vector, then in zip(answered, vectors, found, strict=True):
                disagreement = disagreement_of(one.found.decision, then.decision)
                counts.update(agreement(one.found.decision, then.decision))
                if disagreement is not None:
                    differing.append(disagreement)
                    nearest = disagreement.subject_pks[0]
                    if nearest is not None:
                        known = await self._threads.run(self._generations.has_subject, shadow, nearest)
                        counts["absent"] += not known
                if among is None:  # otherwise an excluded subject may be more similar
                    await self._threads.run(self._substitute, gallery, one, vector)
        except KithError as error:
            counts[f"skipped_{error.code}"] += len(answered) - counts["compared"]
        except Exception:  # no caller waits for this task, so the log is the only report
            log.exception("a shadow search of gallery %s failed", gallery.name)
        finally:
            self._waiting -= len(answered)
            tally = self._tally(gallery, shadow)
            tally.counts += counts
            tally.disagreements += differing
        if time.monotonic() - self._written_s > WRITE_INTERVAL_S:
            await self._write_counts()

    def _substitute(self, gallery: Gallery, one: AnsweredFace, vector: Float) -> None:
        """Store the vector of a confident match for a template of its subject that has no crop."""
        best, other = one.found.decision.best, gallery.other
        if (
            not one.stays
            or best is None
            or other is None
            or not other.details.get("on_sight")
            or not is_confident(one.found.decision)
        ):
            return
        if gallery.settings.quality_gate.reasons(one.face.quality):
            return
        if self._generations.needs_sight(other.number, best.subject_pk):
            self._generations.add_on_sight(gallery, other.number, best.subject_pk, vector)

    async def _write_counts(self) -> None:
        self._written_s = time.monotonic()
        tallies, self._tallies = self._tallies, {}
        for tally in tallies.values():
            if tally.counts:
                await self._threads.run(self._write, tally)

    def _write(self, tally: _Tally) -> None:
        try:
            self._generations.add_comparisons(tally.gallery, tally.generation, tally.counts, tally.disagreements)
        except GalleryMovedError:
            pass  # cut over: the comparison has ended
        except KithError as error:
            log.warning("shadow counts of gallery %s are lost: %s", tally.gallery.name, error.detail)


def agreement(now: Decision, then: Decision) -> list[str]:
    """Return the properties that two recognizers' answers to one face share."""
    same = {
        "compared": True,
        "same_outcome": now.outcome == then.outcome,
        "same_nearest": now.best is not None and then.best is not None and now.best.subject_pk == then.best.subject_pk,
        "agreed": disagreement_of(now, then) is None,
    }
    return [word for word, true in same.items() if true]


def disagreement_of(now: Decision, then: Decision) -> Disagreement | None:
    """Return the disagreement; None: same outcome and, if identified, same subject."""
    first, second = now.best, then.best
    subjects = first.subject_pk if first else None, second.subject_pk if second else None
    if now.outcome == then.outcome and (now.outcome != "identified" or subjects[0] == subjects[1]):
        return None
    similarities = tuple(None if best is None else round(best.similarity, 4) for best in (first, second))
    return Disagreement((now.outcome, then.outcome), subjects, (similarities[0], similarities[1]))


def is_confident(decision: Decision) -> bool:
    """Return whether the match is certain enough to use the probe as a template."""
    best = decision.best
    if decision.outcome != "identified" or best is None or best.false_alarm_probability is None:
        return False
    return best.false_alarm_probability <= MAX_SUBSTITUTE_RISK

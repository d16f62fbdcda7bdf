"""What another recogniser would have answered: every search by photo of a gallery that is moving to it is asked of it
too, in the background, and the two answers are compared. It neither delays nor changes an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from models.network import Float
from service.decision import Decision, RiskTarget
from service.errors import GalleryMovedError, KithError
from service.gallery.generations import Disagreement, Generations
from service.gallery.index import Keys
from service.gallery.subjects import Gallery
from service.pipeline import Face, Found, Pipeline
from service.recognisers import Recognisers
from service.security.acting import Actor, acting, acting_as

MAX_WAITING: Final = 64
"""Faces that wait for a second answer; further ones get none, and are counted as skipped."""
NOTED_AFTER_S: Final = 10.0
"""How long counts stay in memory, and are lost if the process is killed."""
SIGHT_RISK: Final = 1e-4
"""How probable a stranger may be at most, for a face to stand for the subject that it was identified as."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Answered:
    """A face of good quality, and what was answered."""

    face: Face
    found: Found


@dataclass
class _Tally:
    gallery: Gallery
    generation: int
    counts: Counter[str] = field(default_factory=Counter)
    disagreements: list[Disagreement] = field(default_factory=list)


class Shadow:
    """Of one event loop. Use as an async context manager: leaving it answers what waits and writes the counts."""

    def __init__(self, recognisers: Recognisers, pipeline: Pipeline, generations: Generations) -> None:
        self._recognisers = recognisers
        self._pipeline = pipeline
        self._generations = generations
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._tallies: dict[tuple[int, int], _Tally] = {}
        self._noted = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.settle()

    async def settle(self) -> None:
        """Wait until what was observed is answered and written."""
        await asyncio.gather(*self._tasks)
        await self._note()

    def observe(self, gallery: Gallery, answered: Sequence[Answered], target: RiskTarget, among: Keys | None) -> None:
        """Ask again what was just answered; returns at once."""
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
            with acting_as(Actor(acting().name)):  # in the background: the request does not wait for it
                task = asyncio.create_task(self._answer(gallery, answered, target, among))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _tally(self, gallery: Gallery, generation: int) -> _Tally:
        return self._tallies.setdefault((gallery.pk, generation), _Tally(gallery, generation))

    async def _answer(
        self, gallery: Gallery, answered: Sequence[Answered], target: RiskTarget, among: Keys | None
    ) -> None:
        assert gallery.other is not None  # noqa: S101 - observe saw to it
        shadow = gallery.other.number
        counts: Counter[str] = Counter()
        differing: list[Disagreement] = []
        try:
            view = gallery.under(shadow)
            served = self._recognisers.of(view)
            cut = [one.face.other_crop for one in answered if one.face.other_crop is not None]
            vectors = np.stack(await served.batcher.submit(cut, background=True))
            found = await self._pipeline.identify(view, vectors, target, 1, among)
            for one, vector, then in zip(answered, vectors, found, strict=True):
                disagreement = compared(one.found.decision, then.decision)
                counts.update(agreement(one.found.decision, then.decision))
                if disagreement is not None:
                    differing.append(disagreement)
                    nearest = disagreement.subject_pks[0]
                    lacking = nearest is not None and await self._lacks(shadow, nearest)
                    counts["absent"] += lacking
                if among is None:  # else somebody who was left out may be nearer
                    await self._pipeline.in_thread(self._see, gallery, one, vector)
        except KithError as error:
            counts[f"skipped_{error.code}"] += len(answered) - counts["compared"]
        except Exception:  # nobody waits for this answer: whatever it is, the log has it
            log.exception("the shadow of gallery %s could not answer", gallery.name)
        finally:
            self._waiting -= len(answered)
            tally = self._tally(gallery, shadow)
            tally.counts += counts
            tally.disagreements += differing
        if time.monotonic() - self._noted > NOTED_AFTER_S:
            await self._note()

    async def _lacks(self, generation: int, subject_pk: int) -> bool:
        return not await self._pipeline.in_thread(self._generations.knows, generation, subject_pk)

    def _see(self, gallery: Gallery, one: Answered, vector: Float) -> None:
        """Let a face that was surely identified stand for a template of its subject that has no crop."""
        best, other = one.found.decision.best, gallery.other
        if best is None or other is None or not other.details.get("on_sight") or not trusted(one.found.decision):
            return
        if gallery.settings.quality_gate.reasons(one.face.quality):
            return
        if self._generations.unseen(gallery, other.number, best.subject_pk):
            self._generations.see(gallery, other.number, best.subject_pk, vector)

    async def _note(self) -> None:
        self._noted = time.monotonic()
        tallies, self._tallies = self._tallies, {}
        for tally in tallies.values():
            if tally.counts:
                await self._pipeline.in_thread(self._write, tally)

    def _write(self, tally: _Tally) -> None:
        try:
            self._generations.note(tally.gallery, tally.generation, tally.counts, tally.disagreements)
        except GalleryMovedError:
            pass  # cut over: nobody compares any more
        except KithError as error:
            log.warning("how the shadow of gallery %s answered is lost: %s", tally.gallery.name, error.detail)


def agreement(now: Decision, then: Decision) -> list[str]:
    """What two recognisers' answers to one face have in common, as words to count."""
    same = {
        "compared": True,
        "same_outcome": now.outcome == then.outcome,
        "same_nearest": now.best is not None and then.best is not None and now.best.subject_pk == then.best.subject_pk,
        "agreed": compared(now, then) is None,
    }
    return [word for word, true in same.items() if true]


def compared(now: Decision, then: Decision) -> Disagreement | None:
    """None: they agree, in the outcome and, where somebody is identified, in who it is."""
    first, second = now.best, then.best
    subjects = first.subject_pk if first else None, second.subject_pk if second else None
    if now.outcome == then.outcome and (now.outcome != "identified" or subjects[0] == subjects[1]):
        return None
    similarities = tuple(None if best is None else round(best.similarity, 4) for best in (first, second))
    return Disagreement((now.outcome, then.outcome), subjects, (similarities[0], similarities[1]))


def trusted(decision: Decision) -> bool:
    """Whether a stranger is so improbable, and everybody else so far, that the face may stand for its subject."""
    best = decision.best
    if decision.outcome != "identified" or best is None or best.false_alarm_probability is None:
        return False
    return best.false_alarm_probability <= SIGHT_RISK

"""Lines of the audit that no other write goes with, searches above all: gathered, and written in groups by one thread.

A search reads, and a write with each would cost it many times what it takes; so what was searched is written within
half a second, or, if the settings say so, before it is answered: then all that wait are written at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from service.core.actor import Actor
from service.core.errors import AuditWriteError, KithError
from service.domain.gallery import Gallery
from service.storage.audit.log import Entry, pseudonym, record_entries
from service.storage.audit.reader import AuditReader
from service.storage.db.engine import Database

WITHIN_S: Final = 0.5
AGAIN_S: Final = 1.0
"""After the database could not be written."""
AT_ONCE: Final = 2000
MOST_LINES: Final = 20_000
"""That wait for the database, some 20 MB."""
MOST_REFUSED: Final = 20
"""Lines about refused requests in one group: a flood of them is counted, not written line by line."""
OTHERS: Final = ("anonymous", "others")
When = Literal["soon", "before", "off"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    """Whoever does not go on before the line is on disk; None: all lines so far."""

    entry: Entry | None
    future: asyncio.Future[None]


class AuditWriter:
    """``when`` searches are written: soon, before they are answered, or not at all. Of one event loop; to be closed."""

    def __init__(self, database: Database, when: When, most: int = MOST_LINES) -> None:
        self.reader = AuditReader(database)
        self._database = database
        self._when = when
        self._most = most
        self._lines: deque[Entry] = deque()
        self._waiting: list[_Waiting] = []
        self._refused: Counter[tuple[str, str]] = Counter()
        self._lost = 0
        self._closing = False
        self._changed = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="audit")
        self._thread.start()

    async def searched(self, gallery: Gallery, results: Sequence[Mapping[str, Any]]) -> None:
        """A search of so many faces: how it ended, and who was found. ``results``: as IdentifyOut has them. Raises
        AuditWriteError: searches are to be written first, and cannot be."""
        if self._when == "off":
            return
        outcomes = Counter(result["outcome"] for result in results)
        found = {result["subject"]: None for result in results if result["outcome"] == "identified"}
        people = [pseudonym(gallery, subject) for subject in found]
        details: dict[str, Any] = {"outcomes": dict(outcomes)}
        if len(people) > 1:
            details["subjects"] = people
        only = people[0] if len(people) == 1 else None
        await self._take(Entry("searched", (gallery.pk, gallery.name), only, details=details))

    async def verified(self, gallery: Gallery, subject: str, outcome: str) -> None:
        """Whether somebody is this subject was asked. Raises as :meth:`searched`."""
        if self._when != "off":
            known = pseudonym(gallery, subject)
            await self._take(Entry("verified", (gallery.pk, gallery.name), known, outcome))

    async def enrollment_refused(self, gallery: Gallery, subject: str, code: str, count: int) -> None:
        """Record that so many photos or embeddings were refused for this subject, whatever the setting for searches.
        Raises as :meth:`searched`."""
        known = pseudonym(gallery, subject)
        await self._take(Entry("enrollment_refused", (gallery.pk, gallery.name), known, code, {"count": count}))

    async def probed(self, gallery: Gallery, outcome: str, probes: int, near_misses: int) -> None:
        """Record that a caller's embeddings look like probes for a template, or used up their budget, whatever the
        setting for searches. Raises as :meth:`searched`."""
        details = {"probes": probes, "near_misses": near_misses}
        await self._take(Entry("probed", (gallery.pk, gallery.name), None, outcome, details))

    async def write(self, entry: Entry) -> None:
        """On disk when it returns. Raises AuditWriteError."""
        await self._wait_for(entry)

    async def written(self) -> None:
        """All lines so far are on disk, if they can be."""
        with suppress(AuditWriteError):
            await self._wait_for(None)

    def record_refusal(self, actor: str, code: str) -> None:
        """Somebody was refused by the error of this code. Those of the same in a group are one line, with their number.
        From any thread."""
        with self._changed:
            key = (actor, code)
            known = key in self._refused or len(self._refused) < MOST_REFUSED
            self._refused[key if known else OTHERS] += 1
            self._changed.notify()

    def check(self) -> None:
        """Raises AuditWriteError: lines are lost, as the database could not be written for long."""
        if self._lost or len(self._lines) >= self._most:
            raise AuditWriteError(f"{len(self._lines)} lines wait for the database, {self._lost} are lost")

    def backlog(self) -> tuple[int, int]:
        """How many lines wait, and how many are lost that the audit does not tell of yet."""
        return len(self._lines), self._lost

    def close(self) -> None:
        """Write what waits. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._lines or self._lost:
            log.error("%d lines of the audit could not be written and are lost", len(self._lines) + self._lost)

    async def _take(self, entry: Entry) -> None:
        if self._when == "before":
            await self._wait_for(entry)
            return
        with self._changed:
            if len(self._lines) < self._most:
                self._lines.append(entry)
                if len(self._lines) in (1, AT_ONCE):
                    self._changed.notify()
            else:
                self._lost += 1

    async def _wait_for(self, entry: Entry | None) -> None:
        waiting = _Waiting(entry, self._loop.create_future())
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify()
        await waiting.future

    # In the thread

    def _work(self) -> None:
        well, closing = True, False
        while not (closing and self._is_done(well)):
            with self._changed:
                self._changed.wait_for(self._has_work)
                # Others will come; unless somebody waits.
                self._changed.wait_for(*((self._is_urgent, WITHIN_S) if well else (self._has_waiting, AGAIN_S)))
                waiting, self._waiting = self._waiting, []
                lines = [self._lines.popleft() for _ in range(min(len(self._lines), AT_ONCE))]
                refused, self._refused = self._refused, Counter()
                lost = self._lost
                closing = self._closing  # now, so that what fails meanwhile is tried once more
            well = self._write(waiting, lines, refused, lost, well)

    def _has_work(self) -> bool:
        return bool(self._lines or self._waiting or self._refused or self._closing)

    def _has_waiting(self) -> bool:
        return bool(self._waiting or self._closing)

    def _is_urgent(self) -> bool:
        return self._has_waiting() or len(self._lines) >= AT_ONCE

    def _is_done(self, well: bool) -> bool:
        return not (self._lines or self._waiting or self._refused) or not well

    def _write(
        self, waiting: list[_Waiting], lines: list[Entry], refused: Counter[tuple[str, str]], lost: int, well: bool
    ) -> bool:
        entries = [*lines, *(one.entry for one in waiting if one.entry is not None)]
        entries += [
            Entry("access_refused", None, None, code, {"count": count}, Actor(actor))
            for (actor, code), count in refused.items()
        ]
        if lost:
            entries.append(Entry("audit_lines_lost", None, None, "failed", {"lines": lost}, Actor("service")))
        try:
            if entries:
                record_entries(self._database, entries)
        except Exception as error:
            if well:
                log.warning("the audit cannot be written: %s", error)
            if not isinstance(error, KithError):
                log.exception("the audit cannot be written")
            with self._changed:
                self._lines.extendleft(reversed(lines))
                self._refused += refused
            self._tell(waiting, AuditWriteError(f"the audit cannot be written: {error}"))
            return False
        with self._changed:
            self._lost -= lost
        if not well:
            log.info("the audit is written again")
        self._tell(waiting, None)
        return True

    def _tell(self, waiting: Sequence[_Waiting], error: AuditWriteError | None) -> None:
        if waiting:
            self._loop.call_soon_threadsafe(_settle, waiting, error)


def _settle(waiting: Sequence[_Waiting], error: AuditWriteError | None) -> None:
    for one in waiting:
        if one.future.done():  # nobody waits any more
            continue
        if error is None:
            one.future.set_result(None)
        else:
            one.future.set_exception(error)

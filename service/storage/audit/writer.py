"""Background writer of audit lines without their own transaction, mostly searches. It writes them in batches.

A transaction for each search would cost many times the search. Lines are on disk within half a second, or, with the
setting ``before``, before the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from kith.wire.crops import CropIn
from service.core.actor import Actor, Threads
from service.core.errors import AuditWriteError, KithError
from service.core.periodic import PeriodicTask
from service.domain.events import Event
from service.domain.gallery import Gallery
from service.storage.audit.log import Entry, pseudonym, record_entries
from service.storage.db.engine import Database

BATCH_DELAY_S: Final = 0.5
BATCH_LINES: Final = 2000
MAX_LINES: Final = 20_000
"""Lines waiting for the database, about 20 MB."""
MAX_REFUSAL_LINES: Final = 20
"""Lines about refused requests per batch. Further refusals are counted in one line."""
OTHERS: Final = ("anonymous", "others")
When = Literal["soon", "before", "off"]
log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """Line, events, and the caller that waits until they, and all earlier ones, are on disk; each may be None."""

    entry: Entry | None
    reported: tuple[Gallery, Sequence[Event]] | None = None
    future: asyncio.Future[None] | None = None


class AuditWriter(PeriodicTask):
    """Writer for one event loop. Leaving writes all waiting lines.

    ``when``: write searches soon, before the response, or never.
    """

    def __init__(self, database: Database, when: When, most: int = MAX_LINES) -> None:
        super().__init__(BATCH_DELAY_S, "writing the audit failed", log)
        self._database = database
        self._when = when
        self._most = most
        self._lines: deque[_Waiting] = deque()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._lost = 0
        self._works = True
        """Whether the last batch was written."""
        self._threads = Threads(1, "audit")

    async def searched(
        self, gallery: Gallery, results: Sequence[Mapping[str, Any]], events: Sequence[Event] = ()
    ) -> None:
        """Record a search: its outcomes and the subjects found. ``results``: in the form of IdentifyOut.

        ``events`` are stored on return. Raises AuditWriteError: what must be on disk before the response cannot be
        written.
        """
        if self._when == "off":
            if events:
                await self._wait_for(None, (gallery, events))
            return
        outcomes = Counter(result["outcome"] for result in results)
        found = [result["subject"] for result in results if result["outcome"] == "identified"]
        entry = _entry(gallery, "searched", found, outcomes=dict(outcomes))
        await (self._wait_for(entry, (gallery, events)) if events else self._take(entry))

    async def verified(self, gallery: Gallery, subject: str, outcome: str) -> None:
        """Record a verification against this subject. Raises as :meth:`searched`."""
        if self._when != "off":
            await self._take(Entry.about(gallery, "verified", subject, outcome))

    async def crops_read(self, gallery: Gallery, shown: Sequence[CropIn]) -> None:
        """Record in one line that these stored crops were read: how many, and whose. Raises as :meth:`searched`."""
        if self._when == "off" or not shown:
            return
        named: dict[str, list[str]] = {}
        for kind in ("subject", "template", "stranger", "album", "face"):
            if given := [getattr(one, kind) for one in shown if getattr(one, kind) is not None]:
                named[f"{kind}s"] = list(dict.fromkeys(given))
        people = named.pop("subjects", [])
        await self._take(_entry(gallery, "crop_read", people, count=len(shown), **named))

    async def enrollment_refused(self, gallery: Gallery, subject: str, code: str, count: int) -> None:
        """Record that so many photos or embeddings were refused for this subject, whatever the setting for searches.
        Raises as :meth:`searched`."""
        await self._take(Entry.about(gallery, "enrollment_refused", subject, code, count=count))

    async def write(self, entry: Entry) -> None:
        """Write a line; it is on disk on return. Raises AuditWriteError."""
        await self._wait_for(entry)

    async def written(self) -> None:
        """Wait until all earlier lines are on disk, or cannot be written."""
        with suppress(AuditWriteError):
            await self._wait_for(None)

    def record_refusal(self, actor: str, code: str) -> None:
        """Count a refused request by actor and error code. Each batch writes one line per pair."""
        key = (actor, code)
        known = key in self._refused or len(self._refused) < MAX_REFUSAL_LINES
        self._refused[key if known else OTHERS] += 1

    def check(self) -> None:
        """Raises AuditWriteError if lines were lost because the database was unavailable for too long."""
        if self._lost or len(self._lines) >= self._most:
            raise AuditWriteError(f"{len(self._lines)} audit lines wait for the database, {self._lost} are lost")

    def backlog(self) -> tuple[int, int]:
        """Return the number of waiting lines, and of lost lines that the audit has not recorded yet."""
        return len(self._lines), self._lost

    async def _take(self, entry: Entry) -> None:
        if self._when == "before":
            await self._wait_for(entry)
            return
        if len(self._lines) < self._most:
            self._lines.append(_Waiting(entry))
            if len(self._lines) == BATCH_LINES:
                self.wake()
        else:
            self._lost += 1

    async def _wait_for(self, entry: Entry | None, reported: tuple[Gallery, Sequence[Event]] | None = None) -> None:
        written = asyncio.get_running_loop().create_future()
        self._lines.append(_Waiting(entry, reported, written))
        self.wake()
        await written

    async def _close(self) -> None:
        while (self._lines or self._refused) and await self._write():
            pass
        self._threads.shutdown()
        if self._lines or self._lost:
            log.error("%d audit lines could not be written and are lost", len(self._lines) + self._lost)

    async def _look(self) -> None:
        await self._write()
        if self._works and len(self._lines) >= BATCH_LINES:
            self.wake()

    async def _write(self) -> bool:
        """Write a batch; return whether that worked."""
        batch = [self._lines.popleft() for _ in range(min(len(self._lines), BATCH_LINES))]
        refused, self._refused = self._refused, Counter()
        lost = self._lost
        entries = [one.entry for one in batch if one.entry is not None]
        entries += [
            Entry("access_refused", None, None, code, {"count": count}, Actor(actor))
            for (actor, code), count in refused.items()
        ]
        if lost:
            entries.append(Entry("audit_lines_lost", None, None, "failed", {"lines": lost}, Actor("service")))
        reported = [one.reported for one in batch if one.reported is not None]
        failure = None
        try:
            if entries or reported:
                await self._threads.run(record_entries, self._database, entries, reported)
        except Exception as error:
            if self._works:
                log.warning("cannot write the audit: %s", error)
            if not isinstance(error, KithError):
                log.exception("cannot write the audit")
            self._lines.extendleft(one for one in reversed(batch) if one.future is None)
            self._refused += refused
            failure = AuditWriteError(f"cannot write the audit: {error}")
        else:
            self._lost -= lost
            if not self._works:
                log.info("the audit can be written again")
        self._works = failure is None
        for one in batch:
            if one.future is None or one.future.done():  # a caller that was canceled
                continue
            if failure is None:
                one.future.set_result(None)
            else:
                one.future.set_exception(failure)
        return self._works


def _entry(gallery: Gallery, event: str, people: Sequence[str], **details: Any) -> Entry:
    """Return an entry about one person, or with the pseudonyms of several in its details."""
    found = list(dict.fromkeys(people))
    if len(found) > 1:
        details["subjects"] = [pseudonym(gallery, subject) for subject in found]
    return Entry.about(gallery, event, found[0] if len(found) == 1 else None, **details)

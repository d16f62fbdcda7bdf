"""Audit lines of searches: batching, order, and behavior when the database rejects writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from models.vision.recognition import l2_normalize
from service.core.actor import Actor, acting_as
from service.core.errors import AuditWriteError
from service.domain.events import Event, EventFilter, Position
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.storage.audit.log import AuditFilter, Entry, listed_lines
from service.storage.audit.writer import MAX_REFUSAL_LINES, AuditWriter, When
from service.storage.db.audit_chain import Report
from service.storage.db.engine import Database
from service.storage.events.log import EventLog
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH, engine_of, open_database
from tests.service.storage.audit.test_audit_log import report_of

ONE = [{"outcome": "identified", "subject": "ada"}]
SEVERAL = [*ONE, {"outcome": "identified", "subject": "bob"}, {"outcome": "unknown"}, {"outcome": "unknown"}]


def with_writer(
    database: Database, when: When, work: Callable[[AuditWriter], Awaitable[None]], most: int = 1000
) -> None:
    async def run() -> None:
        async with AuditWriter(database, when, most) as writer:
            await work(writer)

    asyncio.run(run())


def gallery_of(database: Database, name: str = "g") -> Gallery:
    return Store(database).galleries.create(name, "f", 8, GallerySettings())


def lines(database: Database, **chosen: Any) -> list[tuple[str, str, dict[str, Any]]]:
    found = listed_lines(database, AuditFilter(**chosen), None, 1000)
    return [(listed.event, listed.outcome, listed.details) for listed in reversed(found)]


def refuse_lines(url: str, refuse: bool) -> None:
    """Make the database reject audit lines, as if it were full."""
    engine = engine_of(url)
    with engine.begin() as connection:
        if connection.dialect.name == "sqlite":
            full = "CREATE TRIGGER full BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'full'); END"
            connection.exec_driver_sql(full if refuse else "DROP TRIGGER full")
        else:
            full = "ALTER TABLE audit ADD CONSTRAINT audit_full CHECK (number < 0) NOT VALID"
            connection.exec_driver_sql(full if refuse else "ALTER TABLE audit DROP CONSTRAINT audit_full")
    engine.dispose()


@pytest.mark.parametrize("when", ["soon", "before", "off"])
def test_events_of_a_search_are_stored_on_return(database: Database, when: When) -> None:
    gallery = gallery_of(database)
    WebhookStore(database).create("https://receiver.example/", None, EventFilter())
    stranger = Event("decision", {"outcome": "unknown"})

    def stored() -> int:
        return len(EventLog(database).read(Position(0, 0), EventFilter()).events)

    async def work(writer: AuditWriter) -> None:
        for count in (2, 4):
            await writer.searched(gallery, SEVERAL, [stranger, stranger])
            assert stored() == count

    with_writer(database, when, work)
    assert len(lines(database, event="searched")) == (0 if when == "off" else 2)


def test_a_search_fails_if_its_events_cannot_be_stored(database: Database, url: str) -> None:
    gallery = gallery_of(database)
    WebhookStore(database).create("https://receiver.example/", None, EventFilter())
    stranger = Event("decision", {"outcome": "unknown"})

    async def work(writer: AuditWriter) -> None:
        refuse_lines(url, True)
        with pytest.raises(AuditWriteError):
            await writer.searched(gallery, SEVERAL, [stranger])
        refuse_lines(url, False)
        assert EventLog(database).read(Position(0, 0), EventFilter()).events == []  # neither line nor event

    with_writer(database, "soon", work)


def test_a_search_is_recorded_with_its_outcomes_and_subjects(database: Database, url: str) -> None:
    gallery = gallery_of(database)

    async def work(writer: AuditWriter) -> None:
        with acting_as(Actor("key:a", "r1")):
            await writer.searched(gallery, ONE)
            await writer.searched(gallery, SEVERAL)
            await writer.verified(gallery, "ada", "different")
        await writer.written()

    with_writer(database, "soon", work)
    ada, bob = (gallery.seal.pseudonym("subject", subject) for subject in ("ada", "bob"))
    assert lines(database, gallery_pk=gallery.pk)[1:] == [
        ("searched", "done", {"outcomes": {"identified": 1}}),
        ("searched", "done", {"outcomes": {"identified": 2, "unknown": 2}, "subjects": [ada, bob]}),
        ("verified", "different", {}),
    ]
    assert len(lines(database, subject=ada, actor="key:a")) == 3 and len(lines(database, subject=bob)) == 1
    assert report_of(database).faults == []


def test_with_the_setting_before_lines_are_on_disk_before_the_response(database: Database) -> None:
    one, other = gallery_of(database), gallery_of(database, "other")
    commits: list[object] = []
    sa.event.listen(database.engine, "commit", commits.append)

    async def work(writer: AuditWriter) -> None:
        for count in range(1, 4):
            await writer.searched(one, ONE)
            assert len(lines(database, event="searched")) == count
        # Concurrent searches share a transaction.
        commits.clear()
        await asyncio.gather(*(writer.searched(gallery, SEVERAL) for gallery in (one, other) * 50))
        assert len(lines(database, event="searched")) == 103 and len(commits) < 20

    with_writer(database, "before", work)


def test_closing_writes_all_lines_and_off_writes_none(database: Database) -> None:
    gallery = gallery_of(database)

    async def work(writer: AuditWriter) -> None:
        for _ in range(5000):
            await writer.searched(gallery, ONE)

    with_writer(database, "soon", work, most=10_000)
    with_writer(database, "off", work)
    query = "SELECT count(*) FROM audit WHERE event = 'searched'"
    with database.read() as connection:
        assert connection.exec_driver_sql(query).scalar() == 5000


@ON_BOTH
def test_a_failing_database_delays_searches_only_with_the_setting_before(database: Database, url: str) -> None:
    gallery = gallery_of(database)

    async def soon(writer: AuditWriter) -> None:
        refuse_lines(url, True)
        for _ in range(4):
            await writer.searched(gallery, ONE)
        await writer.written()
        writer.check()  # not full yet
        writer.record_refusal("key:a", "unauthorized")
        for _ in range(3):
            await writer.searched(gallery, ONE)
        with pytest.raises(AuditWriteError, match="5 audit lines wait for the database, 2 are lost"):
            writer.check()
        with pytest.raises(AuditWriteError):
            await writer.write(Entry("gallery_exported", (gallery.pk, "g")))
        refuse_lines(url, False)
        await writer.written()
        writer.check()

    with_writer(database, "soon", soon, most=5)
    written = lines(database)
    assert [event for event, *_ in written].count("searched") == 5
    assert written[-2:] == [
        ("access_refused", "unauthorized", {"count": 1}),
        ("audit_lines_lost", "failed", {"lines": 2}),
    ]

    async def before(writer: AuditWriter) -> None:
        refuse_lines(url, True)
        with pytest.raises(AuditWriteError):
            await writer.searched(gallery, ONE)
        refuse_lines(url, False)
        await writer.searched(gallery, ONE)

    with_writer(database, "before", before)
    assert len(lines(database, event="searched")) == 6
    assert report_of(database).faults == []


def test_a_flood_of_refusals_is_counted(database: Database) -> None:
    async def work(writer: AuditWriter) -> None:
        for number in range(1000):
            writer.record_refusal(f"key:{number % 100}", "unauthorized")
        await writer.written()

    with_writer(database, "off", work)
    written = lines(database, event="access_refused")
    assert sum(details["count"] for *_, details in written) == 1000
    assert len(written) <= 2 * (MAX_REFUSAL_LINES + 1)


@ON_BOTH
def test_two_processes_and_a_gallery_writer_share_the_chain(database: Database, url: str) -> None:
    galleries = [gallery_of(database, f"g{n}") for n in range(4)]

    async def work(writer: AuditWriter) -> None:
        for _ in range(20):
            await asyncio.gather(*(writer.searched(gallery, ONE) for gallery in galleries))
            await writer.write(Entry("key_created"))

    async def both() -> None:
        with closing(open_database(url)) as other:
            await asyncio.gather(
                *(asyncio.to_thread(with_writer, each, "before", work) for each in (database, other)),
                asyncio.to_thread(enroll, Store(database), galleries),
            )

    asyncio.run(both())
    # Each gallery: its creation, 40 searches and 20 enrollments. The service: 40 keys.
    assert report_of(database) == Report(0, 4 * 61 + 40, [])


def enroll(store: Store, galleries: list[Gallery]) -> None:
    vectors = l2_normalize(np.random.default_rng(0).normal(size=(20, 8)))
    for number, vector in enumerate(vectors):
        for gallery in galleries:
            store.templates.enroll(gallery, "ada", [NewTemplate(f"{number:032x}", vector, "embedding")], None)

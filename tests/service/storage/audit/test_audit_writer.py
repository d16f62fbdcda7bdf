"""Searches in the audit: gathered, written in groups, and what becomes of them when the database refuses."""

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
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.index.follower import Followers
from service.index.replicas import in_process
from service.storage.audit.log import Entry
from service.storage.audit.reader import AuditReader, Chosen
from service.storage.audit.writer import MOST_REFUSED, AuditWriter, When
from service.storage.db.engine import Database
from service.storage.repositories.store import Store
from tests.databases import engine_of, open_database
from tests.service.storage.audit.test_audit_log import report_of, secret_of

ONE = [{"outcome": "identified", "subject": "ada"}]
SEVERAL = [*ONE, {"outcome": "identified", "subject": "bob"}, {"outcome": "unknown"}, {"outcome": "unknown"}]


def with_writer(
    database: Database, when: When, work: Callable[[AuditWriter], Awaitable[None]], most: int = 1000
) -> None:
    async def run() -> None:
        writer = AuditWriter(database, when, most)
        try:
            await work(writer)
        finally:
            await asyncio.to_thread(writer.close)

    asyncio.run(run())


def gallery_of(database: Database, name: str = "g") -> Gallery:
    return Store(database).galleries.create(name, "f", 8, GallerySettings())


def lines(database: Database, **chosen: Any) -> list[tuple[str, str, dict[str, Any]]]:
    found = AuditReader(database).lines(Chosen(**chosen), None, 1000)
    return [(listed.line.event, listed.line.outcome, listed.line.details) for listed in reversed(found)]


def refuse_lines(url: str, refuse: bool) -> None:
    """The database takes no line of the audit, as if it were full."""
    engine = engine_of(url)
    with engine.begin() as connection:
        if connection.dialect.name == "sqlite":
            full = "CREATE TRIGGER full BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'full'); END"
            connection.exec_driver_sql(full if refuse else "DROP TRIGGER full")
        else:
            full = "ALTER TABLE audit ADD CONSTRAINT audit_full CHECK (number < 0) NOT VALID"
            connection.exec_driver_sql(full if refuse else "ALTER TABLE audit DROP CONSTRAINT audit_full")
    engine.dispose()


def test_a_search_is_told_of_by_who_was_found_and_how_often_nobody(database: Database, url: str) -> None:
    gallery = gallery_of(database)

    async def work(writer: AuditWriter) -> None:
        with acting_as(Actor("key:a", "r1")):
            await writer.searched(gallery, ONE)
            await writer.searched(gallery, SEVERAL)
            await writer.verified(gallery, "ada", "different")
        await writer.written()

    with_writer(database, "soon", work)
    ada, bob = (gallery.seal.pseudonym("subject", subject) for subject in ("ada", "bob"))
    assert lines(database, chain=gallery.pk)[1:] == [
        ("searched", "done", {"outcomes": {"identified": 1}}),
        ("searched", "done", {"outcomes": {"identified": 2, "unknown": 2}, "subjects": [ada, bob]}),
        ("verified", "different", {}),
    ]
    assert len(lines(database, subject=ada, actor="key:a")) == 3 and len(lines(database, subject=bob)) == 1
    assert report_of(url, secret_of(database)).faults == []


def test_what_is_to_be_written_before_is_on_disk_before_it_is_answered(database: Database) -> None:
    one, other = gallery_of(database), gallery_of(database, "other")
    commits: list[object] = []
    sa.event.listen(database.engine, "commit", commits.append)

    async def work(writer: AuditWriter) -> None:
        for count in range(1, 4):
            await writer.searched(one, ONE)
            assert len(lines(database, event="searched")) == count
        # Those that come together are written together.
        commits.clear()
        await asyncio.gather(*(writer.searched(gallery, SEVERAL) for gallery in (one, other) * 50))
        assert len(lines(database, event="searched")) == 103 and len(commits) < 20

    with_writer(database, "before", work)


def test_nothing_is_lost_at_the_end_and_nothing_is_written_that_is_not_wanted(database: Database) -> None:
    gallery = gallery_of(database)

    async def work(writer: AuditWriter) -> None:
        for _ in range(5000):
            await writer.searched(gallery, ONE)

    with_writer(database, "soon", work, most=10_000)
    with_writer(database, "off", work)
    query = "SELECT count(*) FROM audit WHERE event = 'searched'"
    with database.read() as connection:
        assert connection.exec_driver_sql(query).scalar() == 5000


def test_a_database_that_refuses_lines_holds_up_no_search_unless_it_must(database: Database, url: str) -> None:
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
        with pytest.raises(AuditWriteError, match="5 lines wait for the database, 2 are lost"):
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
    assert report_of(url, secret_of(database)).faults == []


def test_a_flood_of_refusals_is_counted(database: Database) -> None:
    async def work(writer: AuditWriter) -> None:
        for number in range(1000):
            writer.record_refusal(f"key:{number % 100}", "rate_limited")
        await writer.written()

    with_writer(database, "off", work)
    written = lines(database, event="access_refused")
    assert sum(details["count"] for *_, details in written) == 1000
    assert len(written) <= 2 * (MOST_REFUSED + 1)


def test_two_processes_write_to_the_same_chains_beside_a_galleries_writer(database: Database, url: str) -> None:
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
    report = report_of(url, secret_of(database))
    # Each gallery's: its beginning, 40 searches and 20 enrollments; of the service, 40 keys and the galleries.
    assert report.faults == [] and [end.number for end in report.ends] == [44, 61, 61, 61, 61]


def enroll(store: Store, galleries: list[Gallery]) -> None:
    vectors = l2_normalize(np.random.default_rng(0).normal(size=(20, 8)))
    for number, vector in enumerate(vectors):
        for gallery in galleries:
            store.templates.enroll(gallery, "ada", [NewTemplate(f"{number:032x}", vector, "embedding")], None)


def test_lines_of_searches_leave_what_was_read_where_it_is(database: Database) -> None:
    """They change no gallery: names and index hold, and of SQLite one number is read again."""
    gallery, store = gallery_of(database), Store(database)
    enroll(store, [gallery])
    followers = Followers(in_process(store))
    gallery = store.galleries.get("g")
    follower = followers.of(gallery)
    follower.search(np.eye(1, 8, dtype=np.float32), 1, None, gallery.version)
    store.subjects.names(gallery, [1])
    counted: list[str] = []
    sa.event.listen(
        database.engine, "before_cursor_execute", lambda c, cursor, statement, *_: counted.append(statement)
    )

    async def work(writer: AuditWriter) -> None:
        await writer.searched(gallery, ONE)
        await writer.written()
        counted.clear()
        again = store.galleries.get("g")
        assert again.version == gallery.version and follower.is_at(again.version)
        assert store.subjects.cached_names(again, [1]) is not None
        assert [statement for statement in counted if statement != "BEGIN"] == counted[-1:]

    with_writer(database, "soon", work)
    followers.close()

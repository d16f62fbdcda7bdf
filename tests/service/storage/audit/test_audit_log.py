"""Audit log: recorded content, detection and location of later changes, deletion by age, and lines of searches."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from service.cli.main import app
from service.core.actor import Actor
from service.core.errors import AuditWriteError, StorageDamagedError
from service.domain.events import Event, EventFilter, Position
from service.domain.gallery import Gallery, GallerySettings
from service.storage.audit.log import AuditFilter, Entry, listed_lines, note, prune_lines, record_entries
from service.storage.audit.writer import MAX_REFUSAL_LINES, AuditWriter, When
from service.storage.db.audit_chain import PRUNED_LINES, SIGNED, Report, walk
from service.storage.db.engine import Database
from service.storage.events.log import EventLog
from service.storage.privacy.backup import back_up, restore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH, engine_of, open_database
from tests.service.storage.scene import some

LINES = 6
Faults = list[tuple[str, int, int]]
Tampering = Callable[[sa.Connection], object]


def gallery_with_lines(database: Database, name: str = "g", lines: int = LINES) -> Gallery:
    """``lines``: including the line of its creation."""
    gallery = Store(database).galleries.create(name, "f", 8, GallerySettings())
    for number in range(2, lines + 1):
        with database.change(gallery) as connection:
            note(database.vault, connection, "event", gallery, "ada", number=number, share=0.1 * number)
    return gallery


def report_of(database: Database) -> Report:
    with database.read() as connection:
        return walk(database.vault, connection)


def tamper_with(url: str, *changes: Tampering) -> None:
    """Tamper through another connection while the service runs."""
    other = engine_of(url)
    with other.begin() as connection:
        for change in changes:
            change(connection)
    other.dispose()


def run(text: str, **values: Any) -> Tampering:
    return lambda connection: connection.execute(sa.text(text), values)


COLUMNS = "at, event, outcome, actor, request_id, gallery_pk, gallery, subject, details, hash"
CUT = run("DELETE FROM audit WHERE number = 6")
CUT_HEAD = run("UPDATE audit_head SET number = 5, hash = (SELECT hash FROM audit WHERE number = 5)")
LATER_START = run("UPDATE audit_head SET pruned = 2, before = (SELECT hash FROM audit WHERE number = 2)")
COPIED = f"INSERT INTO audit (number, {COLUMNS}) SELECT :new, {COLUMNS} FROM audit WHERE number = :of"  # noqa: S608


def altered(number: int, assignment: str, **values: Any) -> Tampering:
    return run(f"UPDATE audit SET {assignment} WHERE number = {number}", **values)  # noqa: S608


TAMPERED: dict[str, tuple[list[Tampering], Faults]] = {
    **{
        f"another {column}": ([altered(number, f"{column} = 'x'")], [("altered", number, number)])
        for number, column in enumerate(("event", "outcome", "actor", "request_id", "gallery", "subject"), start=1)
    },
    "altered details": ([altered(4, "details = :d", d='{"number": 4}')], [("altered", 4, 4)]),
    "an altered time": ([altered(6, "at = '2020-01-01 00:00:00.000000'")], [("altered", 6, 6)]),
    "an altered hash": ([altered(3, "hash = :h", h="0" * 64)], [("altered", 3, 3), ("altered", 4, 4)]),
    "a line removed": ([run("DELETE FROM audit WHERE number = 3")], [("missing", 3, 3)]),
    "lines removed": ([run("DELETE FROM audit WHERE number IN (3, 4)")], [("missing", 3, 4)]),
    "the first line removed": ([run("DELETE FROM audit WHERE number = 1")], [("missing", 1, 1)]),
    "the end cut off": ([CUT], [("missing", 6, 6)]),
    "the end cut off, head and all": ([CUT_HEAD, CUT], [("head", 5, 5)]),
    "all lines removed": ([run("DELETE FROM audit")], [("missing", 1, 6)]),
    "the start cut off, head and all": (
        [LATER_START, run("DELETE FROM audit WHERE number <= 2")],
        [("head", 6, 6)],
    ),
    "a line inserted before the start": ([run(COPIED, new=-1, of=3)], [("inserted", -1, -1)]),
    "a line inserted after the end": ([run(COPIED, new=7, of=6)], [("altered", 7, 7), ("head", 6, 7)]),
    "lines swapped": (
        [altered(old, f"number = {new}") for old, new in ((3, 99), (4, 3), (99, 4))],
        [("altered", 3, 3), ("altered", 4, 4), ("altered", 5, 5)],
    ),
    "a head replaced": ([run("UPDATE audit_head SET hash = :h", h="1" * 64)], [("head", 6, 6)]),
    "a signature replaced": ([run("UPDATE audit_head SET mac = :m", m="1" * 64)], [("head", 6, 6)]),
}


@ON_BOTH
def test_tampering_is_found_and_located(database: Database) -> None:
    gallery_with_lines(database)
    assert report_of(database) == Report(0, LINES, [])
    found = {}
    for what, (changes, _) in TAMPERED.items():
        with database.engine.connect() as connection, connection.begin() as undone:
            for change in changes:
                change(connection)
            found[what] = walk(database.vault, connection).faults
            undone.rollback()
    assert found == {what: expected for what, (_, expected) in TAMPERED.items()}
    assert set(SIGNED) == {"number", "at", "event", "outcome", "actor", "request_id", "gallery", "subject", "details"}


@pytest.mark.parametrize("what", ["the end cut off, head and all", "the start cut off, head and all", "a line removed"])
def test_tampering_is_found_after_further_lines(
    database: Database, url: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next write must not sign a forged end."""
    gallery_with_lines(database)
    tamper_with(url, *TAMPERED[what][0])
    for _ in range(2):
        record_entries(database, [Entry("event")])
    assert prune_lines(database, datetime(2000, 1, 1, tzinfo=UTC)) == 0
    assert report_of(database).faults != []
    assert ("tampered with" in caplog.text) == ("head" in what)


def test_a_missing_head_is_reported(database: Database, url: str) -> None:
    tamper_with(url, run("DELETE FROM audit_head"))
    with pytest.raises(StorageDamagedError, match="the head of the audit"):
        report_of(database)
    with pytest.raises(StorageDamagedError, match="the head of the audit"):
        record_entries(database, [Entry("event")])


def test_unreadable_rows_are_found(tmp_path: Path) -> None:
    """SQLite stores any value in any column."""
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    with closing(open_database(url)) as database:
        gallery_with_lines(database, lines=10)
        values = {2: ("details", "no json"), 4: ("details", "[]"), 6: ("at", "noon"), 8: ("actor", b"\xff")}
        changes = [altered(number, f"{column} = :v", v=value) for number, (column, value) in values.items()]
        tamper_with(url, run("PRAGMA ignore_check_constraints = on"), *changes)
        assert report_of(database).faults == [("altered", number, number) for number in values]


def aged(database: Database, ages_days: list[float]) -> datetime:
    """Record lines of these ages, and return the present."""
    now = datetime.now(UTC)
    record_entries(database, [Entry("event", at=now - timedelta(days=age)) for age in ages_days])
    return now


def test_old_lines_are_deleted_and_the_rest_stays_verifiable(database: Database, url: str) -> None:
    now = aged(database, [*[400] * (PRUNED_LINES + 5), 300, 500, 1])
    kept = PRUNED_LINES + 6
    assert prune_lines(database, now - timedelta(days=365), stopped=lambda: True) == 0
    assert prune_lines(database, now - timedelta(days=365)) == PRUNED_LINES + 5
    # A line that a stepped clock dated earlier waits for the one before it.
    left = [listed.number for listed in listed_lines(database, AuditFilter(), None, 9)]
    assert left == [kept + 2, kept + 1, kept]
    assert report_of(database) == Report(PRUNED_LINES + 5, 3, [])
    assert prune_lines(database, now - timedelta(days=365)) == 0
    assert prune_lines(database, now) == 3
    assert report_of(database) == Report(kept + 2, 0, [])
    record_entries(database, [Entry("event")] * 2)
    assert report_of(database) == Report(kept + 2, 2, [])
    tamper_with(url, run("DELETE FROM audit WHERE number = :n", n=kept + 3))
    assert report_of(database).faults == [("missing", kept + 3, kept + 3)]


@ON_BOTH
def test_a_restored_backup_verifies_and_continues(database: Database, url: str, tmp_path: Path) -> None:
    """Into a database with lines of its own."""
    now = aged(database, [400])
    assert prune_lines(database, now - timedelta(days=365)) == 1
    gallery = gallery_with_lines(database)
    back_up(database, tmp_path / "kith.backup")
    gallery_with_lines(database, "else", 2 * LINES)
    restore(database, tmp_path / "kith.backup", replace=True)
    gallery_with_lines(database, "later")
    again = Store(database).galleries.get("g")
    assert again.pk != gallery.pk
    assert report_of(database) == Report(1, 2 * LINES + 1, [])
    assert len(listed_lines(database, AuditFilter(again.pk), None, 100)) == LINES
    tamper_with(url, run("UPDATE audit SET event = 'x' WHERE number = 4"))
    assert report_of(database).faults == [("altered", 4, 4)]


@ON_BOTH
def test_rejected_lines_block_no_others(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """PostgreSQL rejects a character NUL and long texts. SQLite stores both. No database stores an object."""
    gallery = gallery_with_lines(database, lines=1)
    about = gallery.pk, "g"
    Store(database).galleries.delete("g")  # during a search
    bad = [
        Entry("object", about, details={"who": object()}, actor=Actor("key:a")),
        Entry("null", about, subject="a\0"),
        Entry("long", about, actor=Actor("k" * 100)),
    ]

    async def work() -> None:
        async with AuditWriter(database, "soon") as writer:
            await asyncio.gather(*(writer.write(entry) for entry in (Entry("one"), *bad, Entry("two"))))
        assert writer.backlog() == (0, 0)

    with caplog.at_level(logging.DEBUG, "kith.audit"):
        asyncio.run(work())
    listed = listed_lines(database, AuditFilter(), None, 5)
    assert [one.event for one in listed] == ["two", "long", "null", "object", "one"]
    assert [(one.outcome, one.details) for one in listed[3:]] == [("incomplete", {}), ("done", {})]
    assert report_of(database).faults == []
    assert "without its content" in caplog.text
    said = [json.loads(record.message) for record in caplog.records if record.name == "kith.audit"]
    assert (said[-1]["number"], said[-1]["event"], said[-1]["details"]) == (listed[0].number, "two", {})


def test_commands_report_violations_with_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path / "data"))
    url = f"sqlite:///{tmp_path / 'data' / 'kith.db'}"
    with closing(open_database(url)) as database:
        gallery_with_lines(database)

    def verified(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["audit", "verify", *arguments])
        assert result.exit_code == code, result.output
        return result.stdout

    assert "6 lines: sound" in verified()
    assert CliRunner().invoke(app, ["backup", str(tmp_path / "kith.backup")]).exit_code == 0
    with closing(open_database(url)) as database:
        (last,) = listed_lines(database, AuditFilter(), None, 1)
        assert (last.event, last.actor) == ("database_backed_up", "operator")
        prune_lines(database, datetime.now(UTC))
        gallery_with_lines(database, "later")
    assert "6 lines, after 7 lines deleted by age: sound" in verified()
    tamper_with(url, run("DELETE FROM audit WHERE number IN (9, 10)"))
    assert "lines 9 to 10: missing: removed\n4 lines, after 7 lines deleted by age: 1 fault" in verified(code=1)
    told = json.loads(verified("--json", code=1))
    assert told == {"pruned": 7, "lines": 4, "faults": [{"kind": "missing", "first": 9, "last": 10}]}


# The writer

ONE = [{"outcome": "identified", "subject": "ada"}]
SEVERAL = [*ONE, {"outcome": "identified", "subject": "bob"}, {"outcome": "unknown"}, {"outcome": "unknown"}]


def with_writer(
    database: Database, when: When, work: Callable[[AuditWriter], Awaitable[None]], most: int = 1000
) -> None:
    async def run() -> None:
        async with AuditWriter(database, when, most) as writer:
            await work(writer)

    asyncio.run(run())


def stored_lines(database: Database, **chosen: Any) -> list[tuple[str, str, dict[str, Any]]]:
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
def test_events_of_a_search_are_stored_on_return(database: Database, url: str, when: When) -> None:
    gallery = gallery_with_lines(database, lines=1)
    WebhookStore(database).create("https://receiver.example/", None, EventFilter())
    stranger = Event("decision", {"outcome": "unknown"})

    def stored() -> int:
        return len(EventLog(database).read(Position(0, 0), EventFilter()).events)

    async def work(writer: AuditWriter) -> None:
        for count in (2, 4):
            await writer.searched(gallery, SEVERAL, [stranger, stranger])
            assert stored() == count
        refuse_lines(url, True)
        if when != "off":
            with pytest.raises(AuditWriteError):
                await writer.searched(gallery, SEVERAL, [stranger])
        refuse_lines(url, False)
        assert stored() == count  # neither line nor event

    with_writer(database, when, work)
    assert len(stored_lines(database, event="searched")) == (0 if when == "off" else 2)


def test_concurrent_searches_share_a_transaction_and_closing_writes_all(database: Database) -> None:
    galleries, commits = [gallery_with_lines(database, name, 1) for name in ("one", "other")], list[object]()
    sa.event.listen(database.engine, "commit", commits.append)

    async def before(writer: AuditWriter) -> None:
        await asyncio.gather(*(writer.searched(gallery, SEVERAL) for gallery in galleries * 50))
        assert len(stored_lines(database, event="searched")) == 100 and len(commits) < 20

    async def soon(writer: AuditWriter) -> None:
        for _ in range(800):
            await writer.searched(galleries[0], ONE)

    with_writer(database, "before", before)
    with_writer(database, "soon", soon)
    assert len(stored_lines(database, event="searched")) == 900


@ON_BOTH
def test_a_failing_database_delays_searches_only_with_the_setting_before(database: Database, url: str) -> None:
    gallery = gallery_with_lines(database, lines=1)

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
    written = stored_lines(database)
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
    assert len(stored_lines(database, event="searched")) == 6
    assert report_of(database).faults == []


def test_a_flood_of_refusals_is_counted(database: Database) -> None:
    async def work(writer: AuditWriter) -> None:
        for number in range(1000):
            writer.record_refusal(f"key:{number % 100}", "unauthorized")
        await writer.written()

    with_writer(database, "off", work)
    written = stored_lines(database, event="access_refused")
    assert sum(details["count"] for *_, details in written) == 1000
    assert len(written) <= 2 * (MAX_REFUSAL_LINES + 1)


@ON_BOTH
def test_two_processes_and_a_gallery_writer_share_the_chain(database: Database, url: str) -> None:
    galleries = [gallery_with_lines(database, f"g{n}", 1) for n in range(4)]

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
    for template in some(np.random.default_rng(0), 20):
        for gallery in galleries:
            store.templates.enroll(gallery, "ada", [replace(template, crop=None)], None)

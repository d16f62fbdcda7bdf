"""Audit log: recorded content, and detection and location of later changes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from service.cli.main import app
from service.core.actor import Actor
from service.core.errors import AuditFileError
from service.domain.gallery import Gallery, GallerySettings
from service.storage.audit.chain import Anchor, Fault, Line, Report, examine
from service.storage.audit.log import Entry, note, record_entries
from service.storage.audit.reader import (
    AuditFilter,
    anchor_lines,
    listed_lines,
    read_anchors,
    trail_in,
    trail_of,
    write_trail,
)
from service.storage.db.audit_triggers import REFUSAL
from service.storage.db.engine import Database
from service.storage.privacy.backup import back_up, restore
from service.storage.repositories.store import Store
from tests.databases import TEXT, engine_of, open_database
from tests.postgres import DatabaseUrl

LINES = 6
Tampering = Callable[[sa.Connection, int], object]


def drop_audit_triggers(connection: sa.Connection) -> None:
    names = ["audit_guard ON audit"]
    if connection.dialect.name == "sqlite":
        names = ["IF EXISTS audit_update", "IF EXISTS audit_delete"]
    for name in names:
        connection.exec_driver_sql(f"DROP TRIGGER {name}")


def gallery_with_lines(database: Database, name: str = "g", lines: int = LINES) -> Gallery:
    """``lines``: including the line of its creation."""
    gallery = Store(database).galleries.create(name, "f", 8, GallerySettings())
    for number in range(2, lines + 1):
        with database.change(gallery) as connection:
            note(database.vault, connection, "event", gallery, "ada", number=number, share=0.1 * number)
    return gallery


def report_of(url: str, secret: bytes | None, anchors: list[Anchor] | None = None) -> Report:
    with trail_of(url) as trail:
        return examine(trail.lines, trail.heads, secret, trail.galleries, anchors or [])


def secret_of(database: Database) -> bytes:
    with database.read() as connection:
        return database.vault.secret(connection, "audit")


def brief(faults: list[Fault]) -> list[tuple[str, str | None, int | None, int | None]]:
    return [(fault.kind, fault.gallery, fault.first, fault.last) for fault in faults]


def run(text: str, **values: Any) -> Tampering:
    return lambda connection, chain: connection.execute(sa.text(text), {"chain": chain, **values})


def cut(connection: sa.Connection, chain: int, head: bool = True) -> None:
    run("DELETE FROM audit WHERE chain = :chain AND number = 6")(connection, chain)
    if head:
        now = "number = 5, hash = (SELECT hash FROM audit WHERE chain = :chain AND number = 5)"
        run(f"UPDATE audit_heads SET {now} WHERE chain = :chain")(connection, chain)  # noqa: S608


def insert_between(connection: sa.Connection, chain: int) -> None:
    for number in (6, 5, 4):
        run("UPDATE audit SET number = :n + 1 WHERE chain = :chain AND number = :n", n=number)(connection, chain)
    columns = "chain, at, event, outcome, actor, request_id, gallery_pk, gallery, subject, details, hash"
    run(
        f"INSERT INTO audit (number, {columns}) SELECT 4, {columns} FROM audit "  # noqa: S608
        "WHERE chain = :chain AND number = 3"
    )(connection, chain)


def swap(connection: sa.Connection, chain: int) -> None:
    for old, new in ((3, 99), (4, 3), (99, 4)):
        run("UPDATE audit SET number = :new WHERE chain = :chain AND number = :old", old=old, new=new)(
            connection, chain
        )


def remove_chain(connection: sa.Connection, chain: int) -> None:
    for table in ("audit", "audit_heads"):
        run(f"DELETE FROM {table} WHERE chain = :chain")(connection, chain)  # noqa: S608


def rewrite(connection: sa.Connection, chain: int, since: int = 3) -> None:
    """Rewrite a chain with correct hashes, but without the secret."""
    run("UPDATE audit SET actor = 'operator' WHERE chain = :chain AND number = :n", n=since)(connection, chain)
    rows = connection.execute(
        sa.text("SELECT * FROM audit WHERE chain = :chain ORDER BY number"), {"chain": chain}
    ).all()
    last = "0" * 64
    for row in rows:
        at = row.at if isinstance(row.at, datetime) else datetime.fromisoformat(row.at)
        details = row.details if isinstance(row.details, dict) else json.loads(row.details)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        line = Line(
            row.number, at, row.event, row.outcome, row.actor, row.request_id, row.gallery, row.subject, details
        )
        last = line.hash(last)
        run("UPDATE audit SET hash = :h WHERE pk = :pk", h=last, pk=row.pk)(connection, chain)
    run("UPDATE audit_heads SET hash = :h WHERE chain = :chain", h=last)(connection, chain)


TAMPERED: dict[str, tuple[Tampering, list[tuple[str, str | None, int | None, int | None]]]] = {
    "an altered event": (
        run("UPDATE audit SET event = 'searched' WHERE chain = :chain AND number = 3"),
        [("altered", "g", 3, 3)],
    ),
    "altered details": (
        run("""UPDATE audit SET details = '{"number": 4}' WHERE chain = :chain AND number = 4"""),
        [("altered", "g", 4, 4)],
    ),
    "an altered time": (
        run("UPDATE audit SET at = '2020-01-01 00:00:00.000000' WHERE chain = :chain AND number = 6"),
        [("altered", "g", 6, 6)],
    ),
    "another person": (
        run("UPDATE audit SET subject = :s WHERE chain = :chain AND number = 2", s="0" * 32),
        [("altered", "g", 2, 2)],
    ),
    "an altered hash": (
        run("UPDATE audit SET hash = :h WHERE chain = :chain AND number = 3", h="0" * 64),
        [("altered", "g", 3, 4)],
    ),
    "a line removed": (run("DELETE FROM audit WHERE chain = :chain AND number = 3"), [("missing", "g", 3, 3)]),
    "lines removed": (run("DELETE FROM audit WHERE chain = :chain AND number IN (3, 4)"), [("missing", "g", 3, 4)]),
    "the end cut off": (lambda c, chain: cut(c, chain, head=False), [("cut", "g", 6, 6)]),
    "the end cut off, head and all": (cut, [("mac", "g", None, 5)]),
    "a line inserted": (insert_between, [("altered", "g", 4, 7), ("head", "g", None, None)]),
    "two lines swapped": (swap, [("altered", "g", 3, 5)]),
    "a chain removed": (remove_chain, [("chain_missing", "g", None, None), ("chain_missing", "g", None, None)]),
    "a rewritten chain": (rewrite, [("mac", "g", None, 6)]),
    "a head replaced": (
        run("UPDATE audit_heads SET hash = :h WHERE chain = :chain", h="1" * 64),
        [("head", "g", None, None)],
    ),
    "a signature replaced": (
        run("UPDATE audit_heads SET mac = :m WHERE chain = :chain", m="1" * 64),
        [("mac", "g", None, 6)],
    ),
    "a head removed": (run("DELETE FROM audit_heads WHERE chain = :chain"), [("head", "g", None, None)]),
    "a gallery deleted behind the service's back": (
        run("DELETE FROM galleries WHERE pk = :chain"),
        [("gallery", "g", None, None)],
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_is_found_and_located(database: Database, url: str, what: str) -> None:
    """Tamper through another connection while the service runs, and keep the service running."""
    gallery_with_lines(database, "before")
    gallery = gallery_with_lines(database)
    assert report_of(url, secret_of(database)).faults == []
    tamper, expected = TAMPERED[what]
    other = engine_of(url)
    with other.begin() as connection:
        drop_audit_triggers(connection)
        tamper(connection, gallery.pk)
    other.dispose()
    assert brief(report_of(url, secret_of(database)).faults) == expected
    gallery_with_lines(database, "after")
    assert brief(report_of(url, secret_of(database)).faults) == expected


def test_an_emptied_audit_is_reported_without_line_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path))
    with closing(open_database(f"sqlite:///{tmp_path / 'kith.db'}")) as database:
        Store(database).galleries.create("g", "f" * 32, 4, GallerySettings())
    with sa.create_engine(f"sqlite:///{tmp_path / 'kith.db'}").begin() as connection:
        for (trigger,) in connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).all():
            connection.execute(sa.text(f"DROP TRIGGER {trigger}"))
        connection.execute(sa.text("DELETE FROM audit"))
    told = CliRunner().invoke(app, ["audit", "verify"])
    assert told.exit_code == 1
    assert "the service's chain, line 1: cut" in told.output
    assert "gallery g, line" in told.output
    assert not re.search(r"chain \d+,", told.output), told.output
    assert "0 lines in 0 chains: " in told.output


@pytest.mark.parametrize("tamper", [cut, rewrite])
@pytest.mark.parametrize("service_too", [False, True])
def test_forged_lines_are_not_signed_by_the_next_write(
    database: Database, url: str, tamper: Tampering, service_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gallery = gallery_with_lines(database)
    for number in range(LINES):
        gallery_with_lines(database, f"other{number}", lines=1)
    chain = 0 if service_too else gallery.pk
    other = engine_of(url)
    with other.begin() as connection:
        drop_audit_triggers(connection)
        if tamper is cut:
            run("DELETE FROM audit WHERE chain = :chain AND number > 6")(connection, chain)
        tamper(connection, chain)
    other.dispose()
    for _ in range(2):
        record_entries(database, [Entry("event", None if service_too else (gallery.pk, "g"))])
    assert "mac" in [fault.kind for fault in report_of(url, secret_of(database)).faults]
    assert "tampered with" in caplog.text


def test_unreadable_rows_are_found(tmp_path: Path) -> None:
    """SQLite stores any value in any column."""
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    for number, (column, value) in enumerate(
        [("details", "no json"), ("details", "[]"), ("at", "noon"), ("actor", b"\xff"), ("details", None)]
    ):
        with closing(open_database(url)) as database:
            gallery = gallery_with_lines(database, f"g{number}")
            secret = secret_of(database)
        other = engine_of(url)
        with other.begin() as connection:
            connection.exec_driver_sql("PRAGMA ignore_check_constraints = on")
            if number == 0:
                drop_audit_triggers(connection)
            if value is None:
                continue  # the table rejects it
            statement = f"UPDATE audit SET {column} = :v WHERE chain = :chain AND number = 3"  # noqa: S608
            run(statement, v=value)(connection, gallery.pk)
        other.dispose()
        assert ("unreadable", f"g{number}", 3, 3) in brief(report_of(url, secret).faults)


def test_without_the_master_key_only_anchors_detect_a_rewritten_chain(database: Database, url: str) -> None:
    gallery, secret = gallery_with_lines(database), secret_of(database)
    before = report_of(url, None)
    assert not before.signed and [end.number for end in before.ends] == [1, LINES]
    with trail_of(url) as trail:
        early = [
            Anchor(one.hash, 1, one.hash, "g") for one in trail.lines if (one.chain, one.number) == (gallery.pk, 1)
        ]
    other = engine_of(url)
    with other.begin() as connection:
        drop_audit_triggers(connection)
        rewrite(connection, gallery.pk)
    assert report_of(url, None).faults == []
    assert brief(report_of(url, None, [*early, *before.ends]).faults) == [("anchor", "g", 2, 6)]
    assert brief(report_of(url, secret, before.ends).faults) == [("anchor", "g", 1, 6), ("mac", "g", None, 6)]
    with other.begin() as connection:
        rewrite(connection, gallery.pk, since=1)
    other.dispose()
    # Rewritten from its first line on, it counts as another chain.
    kinds = [fault.kind for fault in report_of(url, None, before.ends).faults]
    assert sorted(kinds) == ["chain_missing", "chain_missing", "chain_unknown"]


def test_anchors_detect_an_older_signed_head(database: Database, url: str) -> None:
    gallery = gallery_with_lines(database, lines=5)
    other = engine_of(url)
    with other.begin() as connection:
        signed = connection.execute(sa.text("SELECT * FROM audit_heads WHERE chain = :c"), {"c": gallery.pk}).one()
    with database.change(gallery) as connection:
        note(database.vault, connection, "event", gallery)
    noted = report_of(url, None).ends
    with other.begin() as connection:
        drop_audit_triggers(connection)
        cut(connection, gallery.pk)
        run("UPDATE audit_heads SET mac = :m WHERE chain = :chain", m=signed.mac)(connection, gallery.pk)
    other.dispose()
    assert report_of(url, secret_of(database)).faults == []
    assert brief(report_of(url, secret_of(database), noted).faults) == [("anchor", "g", 6, 6)]


def test_the_database_rejects_changes_of_lines(database: Database, url: str) -> None:
    gallery = gallery_with_lines(database)
    other = engine_of(url)
    for statement in ("UPDATE audit SET event = 'x' WHERE chain = :chain", "DELETE FROM audit WHERE chain = :chain"):
        with pytest.raises(sa.exc.DBAPIError, match=REFUSAL), other.begin() as connection:
            run(statement)(connection, gallery.pk)
    other.dispose()
    assert report_of(url, secret_of(database)).faults == []


def test_the_chain_of_a_deleted_gallery_is_kept(database: Database, url: str) -> None:
    store = Store(database)
    gallery_with_lines(database)
    store.galleries.delete("g")
    again = gallery_with_lines(database)
    report = report_of(url, secret_of(database))
    assert report.faults == [] and [end.gallery for end in report.ends] == [None, "g", "g"]
    # A late line, as of a concurrent search, belongs to no gallery.
    record_entries(database, [Entry("searched", (again.pk - 1, "g")), Entry("searched", (again.pk, "g"))])
    report = report_of(url, secret_of(database))
    assert report.faults == [] and [end.number for end in report.ends] == [4, LINES + 1, LINES + 1]


def test_a_restored_backup_verifies_with_shifted_keys(
    database: Database, url: str, database_url: DatabaseUrl, tmp_path: Path
) -> None:
    file, other_url = tmp_path / "kith.backup", database_url()
    gallery = gallery_with_lines(database)
    noted = report_of(url, None).ends
    back_up(database, file)
    with closing(open_database(other_url)) as other:
        gallery_with_lines(other, "else")
        restore(other, file, replace=True)
        gallery_with_lines(other, "later")
        secret = secret_of(other)
        assert Store(other).galleries.get("g").pk != gallery.pk
        report = report_of(other_url, secret, noted)
        assert report.faults == [] and len(report.ends) == 3
        with database.change(gallery) as connection:
            note(database.vault, connection, "event", gallery)
        # Later lines are missing.
        assert brief(report_of(other_url, secret, report_of(url, None).ends).faults) == [("anchor", "g", 7, 7)]
        with pytest.raises(sa.exc.DBAPIError, match=REFUSAL), other.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM audit")


def test_an_export_verifies_like_the_database(database: Database, url: str, tmp_path: Path) -> None:
    gallery, secret = gallery_with_lines(database), secret_of(database)
    file = tmp_path / "audit.ndjson"
    with trail_of(url) as trail, file.open("wb") as to:
        assert write_trail(trail, to) == LINES + 1

    def faults() -> list[tuple[str, str | None, int | None, int | None]]:
        with trail_in(file) as trail:
            keys = database.vault.master
            assert trail.secret is not None
            assert keys.unwrap(trail.secret.key, "audit", trail.secret.master_key) == secret
            return brief(examine(trail.lines, trail.heads, secret, trail.galleries).faults)

    assert faults() == []
    whole = file.read_text()
    file.write_text(
        whole.replace('"details":{"number":3', '"details":[],"were":{"number":3').replace('"share":0.4', '"share":0.5')
    )
    assert faults() == [("unreadable", "g", 3, 3), ("altered", "g", 4, 4)]
    lines = whole.splitlines(keepends=True)
    file.write_text("".join(lines[:5] + lines[6:]))
    assert [kind for kind, *_ in faults()] == ["missing"]
    for broken in ("".join(lines[:-1]), "".join(lines[1:]), whole[:-20], ""):
        file.write_text(broken)
        with pytest.raises(AuditFileError):
            faults()
    assert gallery.name == "g"


def test_commands_report_violations_with_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path / "data"))
    file = tmp_path / "data" / "kith.db"
    with closing(open_database(f"sqlite:///{file}")) as database:
        gallery = gallery_with_lines(database)

    def kith(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["audit", *arguments])
        assert result.exit_code == code, result.output
        return result.stdout

    assert "7 lines in 2 chains: sound" in kith("verify")
    assert "not checked" not in kith("verify", "--against", str(noted(tmp_path, kith("head"))))
    assert "7 lines" in kith("export", str(tmp_path / "audit.ndjson"))
    assert CliRunner().invoke(app, ["backup", str(tmp_path / "kith.backup")]).exit_code == 0
    with closing(open_database(f"sqlite:///{file}")) as database:
        (last,) = listed_lines(database, AuditFilter(), None, 1)
        assert (last.line.event, last.line.actor) == ("database_backed_up", "operator")
    copy = tmp_path / "copy.db"
    shutil.copy(file, copy)
    copy.chmod(0o400)
    for source in (copy, tmp_path / "audit.ndjson"):
        assert json.loads(kith("verify", str(source), "--json"))["signed"] is True
    other = engine_of(f"sqlite:///{file}")
    with other.begin() as connection:
        drop_audit_triggers(connection)
        rewrite(connection, gallery.pk)
    other.dispose()
    assert "gallery g, chain " in kith("verify", code=1)
    assert kith("head", code=1) == ""
    # On another machine, without the master key: the output names the skipped checks.
    monkeypatch.delenv("KITH_MASTER_KEY")
    assert "not checked" in kith("verify")
    assert "anchor: " in kith("verify", "--against", str(tmp_path / "anchors"), code=1)
    assert not (tmp_path / "data" / "master.key").exists()
    monkeypatch.setenv("KITH_MASTER_KEY", TEXT.replace("07", "08"))
    assert "does not open the secret" in kith("verify", code=1)
    monkeypatch.setenv("KITH_MASTER_KEY", TEXT)
    export = tmp_path / "audit.ndjson"
    header, *lines = export.read_text().splitlines(keepends=True)
    export.write_text(json.dumps(json.loads(header) | {"secret": None}) + "\n" + "".join(lines))
    assert "is missing" in kith("verify", str(export), code=1)
    (tmp_path / "nothing").write_text("nothing")
    assert isinstance(CliRunner().invoke(app, ["audit", "verify", str(tmp_path / "nothing")]).exception, AuditFileError)


def noted(folder: Path, printed: str) -> Path:
    file = folder / "anchors"
    file.write_text(printed)
    assert anchor_lines(read_anchors(file), datetime.now(UTC))
    return file


def test_lines_are_filtered_by_content(database: Database) -> None:
    gallery = gallery_with_lines(database)
    whose = gallery.seal.pseudonym("subject", "bob")
    late = datetime.now(UTC)
    entries = [
        Entry("searched", (gallery.pk, "g"), whose, actor=Actor("key:a", "r1")),
        Entry("searched", (gallery.pk, "g"), details={"subjects": ["0" * 32, whose]}, actor=Actor("key:b")),
        Entry("access_refused", actor=Actor("key:b")),
    ]
    record_entries(database, entries)

    def events(**chosen: Any) -> list[str]:
        return [listed.line.event for listed in listed_lines(database, AuditFilter(**chosen), None, 100)]

    assert events(chain=gallery.pk, event="searched") == ["searched"] * 2
    assert events(actor="key:b") == ["access_refused", "searched"]
    assert events(subject=whose) == ["searched"] * 2
    assert events(since=late) == ["access_refused", "searched", "searched"]
    assert events(chain=gallery.pk, until=late) == ["event"] * (LINES - 1) + ["gallery_created"]
    assert events(gallery="g", event="gallery_created") == ["gallery_created"] * 2
    first, second = listed_lines(database, AuditFilter(), None, 2)
    assert [one.pk for one in listed_lines(database, AuditFilter(), second.pk, 1)] < [first.pk]
    assert listed_lines(database, AuditFilter(actor="key:a"), None, 1)[0].line.request_id == "r1"

"""Erased data is in no table and no file, and earlier work cannot restore it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa

from service.core.errors import GalleryNotFoundError, SubjectErasedError
from service.domain.gallery import (
    Gallery,
    IdempotentResponse,
    SubjectFilter,
)
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import (
    audit,
    changes,
    crops,
    erasures,
    idempotency,
    metadata,
    vectors,
)
from service.storage.db.triggers import SQLITE
from service.storage.privacy.backup import back_up, restore
from service.storage.repositories import erasures as erasures_module
from service.storage.repositories import jobs as jobs_module
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.jobs import ItemOutcome, JobStore
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, claimed, open_database
from tests.postgres import DatabaseUrl
from tests.service.storage.scene import made, some

OF_NOBODY: Final = {
    "galleries": "has settings and counts, and is the root of what it holds, also of its gallery of strangers",
    "erasures": "receipts of what was deleted, by keyed hashes, also of deleted galleries",
    "audit": "lines by keyed hashes, also of deleted galleries; pruned by age",
    "audit_head": "numbers and hashes of the chain's ends",
    "receivers": "addresses of webhooks and positions in the log of events",
    "secrets": "secrets of the service, wrapped by the master key",
    "api_keys": "rights of callers",
    "api_key_versions": "a version",
    "leases": "which process does what",
}
"""Tables without data of people in galleries, and what they hold."""


@ON_BOTH
def test_every_table_goes_with_its_gallery_or_its_subject(database: Database) -> None:
    """A new table with data of people hangs on them by foreign keys with a cascade, or is listed with a reason."""
    inspector = sa.inspect(database.engine)
    assert set(inspector.get_table_names()) == {*metadata.tables, "alembic_version"}
    for table in metadata.sorted_tables:
        if table.name in OF_NOBODY:
            assert all(key.column.table is table for key in table.foreign_keys), table.name
            continue
        keys = inspector.get_foreign_keys(table.name)
        assert all(key["options"].get("ondelete") == "CASCADE" for key in keys), table.name
        owners = {key["referred_table"] for key in keys if not table.c[key["constrained_columns"][0]].nullable}
        assert owners - OF_NOBODY.keys() or "galleries" in owners, table.name
        named = {column.name for column in table.columns if column.name.endswith("_pk")}
        if table is not changes:  # keys alone, so that indexes follow a deletion
            assert named == {key["constrained_columns"][0] for key in keys}, table.name
        if "subject" in table.columns:  # a keyed hash
            assert f" {table.name} " in SQLITE["subjects_removed"], table.name


@ON_BOTH
def test_an_outcome_that_is_recorded_during_an_erasure_names_nobody(
    database: Database, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, jobs, gallery = Store(database), JobStore(database), made(database)
    store.templates.enroll(gallery, "ada", some(rng), None)
    job = claimed(database, gallery)
    erasure = threading.Thread(target=store.subjects.delete, args=(gallery, "ada"))

    def erased_since(*arguments: Any) -> set[str | None]:
        found = erasures_module.erased_since(*arguments)
        erasure.start()
        erasure.join(1)  # it may have to wait for the outcome
        return found

    monkeypatch.setattr(jobs_module, "erased_since", erased_since)
    jobs.record(job, [ItemOutcome("ada/1.jpg", "no_face", {}, "ada")], 1)
    erasure.join()
    assert [(one.item, one.subject) for one in jobs.items(job, None, 9)] == [("", None)]
    assert "ada/1.jpg" in jobs.done(job)


def test_the_receipt_matches_the_erased_rows_and_the_audit(database: Database, rng: np.random.Generator) -> None:
    store, gallery = Store(database), made(database)
    store.templates.enroll(gallery, "ada", some(rng, 3), IdempotentResponse("k", "d", "answer"))
    store.subjects.put(gallery, "ada", "Ada", {"team": 1}, ["old"])
    first = store.templates.list_page(gallery, "ada")[0].id

    one = store.templates.delete(gallery, "ada", first)
    assert (one.kind, one.template, one.removed) == ("template", first, {"templates": 1})
    with database.read() as connection:  # a repeated request enrolls again
        assert connection.execute(sa.select(idempotency.c.lookup)).first() is None
    receipt = store.subjects.delete(gallery, "ada")
    assert receipt.removed == {"subjects": 1, "templates": 2}
    assert receipt.subject == subject_lookup(gallery.seal, "ada")
    assert receipt.log_emptied is (True if database.file else None)
    with database.read() as connection:
        line = connection.execute(sa.select(audit).where(audit.c.event == "subject_deleted")).one()
    assert line.subject == receipt.subject
    assert line.details["receipt"] == receipt.id
    listed = [each for _, each in ErasureStore(database).list_page(gallery, "ada")]
    assert [(each.id, each.kind) for each in listed] == [(receipt.id, "subject"), (one.id, "template")]
    assert [(g.subjects, g.templates) for g in [store.galleries.get("g")]] == [(0, 0)]


def test_no_file_of_sqlite_contains_erased_data(tmp_path: Path, rng: np.random.Generator) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'kith.db'}")
    store, gallery = Store(database), made(database)
    for i in range(30):
        store.templates.enroll(gallery, f"s{i}", some(rng), None)
    with database.read() as connection:
        stored = [
            bytes(value)
            for column in (vectors.c.vector, crops.c.sealed)
            for value in connection.execute(sa.select(column).order_by(column.table.c.template_pk)).scalars()
        ]

    def standing() -> int:
        held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        return sum(value in held for value in stored)

    assert standing() == 60
    for i in range(29):
        assert store.subjects.delete(gallery, f"s{i}").log_emptied
    assert standing() == 2

    # A reader of an older snapshot needs the WAL. The receipt reports this, and a later truncation completes it.
    with database.read() as connection:
        connection.execute(sa.select(vectors.c.template_pk)).all()
        assert store.subjects.delete(gallery, "s29").log_emptied is False
    assert standing() == 2
    assert database.truncate_wal() is True
    assert standing() == 0
    database.close()


def test_an_earlier_job_cannot_restore_a_subject_or_a_template(database: Database, rng: np.random.Generator) -> None:
    """It reads its gallery again from time to time; its start time counts."""
    store, jobs, before = Store(database), JobStore(database), made(database)
    one, two = some(rng, 2)
    store.templates.enroll(before, "ada", some(rng), None)
    store.templates.enroll(before, "bob", [one, two], None)
    job = claimed(database, before)
    store.subjects.delete(before, "ada")
    store.templates.delete(before, "bob", one.id)
    now = store.galleries.get("g")
    jobs.enroll(job, now, "ada", [("ada/1.jpg", some(rng)[0])], [ItemOutcome("ada/2.jpg", "no_face", {})], 1)
    jobs.enroll(job, now, "bob", [("bob/1.jpg", one), ("bob/2.jpg", some(rng)[0])], [], 1)
    assert jobs.job(job.id).progress.counts == {"subject_erased": 2, "no_face": 1, "enrolled": 1}
    assert one.id not in {t.id for t in store.templates.list_page(now, "bob")}
    assert store.galleries.get("g").subjects == 1


@ON_BOTH
def test_a_restored_backup_repeats_erasures(database: Database, tmp_path: Path, rng: np.random.Generator) -> None:
    """And says so; tests/faults/test_model.py has all that is erased again."""
    file, store, gallery = tmp_path / "backup", Store(database), made(database)
    store.templates.enroll(gallery, "ada", some(rng, 2), None)
    made(database, "gone")
    back_up(database, file)
    receipt = store.subjects.delete(gallery, "ada")
    _, whole = store.galleries.delete("gone")
    store.templates.enroll(late := made(database, "late"), "ada", some(rng), None)
    of_late = store.subjects.delete(late, "ada")
    said = list[str]()
    restore(database, file, replace=True, report=said.append)
    assert database.file is None or Path(f"{database.file}-wal").stat().st_size == 0

    after = store.galleries.get("g")
    assert counts(store, after) == {}
    with pytest.raises(GalleryNotFoundError):
        store.galleries.get("gone")
    repeated = [line.removeprefix("repeated erasure: ").partition(",")[0] for line in said if "repeated" in line]
    assert repeated == ["subject", "gallery"]
    listed = listed_lines(database, AuditFilter(after.pk), None, 10)
    (line, *_) = [one for one in listed if one.event == "subject_deleted"]
    assert (line.details["receipt"], line.outcome) == (receipt.id, "repeated")
    with database.read() as connection:
        kept = set(connection.execute(sa.select(erasures.c.id)).scalars())
    assert kept >= {each.id for each in (receipt, whole, of_late)}
    # Restored jobs and requests also began before the erasure.
    with pytest.raises(SubjectErasedError):
        store.templates.enroll(replace(after, erased=0), "ada", some(rng), None)


def counts(store: Store, gallery: Gallery) -> dict[str, int]:
    found = {s.id: s.template_count for s in store.subjects.list_page(gallery, None, 10, SubjectFilter())}
    assert (gallery.subjects, gallery.templates) == (len(found), sum(found.values()))
    return found


def test_a_restore_keeps_who_enrolled_again_after_the_erasure(
    database_url: DatabaseUrl, tmp_path: Path, rng: np.random.Generator
) -> None:
    old, new = open_database(database_url()), open_database(database_url())
    store, there = Store(old), Store(new)
    gallery = made(old)
    for name in ("ada", "bob"):
        store.templates.enroll(gallery, name, some(rng), None)
    back_up(old, tmp_path / "before")
    for name in ("ada", "bob"):
        store.subjects.delete(store.galleries.get("g"), name)
    # A new machine begins with the backup. There, one of them is erased and enrolls again.
    restore(new, tmp_path / "before")
    there.subjects.delete(there.galleries.get("g"), "ada")
    there.templates.enroll(there.galleries.get("g"), "ada", some(rng, 3), None)
    back_up(new, tmp_path / "since")
    new.close()
    restore(old, tmp_path / "since", replace=True)
    assert counts(store, store.galleries.get("g")) == {"ada": 3}
    old.close()

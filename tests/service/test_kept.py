"""What was read is used again for as long as it is true, and no longer: whoever wrote, in whichever process."""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from models.network import Float
from models.recognition import unit
from service.client import Kith, KithClientError
from service.decision import RiskTarget
from service.errors import GalleryNotFoundError, StorageError
from service.gallery.bulk import BulkStore
from service.gallery.consistency import DATABASE_CHECKS, GALLERY_CHECKS, Consistency
from service.gallery.evidence import impostor_evidence
from service.gallery.follower import Followers
from service.gallery.generations import Generations
from service.gallery.hygiene import Finding
from service.gallery.job_store import Job, JobStore
from service.gallery.kept import Kept
from service.gallery.replicas import in_process
from service.gallery.store import Store
from service.gallery.subjects import Gallery, GallerySettings, Named, NewTemplate, StoredEvidence
from service.gallery.transfer import Items, check
from service.pipeline import Found, Pipeline
from service.security.sealing import Seal, new_key
from service.server import embedded
from service.settings import load_settings
from tests.databases import open_database
from tests.faults.old_databases import at_revision
from tests.faults.workers import Worker
from tests.postgres import DatabaseUrl, Postgres

DIMENSION = 16


class Process:
    """What a server process has, and how many statements it has run."""

    def __init__(self, url: str) -> None:
        self.database = open_database(url)
        self.store = Store(self.database)
        self.followers = Followers(in_process(self.store))
        self.statements = 0
        sa.event.listen(self.database.engine, "before_cursor_execute", self._count)

    def _count(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        self.statements += statement != "BEGIN"

    def search(self, name: str, probe: Float) -> list[Named]:
        gallery = self.store.gallery(name)
        (hits,), _ = self.followers.of(gallery).search(probe[None], 3, None, gallery.version)
        pks = [hit.subject_pk for hit in hits]
        known = self.store.named(gallery, pks)
        return [known[pk] for pk in pks]

    def statements_of(self, action: Callable[[], object]) -> int:
        before = self.statements
        action()
        return self.statements - before

    def close(self) -> None:
        self.followers.close()
        self.store.close()


@contextmanager
def process(url: str) -> Iterator[Process]:
    opened = Process(url)
    try:
        yield opened
    finally:
        opened.close()


def some(rng: np.random.Generator, count: int = 1, dimension: int = DIMENSION) -> list[NewTemplate]:
    vectors = unit(rng.normal(size=(count, dimension)))
    return [NewTemplate(uuid.uuid4().hex, np.asarray(vector, np.float32), "embedding") for vector in vectors]


def filled(store: Store, name: str, rng: np.random.Generator) -> list[NewTemplate]:
    gallery = store.create_gallery(name, "f" * 32, DIMENSION, GallerySettings())
    new = some(rng, 4)
    for i, template in enumerate(new):
        store.enrol(gallery, f"s{i}", [template], None)
    return new


def test_where_nothing_was_written_a_search_reads_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    with process(f"sqlite:///{tmp_path / 'kith.db'}") as one:
        probe = filled(one.store, "g", rng)[0].vector
        filled(one.store, "other", rng)
        found = one.search("g", probe)
        assert one.statements_of(lambda: one.search("g", probe)) == 0
        assert one.search("g", probe) == found
        with process(one.database.engine.url.render_as_string()) as two:
            two.store.enrol(two.store.gallery("other"), "s9", some(rng), None)
        # One look at the gallery's version: its names and its index are as they were.
        assert one.statements_of(lambda: one.search("g", probe)) == 1
        assert one.statements_of(lambda: one.search("g", probe)) == 0


def test_in_postgresql_one_statement_says_that_nothing_was_written(
    postgres: Postgres, rng: np.random.Generator
) -> None:
    with process(postgres.create(f"kith_{uuid.uuid4().hex}")) as one:
        probe = filled(one.store, "g", rng)[0].vector
        one.search("g", probe)
        assert one.statements_of(lambda: one.search("g", probe)) == 1


def test_every_process_sees_each_name_as_it_was_last_acknowledged(
    database_url: DatabaseUrl, rng: np.random.Generator
) -> None:
    url = database_url()
    with process(url) as here, process(url) as there:
        probe = filled(here.store, "g", rng)[0].vector
        elsewhere = Worker(url)  # a process of its own
        try:
            for i in range(30):
                writer = (here, there)[i % 2]
                now = writer.store.gallery("g")
                match i % 5:
                    case 0 | 1:
                        writer.store.put_subject(now, "s0", f"name {i}", {}, [])
                    case 2:
                        elsewhere.call("enrol", "g", "s0", some(rng))
                    case 3:
                        elsewhere.call("delete_subject", "g", "s0")
                    case 4:
                        elsewhere.call("enrol", "g", "s0", [NewTemplate(uuid.uuid4().hex, probe, "embedding")])
                present = i % 5 != 3
                subject = here.store.subject(now, "s0") if present else None
                for reader in (here, there):
                    named = {found.id: found.name for found in reader.search("g", probe)}
                    assert ("s0" in named) == present
                    assert subject is None or named["s0"] == subject.name
                    (first, *_) = elsewhere.call("search", "g", probe[None], 1)[0]
                    assert (first[0] == "s0") == present
        finally:
            elsewhere.close()


def test_a_gallery_of_the_same_name_is_another(database_url: DatabaseUrl, rng: np.random.Generator) -> None:
    url = database_url()
    with process(url) as one, process(url) as two:
        probe = filled(one.store, "g", rng)[0].vector
        before = two.store.gallery("g")
        two.search("g", probe)
        one.store.delete_gallery("g")
        with pytest.raises(GalleryNotFoundError):
            two.store.gallery("g")
        new = one.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())
        one.store.put_subject(new, "s0", "somebody else", {}, [])
        one.store.enrol(one.store.gallery("g"), "s0", some(rng), None)
        assert two.store.gallery("g").pk == new.pk != before.pk
        assert [found.name for found in two.search("g", probe)] == ["somebody else"]


def test_every_write_gives_the_gallery_another_version(database_url: DatabaseUrl, rng: np.random.Generator) -> None:
    with process(database_url()) as one:
        store, generations, job_store = one.store, Generations(one.database), JobStore(one.database)
        new = filled(store, "g", rng)

        def now() -> Gallery:
            return store.gallery("g")

        def derive() -> None:
            snapshot = store.snapshot(now())
            scores = impostor_evidence(snapshot, now().settings.fusion)
            stored = StoredEvidence(snapshot.sequence, now().settings.fusion, 4, scores, datetime.now(UTC))
            store.put_evidence(now(), stored, None, {})

        def mend() -> None:
            chosen = next(check for check in DATABASE_CHECKS if check.mend is not None)
            Consistency(one.database).repair_database(chosen)

        def mend_one() -> None:
            chosen = next(check for check in GALLERY_CHECKS if check.mend is not None)
            Consistency(one.database).repair(chosen, now())

        def import_one() -> None:
            columns: dict[str, Any] = {column.name: [None] for column in fields(Items) if column.name != "malformed"}
            said = {"numbers": [1], "subjects": ["s7"], "vectors": some(rng)[0].vector[None], "given": np.array([True])}
            items, refused = check(Items(**columns | said), DIMENSION)
            assert BulkStore(one.database).add(now(), items).templates == 1 and not refused

        def job() -> Job:
            job_store.create(now(), "any", {})
            claimed = job_store.claim("here", 60, lambda job: job.kind == "any")
            assert claimed is not None
            return claimed

        def fill() -> None:
            snapshot = store.snapshot(now())
            made = dict(zip(snapshot.template_pks[:1].tolist(), snapshot.vectors, strict=False))
            generations.add(now(), 1, made, job(), [], 0)

        def see() -> None:
            subject_pk = int(store.snapshot(now()).subject_pks[-1])
            assert generations.see(now(), 1, subject_pk, some(rng)[0].vector)

        writes: dict[str, Callable[[], object]] = {
            "put_subject": lambda: store.put_subject(now(), "s0", "Ada", {}, []),
            "patch_subject": lambda: store.patch_subject(now(), "s0", {"name": None}),
            "enrol": lambda: store.enrol(now(), "s0", some(rng), None),
            "import": import_one,
            "enrol by a job": lambda: job_store.enrol(job(), now(), "s8", [("photo", some(rng)[0])], [], 0),
            "move_template": lambda: store.move_template(now(), "s1", new[1].id, "s0"),
            "delete_template": lambda: store.delete_template(now(), "s0", new[1].id),
            "merge_subject": lambda: store.merge_subject(now(), "s8", "s0"),
            "delete_subject": lambda: store.delete_subject(now(), "s3"),
            "update_gallery": lambda: store.update_gallery("g", lambda s: replace(s, min_margin=0.5)),
            "put_evidence": derive,
            "trim_log": lambda: store.trim_log(now(), 1),
            "start": lambda: generations.start(now(), "e" * 32, DIMENSION, "another", True),
            "fill": fill,
            "see": see,
            "note": lambda: generations.note(now(), 1, {"agreed": 1}, []),
            "cut_over": lambda: generations.cut_over(now(), 0.0, RiskTarget("fpir", 0.01)),
            "roll_back": lambda: generations.roll_back(now()),
            "finish": lambda: generations.finish(now(), True),
            "drop": lambda: generations.drop(now(), 1, []),
            "repair": mend,
            "repair of a gallery": mend_one,
        }
        for name, write in writes.items():
            before = now()
            write()
            assert now().version != before.version, name


def test_what_is_written_without_a_transaction_around_it_is_not_missed(tmp_path: Path) -> None:
    """Checkpoints, a log that begins anew, and commits by others: SQLite counts the latter, whatever else goes on."""
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    with process(url) as one, process(url) as two:
        assert one.database.file_version() == one.database.file_version()
        for i in range(20):
            before = one.database.file_version()
            (one, two)[i % 2].store.create_gallery(f"g{i}", "f" * 32, DIMENSION, GallerySettings())
            after = one.database.file_version()
            assert before is not None and after is not None and before < after
            if i % 3 == 0:
                with two.database.engine.connect() as connection:
                    connection.exec_driver_sql("ROLLBACK")
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            # What reads or is taken back is no change that must be seen, and what is read is read to its end.
            assert one.store.gallery(f"g{i}") == one.store.gallery(f"g{i}")


def test_a_subject_that_somebody_else_removed_is_told_as_damage(tmp_path: Path, rng: np.random.Generator) -> None:
    vectors = [template.vector.tolist() for template in some(rng, 2, 128)]
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url, Kith(url) as kith:
        kith.create_gallery("g", risk={"threshold": 0.5})
        for i, vector in enumerate(vectors):
            kith.enrol("g", f"s{i}", embeddings=[vector], allow_duplicate=True)
        with closing(sqlite3.connect(tmp_path / "kith.db")) as by_hand:
            by_hand.execute("DELETE FROM subjects WHERE pk = (SELECT min(pk) FROM subjects)")
            by_hand.commit()
        with pytest.raises(KithClientError) as refused:
            kith.identify("g", embeddings=[vectors[0]])
        assert (refused.value.status, refused.value.code) == (500, "storage_damaged")


def test_the_event_loop_decides_about_few_candidates_alone(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    class Watched(Pipeline):
        def _identify(self, *arguments: Any) -> list[Found]:
            threads.append(threading.current_thread().name.partition("_")[0])
            return super()._identify(*arguments)

    monkeypatch.setattr("service.app.Pipeline", Watched)
    probes = [template.vector.tolist() for template in some(rng, 26, 128)]
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url, Kith(url) as kith:
        kith.create_gallery("g", risk={"threshold": 0.5})
        for i in range(2):
            kith.enrol("g", f"s{i}", embeddings=[probes[i]], allow_duplicate=True)
        ran_in: list[set[str]] = []
        for count in (25, 26):
            threads.clear()
            for _ in range(10):  # what is derived of the gallery meanwhile is read by the next
                kith.identify("g", embeddings=probes[:count])
            ran_in.append(set(threads))
    assert ran_in[0] - {"blocking"}
    assert ran_in[1] == {"blocking"}


def test_a_database_that_goes_back_is_another_one(tmp_path: Path, rng: np.random.Generator) -> None:
    """An older copy over the file of running processes: what was read of the lost history is not taken for what is
    written after it."""
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    with (
        process(url) as one,
        process(url) as two,
        closing(sqlite3.connect(tmp_path / "kith.db")) as file,
        closing(sqlite3.connect(tmp_path / "copy")) as copy,
    ):
        probe = filled(one.store, "g", rng)[0].vector
        file.backup(copy)
        one.store.put_subject(one.store.gallery("g"), "s0", "lost", {}, [])
        assert two.search("g", probe)[0].name == "lost"
        copy.backup(file)
        assert two.search("g", probe)[0].name is None
        one.store.put_subject(one.store.gallery("g"), "s0", "acknowledged afterwards", {}, [])
        assert two.search("g", probe)[0].name == "acknowledged afterwards"


def test_an_earlier_version_that_still_runs_is_refused_by_the_database(database_url: DatabaseUrl) -> None:
    """It would not say that it changed anything. These are the statements of its writers, by their one way in."""
    url = database_url()
    before = at_revision(url, "0003")
    with process(url) as one:
        one.store.create_gallery("g", "f" * 32, DIMENSION, GallerySettings())
        old = sa.select(before.tables["galleries"].c.generation).with_for_update(key_share=True)
        whole = sa.select(before.tables["galleries"])
        for statement in (old, whole):
            with pytest.raises(StorageError, match="generation"), one.database.read() as connection:
                connection.execute(statement)


@pytest.mark.parametrize("path", ["", ":memory:", "file:kith.db?uri=true"])
def test_sqlite_is_a_file(path: str) -> None:
    """Another connection to it sees the same."""
    with pytest.raises(StorageError, match="path"):
        open_database(f"sqlite:///{path}")


def test_names_are_of_one_version() -> None:
    kept = Kept()
    old = Gallery(1, "g", "f" * 32, DIMENSION, GallerySettings(), datetime.now(UTC), Seal(new_key()), version=5)
    new = replace(old, version=4)
    kept.put(old, 1)
    read_for_old = kept.page("g")
    kept.put(new, 2)
    assert read_for_old is not None
    kept.add_names(read_for_old, {1: Named("ada", "by her old name")})
    page = kept.page_of(new)
    assert page is not None and (page.gallery, page.file_version, page.names) == (new, 2, {})
    assert kept.page_of(old) is None and kept.page_of(replace(new, pk=2)) is None


def test_what_is_kept_is_bounded() -> None:
    kept = Kept(most_galleries=3, most_names=10)
    made = [
        Gallery(i, f"g{i}", "f", DIMENSION, GallerySettings(), datetime.now(UTC), Seal(new_key())) for i in range(5)
    ]
    for gallery in made:
        kept.put(gallery, 1)
        page = kept.page(gallery.name)
        assert page is not None
        kept.add_names(page, {pk: Named(f"s{pk}", None) for pk in range(4)})
    pages = [kept.page(f"g{i}") for i in range(5)]
    assert [None if page is None else len(page.names) for page in pages] == [None, None, 0, 4, 4]
    # More than all may have go at once, and the gallery stays.
    last = pages[-1]
    assert last is not None
    kept.add_names(last, {pk: Named(f"s{pk}", None) for pk in range(10, 20)})
    assert sorted(last.names) == list(range(10, 20))
    kept.add_names(last, {pk: Named(f"s{pk}", None) for pk in range(11)})
    assert not last.names and kept.page("g4") is last and kept.page("g3") is pages[3]


def found_of(keys: Sequence[int]) -> list[Finding]:
    return [Finding("lookalikes", (key, key + 1), (key, key + 1), 0.5, 0.1, None, None, "look") for key in keys]


def test_findings_are_of_one_version_and_bounded() -> None:
    kept = Kept(most_findings=10)
    made = [
        Gallery(i, f"g{i}", "f", DIMENSION, GallerySettings(), datetime.now(UTC), Seal(new_key())) for i in range(4)
    ]
    for gallery in made:
        kept.put(gallery, 1)
        kept.add_findings(gallery, found_of(range(4)))
    kept.add_findings(made[3], found_of(range(5)))
    assert [None if (found := kept.findings(gallery)) is None else len(found) for gallery in made] == [None, None, 4, 5]
    kept.add_findings(made[0], found_of(range(11)))
    assert kept.findings(made[0]) is None and len(kept.findings(made[3]) or ()) == 5
    kept.put(replace(made[3], version=7), 2)
    kept.add_findings(made[3], found_of(range(1)))  # that were read of what it was
    assert kept.findings(made[3]) is None and kept.findings(replace(made[3], version=7)) is None


def test_a_report_is_made_anew_where_anybody_wrote(database_url: DatabaseUrl, rng: np.random.Generator) -> None:
    url = database_url()
    with process(url) as one, process(url) as two:
        template, *_ = filled(one.store, "g", rng)
        kept, reports = Kept(), list[list[Finding]]()
        store = Store(one.database, kept)

        def inspect() -> list[Finding]:
            reports.append(found_of(range(2)))
            return reports[-1]

        def look() -> int:
            """How often it was made by now."""
            store.findings(store.gallery("g"), inspect)
            return len(reports)

        assert (look(), look()) == (1, 1)
        two.store.put_subject(two.store.gallery("g"), "s0", "Ada", {}, [])
        assert (look(), look()) == (2, 2)
        erasing: list[Callable[[Gallery], object]] = [
            lambda now: store.delete_template(now, "s0", template.id),
            lambda now: store.merge_subject(now, "s0", "s1"),
            lambda now: store.delete_subject(now, "s1"),
        ]
        for erase in erasing:
            before = look()
            erase(store.gallery("g"))
            assert kept.page("g") is None  # what was found of who is erased does not wait for the next look
            assert (look(), look()) == (before + 1, before + 1)

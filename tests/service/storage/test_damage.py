# ruff: noqa: S608 - statements of the tests' own
"""Damage of a stored database is found: by the doctor, and what only the service could leave by the tests' oracle."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa

from service.cli.tools.doctor import check_database
from service.core.errors import StorageDamagedError
from service.security.sealing import vector_purpose
from service.settings import load_settings
from service.storage.damage import damage
from service.storage.db.engine import Database
from service.storage.db.row_sealing import SEALED
from service.storage.db.tables import (
    crops,
    data_keys,
    idempotency,
    job_items,
    metadata,
    receivers,
    secrets,
    subjects,
    vectors,
)
from service.storage.db.tables import jobs as job_rows
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, TEXT, engine_of, open_database
from tests.faults.workers import Node
from tests.service.storage.scene import DIMENSION, filled, made, some
from tests.soundness import problems

G = "(SELECT pk FROM galleries WHERE name = 'g')"
LAST_SUBJECT = f"(SELECT max(pk) FROM subjects WHERE gallery_pk = {G})"
LAST_TEMPLATE = f"(SELECT max(pk) FROM templates WHERE gallery_pk = {G})"


def alter(url: str, *statements: str | sa.Executable) -> None:
    """Change the database without the service and its constraints."""
    engine = engine_of(url)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET session_replication_role = replica")
        for each in statements:
            connection.execute(sa.text(each) if isinstance(each, str) else each)
    engine.dispose()


def test_every_sealed_column_is_known() -> None:
    """Those of other keys: the service's own secrets open webhooks, and the master key opens keys."""
    others = {receivers.c.sealed, data_keys.c.wrapped, secrets.c.wrapped}
    binary = [each for table in metadata.sorted_tables for each in table.c if isinstance(each.type, sa.LargeBinary)]
    assert {*map(str, binary)} == {*map(str, SEALED), *map(str, others)}


@ON_BOTH
def test_an_altered_value_of_any_column_is_found_and_never_passed_over(
    database: Database, url: str, rng: np.random.Generator
) -> None:
    (gallery, _), store, bulk = filled(database, rng), Store(database), BulkStore(database)
    assert [*damage(database)] == []
    (job, *_), ada = store.jobs.list_jobs(gallery, ["failed"], None, 9), store.subjects.get(gallery, "ada").pk

    def exported() -> None:
        with bulk.open_export("g", with_crops=True) as reading:
            list(reading.blocks())

    reads: dict[sa.Column[Any], list[Callable[[], object]]] = {
        subjects.c.sealed: [
            lambda: store.subjects.get(gallery, "ada"),
            lambda: store.subjects.names(gallery, [ada]),
            exported,
        ],
        vectors.c.vector: [
            lambda: store.changes.snapshot(gallery),
            exported,
        ],
        crops.c.sealed: [exported],
        idempotency.c.sealed: [lambda: store.templates.stored_answer(gallery, "2nd key of ada", "ada")],
        job_items.c.sealed: [lambda: store.jobs.items(job, None, 9)],
        job_rows.c.problem: [lambda: store.jobs.job(job.id)],
    }
    for column in (*SEALED, receivers.c.sealed, data_keys.c.wrapped):
        with database.read() as connection:
            stored = connection.execute(sa.select(column).where(column.is_not(None))).scalars().all()
        broken = {whole: whole[:-1] + bytes([whole[-1] ^ 1]) for whole in stored}
        write = sa.update(column.table)
        alter(url, *(write.where(column == a).values({column.name: b}) for a, b in broken.items()))
        for read in reads.get(column, []) if database.file else []:  # on both in the same way
            with pytest.raises(StorageDamagedError, match="cannot be decrypted"):
                read()
        found = "\n".join(damage(database))
        assert re.search(f"1 webhooks|cannot be read|: [0-9]+ values of {column} ", found)
        alter(url, *(write.where(column == b).values({column.name: a}) for a, b in broken.items()))
    assert [*damage(database)] == []
    # The key of a row's own gallery opens it, wherever in the gallery it was put.
    bob = sa.select(subjects.c.sealed).where(subjects.c.pk == store.subjects.get(gallery, "bob").pk)
    with database.read() as connection:
        alter(url, subjects.update().where(subjects.c.pk == ada).values(sealed=connection.execute(bob).scalar_one()))
    (swapped,) = damage(database)
    assert swapped.startswith("gallery g: 1 values of subjects.sealed were altered")


def test_the_doctor_opens_the_database(url: str, rng: np.random.Generator) -> None:
    settings = load_settings(database_url=url, master_key=TEXT)
    with closing(open_database(url)) as database:
        filled(database, rng)
        (check,) = check_database(settings)
        assert check.verdict == "ok"
        alter(url, crops.update().values(sealed=b"altered"))
        check, *_ = check_database(settings)
        assert check.verdict == "error" and "values of crops.sealed were altered" in check.detail
    (check,) = check_database(load_settings(database_url=url, master_key="00" * 32))
    assert check.verdict == "error" and "needs master key" in check.detail


def test_the_doctor_creates_no_database(tmp_path: Path) -> None:
    assert check_database(load_settings(data_dir=tmp_path / "data")) == []
    assert [*tmp_path.iterdir()] == []


def test_rows_without_their_owner_are_found(tmp_path: Path, rng: np.random.Generator) -> None:
    """PostgreSQL does not let them be."""
    with closing(open_database(url := f"sqlite:///{tmp_path / 'kith.db'}")) as database:
        filled(database, rng)
        alter(url, "DELETE FROM templates WHERE pk = (SELECT max(template_pk) FROM crops)")
        assert {*damage(database)} == {
            f"1 rows of {table} belong to no other row. Restore a backup." for table in ("vectors", "crops")
        }


def test_a_damaged_page_is_told(tmp_path: Path) -> None:
    path = tmp_path / "kith.db"
    with Node(f"sqlite:///{path}") as node:
        gallery = made(node.database)
        node.enroll("g", "a", some(np.random.default_rng(0), 300))
        with node.database.read() as connection:
            middle = connection.execute(sa.select(vectors.c.vector).offset(150).limit(1)).scalar_one()
    content = bytearray(path.read_bytes())
    place = content.index(middle)
    content[place : place + 65_536] = b"\xff" * 65_536
    path.write_bytes(content)
    with Node(f"sqlite:///{path}") as node, pytest.raises(StorageDamagedError):
        node.store.changes.snapshot(gallery)
    (check,) = check_database(load_settings(data_dir=tmp_path, master_key=TEXT))
    assert check.verdict == "error" and "the file is damaged" in check.detail


# What the oracle finds


def tripled(node: Node) -> sa.Executable:
    gallery, own = node.store.galleries.get("g"), metadata.tables["templates"].c
    sealed = gallery.seal.close(np.full(DIMENSION, 3, "<f4").tobytes(), vector_purpose(0))
    last = sa.select(sa.func.max(own.pk)).where(own.gallery_pk == gallery.pk).scalar_subquery()
    return vectors.update().where(vectors.c.template_pk == last, vectors.c.generation == 0).values(vector=sealed)


UNSOUND: Final[dict[str, str | Callable[[Node], sa.Executable]]] = {
    "names no row of": f"DELETE FROM subjects WHERE pk = {LAST_SUBJECT}",
    "recognizer": f"DELETE FROM generations WHERE gallery_pk = {G}",
    "counts": "UPDATE galleries SET subject_count = 3 WHERE name = 'g'",
    "labels": f"DELETE FROM labels WHERE gallery_pk = {G}",
    "row of another": f"UPDATE subjects SET lookup = 'x' WHERE pk = {LAST_SUBJECT}",
    "no vector": f"UPDATE vectors SET generation = 7 WHERE template_pk = {LAST_TEMPLATE}",
    "unit length": tripled,
    "lacks a template": f"DELETE FROM changes WHERE template_pk = {LAST_TEMPLATE}",
    "ahead": "INSERT INTO index_states SELECT pk, 0, 'milvus', 1000, NULL, created_at FROM galleries WHERE name = 'g'",
}


@pytest.mark.parametrize("said", UNSOUND)
def test_the_oracle_of_the_tests_finds(tmp_path: Path, rng: np.random.Generator, said: str) -> None:
    with Node(url := f"sqlite:///{tmp_path / 'kith.db'}") as node:
        filled(node.database, rng)
        assert problems(url) == []
        how = UNSOUND[said]
        alter(url, how if isinstance(how, str) else how(node))
    assert any(said in problem for problem in problems(url))

# ruff: noqa: S608 - statements of the tests' own
"""Each way in which a database can be wrong is found, and mended where it can be; a sound one has no findings."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from models.vision.recognition import l2_normalize
from service.cli.main import app
from service.core.errors import StorageDamagedError
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.index import recall
from service.index.follower import Followers, in_process
from service.index.selection import Sizes
from service.jobs.spool import ABANDONED_AFTER_S, Spool
from service.operations.gallery_check import GalleryCheck, open_check
from service.security.sealing import Seal, new_key, vector_purpose
from service.storage.db.key_vault import Vault
from service.storage.db.tables import vectors
from service.storage.integrity.consistency import DATABASE_CHECKS, PAGES, Check
from service.storage.integrity.gallery_checks import GALLERY_CHECKS
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows
from service.storage.repositories.store import Store
from tests.databases import MASTER, open_database
from tests.faults.workers import Node
from tests.postgres import DatabaseUrl

DIMENSION = 16
Damage = Callable[[sa.Connection], Any]
G = "(SELECT pk FROM galleries WHERE name = 'g')"


@pytest.fixture
def url(database_url: DatabaseUrl) -> str:
    """A database with two galleries in use."""
    rng = np.random.default_rng(0)
    made = database_url()
    with Node(made) as node:
        for name in ("g", "other"):
            gallery = node.store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings())
            for i in range(12):
                node.put_subject(name, f"s{i}", {"floor": i % 3}, ["night"])
                new = [
                    NewTemplate(uuid.uuid4().hex, v, "embedding") for v in l2_normalize(rng.normal(size=(2, DIMENSION)))
                ]
                node.store.templates.enroll(gallery, f"s{i}", new, None)
            node.delete_subject(name, "s3")
            node.move_template(name, "s0", node.store.templates.list_page(gallery, "s0")[0].id, "s1")
    return made


def damage(url: str, *how: str | Damage) -> None:
    """Change the database without the service and its constraints."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET session_replication_role = replica")
        for step in how:
            if callable(step):
                step(connection)
            else:
                connection.exec_driver_sql(step)
    engine.dispose()


def found(url: str, repair: bool = False, name: str | None = None) -> dict[str, bool]:
    """Kinds of the findings, and whether they were mended."""
    with open_check(open_database(url)) as check:
        return {finding.kind: finding.repaired for finding in check.findings(name, repair)}


def seal_of(connection: sa.Connection) -> Seal:
    row = connection.execute(gallery_rows().where(sa.text(f"galleries.pk = {G}"))).one()
    return gallery_of(row, Vault(MASTER)).seal


def a_vector(value: bytes, sealed: bool = True) -> Damage:
    def change(connection: sa.Connection) -> None:
        stored = seal_of(connection).close(value, vector_purpose(0)) if sealed else value
        pk = connection.exec_driver_sql(f"SELECT max(pk) FROM templates WHERE gallery_pk = {G}").scalar_one()
        statement = sa.text("UPDATE vectors SET vector = :value WHERE template_pk = :pk")
        connection.execute(statement, {"value": stored, "pk": pk})

    return change


def uncounted(connection: sa.Connection) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("DELETE FROM templates WHERE pk = (SELECT max(pk) FROM templates)")
        connection.exec_driver_sql("UPDATE sqlite_sequence SET seq = 5 WHERE name = 'templates'")
    else:
        connection.exec_driver_sql("SELECT setval(pg_get_serial_sequence('templates', 'pk'), 5)")


LONG = np.full(DIMENSION, 3, "<f4").tobytes()
NUMBERLESS = np.full(DIMENSION, np.nan, "<f4").tobytes()
MENDED: Final[dict[str, list[str | Damage]]] = {
    "orphans": [f"DELETE FROM subjects WHERE pk = (SELECT max(pk) FROM subjects WHERE gallery_pk = {G})"],
    "counters": [uncounted],
    "generation": [f"DELETE FROM generations WHERE gallery_pk = {G}"],
    "counts": ["UPDATE galleries SET subject_count = 3, template_count = template_count + 1 WHERE name = 'g'"],
    "labels": [f"DELETE FROM labels WHERE gallery_pk = {G}"],
    "vectors_unowned": [
        f"INSERT INTO vectors SELECT pk, 7, vector FROM templates JOIN vectors ON template_pk = pk "
        f"WHERE gallery_pk = {G}"
    ],
    "vectors_length": [a_vector(LONG)],
    "log": [f"DELETE FROM changes WHERE template_pk = (SELECT max(pk) FROM templates WHERE gallery_pk = {G})"],
    "evidence": [
        "INSERT INTO evidence SELECT pk, 0, 1000, 'max', 24, '{}', created_at FROM galleries WHERE name = 'g'"
    ],
    "index_states": [
        "INSERT INTO index_states SELECT pk, 0, 'milvus', 1000, created_at FROM galleries WHERE name = 'g'"
    ],
}


def test_what_is_wrong_is_found_told_and_mended(url: str) -> None:
    assert found(url) == {}
    for kind, how in MENDED.items():
        damage(url, *how)
        wrong = set(found(url))
        # Rows that went are not counted, and a key that goes beyond the log is one to count on from.
        assert kind in wrong and wrong <= {kind, "counts", "counters", "orphans"}, kind
        mended = found(url, repair=True)
        assert mended[kind] and all(mended.values()), kind
        assert found(url) == {}, kind
        assert kind in [line["kind"] for line in repairs(url)]


def repairs(url: str) -> list[dict[str, Any]]:
    """Return the audit lines of repairs."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        lines = connection.exec_driver_sql("SELECT details FROM audit WHERE event = 'repaired'").scalars().all()
    engine.dispose()
    return [json.loads(line) if isinstance(line, str) else line for line in lines]


@pytest.mark.parametrize("vector", [b"short", NUMBERLESS, bytes(4 * DIMENSION)])
def test_a_vector_that_is_none_is_set_aside_so_that_the_gallery_can_be_searched(url: str, vector: bytes) -> None:
    damage(url, a_vector(vector))
    probe = np.eye(DIMENSION, dtype=np.float32)[:1]
    assert found(url) == {"vectors_damaged": False}
    # What cannot be made whole again is left to be told.
    assert found(url, repair=True) == {"vectors_damaged": True, "vectors_missing": False}
    assert found(url) == {"vectors_missing": False}
    with Node(url) as node:
        ((*hits,),) = node.search("g", probe, 20)
        assert len(hits) == 11
        taken = node.store.changes.snapshot(node.store.galleries.get("g"))
        assert len(taken.vectors) == node.store.galleries.get("g").templates - 1


def test_the_index_is_checked_against_the_database(url: str) -> None:
    """A row changed behind the log's back is what an index cannot know."""
    with open_check(open_database(url)) as check:
        assert list(check.findings("g", False)) == []
        vector = l2_normalize(np.random.default_rng(9).normal(size=(1, DIMENSION))).astype("<f4").tobytes()
        damage(url, a_vector(vector))
        assert [finding.kind for finding in check.findings("g", False)] == ["index"]
    assert found(url) == {}


def test_an_index_of_codes_is_judged_by_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is one: it is put in order before it is searched."""
    monkeypatch.setattr(recall, "RECALL_OF_NEAREST", 0.0)
    database = open_database(f"sqlite:///{tmp_path / 'kith.db'}")
    store, rng = Store(database), np.random.default_rng(0)
    settings = GallerySettings(fusion="max", index="compact", recall=0.5)
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, settings)
    for i in range(40):
        new = [NewTemplate(uuid.uuid4().hex, v, "embedding") for v in l2_normalize(rng.normal(size=(64, DIMENSION)))]
        store.templates.enroll(gallery, f"s{i}", new, None)
    sizes = Sizes(seal=256, compact_from=512, max_length=4096)
    followers = Followers(in_process(store, sizes=sizes, in_foreground=True))
    check = GalleryCheck(store, followers)
    assert list(check.findings("g", False)) == []
    stats = followers.catch_up_blocking(store.galleries.get("g")).stats()
    assert stats.kind == "compact" and stats.recall is not None
    assert stats.recall.at_1 >= 0.5 and stats.recall.at_10 < 0.9  # which is not promised
    others = l2_normalize(rng.normal(size=(40 * 64, DIMENSION))).astype("<f4")
    with database.change(gallery) as connection:
        pks = store.changes.snapshot(gallery).template_pks.tolist()
        for pk, vector in zip(pks, gallery.seal.close_vectors(others, 0), strict=True):
            connection.execute(vectors.update().where(vectors.c.template_pk == pk).values(vector=vector))
    assert [finding.kind for finding in check.findings("g", False)] == ["index"]
    followers.close()
    store.close()


def test_files_that_no_job_waits_for(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for name in ("0" * 32, "1" * 32):
        with spool.receiving(name, Seal(new_key())) as file:
            file.write(b"half an archive")
    long_ago = time.time() - 2 * ABANDONED_AFTER_S
    os.utime(spool.path("0" * 32), (long_ago, long_ago))
    for repair, expected in ((False, {"abandoned": False}), (True, {"abandoned": True}), (False, {})):
        with open_check(open_database(url), spool.abandoned) as check:
            assert {finding.kind: finding.repaired for finding in check.findings("g", repair)} == expected
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["1" * 32]


def test_every_check_says_what_to_do() -> None:
    checks: list[Check[Vault] | Check[Gallery]] = [PAGES, *DATABASE_CHECKS, *GALLERY_CHECKS]
    assert len({check.kind for check in checks}) == len(checks)
    assert all(check.action and check.what for check in checks)
    assert {check.kind for check in checks if check.mend} == {*MENDED, "vectors_damaged"}


@pytest.fixture
def command(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str]]]:
    monkeypatch.setenv("KITH_DATABASE_URL", url)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["gallery", "check", *arguments])
        return result.exit_code, " ".join(result.output.split())

    yield run


def test_the_command(url: str, command: Callable[..., tuple[int, str]]) -> None:
    assert command() == (0, "No problems found")
    damage(url, *MENDED["counts"])
    status, said = command("g")
    assert status == 1 and said.startswith("gallery g: counts (2): ") and said.endswith("[run with --repair]")
    assert command("other") == (0, "No problems found")
    status, said = command("--json")
    assert (status, [finding["kind"] for finding in json.loads(said)]) == (1, ["counts"])
    assert command("g", "--repair")[0] == 0
    assert command("g") == (0, "No problems found")


def test_a_damaged_page_is_told(tmp_path: Path) -> None:
    path = tmp_path / "kith.db"
    with Node(f"sqlite:///{path}") as node:
        node.store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
        drawn = l2_normalize(np.random.default_rng(0).normal(size=(3000, DIMENSION)))
        new = [NewTemplate(uuid.uuid4().hex, vector, "embedding") for vector in drawn]
        node.enroll("g", "a", new)
        with node.store.database.read() as connection:
            middle = connection.execute(sa.select(vectors.c.vector).offset(1500).limit(1)).scalar_one()
    content = bytearray(path.read_bytes())
    place = content.index(middle)
    content[place : place + 65_536] = b"\xff" * 65_536
    path.write_bytes(content)
    with Node(f"sqlite:///{path}") as node, pytest.raises(StorageDamagedError):
        node.store.changes.snapshot(node.store.galleries.get("g"))
    assert found(f"sqlite:///{path}") == {"pages": False}
    assert found(f"sqlite:///{path}", repair=True) == {"pages": False}

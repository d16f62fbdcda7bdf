"""SQL is the truth; the index follows it and answers as brute force over it would."""

from __future__ import annotations

import math
import os
import shutil
import stat
import uuid
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from models.runtime.network import Float
from service.core.errors import StorageError
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.storage.db import engine
from service.storage.db.tables import metadata
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, engine_of, open_database
from tests.service.domain.test_fusion import fused_similarity

DIMENSION = 8


def template(vector: Float) -> NewTemplate:
    return NewTemplate(uuid.uuid4().hex, vector, "embedding")


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())


def test_nobody_else_may_read_the_files_of_a_database(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    before = os.umask(0)
    try:
        with closing(open_database(f"sqlite:///{folder / 'kith.db'}")) as database:
            Store(database).galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
            files = list(folder.iterdir())
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (folder, *files)}
    finally:
        os.umask(before)
    assert modes == {"data": 0o700, "kith.db": 0o600, "kith.db-wal": 0o600, "kith.db-shm": 0o600}


def run(url: str, statement: str) -> list[str]:
    """Run a statement without Kith. Return the first column of its rows, if it is a query."""
    plain = engine_of(url)
    with plain.begin() as connection:
        result = connection.exec_driver_sql(statement)
        found = list(result.scalars()) if result.returns_rows else []
    plain.dispose()
    return found


@ON_BOTH
def test_a_new_database_has_the_tables_and_the_newest_revision(url: str) -> None:
    for _ in range(2):
        with closing(open_database(url)) as database, database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert run(url, "SELECT version_num FROM alembic_version") == ["0200"]


@ON_BOTH
def test_the_database_of_an_earlier_release_is_upgraded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test adds a later revision. A new database starts with it; an existing one runs it, with its contents."""
    with closing(open_database(url)) as database:
        Store(database).galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    shutil.copytree(engine.MIGRATIONS, tmp_path / "migrations")
    (tmp_path / "migrations" / "versions" / "0201_add_a_note.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\nrevision = '0201'\ndown_revision = '0200'\n"
        "def upgrade() -> None:\n    op.add_column('leases', sa.Column('note', sa.String(8)))\n"
    )
    monkeypatch.setattr(engine, "MIGRATIONS", tmp_path / "migrations")
    for _ in range(2):
        with closing(open_database(url)) as database:
            assert Store(database).galleries.get("g").name == "g"
            assert "note" in [column["name"] for column in sa.inspect(database.engine).get_columns("leases")]
        assert run(url, "SELECT version_num FROM alembic_version") == ["0201"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE alembic_version SET version_num = '0006'",
        "UPDATE alembic_version SET version_num = '0300'",
        "DELETE FROM alembic_version",
        "DROP TABLE alembic_version",
    ],
)
def test_the_tables_of_another_version_are_refused(url: str, change: str) -> None:
    open_database(url).close()
    run(url, change)
    with pytest.raises(StorageError, match=r"the database (cannot be upgraded|has tables)") as refused:
        open_database(url)
    assert refused.value.remedy == engine.OTHER_VERSION_REMEDY


def test_a_commit_is_flushed_before_it_is_acknowledged(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'kith.db'}")
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    database.close()


def brute_force(
    enrolled: dict[str, list[NewTemplate]], probe: Float, k: int, among: set[str] | None
) -> list[tuple[str, float]]:
    fused = {
        subject: fused_similarity(
            probe, [t.vector for t in owned], [t.quality["score"] if t.quality else math.nan for t in owned]
        )
        for subject, owned in enrolled.items()
        if owned and (among is None or subject in among)
    }
    return sorted(fused.items(), key=lambda item: -item[1])[:k]


def of_some_quality(vector: Float, rng: np.random.Generator) -> NewTemplate:
    if rng.random() < 0.3:
        return template(vector)
    return NewTemplate(uuid.uuid4().hex, vector, "photo", {"score": round(float(rng.random()), 3)})


def test_a_database_that_cannot_be_opened_or_is_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"unable to open|cannot be"):
        open_database(f"sqlite:///{tmp_path / 'file' / 'kith.db'}")
    with pytest.raises(StorageError, match="sqlite or postgresql"):
        open_database("mysql://localhost/kith")

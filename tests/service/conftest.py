"""Fixtures of the service tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.index.milvus import Milvus
from service.storage.db.engine import Database
from service.storage.repositories.store import Store
from tests.conftest import url_maker
from tests.databases import open_database
from tests.nodes import Node, Nodes
from tests.postgres import DatabaseUrl


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Factory of empty databases. PostgreSQL repeats everything in the long tests, and before that only what it does in
    another way: tests that are marked ON_BOTH.
    """
    return url_maker(request, tmp_path)


@pytest.fixture
def url(database_url: DatabaseUrl) -> str:
    """URL of a new database, of each kind in turn."""
    return database_url()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with closing(open_database(url)) as opened:
        yield opened


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    """Factory of nodes over one new database and separate Milvus collections. The database is SQLite, or of each kind
    if a test uses ``database_url``.
    """
    each = "database_url" in request.fixturenames
    url: str = request.getfixturevalue("database_url")() if each else f"sqlite:///{tmp_path / 'kith.db'}"
    prefix, made = f"t{uuid.uuid4().hex[:12]}", list[Node]()

    def make(engine: str = "milvus lite", timeout_s: float = 10, uri: str | None = None) -> Node:
        options = None
        if engine != "faiss":
            lite = engine == "milvus lite"
            found = uri or request.getfixturevalue("milvus_lite" if lite else "milvus_server")
            options = Milvus(getattr(found, "uri", found), prefix=prefix, timeout_s=timeout_s)
        made.append(Node(url, options))
        return made[-1]

    yield make
    for node in made:
        node.close()

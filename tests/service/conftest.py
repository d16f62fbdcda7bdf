"""Fixtures of the service's tests alone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.gallery.database import Database
from service.gallery.milvus_index import IndexKind, MilvusOptions
from tests.databases import open_database
from tests.nodes import Node, Nodes
from tests.postgres import DatabaseUrl


@pytest.fixture
def url(database_url: DatabaseUrl) -> str:
    """Of a database that is yet to be made, of each kind in turn."""
    return database_url()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with closing(open_database(url)) as opened:
        yield opened


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    """Makes nodes over one fresh database (SQLite; of each kind, where a test uses ``database_url``), and over
    collections of the test's own in Milvus."""
    each = "database_url" in request.fixturenames
    url: str = request.getfixturevalue("database_url")() if each else f"sqlite:///{tmp_path / 'kith.db'}"
    prefix, made = f"t{uuid.uuid4().hex[:12]}", list[Node]()

    def make(
        engine: str = "milvus lite", kind: IndexKind = "FLAT", timeout_s: float = 10, uri: str | None = None
    ) -> Node:
        options = None
        if engine != "faiss":
            lite = engine == "milvus lite"
            found = uri or request.getfixturevalue("milvus_lite" if lite else "milvus_server")
            options = MilvusOptions(getattr(found, "uri", found), index=kind, prefix=prefix, timeout_s=timeout_s)
        made.append(Node(url, options))
        return made[-1]

    yield make
    for node in made:
        node.close()

"""Kills during backup and restore: the file is complete or absent, and the database is unchanged or restored."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import pytest

from service.core.errors import LocalError
from service.domain.gallery import GallerySettings
from service.storage.privacy.backup import back_up, read_manifest, restore
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.tally import Tally
from tests.faults.test_sigkill import new_template
from tests.faults.workers import Node, template_id
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

DIMENSION = 32
TEMPLATES = [template_id(3, number) for number in range(500)]


def _back_up(url: str, path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    pipe.send("begun")
    back_up(database, path)
    pipe.send("done")


def _restore(url: str, path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    pipe.send("begun")
    restore(database, path, replace=True)
    pipe.send("done")


def test_a_killed_backup_leaves_the_one_before(some_database_url: DatabaseUrl, tmp_path: Path, tally: Tally) -> None:
    url, rng, path = some_database_url(), np.random.default_rng(), tmp_path / "kith.backup"
    with Node(url) as node:
        gallery = node.store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
        node.store.templates.enroll(gallery, "a", [new_template(template, DIMENSION) for template in TEMPLATES], None)
    started = time.monotonic()
    assert Killed(_back_up, url, path).at_its_end() == ["begun", "done"]
    took, before = time.monotonic() - started, read_manifest(path)
    for _ in range(8 if LONG else 1):
        Killed(_back_up, url, path).after(1, rng.uniform(0, took))
        tally.kills["backup"] += 1
        with tally.judging():
            assert read_manifest(path).rows == before.rows
    _restores(url, some_database_url(), path, took, tally)


def _restores(source: str, url: str, path: Path, took: float, tally: Tally) -> None:
    rng = np.random.default_rng()
    with Node(url) as node:
        node.store.galleries.create("before", "f" * 32, DIMENSION, GallerySettings())
        node.enroll("before", "a", [new_template(template_id(4, 0), DIMENSION)])
    state = "before"
    for _ in range(8 if LONG else 1):
        said = Killed(_restore, url, path).after(1, rng.uniform(0, 1.5 * took))
        tally.kills["restore"] += 1
        with tally.judging(), Node(url) as node:
            (gallery,) = node.store.galleries.list_page(None, 5)
            assert gallery.name == "g" or (state == "before" and "done" not in said)
            state = gallery.name
            assert set(node.templates(state)) == (set(TEMPLATES) if state == "g" else {template_id(4, 0)})
            assert problems(url) == []
    assert Killed(_restore, url, path).at_its_end() == ["begun", "done"]
    with Node(url) as node, Node(source) as original:
        assert node.templates("g") == original.templates("g")
    assert problems(url) == []


def test_a_backup_cut_off_by_other_means_is_refused(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path / 'kith.db'}", tmp_path / "kith.backup"
    with Node(url) as node:
        node.store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
        database = node.database
        back_up(database, path)
        path.write_bytes(path.read_bytes()[:-100])
        try:
            restore(database, path, replace=True)
        except LocalError as error:
            assert error.code == "backup"
            assert [gallery.name for gallery in node.store.galleries.list_page(None, 5)] == ["g"]
        else:
            raise AssertionError("a part of a backup was restored")

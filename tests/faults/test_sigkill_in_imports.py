"""Kills during an import: complete blocks are stored, and importing the same file again adds the rest."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe

import numpy as np
import pytest

from kith.wire.transfer import GalleryFileItem
from service.domain.gallery import GallerySettings
from service.domain.gallery_items import FileRow, vector_bytes
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.store import Store
from service.storage.transfer.importing import Import
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.tally import Tally
from tests.faults.workers import Node, template_id, vector_of
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

DIMENSION = 32
IN_BLOCK = 100
BLOCKS = 12


def block(number: int) -> list[str]:
    return [template_id(7, number * IN_BLOCK + i) for i in range(IN_BLOCK)]


def _import(url: str, gallery: str, pipe: Pipe) -> None:
    database = open_database(url)
    taking = Import(BulkStore(database), Store(database).galleries.get(gallery))
    for number in range(BLOCKS):
        ids = block(number)
        rows = [
            FileRow(number * IN_BLOCK + place, about, about.subject, vector_bytes(vector_of(template, DIMENSION)))
            for place, template in enumerate(ids, start=1)
            for about in [GalleryFileItem(subject=f"s{int(template, 16) % 500}", template=template)]
        ]
        taking.take(rows)
        pipe.send(number)


def test_an_import_killed_midway_goes_on_with_the_same_file(some_database_url: DatabaseUrl, tally: Tally) -> None:
    url, rng = some_database_url(), np.random.default_rng()
    for i in range(6 if LONG else 1):
        name = f"g{i}"
        with Node(url) as node:
            node.store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings())
        for _ in range(2):
            said = Killed(_import, url, name).after(int(rng.integers(0, BLOCKS // 2)), rng.uniform(0, 0.05))
            tally.kills["import"] += 1
            with tally.judging(), Node(url) as node:
                stored = node.templates(name)
                whole = len(stored) // IN_BLOCK
                assert set(stored) == {template for number in range(whole) for template in block(number)}
                assert whole >= len(said)
                assert problems(url, name) == []
        finished = Killed(_import, url, name).at_its_end()
        with tally.judging(), Node(url) as node:
            assert finished == list(range(BLOCKS))
            assert set(node.templates(name)) == {t for number in range(BLOCKS) for t in block(number)}
            assert problems(url, name) == []

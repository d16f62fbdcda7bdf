"""Kills at any instant of an erasure: the person is stored completely or not at all, and is gone once acknowledged."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import sqlalchemy as sa

from service.domain.gallery import Crop, Gallery, GallerySettings, IdempotentResponse, NewTemplate, SubjectFilter
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import crops, erasures, idempotency, labels, templates, vectors
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.tally import Tally
from tests.faults.workers import DIMENSION, Node, template_id, vector_of
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

PEOPLE: Final = 60
EACH: Final = 5
LANDMARKS: Final = ((1.0, 1.0), (3.0, 1.0), (2.0, 2.0), (1.0, 3.0), (3.0, 3.0))


def _fill(store: Store, gallery: Gallery) -> None:
    for person in range(PEOPLE):
        ids = [template_id(person, number) for number in range(EACH)]
        crop = Crop(b"a face" * 100, LANDMARKS)
        new = [NewTemplate(t, vector_of(t, DIMENSION), "photo", crop=crop) for t in ids]
        store.templates.enroll(gallery, f"s{person}", new, IdempotentResponse(f"key {person}", "d", "an answer"))
        store.subjects.put(gallery, f"s{person}", "Name", {}, ["tag"])


def _judge(url: str, acknowledged: dict[str, str]) -> set[str]:
    """Return the remaining subjects."""
    database = open_database(url)
    store = Store(database)
    gallery = store.galleries.get("g")
    receipts = ErasureStore(database).list_page(gallery, limit=1000)
    left = {s.id for s in store.subjects.list_page(gallery, None, 1000, SubjectFilter())}
    assert not left & acknowledged.keys()
    with database.read() as connection:
        counts = {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in (templates, vectors, crops, labels, idempotency)
        }
        known = set(connection.execute(sa.select(erasures.c.subject)).scalars())
    whole = len(left) * EACH
    assert counts == {
        "templates": whole,
        "vectors": whole,
        "crops": whole,
        "labels": len(left),
        "idempotency": len(left),
    }
    everybody = {f"s{person}" for person in range(PEOPLE)}
    assert known == {subject_lookup(gallery.seal, gone) for gone in everybody - left}
    assert {receipt.id for _, receipt in receipts} >= set(acknowledged.values())
    with Node(url) as node:
        assert set(node.templates("g").values()) == left
    assert problems(url, "g") == []
    database.close()
    return left


def test_a_person_is_erased_whole_or_not_at_all(some_database_url: DatabaseUrl, tmp_path: Path, tally: Tally) -> None:
    url, rng = some_database_url(), np.random.default_rng()
    with Node(url) as node:
        _fill(
            node.store,
            node.store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings(keep_crops=True)),
        )
    acknowledged: dict[str, str] = {}
    left = {f"s{person}" for person in range(PEOPLE)}
    for _ in range(20 if LONG else 4):
        if not left:
            break
        said = Killed(_erase_left, url, sorted(left)).after(int(rng.integers(1, 6)), rng.uniform(0, 0.01))
        tally.kills["erasure"] += 1
        acknowledged |= dict(said)
        with tally.judging():
            left = _judge(url, acknowledged)
    Killed(_erase_left, url, sorted(left)).at_its_end()
    with tally.judging():
        assert _judge(url, acknowledged) == set()


def _erase_left(url: str, left: list[str], pipe: Pipe) -> None:
    with Node(url) as node:
        for subject in left:
            pipe.send((subject, node.delete_subject("g", subject).id))

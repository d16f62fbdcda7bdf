"""Oracle of the tests: what is wrong in a database, counted again from its rows, and with the answers of an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.vision.recognition import l2_normalize
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Gallery
from service.index.follower import Followers, MemoryFollower, in_process
from service.storage.db.row_sealing import labels_of, open_subject, subject_lookup
from service.storage.db.tables import (
    changes,
    evidence,
    galleries,
    generations,
    index_states,
    labels,
    last_change,
    metadata,
    subjects,
    templates,
    vectors,
)
from service.storage.repositories.store import Store
from tests.databases import open_database

PROBES = 32
NEAREST = 10


def problems(url: str, name: str | None = None) -> list[str]:
    """Return what is wrong with the rows of all tables, and with one gallery or all. Raises StorageDamagedError."""
    store = Store(open_database(url))
    followers = Followers(in_process(store))
    with closing(store), closing(followers):
        with store.database.read() as connection:
            found = [*_without_owner(connection)]
        for gallery in store.galleries.list_page(None, 1000) if name is None else [store.galleries.get(name)]:
            with store.database.read() as connection:
                wrong = [*_wrong_rows(connection, gallery)]
            others = [] if gallery.other is None else [gallery.at_generation(gallery.other.number)]
            for generation in (gallery, *others):
                wrong += _wrong_answers(store, followers, generation)
            found += [f"{gallery.name}: {one}" for one in wrong]
    return found


def _without_owner(connection: Connection) -> Iterator[str]:
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            owner = key.column.table.alias()
            owned = sa.select(owner.c[key.column.name]).where(owner.c[key.column.name] == key.parent).exists()
            if connection.execute(sa.select(key.parent).where(key.parent.is_not(None), ~owned)).first():
                yield f"{key.parent} names no row of {key.column.table}"


def _wrong_rows(connection: Connection, gallery: Gallery) -> Iterator[str]:
    row = connection.execute(sa.select(galleries).where(galleries.c.pk == gallery.pk)).one()
    kept = connection.execute(sa.select(generations).where(generations.c.gallery_pk == gallery.pk)).all()
    current = [(one.fingerprint, one.dimension) for one in kept if one.generation == row.current_generation]
    if current != [(row.fingerprint, row.dimension)]:
        yield "its recognizer is not that of its current generation"
    right: set[tuple[int, str]] = set()
    known = connection.execute(sa.select(subjects).where(subjects.c.gallery_pk == gallery.pk)).all()
    for one in known:
        about = open_subject(gallery.seal, one.sealed)
        if subject_lookup(gallery.seal, about.id) != one.lookup:
            yield f"subject {one.pk} has the row of another"
        right |= {(one.pk, label) for label in labels_of(gallery.seal, about.tags, about.metadata)}
    stored = sa.select(labels.c.subject_pk, labels.c.label).where(labels.c.gallery_pk == gallery.pk)
    if {(one.subject_pk, one.label) for one in connection.execute(stored)} != right:
        yield "its labels do not match its subjects"
    own = templates.c.gallery_pk == gallery.pk
    generations_of: dict[int, set[int | None]] = {}
    embedded = sa.select(templates.c.pk, vectors.c.generation).outerjoin(vectors).where(own)
    for pk, generation in connection.execute(embedded):
        generations_of.setdefault(pk, set()).add(generation)
    outsiders = [one for one in known if one.owner_pk is not None]  # each has one template
    if (row.subject_count, row.template_count) != (len(known) - len(outsiders), len(generations_of) - len(outsiders)):
        yield "its counts are wrong"
    if any(found - {one.generation for one in kept} for found in generations_of.values()):
        yield "a template has no vector, or one of no generation"
    logged = sa.select(changes.c.template_pk).where(changes.c.gallery_pk == gallery.pk)
    unlogged = sa.select(templates.c.pk).where(own, templates.c.pk.not_in(logged))
    if row.log_floor == 0 and connection.execute(unlogged).first():
        yield "its change log lacks a template"
    last = connection.execute(sa.select(last_change()).where(galleries.c.pk == gallery.pk)).scalar_one()
    for table in (evidence, index_states):
        ahead = sa.select(table.c.sequence).where(table.c.gallery_pk == gallery.pk, table.c.sequence > last)
        if connection.execute(ahead).first():
            yield f"{table} is ahead of its change log"


def _wrong_answers(store: Store, followers: Followers, gallery: Gallery) -> Iterator[str]:
    """Compare searches for noisy templates with brute force. Both read the rows after the last write."""
    taken = store.changes.snapshot(gallery)
    if not len(taken.vectors):
        return
    if not np.allclose(np.linalg.norm(taken.vectors, axis=1), 1, rtol=0, atol=1e-3):
        yield "a vector is not of unit length"
    rng = np.random.default_rng(len(taken.vectors))
    drawn = taken.vectors[rng.integers(len(taken.vectors), size=PROBES)]
    probes = l2_normalize(drawn + rng.normal(size=drawn.shape) * 0.3 / np.sqrt(drawn.shape[1]))
    follower = followers.catch_up_blocking(gallery)
    found, compared = follower.search(probes, NEAREST)
    if isinstance(follower, MemoryFollower) and follower.index.kind != "exact":
        return  # of limited recall
    expected = fuse_similarities(probes, taken.vectors, taken.subject_pks, taken.qualities)
    subject_pks = np.unique(taken.subject_pks).tolist()
    right = compared == len(subject_pks)
    for hits, row in zip(found, expected, strict=True):
        similarity = dict(zip(subject_pks, row.tolist(), strict=True))
        said = [(hit.similarity, similarity.get(hit.subject_pk, np.nan)) for hit in hits]
        best = np.sort(row)[::-1][:NEAREST, None]
        right = right and len(hits) == len(best) and np.allclose(said, best, rtol=0, atol=1e-4)
    if not right:
        yield "searches differ from brute force"

"""``kith gallery check``: is everything that a gallery promises still so, and can what is not be mended?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from models.recognition import unit
from service.gallery.consistency import DATABASE_CHECKS, GALLERY_CHECKS, PAGES, Consistency
from service.gallery.database import Database, open_engine
from service.gallery.follower import Follower, Followers
from service.gallery.fusion import ONE_VECTOR, scores
from service.gallery.replicas import in_process
from service.gallery.store import Store
from service.gallery.subjects import Gallery

if TYPE_CHECKING:
    from service.gallery.milvus_replica import MilvusEngine

PROBES: Final = 32
NEAREST: Final = 10
SIMILARITY_TOLERANCE: Final = 1e-4
ATTEMPTS: Final = 5
"""At one look at SQL and index together, where others write meanwhile."""
PAGE: Final = 1000


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be. ``repaired``: it was, and is no longer."""

    kind: str
    gallery: str | None
    count: int
    what: str
    action: str
    mendable: bool
    repaired: bool


@contextmanager
def open_check(
    database_url: str, open_milvus: Callable[[Database], MilvusEngine | None] = lambda _: None
) -> Iterator[GalleryCheck]:
    """A check of the database at ``database_url``, and of its indexes: those in Milvus, if ``open_milvus`` gives it, or
    else indexes of the check's own. Raises StorageError."""
    database = Database(open_engine(database_url))
    store = Store(database)
    milvus = open_milvus(database)
    followers = Followers(in_process(store) if milvus is None else milvus.replica)
    try:
        yield GalleryCheck(store, Consistency(database), followers, milvus)
    finally:
        followers.close()
        if milvus is not None:
            milvus.close()
        store.close()


class GalleryCheck:
    """Looks at a database and the indexes that follow it; services may go on meanwhile."""

    def __init__(
        self, store: Store, consistency: Consistency, followers: Followers, milvus: MilvusEngine | None = None
    ) -> None:
        self._store = store
        self._consistency = consistency
        self._followers = followers
        self._milvus = milvus

    def findings(self, name: str | None, repair: bool) -> Iterator[Finding]:
        """Of one gallery, or of all; of the database in both cases.

        Raises:
            GalleryNotFoundError: there is none of this name.
            StorageError: the database cannot be read, or not be mended.
            IndexUnavailableError: Milvus does not answer.
        """
        of_database = list(self._database(repair))
        yield from of_database
        if any(finding.kind == PAGES.kind for finding in of_database):
            return  # there is no use in reading further
        for gallery in [self._store.gallery(name)] if name is not None else self._all():
            yield from self._of(gallery, repair)

    def _all(self) -> Iterator[Gallery]:
        after: str | None = None
        while page := self._store.list_galleries(after, PAGE):
            yield from page
            after = page[-1].name

    def _database(self, repair: bool) -> Iterator[Finding]:
        for check in DATABASE_CHECKS:
            if count := self._consistency.count_in_database(check):
                mended = repair and check.mend is not None
                if mended:
                    self._consistency.repair_database(check)
                yield Finding(check.kind, None, count, check.what, check.action, check.mend is not None, mended)
                if check is PAGES:
                    return

    def _of(self, gallery: Gallery, repair: bool) -> Iterator[Finding]:
        unsearchable = 0
        for check in GALLERY_CHECKS:
            if count := self._consistency.count(check, gallery):
                mended = repair and check.mend is not None
                if mended:
                    self._consistency.repair(check, gallery)
                elif check.kind in ("vectors_damaged", "vectors_length"):
                    unsearchable += count
                yield Finding(check.kind, gallery.name, count, check.what, check.action, check.mend is not None, mended)
        # What damaged vectors do to an index is not the index's fault.
        if not unsearchable:
            yield from self._index(gallery, repair)

    def _index(self, gallery: Gallery, repair: bool) -> Iterator[Finding]:
        """Answers of an index against brute force over SQL."""
        follower = self._followers.of(gallery)
        for _ in range(ATTEMPTS):
            before = self._store.snapshot(gallery)
            wrong = self._wrong_answers(gallery, follower)
            if self._store.changes_since(gallery, before.sequence) == 0:
                break
        else:
            return  # too busy to be seen at one moment; whoever asks again later will
        if not wrong:
            return
        what = "searches are answered otherwise than by brute force over the database"
        if self._milvus is None:
            action = "Restart the service: indexes are made anew from the database. Please report it."
            yield Finding("index", gallery.name, wrong, what, action, False, False)
            return
        action = "The index in Milvus is to be gone through from the beginning. Please report it."
        if repair:
            self._milvus.start_over(gallery)
        mended = repair and not self._wrong_answers(gallery, follower)
        yield Finding("index", gallery.name, wrong, what, action, True, mended)

    def _wrong_answers(self, gallery: Gallery, follower: Follower) -> int:
        """Of PROBES searches for templates of the gallery, a little aside."""
        taken = self._store.snapshot(gallery)
        if not len(taken.template_pks):
            return 0
        rng = np.random.default_rng(len(taken.template_pks))
        drawn = taken.vectors[rng.integers(len(taken.vectors), size=PROBES)]
        probes = unit(drawn + rng.normal(size=drawn.shape) * 0.3 / np.sqrt(drawn.shape[1]))
        results, compared = follower.search(probes, NEAREST)
        subject_pks = np.unique(taken.subject_pks)
        expected = scores(probes, taken.vectors, taken.subject_pks, taken.qualities, gallery.settings.fusion)
        if compared != len(subject_pks):
            return len(probes)
        one_each = gallery.settings.fusion in ONE_VECTOR
        if self._milvus is not None and follower.stats().vectors != len(
            subject_pks if one_each else taken.template_pks
        ):
            return len(probes)
        wrong = 0
        for hits, row in zip(results, expected, strict=True):
            columns = np.searchsorted(subject_pks, [hit.subject_pk for hit in hits])
            best = np.sort(row)[::-1][: len(hits)]
            said = np.array([hit.similarity for hit in hits])
            right = (
                len(hits) == min(NEAREST, len(subject_pks))
                and np.isin([hit.subject_pk for hit in hits], subject_pks).all()
                and np.allclose(said, row[columns], rtol=0, atol=SIMILARITY_TOLERANCE)
                and np.allclose(said, best, rtol=0, atol=SIMILARITY_TOLERANCE)
            )
            wrong += not right
        return wrong

"""Consistency check and repair of galleries (``kith gallery check``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import MasterKeyError, StorageDamagedError
from service.domain.fusion import VECTOR_FUSIONS, fuse_similarities
from service.domain.gallery import Gallery, Hit, Keys, Snapshot
from service.index.follower import Follower, Followers, in_process
from service.storage.db.engine import Database
from service.storage.integrity.consistency import DATABASE_CHECKS, PAGES, Check, Of
from service.storage.integrity.gallery_checks import GALLERY_CHECKS
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store

if TYPE_CHECKING:
    from service.index.milvus_follower import MilvusEngine

PROBES: Final = 32
NEAREST: Final = 10
SIMILARITY_TOLERANCE: Final = 1e-4
DEVIATIONS: Final = 3
"""Standard deviations by which the measured recall may fall below the promise."""
EXACT_KINDS: Final = ("exact", "flat")
"""Index kinds with recall 1. Other kinds promise the gallery's recall@1."""
ATTEMPTS: Final = 5
"""Attempts to compare database and index without a concurrent write."""
PAGE: Final = 1000
DATA_KEY_ACTION: Final = "Provide the master key that wraps it, restore a backup, or delete the gallery."


@dataclass(frozen=True)
class Finding:
    """Detected inconsistency. ``mendable``: it can be repaired; ``repaired``: this run did so."""

    kind: str
    gallery: str | None
    count: int
    what: str
    action: str
    mendable: bool
    repaired: bool


@contextmanager
def open_check(
    database: Database,
    abandoned: Callable[[JobStore], list[Path]] = lambda _: [],
    open_milvus: Callable[[Database], MilvusEngine | None] = lambda _: None,
) -> Iterator[GalleryCheck]:
    """Return a check of a database, its indexes, and the files of this node. Closes the database at the end.

    ``abandoned``: returns files without a job; ``open_milvus``: returns the shared index, or None for own indexes.
    """
    store = Store(database)
    milvus = open_milvus(database)
    followers = Followers(in_process(store, in_foreground=True) if milvus is None else milvus.follower)
    try:
        yield GalleryCheck(store, followers, lambda: abandoned(JobStore(database)), milvus)
    finally:
        followers.close()
        if milvus is not None:
            milvus.close()
        store.close()


class GalleryCheck:
    """Check of a database and its indexes. Services may run meanwhile."""

    def __init__(
        self,
        store: Store,
        followers: Followers,
        abandoned: Callable[[], list[Path]] = list,
        milvus: MilvusEngine | None = None,
    ) -> None:
        self._store = store
        self._followers = followers
        self._abandoned = abandoned
        self._milvus = milvus

    def findings(self, name: str | None, repair: bool) -> Iterator[Finding]:
        """Yield the findings of the database and of one gallery, or of all galleries.

        Raises:
            GalleryNotFoundError: the gallery does not exist.
            StorageError: the database cannot be read or repaired.
            IndexUnavailableError: Milvus does not answer.
        """
        if damaged := self._damaged_pages():
            yield Finding(PAGES.kind, None, damaged, PAGES.what, PAGES.action, False, False)
            return
        yield from self._found(DATABASE_CHECKS, self._store.database.vault, None, repair)
        if files := self._abandoned():
            for path in files if repair else []:
                path.unlink(missing_ok=True)
            what = "files of jobs that have ended or never began"
            yield Finding("abandoned", None, len(files), what, "They are deleted.", True, repair)
        for gallery in self._galleries(name):
            try:
                gallery.seal.unlock()
            except MasterKeyError as error:
                what = f"its data key is missing or cannot be unwrapped, so its data cannot be read: {error.detail}"
                yield Finding("data_key", gallery.name, 1, what, DATA_KEY_ACTION, False, False)
            else:
                yield from self._of(gallery, repair)

    def _galleries(self, name: str | None) -> Iterator[Gallery]:
        """Yield one gallery, or all galleries by name."""
        if name is not None:
            yield self._store.galleries.get(name)
            return
        after: str | None = None
        while page := self._store.galleries.list_page(after, PAGE):
            yield from page
            after = page[-1].name

    def _damaged_pages(self) -> int:
        try:
            return PAGES.count(self._store.database, self._store.database.vault)
        except StorageDamagedError:
            return 1  # the check itself hit a damaged page

    def _found(self, checks: Sequence[Check[Of]], of: Of, gallery: str | None, repair: bool) -> Iterator[Finding]:
        for check in checks:
            if count := check.count(self._store.database, of):
                mendable = check.mend is not None
                if repair and mendable:
                    check.repair(self._store.database, of)
                yield Finding(check.kind, gallery, count, check.what, check.action, mendable, repair and mendable)

    def _of(self, gallery: Gallery, repair: bool) -> Iterator[Finding]:
        unsearchable = False
        for finding in self._found(GALLERY_CHECKS, gallery, gallery.name, repair):
            yield finding
            unsearchable |= finding.kind in ("vectors_damaged", "vectors_length") and not finding.repaired
        # Damaged vectors would also be reported as an error of the index.
        if not unsearchable:
            yield from self._index(gallery, repair)
            if gallery.other is not None:
                yield from self._index(gallery.at_generation(gallery.other.number), repair)

    def _index(self, gallery: Gallery, repair: bool) -> Iterator[Finding]:
        """Compare the answers of an index with exhaustive search over the database."""
        follower = self._followers.of(gallery)
        for _ in range(ATTEMPTS):
            taken = self._store.changes.snapshot(gallery)
            wrong = _wrong_answers(gallery, taken, follower)
            if self._store.changes.count_after(gallery, taken.sequence) == 0:
                break
        else:
            return  # too many concurrent writes; a later check may succeed
        if not wrong:
            return
        what = "search results differ from an exhaustive search of the database"
        if self._milvus is None:
            action = "Restart the service to rebuild the index from the database. Please report this."
            yield Finding("index", gallery.name, wrong, what, action, False, False)
            return
        action = "The index in Milvus is rebuilt. Please report this."
        if repair:
            self._milvus.start_over(gallery)
        mended = repair and not _wrong_answers(gallery, self._store.changes.snapshot(gallery), follower)
        yield Finding("index", gallery.name, wrong, what, action, True, mended)


def _wrong_answers(gallery: Gallery, taken: Snapshot, follower: Follower) -> int:
    """Return how many of PROBES searches give wrong similarities or miss more subjects than the index may.

    Probes are templates of the gallery with noise.
    """
    if not len(taken.template_pks):
        return 0
    rng = np.random.default_rng(len(taken.template_pks))
    drawn = taken.vectors[rng.integers(len(taken.vectors), size=PROBES)]
    probes = l2_normalize(drawn + rng.normal(size=drawn.shape) * 0.3 / np.sqrt(drawn.shape[1]))
    follower.catch_up()
    results, compared = follower.search(probes, NEAREST)
    subject_pks = np.unique(taken.subject_pks)
    expected = fuse_similarities(probes, taken.vectors, taken.subject_pks, taken.qualities, gallery.settings.fusion)
    if compared != len(subject_pks):
        return len(probes)
    stats = follower.stats()
    rows = subject_pks if gallery.settings.fusion in VECTOR_FUSIONS else taken.template_pks
    if stats.engine == "milvus" and stats.vector_count != len(rows):
        return len(probes)  # deleted rows must be gone too
    exhaustive = stats.kind in EXACT_KINDS
    # An approximate index may miss the most similar template of a subject that it found.
    any_template = not exhaustive and gallery.settings.fusion == "max"
    wrong, missed, first_missed = 0, 0, 0
    wanted = min(NEAREST, len(subject_pks))
    for probe, hits, row in zip(probes, results, expected, strict=True):
        said = np.array([hit.similarity for hit in hits])
        own = [
            _of_any_template(hit, probe, taken) if any_template else _of_subject(hit, subject_pks, row) for hit in hits
        ]
        best = np.sort(row)[::-1][:wanted]
        wrong += not (len(hits) == wanted and np.allclose(said, own, rtol=0, atol=SIMILARITY_TOLERANCE))
        missed += int((said >= best[-1] - SIMILARITY_TOLERANCE).sum()) < wanted
        first_missed += not (len(said) and said[0] >= best[0] - SIMILARITY_TOLERANCE)
    if exhaustive:
        return wrong or missed
    return wrong or (first_missed if first_missed > _by_chance(1 - gallery.settings.recall, len(probes)) else 0)


def _of_subject(hit: Hit, subject_pks: Keys, fused: Float) -> float:
    """Return the expected similarity of a hit; NaN if the subject does not exist."""
    place = int(np.searchsorted(subject_pks, hit.subject_pk))
    return float(fused[place]) if hit.subject_pk in subject_pks[place : place + 1] else math.nan


def _of_any_template(hit: Hit, probe: Float, taken: Snapshot) -> float:
    """Return the closest similarity of the subject's templates to the reported one; NaN without templates."""
    first, last = np.searchsorted(taken.subject_pks, [hit.subject_pk, hit.subject_pk + 1])
    each = taken.vectors[first:last] @ probe
    return float(each[np.abs(each - hit.similarity).argmin()]) if len(each) else math.nan


def _by_chance(share: float, probes: int) -> float:
    """Return the maximum number of misses among ``probes`` that is plausible for this miss rate."""
    return max(1, share * probes + DEVIATIONS * math.sqrt(share * (1 - share) * probes))

"""``kith gallery check``: is everything that a gallery promises still so, and can what is not be mended?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from models.network import Float
from models.recognition import unit
from service.errors import MasterKeyAwayError, MasterKeyError
from service.gallery.consistency import DATABASE_CHECKS, GALLERY_CHECKS, PAGES, Consistency
from service.gallery.database import Database
from service.gallery.follower import Follower, Followers
from service.gallery.fusion import ONE_VECTOR, scores
from service.gallery.index import Keys
from service.gallery.index_files import check_index_files
from service.gallery.job_store import JobStore
from service.gallery.replicas import in_process
from service.gallery.store import Store
from service.gallery.subjects import Gallery, Hit, Snapshot

if TYPE_CHECKING:
    from service.gallery.milvus_replica import MilvusEngine

PROBES: Final = 32
NEAREST: Final = 10
SIMILARITY_TOLERANCE: Final = 1e-4
DEVIATIONS: Final = 3
"""Within which chance may miss more of the most similar than was promised."""
COMPARES_ALL: Final = ("exact", "flat")
"""Kinds of index, in this process and in Milvus, that miss nobody; of the others the most similar vector is promised,
as often as the gallery's recall says."""
ATTEMPTS: Final = 5
"""At one look at SQL and index together, where others write meanwhile."""
PAGE: Final = 1000
FILES: Final = {
    "abandoned": ("files of jobs that are over, or never began", "They are deleted."),
    "index_files": ("index files are damaged, or of a deleted gallery", "They are deleted, and made anew if needed."),
}

DATA_KEY_ACTION: Final = "Give the master key that wraps it, restore a backup, or delete the gallery."


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
    database: Database,
    abandoned: Callable[[JobStore], list[Path]] = lambda _: [],
    index_folder: Path | None = None,
    open_milvus: Callable[[Database], MilvusEngine | None] = lambda _: None,
) -> Iterator[GalleryCheck]:
    """A check of a database, which is closed in the end, of its indexes (those in Milvus, if ``open_milvus`` gives it,
    or else indexes of the check's own), and of files on this node: those that are ``abandoned``, as no job waits for
    them, and those of indexes."""
    store = Store(database)
    milvus = open_milvus(database)
    followers = Followers(in_process(store, at_once=True) if milvus is None else milvus.replica)
    try:
        files = {
            "abandoned": lambda: abandoned(JobStore(database)),
            "index_files": lambda: [] if index_folder is None else _damaged(index_folder, store),
        }
        yield GalleryCheck(store, Consistency(database), followers, files, milvus)
    finally:
        followers.close()
        if milvus is not None:
            milvus.close()
        store.close()


def _damaged(index_folder: Path, store: Store) -> list[Path]:
    known = [gallery.pk for gallery in every_gallery(store)]
    return [found.path for found in check_index_files(index_folder, known)]


def every_gallery(store: Store) -> Iterator[Gallery]:
    after: str | None = None
    while page := store.list_galleries(after, PAGE):
        yield from page
        after = page[-1].name


class GalleryCheck:
    """Looks at a database and the indexes that follow it; services may go on meanwhile."""

    def __init__(
        self,
        store: Store,
        consistency: Consistency,
        followers: Followers,
        files: Mapping[str, Callable[[], list[Path]]],
        milvus: MilvusEngine | None = None,
    ) -> None:
        """``files``: by each of FILES, those that are wrong."""
        self._wrong_files = files
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
            MasterKeyAwayError: who unwraps galleries' keys cannot be asked.
        """
        of_database = list(self._database(repair))
        yield from of_database
        if any(finding.kind == PAGES.kind for finding in of_database):
            return  # there is no use in reading further
        yield from self._files(repair)
        for gallery in [self._store.gallery(name)] if name is not None else every_gallery(self._store):
            try:
                gallery.seal.unlock()
            except MasterKeyAwayError:
                raise
            except MasterKeyError as error:
                what = f"its data key is gone or does not open, and so nothing of it: {error.detail}"
                yield Finding("data_key", gallery.name, 1, what, DATA_KEY_ACTION, False, False)
            else:
                yield from self._of(gallery, repair)

    def _database(self, repair: bool) -> Iterator[Finding]:
        for check in DATABASE_CHECKS:
            if count := self._consistency.count_in_database(check):
                mended = repair and check.mend is not None
                if mended:
                    self._consistency.repair_database(check)
                yield Finding(check.kind, None, count, check.what, check.action, check.mend is not None, mended)
                if check is PAGES:
                    return

    def _files(self, repair: bool) -> Iterator[Finding]:
        for kind, wrong in self._wrong_files.items():
            if files := wrong():
                for path in files if repair else []:
                    path.unlink(missing_ok=True)
                what, action = FILES[kind]
                yield Finding(kind, None, len(files), what, action, True, repair)

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
            if gallery.other is not None:
                yield from self._index(gallery.under(gallery.other.number), repair)

    def _index(self, gallery: Gallery, repair: bool) -> Iterator[Finding]:
        """Answers of an index against brute force over SQL, of one recogniser's vectors."""
        follower = self._followers.of(gallery)
        for _ in range(ATTEMPTS):
            taken = self._store.snapshot(gallery)
            wrong = _wrong_answers(gallery, taken, follower)
            if self._store.changes_since(gallery, taken.sequence) == 0:
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
        mended = repair and not _wrong_answers(gallery, self._store.snapshot(gallery), follower)
        yield Finding("index", gallery.name, wrong, what, action, True, mended)


def _wrong_answers(gallery: Gallery, taken: Snapshot, follower: Follower) -> int:
    """Of PROBES searches for templates of the gallery, a little aside: those that name somebody with a similarity that
    is not theirs, or miss somebody whom the index promises to find."""
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
    stats = follower.stats()
    rows = subject_pks if gallery.settings.fusion in ONE_VECTOR else taken.template_pks
    if stats.engine == "milvus" and stats.vectors != len(rows):
        return len(probes)  # what was deleted must not lie there either
    exhaustive = stats.kind in COMPARES_ALL
    # Of a subject found, an index that does not look at everything may have missed the most similar template.
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
    """What its similarity should be; NaN if there is no such subject."""
    place = int(np.searchsorted(subject_pks, hit.subject_pk))
    return float(fused[place]) if hit.subject_pk in subject_pks[place : place + 1] else math.nan


def _of_any_template(hit: Hit, probe: Float, taken: Snapshot) -> float:
    """The similarity of one of the subject's templates, that next to what was said; NaN if it has none."""
    first, last = np.searchsorted(taken.subject_pks, [hit.subject_pk, hit.subject_pk + 1])
    each = taken.vectors[first:last] @ probe
    return float(each[np.abs(each - hit.similarity).argmin()]) if len(each) else math.nan


def _by_chance(share: float, probes: int) -> float:
    """The most of so many probes that may well miss what the index misses for this share of all."""
    return max(1, share * probes + DEVIATIONS * math.sqrt(share * (1 - share) * probes))

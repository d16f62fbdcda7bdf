"""The truth about galleries, in SQL. What a method returns after writing is on disk.

Every change of a gallery's templates writes lines into its change log in the same transaction, which the indexes
follow.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from models.gallery_risk import ImpostorEvidence
from models.gate import QualityGate
from models.network import Float
from service.decision import RiskTarget
from service.errors import (
    GalleryExistsError,
    GalleryNotFoundError,
    IdempotencyConflictError,
    InvalidRequestError,
    KithError,
    MasterKeyAwayError,
    MasterKeyError,
    SubjectExistsError,
    SubjectNotFoundError,
    TemplateNotFoundError,
)
from service.gallery import erasure
from service.gallery.audit_log import pseudonym, record
from service.gallery.database import Database, new_version
from service.gallery.erasure import Receipt
from service.gallery.hygiene import Finding
from service.gallery.kept import Kept
from service.gallery.labels import labels_of
from service.gallery.merging import merged
from service.gallery.sealed_rows import (
    ANSWER,
    DIGEST,
    REQUEST,
    About,
    close_about,
    close_crop,
    lookup_of,
    open_about,
)
from service.gallery.subjects import (
    Change,
    Gallery,
    GallerySettings,
    Generation,
    Idempotent,
    LogTrimmedError,
    Named,
    NewTemplate,
    Sizes,
    Snapshot,
    StoredEvidence,
    Subject,
    SubjectFilter,
    Template,
)
from service.gallery.tables import (
    changes,
    crops,
    data_keys,
    evidence,
    galleries,
    generations,
    idempotency,
    index_states,
    labels,
    subjects,
    templates,
    vectors,
)
from service.gallery.vault import Vault, fresh_key
from service.security.sealing import Seal

OTHER: Final = ("generation", "fingerprint", "dimension", "model", "state", "details")
"""Columns of a generation, as Generation has them."""
ROWS_AT_ONCE: Final = 4096
"""Templates that are in memory twice while a gallery is read."""
LATER_SETTINGS: Final = (
    *("review_factor", "min_margin", "keep_crops", "index", "recall", "retention_days"),
    *("liveness", "liveness_threshold"),
)
KEEP_LINES: Final = 10_000
"""Of a change log, for processes that follow it."""
ABANDONED: Final = timedelta(days=7)
"""Without a step of an index that nodes share, while the log went on: nobody searches it. A step as far in the future
was written while the clock was wrong."""
MERGED: Final = "subject_merged"
"""The audit's event."""
BEGUN: Final = "/begun"
"""After an engine's name: the row that says which subject a passage through all of them has come to, as a negative
number, which no number of the log is."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """Two subjects who are one now: ``into``, who has ``templates`` more than before; ``receipt``: of the other."""

    into: Subject
    templates: int
    receipt: Receipt


class Store:
    """Galleries, subjects, templates and the change log. Every method is one transaction; all block, but for those
    ``at_once``. ``kept``: what was read before, for as long as nobody changed it."""

    def __init__(self, database: Database, kept: Kept | None = None) -> None:
        self._database = database
        self._kept = Kept() if kept is None else kept

    def close(self) -> None:
        self._database.close()

    def check(self) -> None:
        """Prove that the database answers.

        Raises:
            StorageError: it does not.
        """
        with self._database.read() as connection:
            connection.execute(sa.select(galleries.c.pk).limit(1)).all()

    def sizes(self, most: int) -> Sizes:
        """How much there is, in all and in the ``most`` oldest galleries. Reads a row for each gallery there is."""
        counts = galleries.c.name, galleries.c.subject_count, galleries.c.template_count
        first = sa.select(*counts).order_by(galleries.c.pk).limit(most)
        total = sa.select(
            sa.func.count(), sa.func.sum(galleries.c.subject_count), sa.func.sum(galleries.c.template_count)
        ).select_from(galleries)
        with self._database.read() as connection:
            number, people, photos = connection.execute(total).one()
            return Sizes(
                number, people or 0, photos or 0, {row[0]: (row[1], row[2]) for row in connection.execute(first)}
            )

    def gallery_keys(self) -> set[int]:
        """Of all galleries there are."""
        with self._database.read() as connection:
            return set(connection.execute(sa.select(galleries.c.pk)).scalars())

    def lines_after(self, sequences: Mapping[int, int], most: int) -> dict[int, int]:
        """How many lines of galleries' change logs come after these numbers, by the gallery's key; ``most``: counted of
        each."""
        after = (
            sa.select(sa.literal(1))
            .where(changes.c.gallery_pk == sa.bindparam("gallery"), changes.c.sequence > sa.bindparam("after"))
            .limit(most)
            .subquery()
        )
        count = sa.select(sa.func.count()).select_from(after)
        with self._database.read() as connection:
            return {
                pk: connection.execute(count, {"gallery": pk, "after": sequence}).scalar_one()
                for pk, sequence in sequences.items()
            }

    # Galleries

    def create_gallery(self, name: str, fingerprint: str, dimension: int, settings: GallerySettings) -> Gallery:
        """Raises GalleryExistsError."""
        now, version = _now(), new_version()
        with self._database.read() as connection:
            by = self._database.vault.in_use(connection, held=False)
        fresh = fresh_key(by)
        with self._database.write(GalleryExistsError(f"gallery {name!r} exists")) as connection:
            pk = _key(
                connection.execute(
                    galleries.insert().values(
                        name=name,
                        fingerprint=fingerprint,
                        dimension=dimension,
                        settings=asdict(settings),
                        version=version,
                        created_at=now,
                    )
                )
            )
            seal = self._database.vault.create(connection, pk, fresh)
            first = {"gallery_pk": pk, "generation": 0, "fingerprint": fingerprint, "dimension": dimension}
            connection.execute(
                generations.insert().values(**first, state="current", details={}, created_at=now, updated_at=now)
            )
            gallery = Gallery(pk, name, fingerprint, dimension, settings, now, seal, version=version)
            record(self._database.vault, connection, "gallery_created", gallery)
        return gallery

    def gallery(self, name: str) -> Gallery:
        """As it is now, with its key at hand; one that is lost is told of to whoever uses it.

        Raises:
            GalleryNotFoundError: there is none.
            MasterKeyAwayError: who unwraps its key cannot be asked.
        """
        if (known := self.gallery_at_once(name)) is not None:
            return known
        # Before it is read: whatever is written from here on shows as another version.
        file_version = self._database.file_version()
        page = self._kept.page(name)
        if page is not None:
            now = self._database.first(VERSION, {"gallery": name})
            if now is not None and tuple(now) == (page.gallery.pk, page.gallery.version):
                self._kept.put(page.gallery, file_version)
                return page.gallery
        row = self._database.first(GALLERY, {"gallery": name})
        if page is not None and (row is None or row.pk != page.gallery.pk):
            self._database.vault.forget(page.gallery.pk)  # another process deleted it
        if row is None:
            self._kept.forget(name)
            raise GalleryNotFoundError(f"there is no gallery {name!r}")
        gallery = gallery_of(row, self._database.vault)
        try:
            gallery.seal.unlock()
        except MasterKeyAwayError:
            raise
        except MasterKeyError as error:
            log.warning("gallery %s (kith gallery check): %s", gallery.pk, error.detail)
        self._kept.put(gallery, file_version)
        return gallery

    def gallery_at_once(self, name: str) -> Gallery | None:
        """As :meth:`gallery`, in microseconds, where nothing at all was written to the file since it was read."""
        page = self._kept.page(name)
        if page is None or page.file_version is None or page.file_version != self._database.file_version(wait=False):
            return None
        return page.gallery

    def forget_changed(self) -> None:
        """Let go of what is kept of galleries that are others by now, and so of names that another process erased, and
        of the keys of those that are gone."""
        kept = {gallery.name: (gallery.pk, gallery.version) for gallery in self._kept.galleries()}
        query = sa.select(galleries.c.name, galleries.c.pk, galleries.c.version).where(galleries.c.name.in_(kept))
        with self._database.read() as connection:
            self._database.vault.forget_deleted(connection)
            now = {row.name: (row.pk, row.version) for row in connection.execute(query)}
        for name in [name for name, known in kept.items() if now.get(name) != known]:
            self._kept.forget(name)

    def list_galleries(self, after: str | None, limit: int, among: Collection[str] | None = None) -> list[Gallery]:
        query = gallery_rows().order_by(galleries.c.name).limit(limit)
        if among is not None:
            query = query.where(galleries.c.name.in_(among))
        if after is not None:
            query = query.where(galleries.c.name > after)
        with self._database.read() as connection:
            return [gallery_of(row, self._database.vault) for row in connection.execute(query)]

    def update_gallery(self, name: str, change: Callable[[GallerySettings], GallerySettings]) -> Gallery:
        """Replace the settings by ``change`` of what they are. Raises GalleryNotFoundError."""
        missing = GalleryNotFoundError(f"there is no gallery {name!r}")
        with self._database.write(missing) as connection:
            row = connection.execute(
                gallery_rows().where(galleries.c.name == name).with_for_update(of=galleries)
            ).first()
            if row is None:
                raise missing
            settings = change(gallery_of(row, self._database.vault).settings)
            changed = {"settings": asdict(settings), "version": new_version()}
            connection.execute(galleries.update().where(galleries.c.name == name).values(**changed))
            before = gallery_of(row, self._database.vault)
            record(self._database.vault, connection, "gallery_updated", before, **_differing(before.settings, settings))
        return self.gallery(name)

    def delete_gallery(self, name: str) -> tuple[Gallery, Receipt]:
        """Delete it with everyone in it; return what it was. Raises GalleryNotFoundError."""
        gallery = self.gallery(name)
        key = erasure.key_name(gallery.seal)
        with self._database.change(gallery, sealed=False, erasing=True) as connection:
            counts = sa.select(galleries.c.subject_count, galleries.c.template_count)
            now = connection.execute(counts.where(galleries.c.pk == gallery.pk)).one()
            removed = Counter(subjects=now.subject_count, templates=now.template_count)
            erasure.remove_gallery(connection, gallery)
            receipt = erasure.write_down(self._database.vault, connection, gallery, "gallery", removed, key=key)
        self._database.vault.forget(gallery.pk)
        self._kept.forget(name)
        return gallery, self._overwritten(receipt)

    # Subjects

    def put_subject(
        self,
        gallery: Gallery,
        subject_id: str,
        name: str | None,
        metadata: dict[str, Any],
        tags: list[str],
        only_new: bool = False,
    ) -> tuple[Subject, bool]:
        """Create or, unless ``only_new``, replace; returns whether it was created. Raises SubjectErasedError,
        SubjectExistsError: as :meth:`enrol`."""
        now, about = _now(), About(subject_id, name, metadata, tags)
        with self._database.change(gallery) as connection:
            erasure.refuse_erased(connection, gallery, subject_id)
            if only_new:
                _refuse_known(connection, gallery, subject_id)
            subject_pk = connection.execute(_key_of(gallery, subject_id)).scalar()
            created = subject_pk is None
            if subject_pk is None:
                subject_pk = _add_subject(connection, gallery, about, now)
            else:
                _rewrite(connection, gallery, subject_pk, about, now)
            _relabel(connection, gallery, subject_pk, about)
            record(self._database.vault, connection, "subject_put", gallery, subject_id, created=created)
        return self.subject(gallery, subject_id), created

    def patch_subject(self, gallery: Gallery, subject_id: str, given: dict[str, Any]) -> Subject:
        """Change what is given (name, metadata, tags). Raises SubjectNotFoundError, SubjectErasedError: as
        :meth:`enrol`."""
        with self._database.change(gallery) as connection:
            subject = self._subject(connection, gallery, subject_id)
            erasure.refuse_erased(connection, gallery, subject_id)
            about = replace(About(subject.id, subject.name, subject.metadata, subject.tags), **given)
            _rewrite(connection, gallery, subject.pk, about, _now())
            _relabel(connection, gallery, subject.pk, about)
            record(self._database.vault, connection, "subject_changed", gallery, subject_id, changed=sorted(given))
            return self._subject(connection, gallery, subject_id)

    def subject(self, gallery: Gallery, subject_id: str) -> Subject:
        """Raises SubjectNotFoundError."""
        with self._database.read() as connection:
            return self._subject(connection, gallery, subject_id)

    @staticmethod
    def _subject(connection: Connection, gallery: Gallery, subject_id: str) -> Subject:
        row = connection.execute(_subject_rows().where(_is(gallery, subject_id))).first()
        if row is None:
            raise _no_subject(gallery, subject_id)
        return _subject(gallery.seal, row)

    def list_subjects(self, gallery: Gallery, after: int | None, limit: int, chosen: SubjectFilter) -> list[Subject]:
        """Page by age, the oldest first: those of a key after ``after``, at most ``limit``, that pass the filter."""
        query = _subject_rows().where(subjects.c.gallery_pk == gallery.pk).order_by(subjects.c.pk).limit(limit)
        if after is not None:
            query = query.where(subjects.c.pk > after)
        if wanted := _wanted(gallery, chosen):
            query = query.where(subjects.c.pk.in_(_bearing(gallery, wanted)))
        with self._database.read() as connection:
            return [_subject(gallery.seal, row) for row in connection.execute(query)]

    def subjects_by_pk(self, gallery: Gallery, pks: Sequence[int]) -> dict[int, Subject]:
        chosen = (subjects.c.gallery_pk == gallery.pk) & subjects.c.pk.in_(list(pks))
        with self._database.read() as connection:
            rows = connection.execute(_subject_rows().where(chosen))
            return {row.pk: _subject(gallery.seal, row) for row in rows}

    def named(self, gallery: Gallery, pks: Collection[int]) -> dict[int, Named]:
        """Who subjects are, as of ``gallery``'s version or later; without those deleted since."""
        page = self._kept.page_of(gallery)
        names = {} if page is None else page.names
        known = {pk: names[pk] for pk in pks if pk in names}
        if len(known) == len(pks):
            return known
        query = NAMES.where(subjects.c.pk.in_([pk for pk in pks if pk not in known]))
        with self._database.read() as connection:
            opened = ((row.pk, open_about(gallery.seal, row.sealed)) for row in connection.execute(query))
            read = {pk: Named(about.id, about.name) for pk, about in opened}
        if page is not None:
            self._kept.add_names(page, read)
        return known | read

    def named_at_once(self, gallery: Gallery, pks: Collection[int]) -> dict[int, Named] | None:
        """As :meth:`named`, where all were named since the gallery changed."""
        page = self._kept.page_of(gallery)
        names = {} if page is None else page.names
        return {pk: names[pk] for pk in pks} if all(pk in names for pk in pks) else None

    def matching_subjects(self, gallery: Gallery, chosen: SubjectFilter) -> NDArray[np.int64]:
        """Ascending keys of the subjects that pass the filter."""
        wanted = _wanted(gallery, chosen)
        passing = (_bearing(gallery, wanted) if wanted else _keys_of(gallery)).subquery()
        (key,) = passing.c
        # As one text: a row for each would take most of a search's time.
        query = sa.select(sa.func.aggregate_strings(sa.cast(key, sa.Text), ",")).select_from(passing)
        with self._database.read() as connection:
            text = connection.execute(query).scalar()
        keys = np.fromstring(text, np.int64, sep=",") if text else np.empty(0, np.int64)
        keys.sort()
        return keys

    def delete_subject(self, gallery: Gallery, subject_id: str) -> Receipt:
        """Erase a subject with everything that is stored of it. Raises SubjectNotFoundError, which has the receipt of
        an earlier erasure."""
        with self._database.change(gallery, erasing=True) as connection:
            subject_pk = connection.execute(_key_of(gallery, subject_id)).scalar()
            if subject_pk is None:
                raise _no_subject(gallery, subject_id, erasure.last_receipt(connection, gallery, subject_id))
            receipt = erasure.erase_subject(self._database.vault, connection, gallery, subject_pk, subject_id)
        self._kept.forget(gallery.name)
        return self._overwritten(receipt)

    def _overwritten(self, receipt: Receipt) -> Receipt:
        return replace(receipt, log_emptied=self._database.empty_log())

    # Templates

    def refuse_known(self, gallery: Gallery, subject_id: str) -> None:
        """Raises SubjectExistsError."""
        with self._database.read() as connection:
            _refuse_known(connection, gallery, subject_id)

    def enrol(
        self,
        gallery: Gallery,
        subject_id: str,
        new: list[NewTemplate],
        keyed: Idempotent | None,
        only_new: bool = False,
    ) -> str | None:
        """Store templates, their subject if need be, and their log lines, all or nothing.

        Returns the earlier response if ``keyed`` was answered before, and stores nothing then; else None.

        Raises:
            IdempotencyConflictError: the key belongs to another request.
            SubjectErasedError: the subject was erased since ``gallery`` was read.
            SubjectExistsError: there is one already, and ``only_new``.
            GalleryNotFoundError, RecogniserMismatchError: the gallery was deleted, or moved to another recogniser,
                meanwhile.
        """
        now = _now()
        with self._database.change(gallery) as connection:
            if keyed and (earlier := self._answered(connection, gallery, keyed.key, keyed.digest)):
                return earlier
            erasure.refuse_erased(connection, gallery, subject_id)
            if only_new:
                _refuse_known(connection, gallery, subject_id)
            subject_pk = add_templates(connection, gallery, subject_id, new, now)
            if keyed:
                connection.execute(
                    idempotency.insert().values(
                        gallery_pk=gallery.pk,
                        lookup=gallery.seal.pseudonym(REQUEST, keyed.key),
                        subject_pk=subject_pk,
                        digest=gallery.seal.pseudonym(DIGEST, keyed.digest),
                        sealed=gallery.seal.close(keyed.response.encode(), ANSWER),
                        created_at=now,
                    )
                )
            record(self._database.vault, connection, "templates_enrolled", gallery, subject_id, templates=len(new))
        return None

    def known_templates(self, gallery: Gallery, ids: Collection[str]) -> set[str]:
        """Those of the template ids that the gallery has, of whichever subject."""
        with self._database.read() as connection:
            return known_templates(connection, gallery, ids)

    def answered(self, gallery: Gallery, key: str, digest: str) -> str | None:
        """The response given to this keyed request before, if any. Raises IdempotencyConflictError."""
        with self._database.read() as connection:
            return self._answered(connection, gallery, key, digest)

    @staticmethod
    def _answered(connection: Connection, gallery: Gallery, key: str, digest: str) -> str | None:
        row = connection.execute(
            sa.select(idempotency.c.digest, idempotency.c.sealed).where(
                idempotency.c.gallery_pk == gallery.pk,
                idempotency.c.lookup == gallery.seal.pseudonym(REQUEST, key),
            )
        ).first()
        if row is None:
            return None
        if row.digest != gallery.seal.pseudonym(DIGEST, digest):
            raise IdempotencyConflictError(f"the key {key!r} was used for another request")
        return gallery.seal.open(row.sealed, ANSWER).decode()

    def list_templates(
        self, gallery: Gallery, subject_id: str, after: int | None = None, limit: int | None = None
    ) -> list[Template]:
        """A subject's templates, oldest first: those of a key after ``after``, at most ``limit``. Raises
        SubjectNotFoundError."""
        query = sa.select(templates).order_by(templates.c.pk).limit(limit)
        if after is not None:
            query = query.where(templates.c.pk > after)
        with self._database.read() as connection:
            subject = self._subject(connection, gallery, subject_id)
            rows = connection.execute(query.where(templates.c.subject_pk == subject.pk))
            return [_template(row, subject_id) for row in rows]

    def template(self, gallery: Gallery, subject_id: str, template_id: str) -> Template:
        """Raises SubjectNotFoundError, TemplateNotFoundError."""
        with self._database.read() as connection:
            subject = self._subject(connection, gallery, subject_id)
            row = connection.execute(sa.select(templates).where(_is_template(subject, template_id))).first()
        if row is None:
            raise _no_template(template_id, subject_id)
        return _template(row, subject_id)

    def templates_by_pk(self, gallery: Gallery, pks: Sequence[int]) -> dict[int, Template]:
        query = (
            sa.select(templates, subjects.c.sealed)
            .join(subjects, subjects.c.pk == templates.c.subject_pk)
            .where(templates.c.gallery_pk == gallery.pk, templates.c.pk.in_(list(pks)))
        )
        with self._database.read() as connection:
            owned = ((row, open_about(gallery.seal, row.sealed).id) for row in connection.execute(query))
            return {row.pk: _template(row, owner) for row, owner in owned}

    def subject_vectors(self, gallery: Gallery, subject_id: str) -> tuple[Float, Float]:
        """(n, d) templates of a subject and their (n,) quality scores, NaN for bare embeddings; n may be 0. Raises
        SubjectNotFoundError."""
        with self._database.read() as connection:
            subject = self._subject(connection, gallery, subject_id)
            stored = read_snapshot(connection, gallery, 0, templates.c.subject_pk == subject.pk)
        return stored.vectors, stored.qualities

    def delete_template(self, gallery: Gallery, subject_id: str, template_id: str) -> Receipt:
        """Raises SubjectNotFoundError, TemplateNotFoundError."""
        with self._database.change(gallery, erasing=True) as connection:
            subject = self._subject(connection, gallery, subject_id)
            if connection.execute(sa.select(templates.c.pk).where(_is_template(subject, template_id))).first() is None:
                raise _no_template(template_id, subject_id)
            receipt = erasure.erase_template(self._database.vault, connection, gallery, subject_id, template_id)
        self._kept.forget(gallery.name)
        return self._overwritten(receipt)

    def move_template(self, gallery: Gallery, subject_id: str, template_id: str, to: str) -> None:
        """File a template under another subject. Raises SubjectNotFoundError (of either), TemplateNotFoundError."""
        with self._database.change(gallery) as connection:
            here = self._subject(connection, gallery, subject_id)
            there = self._subject(connection, gallery, to)
            chosen = _is_template(here, template_id)
            template_pk = connection.execute(sa.select(templates.c.pk).where(chosen)).scalar()
            if template_pk is None:
                raise _no_template(template_id, subject_id)
            connection.execute(templates.update().where(chosen).values(subject_pk=there.pk, moved=True))
            connection.execute(idempotency.delete().where(idempotency.c.subject_pk == here.pk))
            # Both are other people than before.
            _log(connection, gallery, [(template_pk, here.pk), (template_pk, there.pk)])
            moved = {"template": template_id, "to": pseudonym(gallery, to)}
            record(self._database.vault, connection, "template_moved", gallery, subject_id, **moved)

    def merge_subject(self, gallery: Gallery, subject_id: str, into: str) -> Merged:
        """File all templates of a subject under another one, who gets of its name, tags and metadata what it lacks, and
        erase it. Done already, it is told of again.

        Raises:
            InvalidRequestError: they are one subject, or would have too many tags or metadata.
            SubjectNotFoundError: there is none of either id; it has the receipt of an earlier erasure.
            SubjectErasedError: either was erased since ``gallery`` was read.
        """
        if subject_id == into:
            raise InvalidRequestError("into: it is the subject itself")
        with self._database.change(gallery) as connection:
            if connection.execute(_key_of(gallery, subject_id)).scalar() is None:
                return self._merged_before(connection, gallery, subject_id, into)
            gone = self._subject(connection, gallery, subject_id)
            kept = self._subject(connection, gallery, into)
            for each in (subject_id, into):
                erasure.refuse_erased(connection, gallery, each)
            before = About(kept.id, kept.name, kept.metadata, kept.tags)
            about = merged(before, About(gone.id, gone.name, gone.metadata, gone.tags))
            owned = templates.c.subject_pk == gone.pk
            moved = connection.execute(sa.select(templates.c.pk).where(owned).order_by(templates.c.pk)).scalars().all()
            if moved:
                connection.execute(templates.update().where(owned).values(subject_pk=kept.pk))
                # Both are other people than before.
                _log(connection, gallery, [(pk, owner) for pk in moved for owner in (gone.pk, kept.pk)])
            changed = sorted(name for name, value in vars(about).items() if value != vars(before)[name])
            if changed:
                _rewrite(connection, gallery, kept.pk, about, _now())
                _relabel(connection, gallery, kept.pk, about)
            removed = erasure.remove_subjects(connection, gallery, [gone.pk])
            vault, count, by = self._database.vault, len(moved), pseudonym(gallery, subject_id)
            record(vault, connection, "subject_changed", gallery, into, changed=changed, merged=by, templates=count)
            said = {"into": pseudonym(gallery, into), "templates": count}
            receipt = erasure.write_down(
                vault, connection, gallery, "subject", removed, subject_id, event=MERGED, said=said
            )
            now = self._subject(connection, gallery, into)
        self._kept.forget(gallery.name)
        return Merged(now, count, self._overwritten(receipt))

    def _merged_before(self, connection: Connection, gallery: Gallery, subject_id: str, into: str) -> Merged:
        receipt = erasure.last_receipt(connection, gallery, subject_id)
        said = None if receipt is None else erasure.said_of(connection, receipt, MERGED)
        if receipt is None or said is None or said["into"] != pseudonym(gallery, into):
            raise _no_subject(gallery, subject_id, receipt)
        return Merged(self._subject(connection, gallery, into), said["templates"], receipt)

    def snapshot(self, gallery: Gallery) -> Snapshot:
        """All templates at one moment."""
        with self._database.read() as connection:
            last = sa.select(sa.func.max(changes.c.sequence)).where(changes.c.gallery_pk == gallery.pk)
            floor = sa.select(galleries.c.log_floor).where(galleries.c.pk == gallery.pk)
            sequence = connection.execute(last).scalar() or connection.execute(floor).scalar() or 0
            return read_snapshot(connection, gallery, sequence)

    def changed_subjects(self, gallery: Gallery, sequence: int, at_most: int) -> tuple[set[int], Snapshot, bool]:
        """Keys of the subjects that the next ``at_most`` lines of the log after ``sequence`` name, the templates that
        they have now, as of the last of these lines, and whether there may be more lines.

        Raises:
            LogTrimmedError: some of the lines are gone.
        """
        later = (changes.c.gallery_pk == gallery.pk) & (changes.c.sequence > sequence)
        query = sa.select(changes.c.sequence, changes.c.subject_pk).where(later).order_by(changes.c.sequence)
        with self._database.read() as connection:
            _check_floor(connection, gallery, sequence)
            lines = connection.execute(query.limit(at_most)).all()
            last = lines[-1].sequence if lines else sequence
            # By a subquery, as a list of keys may exceed what a statement can bind.
            named = sa.select(changes.c.subject_pk).where(later, changes.c.sequence <= last)
            changed = templates.c.subject_pk.in_(named)
            now = read_snapshot(connection, gallery, last, changed if lines else sa.false())
        return {line.subject_pk for line in lines}, now, len(lines) == at_most

    def findings(self, gallery: Gallery, inspect: Callable[[], Sequence[Finding]]) -> Sequence[Finding]:
        """What deserves a look in the gallery as it is in this version, found by ``inspect`` unless it was before."""
        found = self._kept.findings(gallery)
        if found is None:
            found = inspect()
            self._kept.add_findings(gallery, found)
        return found

    # Evidence

    def evidence(self, gallery: Gallery) -> StoredEvidence | None:
        with self._database.read() as connection:
            row = connection.execute(sa.select(evidence).where(_evidence_of(gallery))).first()
        if row is None:
            return None
        scores = ImpostorEvidence.from_document(json.loads(row.document))
        return StoredEvidence(row.sequence, row.fusion, row.templates, scores, row.derived_at)

    def changes_since(self, gallery: Gallery, sequence: int) -> int:
        """How many templates came or went."""
        query = sa.select(sa.func.count()).where(changes.c.gallery_pk == gallery.pk, changes.c.sequence > sequence)
        with self._database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def put_evidence(self, gallery: Gallery, new: StoredEvidence, event: str | None, details: dict[str, Any]) -> None:
        """Replace a gallery's evidence and write ``event`` to the audit with it; not if a later one is there, or the
        gallery's rule of fusion is another by now."""
        values = {
            "sequence": new.sequence,
            "fusion": new.fusion,
            "templates": new.templates,
            "document": json.dumps(new.scores.document()),
            "derived_at": new.derived_at,
        }
        with self._database.change(gallery) as connection:
            stored = connection.execute(sa.select(evidence).where(_evidence_of(gallery))).first()
            settings = connection.execute(
                sa.select(galleries.c.settings).where(galleries.c.pk == gallery.pk)
            ).scalar_one_or_none()
            overtaken = stored is not None and stored.sequence > new.sequence
            if overtaken or settings is None or settings["fusion"] != new.fusion:
                return
            if stored is None:
                connection.execute(
                    evidence.insert().values(gallery_pk=gallery.pk, generation=gallery.generation, **values)
                )
            else:
                connection.execute(evidence.update().where(_evidence_of(gallery)).values(**values))
            if event is not None:
                record(self._database.vault, connection, event, gallery, **details)

    # The change log

    def changes_after(self, gallery: Gallery, sequence: int, at_most: int | None = None) -> list[Change]:
        """Log lines later than ``sequence``, in order. A line whose template still exists carries its vector: state,
        not history, so that applying a line twice, or a line whose template went away later, does no harm.

        Raises:
            LogTrimmedError: some of the lines are gone.
        """
        query = (
            sa.select(
                changes.c.sequence,
                changes.c.template_pk,
                sa.func.coalesce(templates.c.subject_pk, changes.c.subject_pk).label("subject_pk"),
                vectors.c.vector,
            )
            .outerjoin(templates, templates.c.pk == changes.c.template_pk)
            .outerjoin(
                vectors,
                (vectors.c.template_pk == changes.c.template_pk) & (vectors.c.generation == gallery.generation),
            )
            .where(changes.c.gallery_pk == gallery.pk, changes.c.sequence > sequence)
            .order_by(changes.c.sequence)
            .limit(at_most)
        )
        with self._database.read() as connection:
            _check_floor(connection, gallery, sequence)
            rows = connection.execute(query).all()
            sealed = [row.vector for row in rows if row.vector is not None]
            opened = iter(gallery.seal.open_vectors(sealed, gallery.generation, gallery.dimension))
            return [
                Change(row.sequence, row.template_pk, row.subject_pk, None if row.vector is None else next(opened))
                for row in rows
            ]

    def trim_log(self, gallery: Gallery, keep: int = KEEP_LINES, stopped: Callable[[], bool] = lambda: False) -> int:
        """Delete the log's oldest lines, but for ``keep`` and for as many as there are templates, which a snapshot
        would be read instead of; and none that an index that nodes share has yet to follow, unless it is ABANDONED, or
        the evidence of vectors that answer requests or are about to. In parts, because other writers wait for each,
        until ``stopped`` says so between two. Returns how many. ``gallery`` may have been read long ago.

        Raises:
            GalleryNotFoundError: it was deleted.
            GalleryMovedError: it moved to another recogniser at this very moment.
            StorageError: the database cannot be read or written.
        """
        trimmed = 0
        while not stopped() and (lines := self._trim_some(gallery, keep)):
            trimmed += lines
        return trimmed

    def _trim_some(self, gallery: Gallery, keep: int) -> int:
        here = changes.c.gallery_pk == gallery.pk
        followed = sa.select(sa.func.min(index_states.c.sequence)).where(
            index_states.c.gallery_pk == gallery.pk,
            ~index_states.c.engine.endswith(BEGUN),
            index_states.c.updated_at.between(_now() - ABANDONED, _now() + ABANDONED),
        )
        with self._database.read() as connection:
            row = connection.execute(gallery_rows().where(galleries.c.pk == gallery.pk)).first()
            if row is None:
                raise GalleryNotFoundError(f"gallery {gallery.name!r} was deleted meanwhile")
            now = gallery_of(row, self._database.vault)
            last = connection.execute(
                sa.select(changes.c.sequence)
                .where(here)
                .order_by(changes.c.sequence.desc())
                .offset(max(keep, now.templates))
                .limit(1)
            ).scalar()
            shadow = now.other if now.other is not None and now.other.state == "shadow" else None
            counted = [now.evidence_sequence, shadow.evidence_sequence if shadow else None]
            bounds = [last, connection.execute(followed).scalar(), *counted]
            end = min(bound for bound in bounds if bound is not None) if last is not None else 0
            oldest = sa.select(changes.c.sequence).where(here, changes.c.sequence <= end)
            doomed = connection.execute(oldest.order_by(changes.c.sequence).limit(ROWS_AT_ONCE)).scalars().all()
        if not doomed:
            return 0
        with self._database.change(now) as connection:
            # Another process may have trimmed further meanwhile: what is gone must stay known to be gone.
            floor = sa.case((galleries.c.log_floor > doomed[-1], galleries.c.log_floor), else_=doomed[-1])
            connection.execute(galleries.update().where(galleries.c.pk == gallery.pk).values(log_floor=floor))
            return connection.execute(changes.delete().where(here, changes.c.sequence <= doomed[-1])).rowcount


def _check_floor(connection: Connection, gallery: Gallery, sequence: int) -> None:
    floor = connection.execute(sa.select(galleries.c.log_floor).where(galleries.c.pk == gallery.pk)).scalar()
    if floor is not None and sequence < floor:
        raise LogTrimmedError


def add_templates(
    connection: Connection, gallery: Gallery, subject_id: str, new: Sequence[NewTemplate], now: datetime
) -> int:
    """Store templates, their subject if need be, and their log lines, within a transaction of ``Database.change``.
    Returns the subject's key."""
    subject_pk = connection.execute(_key_of(gallery, subject_id)).scalar()
    if subject_pk is None:
        subject_pk = _add_subject(connection, gallery, About(subject_id, None, {}, []), now)
    for template in new:
        template_pk = _key(
            connection.execute(
                templates.insert().values(
                    id=template.id,
                    gallery_pk=gallery.pk,
                    subject_pk=subject_pk,
                    kind=template.kind,
                    quality=template.quality,
                    detection_score=template.detection_score,
                    created_at=now,
                    erased=gallery.erased,
                )
            )
        )
        made = {gallery.generation: template.vector, **_kept(connection, gallery, template.others)}
        for generation, vector in made.items():
            (sealed,) = gallery.seal.close_vectors(vector[None], generation)
            connection.execute(vectors.insert().values(template_pk=template_pk, generation=generation, vector=sealed))
        if template.crop is not None:
            face = close_crop(gallery.seal, template.crop)
            connection.execute(crops.insert().values(template_pk=template_pk, sealed=face))
        _log(connection, gallery, [(template_pk, subject_pk)])
    _count(connection, gallery, templates=len(new))
    return subject_pk


def known_templates(connection: Connection, gallery: Gallery, ids: Collection[str]) -> set[str]:
    """Those of the template ids that the gallery has."""
    query = sa.select(templates.c.id).where(templates.c.gallery_pk == gallery.pk, templates.c.id.in_(list(ids)))
    return set(connection.execute(query).scalars())


def _now() -> datetime:
    return datetime.now(UTC)


def _is(gallery: Gallery, subject_id: str) -> sa.ColumnElement[bool]:
    return (subjects.c.gallery_pk == gallery.pk) & (subjects.c.lookup == lookup_of(gallery.seal, subject_id))


def _key_of(gallery: Gallery, subject_id: str) -> sa.Select[int]:
    return sa.select(subjects.c.pk).where(_is(gallery, subject_id))


def _keys_of(gallery: Gallery) -> sa.Select[int]:
    return sa.select(subjects.c.pk).where(subjects.c.gallery_pk == gallery.pk)


def _is_template(subject: Subject, template_id: str) -> sa.ColumnElement[bool]:
    return (templates.c.subject_pk == subject.pk) & (templates.c.id == template_id)


def _no_subject(gallery: Gallery, subject_id: str, erased: Receipt | None = None) -> KithError:
    said: dict[str, Any] = {} if erased is None else {"receipt": erased.document()}
    return SubjectNotFoundError(f"there is no subject {subject_id!r} in gallery {gallery.name!r}", **said)


def _refuse_known(connection: Connection, gallery: Gallery, subject_id: str) -> None:
    if connection.execute(_key_of(gallery, subject_id)).scalar() is not None:
        raise SubjectExistsError(f"there is a subject {subject_id!r} in gallery {gallery.name!r}")


def _no_template(template_id: str, subject_id: str) -> KithError:
    return TemplateNotFoundError(f"there is no template {template_id!r} of subject {subject_id!r}")


def _key(result: sa.CursorResult[Any]) -> int:
    inserted = result.inserted_primary_key
    assert inserted is not None  # noqa: S101 - of a single insert
    return int(inserted[0])


def _add_subject(connection: Connection, gallery: Gallery, about: About, now: datetime) -> int:
    values = {"lookup": lookup_of(gallery.seal, about.id), "sealed": close_about(gallery.seal, about)}
    times = {"created_at": now, "updated_at": now}
    knew = {"gallery_pk": gallery.pk, "erased": gallery.erased}
    pk = _key(connection.execute(subjects.insert().values(**knew, **values, **times)))
    _count(connection, gallery, subjects=1)
    return pk


def _rewrite(connection: Connection, gallery: Gallery, subject_pk: int, about: About, now: datetime) -> None:
    values = {"sealed": close_about(gallery.seal, about), "updated_at": now}
    connection.execute(subjects.update().where(subjects.c.pk == subject_pk).values(**values))


def _count(connection: Connection, gallery: Gallery, subjects: int = 0, templates: int = 0) -> None:
    """Keep a gallery's counts up: counting a million rows for each request would cost more than searching them."""
    connection.execute(
        galleries.update()
        .where(galleries.c.pk == gallery.pk)
        .values(
            subject_count=galleries.c.subject_count + subjects, template_count=galleries.c.template_count + templates
        )
    )


def _log(connection: Connection, gallery: Gallery, lines: Sequence[tuple[int, int]]) -> None:
    """Write (template, subject) lines to the change log."""
    connection.execute(
        changes.insert(),
        [{"gallery_pk": gallery.pk, "template_pk": t, "subject_pk": s} for t, s in lines],
    )


def _relabel(connection: Connection, gallery: Gallery, subject_pk: int, about: About) -> None:
    connection.execute(labels.delete().where(labels.c.subject_pk == subject_pk))
    if borne := sorted(labels_of(gallery.seal, about.tags, about.metadata)):
        connection.execute(
            labels.insert(),
            [{"gallery_pk": gallery.pk, "label": label, "subject_pk": subject_pk} for label in borne],
        )


def _differing(before: GallerySettings, after: GallerySettings) -> dict[str, Any]:
    was, now = asdict(before), asdict(after)
    return {"changed": {name: now[name] for name in now if now[name] != was[name]}}


def _wanted(gallery: Gallery, chosen: SubjectFilter) -> list[str]:
    return sorted(labels_of(gallery.seal, chosen.tags, dict(chosen.metadata)))


def _bearing(gallery: Gallery, wanted: list[str]) -> sa.Select[int]:
    """Keys of the subjects that bear all of these labels."""
    bearers = sa.select(labels.c.subject_pk).where(labels.c.gallery_pk == gallery.pk)
    if len(wanted) == 1:
        return bearers.where(labels.c.label == wanted[0])
    bearing_any = bearers.where(labels.c.label.in_(wanted)).group_by(labels.c.subject_pk)
    return bearing_any.having(sa.func.count() == len(wanted))


def _kept(connection: Connection, gallery: Gallery, others: Mapping[int, Float]) -> dict[int, Float]:
    """Without those of generations that were dropped meanwhile."""
    if not others:
        return {}
    live = sa.select(generations.c.generation).where(
        generations.c.gallery_pk == gallery.pk, generations.c.state != "dropped"
    )
    return {generation: others[generation] for generation in connection.execute(live).scalars() if generation in others}


def _evidence_of(gallery: Gallery) -> sa.ColumnElement[bool]:
    return (evidence.c.gallery_pk == gallery.pk) & (evidence.c.generation == gallery.generation)


def gallery_rows() -> sa.Select[Any]:
    other = (generations.c.gallery_pk == galleries.c.pk) & generations.c.state.not_in(["current", "dropped"])
    return sa.select(
        galleries,
        _evidence_sequence(galleries.c.current_generation).label("evidence_sequence"),
        *(generations.c[name].label(f"other_{name}") for name in OTHER),
        _evidence_sequence(generations.c.generation).label("other_evidence_sequence"),
        _moved().label("moved"),
        data_keys.c.wrapped,
        data_keys.c.master_key,
    ).select_from(
        galleries.outerjoin(data_keys, data_keys.c.gallery_pk == galleries.c.pk).outerjoin(generations, other)
    )


def _moved() -> sa.ColumnElement[bool]:
    every = generations.alias()  # those that were dropped, too: they stay as rows
    return sa.exists().where(every.c.gallery_pk == galleries.c.pk, every.c.generation > 0).correlate(galleries)


def _evidence_sequence(generation: sa.ColumnElement[int]) -> sa.ScalarSelect[int]:
    return (
        sa.select(evidence.c.sequence)
        .where(evidence.c.gallery_pk == galleries.c.pk, evidence.c.generation == generation)
        .scalar_subquery()
    )


def _subject_rows() -> sa.Select[Any]:
    owned = sa.select(sa.func.count()).select_from(templates).where(templates.c.subject_pk == subjects.c.pk)
    return sa.select(subjects, owned.scalar_subquery().label("template_count"))


def read_snapshot(
    connection: Connection, gallery: Gallery, sequence: int, chosen: sa.ColumnElement[bool] | None = None
) -> Snapshot:
    """The gallery's templates, or the chosen of them, by subject and age; those that its recogniser has seen."""
    query = (
        sa.select(templates.c.pk, templates.c.subject_pk, templates.c.quality, vectors.c.vector)
        .join(vectors, vectors.c.template_pk == templates.c.pk)
        .where(templates.c.gallery_pk == gallery.pk, vectors.c.generation == gallery.generation)
        .where(sa.true() if chosen is None else chosen)
        .execution_options(yield_per=ROWS_AT_ONCE)
    )
    pks, owners, qualities, blocks = [], [], [], [np.empty((0, gallery.dimension), np.float32)]
    for rows in connection.execute(query).partitions():
        pks += [row.pk for row in rows]
        owners += [row.subject_pk for row in rows]
        qualities += [(row.quality or {}).get("score", np.nan) for row in rows]
        sealed = [row.vector for row in rows]
        blocks.append(gallery.seal.open_vectors(sealed, gallery.generation, gallery.dimension))
    template_pks, subject_pks = np.array(pks, np.int64), np.array(owners, np.int64)
    order = np.lexsort((template_pks, subject_pks))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    stored = np.empty((len(order), gallery.dimension), np.float32)
    # From the last block on, each of which goes once it is copied: a gallery is in memory once.
    end = len(order)
    while blocks:
        block = blocks.pop()
        stored[place[end - len(block) : end]] = block
        end -= len(block)
    return Snapshot(sequence, template_pks[order], subject_pks[order], stored, np.array(qualities, np.float32)[order])


def gallery_of(row: sa.Row[Any], vault: Vault) -> Gallery:
    """Of a row of :func:`gallery_rows`. Its key is unwrapped when it is used, which raises MasterKeyError."""
    stored = row.settings
    # What a gallery was created before keeps its default.
    others = {name: stored[name] for name in LATER_SETTINGS if name in stored}
    settings = GallerySettings(
        RiskTarget(**stored["risk"]), stored["fusion"], QualityGate(**stored["quality_gate"]), **others
    )
    return Gallery(
        pk=row.pk,
        name=row.name,
        fingerprint=row.fingerprint,
        dimension=row.dimension,
        settings=settings,
        created_at=row.created_at,
        seal=vault.seal(row.pk, row.wrapped, row.master_key),
        subjects=row.subject_count,
        templates=row.template_count,
        evidence_sequence=row.evidence_sequence,
        generation=row.current_generation,
        current_generation=row.current_generation,
        log_floor=row.log_floor,
        other=_other_generation(row),
        moved=bool(row.moved),
        version=row.version,
        erased=row.erased,
    )


def _other_generation(row: sa.Row[Any]) -> Generation | None:
    if row.other_generation is None:
        return None
    return Generation(
        number=row.other_generation,
        fingerprint=row.other_fingerprint,
        dimension=row.other_dimension,
        model=row.other_model,
        state=row.other_state,
        details=row.other_details,
        evidence_sequence=row.other_evidence_sequence,
    )


def _subject(seal: Seal, row: sa.Row[Any]) -> Subject:
    about = vars(open_about(seal, row.sealed))
    return Subject(row.pk, **about, created_at=row.created_at, updated_at=row.updated_at, templates=row.template_count)


def _template(row: sa.Row[Any], subject_id: str) -> Template:
    return Template(row.pk, row.id, subject_id, row.kind, row.quality, row.detection_score, row.created_at)


# Made once: SQLAlchemy takes longer to make a statement than SQLite to run it.
GALLERY: Final = gallery_rows().where(galleries.c.name == sa.bindparam("gallery"))
VERSION: Final = sa.select(galleries.c.pk, galleries.c.version).where(galleries.c.name == sa.bindparam("gallery"))
NAMES: Final = sa.select(subjects.c.pk, subjects.c.sealed)

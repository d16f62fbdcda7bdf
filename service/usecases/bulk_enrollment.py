"""Bulk enrollment: enroll the photos of an archive in order, as if each was sent alone."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from kith.wire.common import Detail, FaceChoice, NameEncoding, to_name_encoding
from kith.wire.fields import DETAIL
from kith.wire.identifiers import ID_RULE, normalize_id
from kith.wire.subjects import ChecksIn
from service.core.errors import GalleryChangedError, GalleryMovedError, InvalidRequestError, KithError, RefusedError
from service.domain.gallery import Gallery, NewTemplate
from service.inference.archives import (
    ArchiveContents,
    ArchivedFile,
    ArchiveLimits,
    is_utf8,
    iterate_members,
    read_contents,
)
from service.inference.photo_pipeline import Photo
from service.jobs.runner import JobContext, JobKind, JobStoppedError, is_fault
from service.risk.gallery_risks import MIN_SUBJECTS
from service.security.sealing import Seal
from service.storage.repositories.jobs import ALREADY_ENROLLED, IGNORED, DoneItems, ItemOutcome
from service.usecases.backend import Backend
from service.usecases.enrollment_checks import (
    choose_face,
    embed_for,
    needs_identity_check,
    refuse_identities,
    template_from_face,
)

KIND: Final = "enrollment"
PHOTOS_AT_ONCE: Final = 16
"""Photos embedded together, while those before them are decided: two full detector batches."""
MAX_PHOTOS_PER_TRANSACTION: Final = 32
MAX_OTHER_FILES_PER_TRANSACTION: Final = 500
log = logging.getLogger(__name__)


class BulkOptions(ChecksIn):
    """Options of a job."""

    face: FaceChoice = "only"
    strip: int | None = Field(
        None, ge=0, le=64, description="Leading folders to strip from each path; default: detected from the archive."
    )
    detail: Detail | None = Field(None, description=f"{DETAIL} Default: KITH_DETAIL, at least medium.")
    names: Annotated[NameEncoding, BeforeValidator(to_name_encoding)] | None = Field(
        None,
        description="Encoding of names that the archive does not declare, as Python names it; default: UTF-8.",
    )


@dataclass(frozen=True)
class BulkEnrollment:
    """Bulk enrollment jobs and their dependencies."""

    backend: Backend
    limits: ArchiveLimits

    def kind(self) -> JobKind:
        """Return the functions of this kind of job."""
        spool = self.backend.spool
        return JobKind(self.run, spool.has, lambda job: spool.discard(job.id))

    async def run(self, context: JobContext) -> None:
        """Enroll the photos of the archive that have no recorded outcome yet."""
        options = BulkOptions(**context.job.parameters)
        gallery = await context.run(self.backend.store.galleries.get, context.job.gallery)
        archive = self.backend.spool.archive(context.job.id, gallery.seal)
        read = partial(read_contents, names=options.names)
        found = await context.run(read, archive, self.limits, options.strip, context.check)
        done = await context.run(context.done)
        await context.run(record_other_files, context, found, done)
        run = _Run(self.backend, context, options, gallery)
        waiting = _waiting(iterate_members(archive, self.limits, options.names), found, done)
        try:
            await run.derive_risk()  # an earlier process may have ended before it did
            await run.decide_all(waiting)
        except GalleryMovedError as error:
            # Vectors of the old recognizer are useless: resume after the last stored photo with the new one.
            raise JobStoppedError from error


@dataclass(frozen=True)
class _Item:
    """Photo of the archive; ``number``: its position, from 1."""

    number: int
    name: str
    subject: str | None
    payload: bytes | KithError
    template_id: str


_NOT_THERE: Final = InvalidRequestError("the manifest names this photo, and the archive does not contain it")
_NO_SUBJECT: Final = InvalidRequestError("the photo has no subject: expected PERSON/PHOTO, or a manifest")
_NOT_UTF8: Final = InvalidRequestError(
    "the folder name is not UTF-8", "Rename the folder, or state the encoding of all names with names."
)
_NO_ID: Final = InvalidRequestError(f"the folder name is not a valid subject id: it {ID_RULE}", "Rename the folder.")


def record_other_files(context: JobContext, found: ArchiveContents, done: DoneItems) -> None:
    """Record the number of items, the files that are not photos, and the manifest entries without a file."""
    total = len(found.subjects) + len(found.missing) + len(found.ignored)
    context.record([], total, ignored=found.hidden + len(found.ignored))
    ignored = (ItemOutcome(name, IGNORED, subject=_valid(subject)) for name, subject in found.ignored.items())
    missing = (refusal(name, _NOT_THERE) for name in found.missing)
    others = (outcome for outcome in chain(ignored, missing) if outcome.item not in done)
    while block := list(islice(others, MAX_OTHER_FILES_PER_TRANSACTION)):
        context.check()
        context.record(block)


class _Run:
    """One run of a job.

    Photos are embedded concurrently, and decided in archive order, because decisions depend on earlier enrollments.
    Consecutive photos of a subject are stored in one transaction with their outcomes.
    """

    def __init__(self, backend: Backend, context: JobContext, options: BulkOptions, gallery: Gallery) -> None:
        self._backend = backend
        self._context = context
        self._options = options
        self.gallery = gallery
        backend.recognizers.for_gallery(gallery)  # fail the job, not each photo, if the recognizer is not served
        self._subject: str | None = None
        self._admitted: dict[str, NewTemplate] = {}
        self._refused: list[ItemOutcome] = []

    async def decide_all(self, waiting: Iterator[_Item]) -> None:
        """Store all accepted photos and record the other outcomes.

        Passes on errors of the archive, the database and the job. No photo is being embedded afterwards.
        """
        ahead = asyncio.create_task(self._embed_next(waiting))
        try:
            while block := await ahead:
                # The networks have work while photos are decided and stored.
                ahead = asyncio.create_task(self._embed_next(waiting))
                for item, seen in block:
                    await self._decide(item, seen)
            await self._store()
        finally:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)

    async def _embed_next(self, waiting: Iterator[_Item]) -> list[tuple[_Item, Photo | Exception]]:
        """Return the next photos, without their bytes, and what is seen in each, or why nothing is."""
        block = await self._context.run(_read, waiting)
        ids = [item.template_id for item in block]
        known = await self._context.run(self._backend.store.templates.owners, self.gallery, ids)
        async with asyncio.TaskGroup() as group:
            seen = [group.create_task(self._embed(item, item.template_id in known)) for item in block]
        return [(replace(item, payload=b""), task.result()) for item, task in zip(block, seen, strict=True)]

    async def derive_risk(self) -> None:
        """Update the gallery's risk in the foreground, so that decisions do not depend on timing."""
        if self.gallery.subjects >= MIN_SUBJECTS:
            await self._context.run(self._backend.risks.refresh, self.gallery.name)
            await self._read_gallery()

    async def _read_gallery(self) -> None:
        """Read the gallery's current settings, counts and risk. Raises GalleryMovedError."""
        before = self.gallery.generation
        self.gallery = await self._context.run(self._backend.store.galleries.get, self.gallery.name)
        if self.gallery.generation != before:
            raise GalleryMovedError(f"gallery {self.gallery.name!r} moved to another recognizer meanwhile")

    async def _embed(self, item: _Item, known: bool) -> Photo | Exception:
        if known or isinstance(item.payload, KithError):
            return item.payload if isinstance(item.payload, KithError) else _KNOWN
        try:
            return await embed_for(self._backend, self.gallery, item.payload, self._options.detail, background=True)
        except Exception as error:  # raised when the photo has its turn
            return error

    async def _decide(self, item: _Item, seen: Photo | Exception) -> None:
        """Accept or refuse a photo. A fault is raised after the earlier photos are stored: this one has no outcome."""
        if item.subject != self._subject or len(self._admitted) + len(self._refused) >= MAX_PHOTOS_PER_TRANSACTION:
            await self._store()
            self._context.check()
        self._subject = item.subject
        try:
            await self._accept_or_refuse(item, seen)
        except Exception as error:
            await self._store()
            if isinstance(error, KithError):
                raise
            job = self._context.job.id
            log.exception("job %s: photo %d of the archive failed", job, item.number)
            raise RefusedError(
                "job_crashed", f"photo {item.number} of the archive: see the log entries of job {job}"
            ) from error

    async def _accept_or_refuse(self, item: _Item, seen: Photo | Exception) -> None:
        if seen is _KNOWN:
            self._refused.append(ItemOutcome(item.name, ALREADY_ENROLLED, subject=item.subject))
            return
        try:
            if isinstance(seen, Exception):
                raise seen
            template = await self._context.run(self._admit, item, seen)
        except KithError as error:
            if is_fault(error) or isinstance(error, GalleryMovedError):
                raise  # not an error of the photo
            self._backend.metrics.count_enrollment(error.code)
            self._refused.append(refusal(item.name, error, item.subject))
        else:
            self._admitted[item.name] = template

    def _admit(self, item: _Item, photo: Photo) -> NewTemplate:
        """Return the template of a photo, whose identity is not checked yet."""
        face = choose_face(photo, self._options.face, self.gallery.settings.quality_gate)
        template = template_from_face(face, self.gallery, self._options, item.template_id)
        return replace(template, face_count=photo.face_count)

    async def _store(self) -> None:
        """Check the identity of the admitted templates, store those that pass, and record all outcomes.

        The checks are repeated if another process changed the templates in between.
        """
        admitted, refused = self._admitted, self._refused
        self._admitted, self._refused = {}, []
        while admitted:
            async with self._backend.enrolling.of(self.gallery.pk):
                await self._read_gallery()
                checked = needs_identity_check(self.gallery, self._backend.risks, self._options)
                if checked:
                    assert self._subject is not None  # noqa: S101 - only photos with a subject are embedded
                    rest = (self.gallery, self._subject, self._backend, self._options, self._context.run)
                    for name, rejection in (await refuse_identities(admitted, *rest)).items():
                        self._backend.metrics.count_enrollment(rejection.code)
                        refused.append(refusal(name, rejection, self._subject))
                if not admitted:
                    break
                try:
                    canceled = await self._context.run(self._enroll, admitted, refused, checked)
                except GalleryChangedError:
                    self._context.check()
                    continue  # after requests that wait for their turn
                self._context.note_cancellation(canceled)
                break
        if not admitted:
            if refused:
                await self._context.run(self._context.record, refused)
            return
        # The archive may have copies of a photo.
        self._backend.metrics.count_enrollment("enrolled", len({template.id for template in admitted.values()}))
        await self._read_gallery()
        await self.derive_risk()

    def _enroll(self, admitted: Mapping[str, NewTemplate], refused: list[ItemOutcome], checked: bool) -> bool:
        assert self._subject is not None  # noqa: S101 - as above
        context = self._context
        return context.store.enroll(
            context.job, self.gallery, self._subject, list(admitted.items()), refused, context.seconds, as_read=checked
        )


_KNOWN: Final = KithError("the photo is already enrolled")


def template_id(seal: Seal, subject: str, payload: bytes) -> str:
    """Return an id that depends on photo and subject only, so that a photo is enrolled once.

    The id is keyed: receipts and the audit show it, and it must not reveal whether a known photo was enrolled.
    """
    return seal.pseudonym("photo", f"{subject}\0{hashlib.sha256(payload).hexdigest()}")


def _waiting(found: Iterator[ArchivedFile], known: ArchiveContents, done: DoneItems) -> Iterator[_Item]:
    photos = (member for member in found if member.name in known.subjects)
    for number, member in enumerate(photos, start=1):
        if member.name in done:
            continue
        subject = known.subjects[member.name]
        if (unfit := _unfit(subject)) is not None:
            yield _Item(number, member.name, None, unfit, "")
            continue
        try:
            payload = member.read()
        except KithError as error:
            yield _Item(number, member.name, subject, error, "")
        else:
            yield _Item(number, member.name, subject, payload, template_id(done.seal, subject or "", payload))


def _read(waiting: Iterator[_Item]) -> list[_Item]:
    return list(islice(waiting, PHOTOS_AT_ONCE))


def _unfit(subject: str | None) -> KithError | None:
    if subject is None:
        return _NO_SUBJECT
    if not is_utf8(subject):
        return _NOT_UTF8
    try:
        normalize_id(subject)
    except ValueError:
        return _NO_ID
    return None


def _valid(subject: str | None) -> str | None:
    """Return the subject if its id is valid. Otherwise it cannot exist, and its id may not be storable."""
    return None if _unfit(subject) else subject


def refusal(name: str, error: KithError, subject: str | None = None) -> ItemOutcome:
    return ItemOutcome(name, error.code, error.redacted().document(), subject)

"""Bulk enrolment: an archive's photos, each decided on as if it had come alone and in this order."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

from service.archives import ArchiveLimits, Contents, Member, contents, members
from service.decision import FaceChoice
from service.enrolment import (
    Overrides,
    check_identity,
    choose_face,
    embed_for,
    template_from_face,
)
from service.errors import GalleryMovedError, InvalidRequestError, KithError
from service.gallery.follower import Followers
from service.gallery.job_store import ALREADY_ENROLLED, Done, ItemOutcome
from service.gallery.risks import FEWEST_SUBJECTS
from service.gallery.store import Store
from service.gallery.subjects import SUBJECT_ID, Gallery, NewTemplate, printable
from service.jobs import JobContext, JobKind, JobStoppedError
from service.pipeline import Photo, Pipeline
from service.recognisers import Recognisers
from service.security.sealing import Seal
from service.spool import Spool

KIND: Final = "enrolment"
IN_FLIGHT: Final = 16
"""Photos in memory, being looked at: two full batches of the detector, so that it never waits."""
AHEAD: Final = 64
"""Photos that were looked at, or are, and are not decided on yet."""
TOGETHER: Final = 32
"""Most photos of a person that are stored in one transaction."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BulkOptions:
    """``strip``: folders above the people's; None: as the archive suggests."""

    face: FaceChoice = "only"
    allow_duplicate: bool = False
    allow_inconsistent: bool = False
    allow_low_quality: bool = False
    strip: int | None = None
    allow_not_live: bool = False

    def parameters(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BulkEnrolment:
    """What a job of this kind works with."""

    spool: Spool
    limits: ArchiveLimits
    store: Store
    followers: Followers
    pipeline: Pipeline
    recognisers: Recognisers

    def kind(self) -> JobKind:
        return JobKind(self.run, self.spool.has, self.spool.discard, self.spool.tidy)

    async def run(self, context: JobContext) -> None:
        """Enrol what the job's archive holds and its items do not name yet."""
        options = BulkOptions(**context.job.parameters)
        gallery = await context.run(self.store.gallery, context.job.gallery)
        archive = self.spool.archive(context.job.id, gallery.seal)
        found = await context.run(contents, archive, self.limits, options.strip, context.check)
        done = await context.run(context.done)
        missing = [_refusal(name, _NOT_THERE) for name in found.missing if name not in done]
        total = len(found.subjects) + len(found.missing)
        await context.run(lambda: context.record(missing, total, ignored=found.ignored))
        run = _Run(self, context, options, await context.run(self.store.gallery, context.job.gallery))
        await run.derive_risk()  # as a process that died may have left it to be
        waiting = _waiting(members(archive, self.limits), found, done)
        try:
            await run.decide_all(waiting)
        except GalleryMovedError as error:
            # What the other recogniser saw is of no use any more: from the last photo stored, with the new one.
            raise JobStoppedError from error


@dataclass(frozen=True)
class _Item:
    name: str
    subject: str | None
    payload: bytes | KithError
    template_id: str
    earlier_id: str


@dataclass(frozen=True)
class _Ahead:
    """An item that is being looked at, without its bytes."""

    name: str
    subject: str | None
    template_id: str
    seen: asyncio.Task[Photo | KithError]


_NOT_THERE: Final = InvalidRequestError("the manifest names it, and the archive does not have it")
_NOBODYS: Final = InvalidRequestError("it lies in no person's folder: PERSON/PHOTO is expected, or a manifest")
_NO_ID: Final = InvalidRequestError(
    "the person's name is no subject's id: at most 128 printable characters, no slashes, no spaces at its ends"
)


class _Run:
    """Photos are looked at many at a time, and decided on one by one in the archive's order: a decision depends on who
    is enrolled already. A person's photos that follow each other are stored together, with what became of each."""

    def __init__(self, work: BulkEnrolment, context: JobContext, options: BulkOptions, gallery: Gallery) -> None:
        self._work = work
        self._context = context
        self._choice = options.face
        self._overrides = Overrides(
            options.allow_duplicate, options.allow_inconsistent, options.allow_low_quality, options.allow_not_live
        )
        self.gallery = gallery
        work.recognisers.of(gallery)  # where it is not served the job fails, not each photo
        self._seats = asyncio.Semaphore(IN_FLIGHT)
        self._looking: set[asyncio.Task[Photo | KithError]] = set()
        self._ahead: asyncio.Queue[_Ahead | Exception | None] = asyncio.Queue(AHEAD)
        self._subject: str | None = None
        self._admitted: list[tuple[str, NewTemplate]] = []
        self._refused: list[ItemOutcome] = []

    async def decide_all(self, waiting: Iterator[_Item]) -> None:
        """Store every photo that may be enrolled, and record what became of the others. Raises what the archive, the
        database or the job's end raise; nothing is being looked at any more then."""
        reader = asyncio.create_task(self._read_ahead(waiting))
        try:
            while (next_one := await self._ahead.get()) is not None:
                if isinstance(next_one, Exception):
                    raise next_one
                await self._decide(next_one)
            await self._store()
        finally:
            for task in (reader, *self._looking):
                task.cancel()
            await asyncio.gather(reader, *self._looking, return_exceptions=True)

    async def _read_ahead(self, waiting: Iterator[_Item]) -> None:
        """So that the networks have work while somebody's photos are being stored."""
        ending: Exception | None = None
        try:
            while block := await self._context.run(_read, waiting):
                ids = [id_ for item in block for id_ in (item.template_id, item.earlier_id)]
                known = await self._context.run(self._work.store.known_templates, self.gallery, ids)
                for item in block:
                    await self._seats.acquire()
                    task = asyncio.create_task(
                        self._look(item, not known.isdisjoint((item.template_id, item.earlier_id)))
                    )
                    self._looking.add(task)
                    task.add_done_callback(self._looked)
                    await self._ahead.put(_Ahead(item.name, item.subject, item.template_id, task))
        except Exception as error:
            ending = error
        await self._ahead.put(ending)

    def _looked(self, task: asyncio.Task[Photo | KithError]) -> None:
        self._looking.discard(task)
        self._seats.release()

    async def derive_risk(self) -> None:
        """Bring the gallery's risk up to date now, not in the background: which photos are refused must not depend on
        how fast the machine is, or on when it was interrupted."""
        if self.gallery.subjects >= FEWEST_SUBJECTS:
            await self._context.run(self._work.pipeline.risks.refresh, self.gallery.name)
            await self._read_gallery()

    async def _read_gallery(self) -> None:
        """Its settings, counts and risk as they are now. Raises GalleryMovedError."""
        before = self.gallery.generation
        self.gallery = await self._context.run(self._work.store.gallery, self.gallery.name)
        if self.gallery.generation != before:
            raise GalleryMovedError(f"gallery {self.gallery.name!r} moved to another recogniser meanwhile")

    async def _look(self, item: _Item, known: bool) -> Photo | KithError:
        if known or isinstance(item.payload, KithError):
            return item.payload if isinstance(item.payload, KithError) else _KNOWN
        if (unfit := _unfit(item.subject)) is not None:
            return unfit
        try:
            return await embed_for(
                self.gallery, item.payload, self._work.pipeline, self._work.recognisers, background=True
            )
        except KithError as error:
            return error
        except Exception:
            log.exception("job %s: a photo could not be looked at", self._context.job.id)
            return KithError(f"an unforeseen error; the log has the details under job {self._context.job.id}")

    async def _decide(self, item: _Ahead) -> None:
        seen = await item.seen
        if item.subject != self._subject or len(self._admitted) + len(self._refused) >= TOGETHER:
            await self._store()
            self._context.check()
        self._subject = item.subject
        if seen is _KNOWN or item.template_id in {template.id for _, template in self._admitted}:
            self._refused.append(ItemOutcome(item.name, ALREADY_ENROLLED, subject=item.subject))
            return
        try:
            if isinstance(seen, KithError):
                raise seen
            template = await self._context.run(self._admit, item, seen)
        except KithError as error:
            if error.status >= 500 and not isinstance(seen, KithError):
                raise  # the database's, not the photo's
            self._work.pipeline.measures.enrolled.add(error.code)
            self._refused.append(_refusal(item.name, error, item.subject))
        else:
            self._admitted.append((item.name, template))

    def _admit(self, item: _Ahead, photo: Photo) -> NewTemplate:
        face = choose_face(photo, self._choice)
        template = template_from_face(face, self.gallery, self._overrides, item.template_id)
        assert item.subject is not None  # noqa: S101 - looked at only where there is one
        check_identity(
            template,
            [sibling for _, sibling in self._admitted],
            self.gallery,
            item.subject,
            self._work.store,
            self._work.followers,
            self._work.pipeline,
            self._overrides,
        )
        return template

    async def _store(self) -> None:
        admitted, refused = self._admitted, self._refused
        self._admitted, self._refused = [], []
        if not admitted:
            if refused:
                await self._context.run(self._context.record, refused)
            return
        assert self._subject is not None  # noqa: S101 - as above
        self._context.asked(
            await self._context.run(
                self._context.store.enrol,
                self._context.job,
                self.gallery,
                self._subject,
                admitted,
                refused,
                self._context.seconds,
            )
        )
        self._work.pipeline.measures.enrolled.add("enrolled", len(admitted))
        await self._read_gallery()
        await self.derive_risk()


_KNOWN: Final = KithError("the gallery has this photo")


def template_id(seal: Seal, subject: str, payload: bytes) -> str:
    """The same photo of the same person has the same id, however often and under whatever file name it comes. Receipts
    and the audit name it in clear: without the gallery's key nobody can tell by it whether a photo was theirs."""
    return seal.pseudonym("photo", f"{subject}\0{hashlib.sha256(payload).hexdigest()}")


def earlier_id(subject: str, payload: bytes) -> str:
    """As the template's id was made before it was keyed, and lies in galleries of then."""
    return hashlib.sha256(subject.encode() + b"\0" + hashlib.sha256(payload).digest()).hexdigest()[:32]


def _waiting(found: Iterator[Member], known: Contents, done: Done) -> Iterator[_Item]:
    for member in found:
        if member.name not in known.subjects or member.name in done:
            continue
        subject = known.subjects[member.name]
        try:
            payload = member.read()
        except KithError as error:
            yield _Item(member.name, subject, error, "", "")
        else:
            ids = template_id(done.seal, subject or "", payload), earlier_id(subject or "", payload)
            yield _Item(member.name, subject, payload, *ids)


def _read(waiting: Iterator[_Item]) -> list[_Item]:
    return list(islice(waiting, IN_FLIGHT // 2))


def _unfit(subject: str | None) -> KithError | None:
    if subject is None:
        return _NOBODYS
    try:
        printable(subject)
    except ValueError:
        return _NO_ID
    return None if re.match(SUBJECT_ID, subject) else _NO_ID


def _refusal(name: str, error: KithError, subject: str | None = None) -> ItemOutcome:
    return ItemOutcome(name, error.code, error.kept(), subject)

"""Jobs: leases, progress and item outcomes of background work.

A job belongs to the process that holds its lease. Any process may claim a job whose lease expired. A process that lost
its lease cannot record anything, because every record checks the owner. An outcome is recorded in the transaction of
its effect, so that each effect happens exactly once.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.engine import Connection

from kith.wire.common import JobState
from kith.wire.jobs import JobItemOut
from service.core.actor import current_actor
from service.core.errors import MasterKeyError, NotFoundError, RefusedError, StorageError, SubjectErasedError
from service.domain.events import Event
from service.domain.gallery import Gallery, Item, NewTemplate
from service.security.sealing import Seal
from service.storage.audit.log import Entry, append, note
from service.storage.db.engine import Database, deleted_meanwhile
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import ITEM, PROBLEM, subject_lookup
from service.storage.db.tables import data_keys, galleries, job_items, jobs
from service.storage.events.outbox import Origin, publish
from service.storage.repositories.erasures import erased_since
from service.storage.repositories.templates import admit

FINISHED: Final[tuple[JobState, ...]] = ("succeeded", "failed", "canceled")
ENROLLED: Final = "enrolled"
ALREADY_ENROLLED: Final = "already_enrolled"
ERASED: Final = "subject_erased"
IGNORED: Final = "ignored"
ARCHIVE_KINDS: Final = ("enrollment", "album")
"""Kinds of jobs that read an archive from the disk of one server (service.jobs.spool)."""
MAX_LEASE: Final = timedelta(hours=1)
"""Longest lease. A later end was written by a wrong clock."""
Beginning = Callable[[Connection, str], None]
"""Writes what a job works on, in the transaction that queues it: gets the connection and the job's id."""


class LeaseLostError(Exception):
    """The job was claimed by another process, or deleted: stop without recording anything."""


@dataclass(frozen=True)
class Progress:
    """Progress of a job, in items."""

    total: int | None = None
    """None until counted."""
    failed: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    """Finished items by outcome."""
    details: dict[str, Any] = field(default_factory=dict)
    """Values of the job's kind."""

    @property
    def done(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Job:
    """Background job of a gallery."""

    pk: int
    id: str
    kind: str
    gallery: str
    """Name."""
    state: JobState
    parameters: dict[str, Any]
    """JSON, stored unencrypted."""
    progress: Progress
    problem: dict[str, Any] | None
    actor: str
    """Requester, who is also the actor of the job's audit lines."""
    cancel: bool
    owner: str | None
    attempts: int
    """Attempts since the last finished item that failed, or whose process died."""
    created_at: datetime
    updated_at: datetime
    seal: Seal = field(repr=False, compare=False)
    erased: int = 0
    """Key of the gallery's last receipt when the job was queued."""


@dataclass(frozen=True)
class ItemOutcome:
    """Outcome of an item, its problem if it failed, the id of its subject, and the number of faces of a photo."""

    item: str
    outcome: str
    problem: dict[str, Any] | None = None
    subject: str | None = None
    face_count: int | None = None


class JobItem(JobItemOut):
    pk: int = Field(exclude=True)


@dataclass(frozen=True)
class DoneItems:
    """Set of finished items, by keyed hashes, because names of erased subjects are deleted."""

    seal: Seal = field(repr=False)
    lookups: frozenset[str]

    def __contains__(self, item: str) -> bool:
        return self.seal.pseudonym(ITEM, item) in self.lookups


class JobStore:
    """Jobs in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        gallery: Gallery,
        kind: str,
        parameters: dict[str, Any],
        job_id: str | None = None,
        beginning: Beginning | None = None,
    ) -> Job:
        """Queue a job. ``beginning``: see :data:`Beginning`. Raises GalleryNotFoundError."""
        with self._database.write(deleted_meanwhile(gallery)) as connection:
            created = create_in(connection, gallery, kind, parameters, job_id)
            if beginning is not None:
                beginning(connection, created)
            note(self._database.vault, connection, "job_queued", gallery, job=created, kind=kind)
            return self._job(_row(connection, created))

    def job(self, job_id: str) -> Job:
        """Raises job_not_found."""
        with self._database.read() as connection:
            return self._job(_row(connection, job_id))

    def list_jobs(
        self,
        gallery: Gallery | None,
        states: Collection[JobState],
        before: int | None,
        limit: int,
        among: Collection[str] | None = None,
    ) -> list[Job]:
        """Return jobs, latest first: at most ``limit`` before the row key ``before``, filtered by gallery and state.

        ``among`` restricts the gallery names.
        """
        query = _rows().order_by(jobs.c.pk.desc()).limit(limit)
        if among is not None:
            query = query.where(galleries.c.name.in_(among))
        if gallery is not None:
            query = query.where(jobs.c.gallery_pk == gallery.pk)
        if states:
            query = query.where(jobs.c.state.in_(list(states)))
        if before is not None:
            query = query.where(jobs.c.pk < before)
        with self._database.read() as connection:
            return [self._job(row) for row in connection.execute(query)]

    def states(self) -> dict[JobState, int]:
        """Count the jobs in each state."""
        count = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        with self._database.read() as connection:
            found = {row[0]: row[1] for row in connection.execute(count)}
        return {state: found.get(state, 0) for state in get_args(JobState)}

    def items(self, job: Job, after: int | None, limit: int, failed_only: bool = False) -> list[JobItem]:
        """Return finished items in order: at most ``limit`` after the row key ``after``."""
        query = sa.select(job_items).where(job_items.c.job_pk == job.pk).order_by(job_items.c.pk).limit(limit)
        if after is not None:
            query = query.where(job_items.c.pk > after)
        if failed_only:
            query = query.where(job_items.c.failed)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
            told = [_NAMELESS if row.sealed is None else job.seal.open_json(row.sealed, ITEM) for row in rows]
        return [JobItem(pk=row.pk, at=row.at, **about) for row, about in zip(rows, told, strict=True)]

    def done(self, job: Job) -> DoneItems:
        """Return the items that are finished."""
        query = sa.select(job_items.c.lookup).where(job_items.c.job_pk == job.pk)
        with self._database.read() as connection:
            return DoneItems(job.seal, frozenset(connection.execute(query).scalars()))

    def unfinished(self, job_ids: Collection[str]) -> set[str]:
        """Return those of the given jobs that are not finished."""
        query = sa.select(jobs.c.id).where(jobs.c.id.in_(list(job_ids)), jobs.c.state.not_in(FINISHED))
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    # Running jobs

    def claim(self, process: str, lease_s: float, ready: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """Claim the oldest free job that is ``ready`` to be run here; None if there is none.

        ``process``: name of at most 48 characters. Each claim gets a unique owner name.
        """
        with self._database.read() as connection:  # polling takes no write lock
            now = self._database.now(connection)
            waiting = connection.execute(_rows().where(_is_free(now)).order_by(jobs.c.pk)).all()
        for row in waiting:
            if not ready(self._job(row)):
                continue
            owner, until = f"{process}:{uuid.uuid4().hex[:8]}", now + timedelta(seconds=lease_s)
            died = sa.case((jobs.c.state == "running", 1), else_=0)
            claimed = jobs.update().where(jobs.c.pk == row.pk, _is_free(now)).values(attempts=jobs.c.attempts + died)
            with self._database.write(_CONFLICT) as connection:
                values = {"state": "running", "owner": owner, "lease_until": until, "updated_at": now}
                if connection.execute(claimed.values(**values)).rowcount:
                    return self._job(_row(connection, row.id))
        return None

    def renew(self, job: Job, lease_s: float) -> bool:
        """Renew the lease; return whether cancellation was requested. Raises LeaseLostError."""
        with self._database.write(_CONFLICT) as connection:
            row = own_row(connection, job)
            _update(connection, job.pk, lease_until=self._database.now(connection) + timedelta(seconds=lease_s))
            return bool(row.cancel)

    def record(
        self, job: Job, outcomes: Sequence[ItemOutcome], seconds: float, total: int | None = None, **details: Any
    ) -> bool:
        """Record outcomes, like :func:`record_in`, in its own transaction."""
        with self._owned(job) as (connection, _):
            return record_in(connection, job, outcomes, seconds, total, **details)

    def enroll(
        self,
        job: Job,
        gallery: Gallery,
        subject_id: str,
        admitted: Sequence[tuple[str, NewTemplate]],
        refused: Sequence[ItemOutcome],
        seconds: float,
        as_read: bool = True,
    ) -> bool:
        """Enroll the templates of (item, template) pairs and record all items, all or nothing.

        Existing templates are skipped. Subjects and templates that were erased since the job was queued are refused.
        Returns whether cancellation was requested.

        ``as_read``: require that no template was enrolled or removed since ``gallery`` was read, so that the checks of
        ``admitted`` still hold.

        Raises LeaseLostError, GalleryChangedError, GalleryNotFoundError and GalleryMovedError; nothing is stored then.
        """
        with self._database.change(gallery, as_read=as_read) as connection:
            own_row(connection, job)  # before the locks of the audit line and the event, as everywhere
            begun = replace(gallery, erased=job.erased)
            items = [Item(subject_id, template) for _, template in admitted]
            done = admit(self._database.vault, connection, begun, items, job=job.id)
            outcomes = list[ItemOutcome]()
            for row, (item, template) in enumerate(admitted):
                error = done.refused.get(row)
                if isinstance(error, SubjectErasedError):
                    outcomes.append(ItemOutcome(item, ERASED, error.document(), subject_id))
                else:
                    outcome = ENROLLED if row in done.enrolled else ALREADY_ENROLLED
                    outcomes.append(ItemOutcome(item, outcome, subject=subject_id, face_count=template.face_count))
            return record_in(connection, job, [*outcomes, *refused], seconds)

    def finish(self, job: Job, state: JobState, problem: dict[str, Any] | None = None) -> None:
        """Raises LeaseLostError."""
        with self._owned(job) as (connection, _):
            _update(
                connection, job.pk, **_ended(state, None if problem is None else _sealed_problem(job.seal, problem))
            )
            self._report(connection, job.id)

    def release(self, job: Job) -> None:
        """Return the job to the queue. Raises LeaseLostError."""
        with self._owned(job) as (connection, _):
            _update(connection, job.pk, **_ended("queued"))

    def retry(self, job: Job, delay_s: float, max_attempts: int) -> bool:
        """Count a failed attempt, and return the job to the queue, where it is not claimed for ``delay_s``.

        Returns False, and changes nothing, after ``max_attempts`` since the last recorded item. Raises LeaseLostError.
        """
        with self._owned(job) as (connection, row):
            if row.attempts >= max_attempts:
                return False
            not_before = self._database.now(connection) + timedelta(seconds=delay_s)
            _update(connection, job.pk, **_ended("queued") | {"attempts": row.attempts + 1, "lease_until": not_before})
            return True

    @contextmanager
    def _owned(self, job: Job) -> Iterator[tuple[Connection, sa.Row[Any]]]:
        """Open a transaction of the job's owner, and return the job's row. Raises LeaseLostError.

        The gallery's row is locked first, as in Database.change: an erasure waits for outcomes, and then removes their
        names, or comes first, and they name no person.
        """
        with self._database.write(_CONFLICT) as connection:
            own = sa.select(galleries.c.pk).where(galleries.c.name == job.gallery)
            connection.execute(own.with_for_update(read=True))
            yield connection, own_row(connection, job)

    # Managing jobs

    def cancel(self, job_id: str) -> Job:
        """Cancel a free job at once, or let its process stop after the current item. Raises job_not_found.

        Finished jobs do not change.
        """
        with self._database.write(_CONFLICT) as connection:
            row = _row(connection, job_id, lock=True)
            if row.state not in FINISHED:
                free = (jobs.c.state == "queued") | _is_free(self._database.now(connection))
                ending = jobs.update().where(jobs.c.pk == row.pk, free).values(**_ended("canceled"))
                if connection.execute(ending).rowcount:
                    self._report(connection, job_id)
                else:
                    _update(connection, row.pk, cancel=True)
                entry = Entry("job_canceled", (row.gallery_pk, row.gallery), details={"job": job_id, "kind": row.kind})
                append(self._database.vault, connection, [entry])
        return self.job(job_id)

    def delete_finished(self, days: float) -> int:
        """Delete jobs that finished more than ``days`` ago; return their number."""
        with self._database.write(_CONFLICT) as connection:
            before = self._database.now(connection) - timedelta(days=days)
            old = jobs.c.state.in_(FINISHED) & (jobs.c.updated_at < before)
            return connection.execute(jobs.delete().where(old)).rowcount

    def _report(self, connection: Connection, job_id: str) -> None:
        """Report a finished job to webhooks, in the transaction that ends it."""
        row = _row(connection, job_id)
        job = self._job(row)
        counts = {
            "total_count": job.progress.total,
            "done_count": job.progress.done,
            "failed_count": job.progress.failed,
        }
        event = Event("job_finished", {"job": job.id, "kind": job.kind, "state": job.state, **counts})
        publish(self._database.vault, connection, Origin(row.gallery_pk, job.gallery, job.seal), [event])

    def _job(self, row: sa.Row[Any]) -> Job:
        seal = self._database.vault.seal(row.gallery_pk, row.wrapped, row.master_key)
        problem = None if row.problem is None else _problem(seal, row.problem)
        known = {name: row._mapping[name] for name in JOB_COLUMNS}
        return Job(**known, progress=Progress(**row.progress), problem=problem, seal=seal)


# Rows, within a transaction of the caller


def create_in(
    connection: Connection, gallery: Gallery, kind: str, parameters: dict[str, Any], job_id: str | None = None
) -> str:
    """Queue a job; return its id."""
    now, job_id = datetime.now(UTC), job_id or uuid.uuid4().hex
    job = {"id": job_id, "kind": kind, "gallery_pk": gallery.pk, "parameters": parameters, "erased": gallery.erased}
    start = {"state": "queued", "progress": vars(Progress()), "actor": current_actor().name, "cancel": False}
    connection.execute(jobs.insert().values(**job, **start, created_at=now, updated_at=now))
    return job_id


def record_in(
    connection: Connection,
    job: Job,
    outcomes: Sequence[ItemOutcome],
    seconds: float,
    total: int | None = None,
    **details: Any,
) -> bool:
    """Record the outcomes of items within the transaction of their effects. The first outcome of an item stays.

    Args:
        seconds: total duration of the job's work.
        total, details: replace the values of the progress, if given.

    Return whether cancellation was requested. After LeaseLostError the transaction must not be committed.
    """
    row = own_row(connection, job)
    now = datetime.now(UTC)
    new = {job.seal.pseudonym(ITEM, outcome.item): outcome for outcome in outcomes}
    known = sa.select(job_items.c.lookup).where(job_items.c.job_pk == job.pk, job_items.c.lookup.in_(list(new)))
    for lookup in connection.execute(known).scalars().all() if new else ():
        del new[lookup]
    values: dict[str, Any] = {"updated_at": now}
    if new:
        values["attempts"] = 0
        gone = erased_since(connection, row.gallery_pk, job.erased)
        rows = [_item(job, lookup, one, gone) | {"at": now} for lookup, one in new.items()]
        connection.execute(job_items.insert(), rows)
    before = Progress(**row.progress)
    progress = Progress(
        before.total if total is None else total,
        before.failed + sum(one.problem is not None for one in new.values()),
        round(seconds, 3),
        dict(Counter(before.counts) + Counter(one.outcome for one in new.values())),
        before.details | details,
    )
    _update(connection, job.pk, progress=vars(progress), **values)
    return bool(row.cancel)


def own_row(connection: Connection, job: Job) -> sa.Row[Any]:
    """Lock and return the row of a job that this owner runs. Raises LeaseLostError."""
    mine = (jobs.c.pk == job.pk) & (jobs.c.owner == job.owner) & (jobs.c.state == "running")
    row = connection.execute(sa.select(jobs).where(mine).with_for_update()).first()
    if row is None:
        raise LeaseLostError(f"job {job.id} no longer belongs to {job.owner}")
    return row


def fail_archive_jobs(vault: Vault, connection: Connection) -> int:
    """End restored jobs that wait for an archive, which no backup holds, as failed; return their number."""
    problem = RefusedError(
        "job_unrunnable", "the database was restored from a backup, which holds no archives"
    ).document()
    lost = _rows().where(jobs.c.kind.in_(ARCHIVE_KINDS), jobs.c.state.not_in(FINISHED))
    found = connection.execute(lost).all()
    for row in found:
        seal = vault.seal(row.gallery_pk, row.wrapped, row.master_key)
        _update(connection, row.pk, **_ended("failed", _sealed_problem(seal, problem)))
    return len(found)


def missing(job_id: str) -> NotFoundError:
    return NotFoundError("job", f"there is no job {job_id!r}")


JOB_COLUMNS: Final = tuple(part.name for part in fields(Job) if part.name not in {"progress", "problem", "seal"})
_NAMELESS: Final = vars(ItemOutcome("", ""))
_CONFLICT: Final = StorageError("the job violates a constraint of the database")


def _item(job: Job, lookup: str, outcome: ItemOutcome, gone: Collection[str | None]) -> dict[str, Any]:
    name = None if outcome.subject is None else subject_lookup(job.seal, outcome.subject)
    erased = name is not None and name in gone
    # It is not known yet who is in a photo of an album: its name here would outlive the erasure of that person.
    about = vars(outcome) | ({"item": ""} if job.kind == "album" and outcome.problem is None else {})
    return {
        "job_pk": job.pk,
        "lookup": lookup,
        "sealed": None if erased else job.seal.close_json(about, ITEM),
        "failed": outcome.problem is not None,
        "subject": None if erased else name,
    }


def _problem(seal: Seal, sealed: bytes) -> dict[str, Any]:
    """Open a job's problem; if the gallery's key is lost, return that error, so that job lists still work."""
    try:
        opened: dict[str, Any] = seal.open_json(sealed, PROBLEM)
    except MasterKeyError as error:
        return error.document()
    return opened


def _sealed_problem(seal: Seal, problem: dict[str, Any]) -> bytes | None:
    """Seal a job's problem; None if the gallery's key is lost."""
    try:
        return seal.close_json(problem, PROBLEM)
    except MasterKeyError:
        return None


def _is_free(now: datetime) -> sa.ColumnElement[bool]:
    """Choose the jobs that wait, or whose process died."""
    until = jobs.c.lease_until
    ended = until.is_(None) | (until < now) | (until > now + MAX_LEASE)
    return jobs.c.state.not_in(FINISHED) & ended


def _ended(state: JobState, problem: bytes | None = None) -> dict[str, Any]:
    """Return the columns of a job in a final state, or back in the queue. ``problem`` is sealed."""
    return {"state": state, "problem": problem, "owner": None, "lease_until": None, "updated_at": datetime.now(UTC)}


def _update(connection: Connection, pk: int, **values: Any) -> None:
    connection.execute(jobs.update().where(jobs.c.pk == pk).values(**values))


def _row(connection: Connection, job_id: str, lock: bool = False) -> sa.Row[Any]:
    """Raises job_not_found."""
    query = _rows().where(jobs.c.id == job_id)
    row = connection.execute(query.with_for_update(of=jobs) if lock else query).first()
    if row is None:
        raise missing(job_id)
    return row


def _rows() -> sa.Select[Any]:
    columns = sa.select(jobs, galleries.c.name.label("gallery"), data_keys.c.wrapped, data_keys.c.master_key)
    named = columns.select_from(jobs).join(galleries, galleries.c.pk == jobs.c.gallery_pk)
    return named.outerjoin(data_keys, data_keys.c.gallery_pk == jobs.c.gallery_pk)

"""Long work, in SQL: who runs a job, how far it is, and what became of each of its items.

A job belongs to the process whose lease it bears. A lease that ran out may be taken by any process; whoever lost it so
can record nothing more, as every record is conditional on still being the owner. Written together with an item's effect
in one transaction, a record makes the effect happen exactly once, however often the job changes hands.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import (
    GalleryNotFoundError,
    JobNotFoundError,
    JobUnrunnableError,
    MasterKeyAwayError,
    MasterKeyError,
    StorageError,
)
from service.gallery.audit_log import Entry, append, record
from service.gallery.database import Database
from service.gallery.erasure import blank_item, erased_since, erased_templates_since, was_erased
from service.gallery.sealed_rows import ITEM, PROBLEM, lookup_of
from service.gallery.store import add_templates, known_templates
from service.gallery.subjects import Gallery, JobState, NewTemplate
from service.gallery.tables import data_keys, galleries, job_items, jobs
from service.security.acting import acting
from service.security.sealing import Seal

FINISHED: Final[tuple[JobState, ...]] = ("succeeded", "failed", "cancelled")
ENROLLED: Final = "enrolled"
ALREADY_ENROLLED: Final = "already_enrolled"
ERASED: Final = "subject_erased"
CLAIMED_AT_ONCE: Final = 16
MAX_LEASE: Final = timedelta(hours=1)
"""No lease ends later than this from now, unless the clock was wrong when it was written."""
"""Jobs that are looked at to find one that this process can run."""


class LeaseLostError(Exception):
    """The job is another process's now, or is gone with its gallery: whoever meets this stops, and records nothing."""


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` items (None: not counted yet), ``failed`` of them with a problem; ``counts`` by outcome;
    ``seconds`` of work; ``takeovers`` from processes that died since the last item; ``details``: the kind's own."""

    total: int | None = None
    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    takeovers: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """``gallery``: its name. ``parameters``: what was asked, as JSON, lying in clear. ``problem``: why it failed.
    ``actor``: who asked for it, as whom it acts. ``erased``: of the gallery's last erasure when the job was asked
    for."""

    pk: int
    id: str
    kind: str
    gallery: str
    state: JobState
    parameters: dict[str, Any]
    progress: Progress
    problem: dict[str, Any] | None
    actor: str
    cancel: bool
    owner: str | None
    created_at: datetime
    updated_at: datetime
    seal: Seal = field(repr=False, compare=False)
    erased: int = 0


@dataclass(frozen=True)
class ItemOutcome:
    """What became of an item: a word to count it by, and why it failed. ``subject``: the id of whom it concerns."""

    item: str
    outcome: str
    problem: dict[str, Any] | None = None
    subject: str | None = None


@dataclass(frozen=True)
class JobItem:
    pk: int
    item: str
    problem: dict[str, Any] | None
    at: datetime


@dataclass(frozen=True)
class Done:
    """Items, by keyed hashes: of those of people who were erased the names are gone."""

    seal: Seal = field(repr=False)
    lookups: frozenset[str]

    def __contains__(self, item: str) -> bool:
        return self.seal.pseudonym(ITEM, item) in self.lookups

    def __len__(self) -> int:
        return len(self.lookups)


class JobStore:
    """Every method is one transaction; all block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, gallery: Gallery, kind: str, parameters: dict[str, Any], job_id: str | None = None) -> Job:
        """Queue a job. Raises GalleryNotFoundError."""
        deleted = GalleryNotFoundError(f"gallery {gallery.name!r} was deleted meanwhile")
        with self._database.write(deleted) as connection:
            created = create_in(connection, gallery, kind, parameters, job_id)
            record(self._database.vault, connection, "job_queued", gallery, job=created, kind=kind)
        return self.job(created)

    def job(self, job_id: str) -> Job:
        """Raises JobNotFoundError."""
        with self._database.read() as connection:
            return self._found(connection, job_id)

    def list_jobs(
        self,
        gallery: Gallery | None,
        states: Collection[JobState],
        before: int | None,
        limit: int,
        among: Collection[str] | None = None,
    ) -> list[Job]:
        """The latest first; ``before``: only those of a smaller key; ``among``: only of galleries of these names."""
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
        """How many jobs are in each state. Finished ones are forgotten after some time, so that they are few."""
        count = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        with self._database.read() as connection:
            found = {row[0]: row[1] for row in connection.execute(count)}
        return {state: found.get(state, 0) for state in get_args(JobState)}

    def items(self, job: Job, after: int | None, limit: int, failed_only: bool = False) -> list[JobItem]:
        """What was done already, in this order; ``after``: only those of a greater key."""
        query = sa.select(job_items).where(job_items.c.job_pk == job.pk).order_by(job_items.c.pk).limit(limit)
        if after is not None:
            query = query.where(job_items.c.pk > after)
        if failed_only:
            query = query.where(job_items.c.failed)
        with self._database.read() as connection:
            opened = ((row, job.seal.open_json(row.sealed, ITEM)) for row in connection.execute(query))
            return [JobItem(row.pk, said["item"], said["problem"], row.at) for row, said in opened]

    def done(self, job: Job) -> Done:
        """The items that need not be looked at again."""
        query = sa.select(job_items.c.lookup).where(job_items.c.job_pk == job.pk)
        with self._database.read() as connection:
            return Done(job.seal, frozenset(connection.execute(query).scalars()))

    def unfinished(self, job_ids: Collection[str]) -> set[str]:
        """Those of the given jobs that may still be run."""
        query = sa.select(jobs.c.id).where(jobs.c.id.in_(list(job_ids)), jobs.c.state.not_in(FINISHED))
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    # For those who run jobs

    def claim(
        self,
        process: str,
        lease_s: float,
        ready: Callable[[Job], bool] = lambda job: True,
        dead: Callable[[str], bool] = lambda owner: False,
    ) -> Job | None:
        """Take the oldest job that nobody runs and that is ``ready`` here; None: there is none. ``process``: a name of
        at most 48 characters; each claim of it is an owner of its own. ``dead``: of an owner, whether it is known to
        have ended, so that its lease need not be waited for."""
        active = _rows().where(jobs.c.state.not_in(FINISHED)).order_by(jobs.c.pk)
        # A look first: asking takes no lock from those who write.
        with self._database.read() as connection:
            now = self._database.now(connection)
            rows = connection.execute(active).all()
        owners = {row.owner for row in rows if row.owner is not None and dead(row.owner)}
        free = (jobs.c.state == "queued") | _expired(now) | jobs.c.owner.in_(owners)
        waiting = [row.pk for row in rows if (_is_free(row, now) or row.owner in owners) and ready(self._job(row))]
        if not waiting:
            return None
        with self._database.write(_UNFORESEEN) as connection:
            chosen = active.where(free, jobs.c.pk.in_(waiting[:CLAIMED_AT_ONCE])).limit(1)
            row = connection.execute(chosen.with_for_update(of=jobs, skip_locked=True)).first()
            if row is None:
                return None
            died = row.state == "running" and not row.owner.startswith(process)
            progress = row.progress | {"takeovers": row.progress["takeovers"] + died}
            owner = f"{process}:{uuid.uuid4().hex[:8]}"
            connection.execute(
                jobs.update()
                .where(jobs.c.pk == row.pk)
                .values(
                    state="running",
                    owner=owner,
                    lease_until=now + timedelta(seconds=lease_s),
                    progress=progress,
                    updated_at=now,
                )
            )
            return self._found(connection, row.id)

    def renew(self, job: Job, lease_s: float) -> bool:
        """Keep the lease; tells whether somebody asked to cancel. Raises LeaseLostError."""
        with self._database.write(_UNFORESEEN) as connection:
            row = _own(connection, job)
            until = self._database.now(connection) + timedelta(seconds=lease_s)
            connection.execute(jobs.update().where(jobs.c.pk == job.pk).values(lease_until=until))
            return bool(row.cancel)

    def record(
        self, job: Job, outcomes: Sequence[ItemOutcome], seconds: float, total: int | None = None, **details: Any
    ) -> bool:
        """As :func:`record_in`, in a transaction of its own."""
        job.seal.unlock()
        with self._database.write(_UNFORESEEN) as connection:
            return record_in(connection, job, outcomes, seconds, total, **details)

    def enrol(
        self,
        job: Job,
        gallery: Gallery,
        subject_id: str,
        admitted: Sequence[tuple[str, NewTemplate]],
        refused: Sequence[ItemOutcome],
        seconds: float,
    ) -> bool:
        """Enrol the templates of some (item, template) and record these and the other items, all or nothing. A template
        whose id the gallery has is left as it is; none is enrolled that, or of a subject that, was erased since the job
        was asked for. Returns as :func:`record_in`.

        Raises:
            GalleryNotFoundError, RecogniserMismatchError: as ``Database.change``.
            LeaseLostError: nothing was stored.
        """
        with self._database.change(gallery) as connection:
            if erased_since(connection, gallery.pk, gallery.seal, [subject_id], job.erased):
                gone = [ItemOutcome(item, ERASED, was_erased().document(), subject_id) for item, _ in admitted]
                return record_in(connection, job, [*gone, *refused], seconds)
            ids = [template.id for _, template in admitted]
            if lost := erased_templates_since(connection, gallery.pk, ids, job.erased):
                problem = was_erased("template").document()
                gone = [ItemOutcome(item, ERASED, problem, subject_id) for item, t in admitted if t.id in lost]
                admitted, refused = [(item, t) for item, t in admitted if t.id not in lost], [*gone, *refused]
            known = known_templates(connection, gallery, [template.id for _, template in admitted])
            new = {template.id: template for _, template in admitted if template.id not in known}
            if new:
                begun = replace(gallery, erased=job.erased)
                add_templates(connection, begun, subject_id, list(new.values()), _now())
            first = {template.id: item for item, template in reversed(admitted)}
            outcomes = [
                ItemOutcome(
                    item,
                    ENROLLED if template.id in new and first[template.id] == item else ALREADY_ENROLLED,
                    subject=subject_id,
                )
                for item, template in admitted
            ]
            cancelled = record_in(connection, job, [*outcomes, *refused], seconds)
            if new:
                counts: dict[str, Any] = {"templates": len(new), "job": job.id}
                record(self._database.vault, connection, "templates_enrolled", gallery, subject_id, **counts)
            return cancelled

    def finish(self, job: Job, state: JobState, problem: dict[str, Any] | None = None) -> None:
        """Raises LeaseLostError."""
        sealed = None if problem is None else _sealed_problem(job, problem)
        with self._database.write(_UNFORESEEN) as connection:
            _own(connection, job)
            _end(connection, job.pk, state, sealed)

    def release(self, job: Job) -> None:
        """Give the job back, for any process to take at once. Raises LeaseLostError."""
        with self._database.write(_UNFORESEEN) as connection:
            _own(connection, job)
            _end(connection, job.pk, "queued", None)

    # For everybody

    def cancel(self, job_id: str) -> Job:
        """End a job that waits, or whose process has not renewed its lease; ask the one who runs it to end it between
        two items. One that is finished stays as it is. Raises JobNotFoundError."""
        with self._database.write(_UNFORESEEN) as connection:
            row = connection.execute(_rows().where(jobs.c.id == job_id).with_for_update(of=jobs)).first()
            if row is None:
                raise missing(job_id)
            if row.state not in FINISHED and _is_free(row, self._database.now(connection)):
                _end(connection, row.pk, "cancelled", None)
            elif row.state == "running":
                connection.execute(jobs.update().where(jobs.c.pk == row.pk).values(cancel=True))
            if row.state not in FINISHED:
                whose = Entry("job_cancelled", (row.gallery_pk, row.gallery), details={"job": job_id, "kind": row.kind})
                append(self._database.vault, connection, row.gallery_pk, [whose])
        return self.job(job_id)

    def give_up(self, days: float, ready: Callable[[Job], bool]) -> int:
        """Fail the jobs that no process could run for so long; tells how many. ``ready``: whether this one could, which
        is noted for the others. To be called far more often than that."""
        with self._database.read() as connection:
            now = self._database.now(connection)
            free = (jobs.c.state == "queued") | ((jobs.c.state == "running") & _expired(now))
            stale = free & (jobs.c.updated_at < now - timedelta(days=days) / 2)
            found = [self._job(row) for row in connection.execute(_rows().where(stale))]
        if not found:
            return 0
        could = {job.pk for job in found if ready(job)}
        problem = JobUnrunnableError(f"no server that could run it was there for {days:g} days").document()
        sealed = {job.pk: _sealed_problem(job, problem) for job in found}
        with self._database.write(_UNFORESEEN) as connection:
            connection.execute(jobs.update().where(stale, jobs.c.pk.in_(could)).values(updated_at=now))
            hopeless, given_up = stale & (jobs.c.updated_at < now - timedelta(days=days)), 0
            for job in found:
                ended = {
                    "state": "failed",
                    "problem": sealed[job.pk],
                    "owner": None,
                    "lease_until": None,
                    "updated_at": now,
                }
                given_up += connection.execute(
                    jobs.update().where(hopeless, jobs.c.pk == job.pk).values(**ended)
                ).rowcount
            return given_up

    def forget(self, days: float) -> int:
        """Delete the jobs that were finished so long ago; tells how many."""
        with self._database.read() as connection:
            before = self._database.now(connection) - timedelta(days=days)
            old = jobs.c.state.in_(FINISHED) & (jobs.c.updated_at < before)
            if connection.execute(sa.select(jobs.c.pk).where(old).limit(1)).first() is None:
                return 0
        with self._database.write(_UNFORESEEN) as connection:
            return int(connection.execute(jobs.delete().where(old)).rowcount)

    def _found(self, connection: Connection, job_id: str) -> Job:
        row = connection.execute(_rows().where(jobs.c.id == job_id)).first()
        if row is None:
            raise missing(job_id)
        return self._job(row)

    def _job(self, row: sa.Row[Any]) -> Job:
        seal = self._database.vault.seal(row.gallery_pk, row.wrapped, row.master_key)
        return Job(
            row.pk,
            row.id,
            row.kind,
            row.gallery,
            row.state,
            row.parameters,
            Progress(**row.progress),
            None if row.problem is None else _problem(seal, row.problem),
            row.actor,
            row.cancel,
            row.owner,
            row.created_at,
            row.updated_at,
            seal,
            row.erased,
        )


def create_in(
    connection: Connection, gallery: Gallery, kind: str, parameters: dict[str, Any], job_id: str | None = None
) -> str:
    """Queue a job within a transaction that makes it necessary; returns its id."""
    now, job_id = _now(), job_id or uuid.uuid4().hex
    connection.execute(
        jobs.insert().values(
            id=job_id,
            kind=kind,
            gallery_pk=gallery.pk,
            state="queued",
            parameters=parameters,
            progress=vars(Progress()),
            actor=acting().name,
            cancel=False,
            erased=gallery.erased,
            created_at=now,
            updated_at=now,
        )
    )
    return job_id


def record_in(
    connection: Connection,
    job: Job,
    outcomes: Sequence[ItemOutcome],
    seconds: float,
    total: int | None = None,
    **details: Any,
) -> bool:
    """Write what became of items, within the transaction that brought their effect about; an item recorded before keeps
    its first outcome. ``seconds`` of work so far; ``total`` and ``details`` replace what the progress says, if given.

    Returns:
        Whether somebody asked to cancel.

    Raises:
        LeaseLostError: the job is another process's; the transaction must not be committed.
    """
    row = _own(connection, job)
    now = _now()
    given = {job.seal.pseudonym(ITEM, outcome.item): outcome for outcome in outcomes}
    known = sa.select(job_items.c.lookup).where(job_items.c.job_pk == job.pk, job_items.c.lookup.in_(list(given)))
    before = set(connection.execute(known).scalars()) if given else set()
    unknown = {lookup: outcome for lookup, outcome in given.items() if lookup not in before}
    new = list(unknown.values())
    if new:
        concerned = {outcome.subject for outcome in new if outcome.subject is not None}
        erased = erased_since(connection, row.gallery_pk, job.seal, concerned, job.erased)
        rows = [_item(job, lookup, o, o.subject in erased) | {"at": now} for lookup, o in unknown.items()]
        connection.execute(job_items.insert(), rows)
    progress = Progress(**row.progress)
    document = vars(progress) | {
        "total": progress.total if total is None else total,
        "done": progress.done + len(new),
        "failed": progress.failed + sum(o.problem is not None for o in new),
        "seconds": round(seconds, 3),
        "takeovers": 0 if new else progress.takeovers,
        "counts": dict(Counter(progress.counts) + Counter(o.outcome for o in new)),
        "details": progress.details | details,
    }
    connection.execute(jobs.update().where(jobs.c.pk == job.pk).values(progress=document, updated_at=now))
    return bool(row.cancel)


def _item(job: Job, lookup: str, outcome: ItemOutcome, erased: bool) -> dict[str, Any]:
    said = {"item": outcome.item, "problem": outcome.problem}
    return {
        "job_pk": job.pk,
        "lookup": lookup,
        "sealed": blank_item(job.seal) if erased else job.seal.close_json(said, ITEM),
        "failed": outcome.problem is not None,
        "subject": None if outcome.subject is None or erased else lookup_of(job.seal, outcome.subject),
    }


_UNFORESEEN: Final = StorageError("a constraint of the jobs was refused")


def _problem(seal: Seal, sealed: bytes) -> dict[str, Any]:
    """Why it cannot be told, where the gallery's key does not open: lists of jobs are not to end there."""
    try:
        opened: dict[str, Any] = seal.open_json(sealed, PROBLEM)
    except MasterKeyError as error:
        return error.document()
    return opened


def _sealed_problem(job: Job, problem: dict[str, Any]) -> bytes | None:
    """None where the gallery's key is lost, by which nobody could read it. Raises MasterKeyAwayError."""
    try:
        return job.seal.close_json(problem, PROBLEM)
    except MasterKeyAwayError:
        raise
    except MasterKeyError:
        return None


def _own(connection: Connection, job: Job) -> sa.Row[Any]:
    mine = (jobs.c.pk == job.pk) & (jobs.c.owner == job.owner) & (jobs.c.state == "running")
    row = connection.execute(sa.select(jobs).where(mine).with_for_update()).first()
    if row is None:
        raise LeaseLostError(f"job {job.id} is no longer {job.owner}'s")
    return row


def _is_free(row: sa.Row[Any], now: datetime) -> bool:
    return bool(row.state == "queued" or row.lease_until < now or row.lease_until > now + MAX_LEASE)


def _expired(now: datetime) -> sa.ColumnElement[bool]:
    """As SQL. A lease too far ahead is expired, too: the clock was wrong when it was written."""
    return (jobs.c.lease_until < now) | (jobs.c.lease_until > now + MAX_LEASE)


def _end(connection: Connection, pk: int, state: JobState, problem: bytes | None) -> None:
    """``problem``: sealed."""
    ended = {"state": state, "problem": problem, "owner": None, "lease_until": None, "updated_at": _now()}
    connection.execute(jobs.update().where(jobs.c.pk == pk).values(**ended))


def _now() -> datetime:
    return datetime.now(UTC)


def _rows() -> sa.Select[Any]:
    keyed = jobs.join(galleries, galleries.c.pk == jobs.c.gallery_pk).outerjoin(
        data_keys, data_keys.c.gallery_pk == jobs.c.gallery_pk
    )
    gallery = galleries.c.name.label("gallery")
    return sa.select(jobs, gallery, data_keys.c.wrapped, data_keys.c.master_key).select_from(keyed)


def missing(job_id: str) -> JobNotFoundError:
    return JobNotFoundError(f"there is no job {job_id!r}")

"""Job rows: creation of jobs, and records of item outcomes within the transaction of their effects."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.common import JobState
from service.core.actor import current_actor
from service.domain.gallery import Gallery
from service.security.sealing import Seal
from service.storage.db.row_sealing import ITEM, subject_lookup
from service.storage.db.tables import job_items, jobs
from service.storage.repositories.erasures import erased_since


class LeaseLostError(Exception):
    """The job was claimed by another process, or deleted: stop without recording anything."""


@dataclass(frozen=True)
class Progress:
    """Progress of a job, in items."""

    total: int | None = None
    """None until counted."""
    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    takeovers: int = 0
    """Attempts that failed, or whose process died, since the last recorded item."""
    counts: dict[str, int] = field(default_factory=dict)
    """Items by outcome."""
    details: dict[str, Any] = field(default_factory=dict)
    """Values of the job's kind."""


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


def create_in(
    connection: Connection, gallery: Gallery, kind: str, parameters: dict[str, Any], job_id: str | None = None
) -> str:
    """Queue a job within the caller's transaction; return its id."""
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
    given = {job.seal.pseudonym(ITEM, outcome.item): outcome for outcome in outcomes}
    known = sa.select(job_items.c.lookup).where(job_items.c.job_pk == job.pk, job_items.c.lookup.in_(list(given)))
    recorded = set(connection.execute(known).scalars()) if given else set()
    new = {lookup: outcome for lookup, outcome in given.items() if lookup not in recorded}
    if new:
        concerned = {outcome.subject for outcome in new.values() if outcome.subject is not None}
        erased = erased_since(connection, row.gallery_pk, job.seal, concerned, job.erased)
        rows = [_item(job, lookup, one, one.subject in erased) | {"at": now} for lookup, one in new.items()]
        connection.execute(job_items.insert(), rows)
    before = Progress(**row.progress)
    progress = Progress(
        total=before.total if total is None else total,
        done=before.done + len(new),
        failed=before.failed + sum(one.problem is not None for one in new.values()),
        seconds=round(seconds, 3),
        takeovers=0 if new else before.takeovers,
        counts=dict(Counter(before.counts) + Counter(one.outcome for one in new.values())),
        details=before.details | details,
    )
    connection.execute(jobs.update().where(jobs.c.pk == job.pk).values(progress=vars(progress), updated_at=now))
    return bool(row.cancel)


def _item(job: Job, lookup: str, outcome: ItemOutcome, erased: bool) -> dict[str, Any]:
    return {
        "job_pk": job.pk,
        "lookup": lookup,
        "sealed": None if erased else job.seal.close_json(vars(outcome), ITEM),
        "failed": outcome.problem is not None,
        "subject": None if outcome.subject is None or erased else subject_lookup(job.seal, outcome.subject),
    }


def own_row(connection: Connection, job: Job) -> sa.Row[Any]:
    """Lock and return the row of a job that this owner runs. Raises LeaseLostError."""
    mine = (jobs.c.pk == job.pk) & (jobs.c.owner == job.owner) & (jobs.c.state == "running")
    row = connection.execute(sa.select(jobs).where(mine).with_for_update()).first()
    if row is None:
        raise LeaseLostError(f"job {job.id} no longer belongs to {job.owner}")
    return row

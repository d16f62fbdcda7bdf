"""Runner of background jobs: few at a time, leased from the database, resumed after a crash."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from kith.wire.common import JobState
from service.core.actor import Actor, acting_as
from service.core.errors import KithError, RefusedError, StorageError
from service.core.periodic import PeriodicTask
from service.core.single_flight import run_in_daemon
from service.storage.repositories.jobs import FINISHED, DoneItems, ItemOutcome, Job, JobStore, LeaseLostError

MAX_JOBS: Final = 2
LEASE_S: Final = 15.0
"""Time after which another process takes over the job of a dead one, within 20 s with its next look."""
POLL_S: Final = 1.0
STOP_S: Final = 5.0
"""Time for a job to finish its current item when the service stops; then it is canceled, and released to the queue in
as much again."""
MAX_ATTEMPTS: Final = 5
"""Attempts at one job that may fail, or whose process may die, without finishing an item, before the job fails."""
RETRY_S: Final = 6.0
"""Time until a failed job is tried again."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
log = logging.getLogger(__name__)


class JobCancelledError(Exception):
    """Cancellation of the job was requested."""


class JobStoppedError(Exception):
    """This process stops; another one resumes the job."""


class JobContext:
    """Interface of a job's function to the runner. Safe to share between threads; all but :meth:`run` block."""

    def __init__(self, job: Job, store: JobStore, stopping: Callable[[], bool]) -> None:
        """``stopping``: whether the job is to stop at its next check."""
        self.job = job
        self.store = store
        self._stopping = stopping
        self._since = time.monotonic()
        self._canceled = job.cancel
        self.owned = True

    @property
    def seconds(self) -> float:
        """Seconds of work on this job so far, by all processes."""
        return self.job.progress.seconds + time.monotonic() - self._since

    def check(self) -> None:
        """Check whether to continue; call between items. Does not block.

        Raises JobCancelledError, JobStoppedError or LeaseLostError to stop; recorded items stay.
        """
        if not self.owned:
            raise LeaseLostError(f"job {self.job.id} belongs to another process")
        if self._canceled:
            raise JobCancelledError
        if self._stopping():
            raise JobStoppedError

    def done(self) -> DoneItems:
        """Return the items recorded by earlier runs of this job."""
        return self.store.done(self.job)

    def record(self, outcomes: Sequence[ItemOutcome], total: int | None = None, **details: Any) -> None:
        """Record outcomes as :meth:`JobStore.record`. Raises LeaseLostError."""
        self.note_cancellation(self.store.record(self.job, outcomes, self.seconds, total, **details))

    def note_cancellation(self, cancel: bool) -> None:
        """Remember whether cancellation was requested, for kinds that record in their own transaction."""
        self._canceled = self._canceled or cancel

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in a thread, with the current actor and context."""
        return await _in_thread(function, *arguments)


@dataclass(frozen=True)
class JobKind:
    """Functions of one kind of job. All but ``run`` block.

    Attributes:
        run: async or blocking; calls ``check`` between items. An error of the request (4xx) fails the job. After any
            other error it is called again, so a fault must not be recorded as the outcome of an item.
        ready: returns whether this process can run the job.
        discard: deletes files of a finished job; idempotent, and called for jobs that never ran.
    """

    run: Callable[[JobContext], Awaitable[None] | None]
    ready: Callable[[Job], bool] = lambda job: True
    discard: Callable[[Job], None] = lambda job: None


class Runner(PeriodicTask):
    """Runner of queued jobs of the given kinds. Leaving it releases the jobs."""

    def __init__(
        self,
        store: JobStore,
        kinds: Mapping[str, JobKind],
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(poll_s, "polling for jobs failed", log)
        self.store = store
        self._kinds = kinds
        self._lease_s = lease_s
        self._process = uuid.uuid4().hex
        self._running: dict[int, asyncio.Task[None]] = {}
        """By the job's row key."""

    async def _close(self) -> None:
        tasks = set(self._running.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=STOP_S)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job as :meth:`JobStore.cancel`; blocks."""
        job = self.store.cancel(job_id)
        if job.state in FINISHED:
            self._discard(job)
        return job

    async def _look(self) -> None:
        while len(self._running) < MAX_JOBS and not self._stopping:
            job = await _in_thread(self.store.claim, self._process, self._lease_s, self._is_ready)
            if job is None:
                return
            self._running[job.pk] = asyncio.create_task(self._run(job))

    def _is_ready(self, job: Job) -> bool:
        # This process still runs a job whose lease expired while the database was away.
        if job.pk in self._running:
            return False
        # Any process can end a canceled job.
        return job.cancel or (job.kind in self._kinds and self._kinds[job.kind].ready(job))

    async def _run(self, job: Job) -> None:
        """Run a job until it ends or the service stops. Never raises: errors go to the job or the log."""
        try:
            try:
                with acting_as(Actor(job.actor)):
                    has_ended = await self._has_ended(JobContext(job, self.store, lambda: self._stopping))
            except LeaseLostError:
                has_ended = not await _in_thread(self.store.unfinished, [job.id])  # or deleted with its gallery
                log.info("job %s (%s) was taken over by another process, or deleted", job.id, job.kind)
            if has_ended:
                await _in_thread(self._discard, job)
        except StorageError as error:
            # The lease expires, and the first process with a connection resumes the job.
            log.warning("job %s (%s) waits for the database: %s", job.id, job.kind, error.detail)
        except Exception:
            log.exception("job %s (%s): writing its result failed", job.id, job.kind)
        finally:
            del self._running[job.pk]
            self._wake.set()

    async def _has_ended(self, context: JobContext) -> bool:
        """Run a job and write its result. Return whether it ended, and False if it is in the queue again."""
        job, problem = context.job, None
        state: JobState = "succeeded"
        try:
            context.check()
            if job.attempts > MAX_ATTEMPTS:
                raise RefusedError("job_crashed", f"{job.attempts} attempts failed, or their process ended")
            await self._run_with_lease(context)
        except (LeaseLostError, StorageError):
            raise
        except (JobStoppedError, asyncio.CancelledError):
            await _in_thread(self.store.release, job)
            return False
        except JobCancelledError:
            state = "canceled"
        except Exception as error:
            if not isinstance(error, KithError):
                log.exception("job %s (%s) failed", job.id, job.kind)
                error = RefusedError("job_crashed", f"unexpected error; see the log entries of job {job.id}")
            if is_fault(error) and await _in_thread(self.store.retry, job, RETRY_S, MAX_ATTEMPTS):
                log.warning("job %s (%s) is tried again: %s", job.id, job.kind, error.detail)
                return False
            state, problem = "failed", error.document()
        await _in_thread(self.store.finish, job, state, problem)
        return True

    def _discard(self, job: Job) -> None:
        if job.kind in self._kinds:
            self._kinds[job.kind].discard(job)

    async def _run_with_lease(self, context: JobContext) -> None:
        kind = self._kinds[context.job.kind]
        work = asyncio.ensure_future(
            kind.run(context) if inspect.iscoroutinefunction(kind.run) else _in_thread(kind.run, context)
        )
        renewal = asyncio.create_task(self._renew(context, work))
        try:
            await work
        except asyncio.CancelledError:
            context.check()
            raise
        finally:
            renewal.cancel()

    async def _renew(self, context: JobContext, work: asyncio.Future[Any]) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                context.note_cancellation(await _in_thread(self.store.renew, context.job, self._lease_s))
            except LeaseLostError:
                context.owned = False
                work.cancel()
                return
            except StorageError as error:
                log.warning("renewing the lease of job %s failed: %s", context.job.id, error.detail)


def is_fault(error: KithError) -> bool:
    """Return whether an error is a fault of the service, which may be over at the next attempt."""
    return error.status >= 500


async def _in_thread(function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run a step in a thread of its own that does not keep the process from exiting, whatever the step waits for."""
    step = partial(copy_context().run, function, *arguments)
    return await asyncio.wrap_future(run_in_daemon("job", step))

"""Running long work in the service's own process, few jobs at a time, from where an earlier process left off."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, TypeVarTuple

from service.clock import Clock
from service.errors import ClockSteppedError, JobCrashedError, JobNotFoundError, KithError, StorageError
from service.gallery.job_store import FINISHED, Done, ItemOutcome, Job, JobStore, LeaseLostError
from service.gallery.subjects import Gallery
from service.security.acting import Actor, acting_as, in_context

JOBS_AT_ONCE: Final = 2
LEASE_S: Final = 20.0
"""How long the job of a process that died waits for one of another machine."""
POLL_S: Final = 1.0
STOP_S: Final = 5.0
"""How long a job may take to come to the end of an item when the service stops, before it is cut off."""
KEPT_DAYS: Final = 14
"""After which a finished job is forgotten."""
TIDY_EVERY_S: Final = 3600.0
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
MAX_TAKEOVERS: Final = 5
"""Processes that may die of one job without having finished an item, before it is given up."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
log = logging.getLogger(__name__)


class JobCancelledError(Exception):
    """Somebody asked to cancel the job."""


class JobStoppedError(Exception):
    """This process ends; another one goes on with the job."""


class JobContext:
    """What a job's function has of its runner. Safe to share between threads; all but :meth:`run` block."""

    def __init__(self, job: Job, store: JobStore, threads: ThreadPoolExecutor) -> None:
        self.job = job
        self.store = store
        self._threads = threads
        self._since = time.monotonic()
        self._cancelled = job.cancel
        self._stopping = False
        self.owned = True

    @property
    def seconds(self) -> float:
        """Of work on this job so far, by all who ran it."""
        return self.job.progress.seconds + time.monotonic() - self._since

    def check(self) -> None:
        """To be called between items; does not block.

        Raises:
            JobCancelledError, JobStoppedError, LeaseLostError: end here; what was recorded stays.
        """
        if not self.owned:
            raise LeaseLostError(f"job {self.job.id} is another process's")
        if self._cancelled:
            raise JobCancelledError
        if self._stopping:
            raise JobStoppedError

    def done(self) -> Done:
        """Items recorded by whoever ran this job before."""
        return self.store.done(self.job)

    def record(self, outcomes: Sequence[ItemOutcome], total: int | None = None, **details: Any) -> None:
        """As :meth:`JobStore.record`; raises LeaseLostError."""
        self.asked(self.store.record(self.job, outcomes, self.seconds, total, **details))

    def asked(self, cancel: bool) -> None:
        """Take note of what ``record_in`` says, where a kind records with its own transaction."""
        self._cancelled = self._cancelled or cancel

    def stop(self) -> None:
        self._stopping = True

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run something that blocks, away from the event loop and from the threads that answer requests."""
        return await in_context(self._threads, function, *arguments)


@dataclass(frozen=True)
class JobKind:
    """``run``: async, or blocking and then given a thread; it calls ``check`` between items, and what else it raises
    fails the job. ``ready``: whether this process has what the job needs. ``discard``: removes what a finished job left
    outside of the database; may be called again, and for a job that never ran. ``tidy``: what ``discard`` missed, at
    the start and now and then. These three block."""

    run: Callable[[JobContext], Awaitable[None] | None]
    ready: Callable[[Job], bool] = lambda job: True
    discard: Callable[[Job], None] = lambda job: None
    tidy: Callable[[JobStore], None] = lambda store: None


class Runner:
    """Runs whatever jobs of its ``kinds`` wait in the database. Use as an async context manager: leaving it gives the
    jobs back at once."""

    def __init__(
        self,
        store: JobStore,
        kinds: Mapping[str, JobKind],
        at_once: int = JOBS_AT_ONCE,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
        kept_days: float = KEPT_DAYS,
        clock: Clock | None = None,
    ) -> None:
        self.store = store
        self._kinds = kinds
        self._at_once = at_once
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._kept_days = kept_days
        self._clock = Clock() if clock is None else clock
        self._process = f"{_machine() or 'unknown'}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        # Two threads for each job, one for each job's lease, one to look for more.
        self._threads = ThreadPoolExecutor(3 * at_once + 1, thread_name_prefix="jobs")
        self._contexts: set[JobContext] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopping = False
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._wake.set()
        for context in self._contexts:
            context.stop()
        if self._worker is not None:
            await self._worker
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._threads.shutdown()

    def submit(self, gallery: Gallery, kind: str, parameters: dict[str, Any], job_id: str | None = None) -> Job:
        """Queue a job; blocks. Raises GalleryNotFoundError."""
        return self.store.create(gallery, kind, parameters, job_id)

    def wake(self) -> None:
        """Look for jobs now."""
        self._wake.set()

    def cancel(self, job_id: str) -> Job:
        """As :meth:`JobStore.cancel`; blocks."""
        job = self.store.cancel(job_id)
        if job.state in FINISHED:
            self._discard(job)
        return job

    async def _work(self) -> None:
        tidied = -TIDY_EVERY_S
        while not self._stopping:
            self._wake.clear()
            if time.monotonic() - tidied > TIDY_EVERY_S:
                tidied = time.monotonic()
                await self._in_thread(self._tidy)
            job = await self._in_thread(self._claim) if len(self._tasks) < self._at_once else None
            if job is None:
                await self._rest()
                continue
            task = asyncio.create_task(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake.set()

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self._poll_s)

    def _claim(self) -> Job | None:
        try:
            return self.store.claim(self._process, self._lease_s, self._is_ready, has_ended)
        except StorageError as error:
            log.warning("no jobs can be looked for: %s", error.detail)
            return None

    def _is_ready(self, job: Job) -> bool:
        # One of its own whose lease ran out while the database was away is still being run.
        if any(context.job.pk == job.pk for context in list(self._contexts)):
            return False
        # One that is called off only needs to be ended, which any process can do.
        return job.cancel or self._has_what_it_needs(job)

    def _has_what_it_needs(self, job: Job) -> bool:
        return job.kind in self._kinds and self._kinds[job.kind].ready(job)

    def _tidy(self) -> None:
        try:
            self._clock.check()  # what is deleted here is deleted for its age
            self.store.forget(self._kept_days)
            self.store.give_up(self._kept_days, self._has_what_it_needs)
            for kind in self._kinds.values():
                kind.tidy(self.store)
        except (ClockSteppedError, StorageError, OSError) as error:
            log.warning("finished jobs could not be tidied away: %s", error)

    async def _run(self, job: Job) -> None:
        """Run a job to its end, or to this process's. Never raises: whatever happens is in the job, or in the log."""
        context = JobContext(job, self.store, self._threads)
        self._contexts.add(context)
        if self._stopping:
            context.stop()
        try:
            with acting_as(Actor(job.actor)):
                await self._lead(context)
        except LeaseLostError:
            log.info("job %s (%s) is no longer this process's", job.id, job.kind)
            await self._in_thread(self._discard_if_gone, job)
        except StorageError as error:
            # Its lease runs out, and whoever reaches the database first goes on with it.
            log.warning("job %s (%s) waits for the database: %s", job.id, job.kind, error.detail)
        except Exception:
            log.exception("job %s (%s): its end could not be written", job.id, job.kind)
        finally:
            self._contexts.discard(context)

    def _discard_if_gone(self, job: Job) -> None:
        try:
            self.store.job(job.id)
        except JobNotFoundError:  # with its gallery
            self._discard(job)
        except StorageError:
            log.warning("job %s (%s) may have left something behind", job.id, job.kind)

    async def _lead(self, context: JobContext) -> None:
        job = context.job
        try:
            context.check()
            if job.progress.takeovers > MAX_TAKEOVERS:
                raise JobCrashedError(f"{job.progress.takeovers} processes ended while they ran it")
            await self._leased(context)
        except (LeaseLostError, StorageError):
            raise
        except (JobStoppedError, asyncio.CancelledError):
            await self._in_thread(self.store.release, job)
            return
        except JobCancelledError:
            await self._in_thread(self.store.finish, job, "cancelled", None)
        except KithError as error:
            await self._in_thread(self.store.finish, job, "failed", error.document())
        except Exception:
            log.exception("job %s (%s) failed", job.id, job.kind)
            crash = JobCrashedError(f"an unforeseen error; the log has the details under job {job.id}")
            await self._in_thread(self.store.finish, job, "failed", crash.document())
        else:
            await self._in_thread(self.store.finish, job, "succeeded", None)
        await self._in_thread(self._discard, job)

    def _discard(self, job: Job) -> None:
        if job.kind in self._kinds:
            self._kinds[job.kind].discard(job)

    async def _leased(self, context: JobContext) -> None:
        """Run the kind's function while the lease is being renewed."""
        kind = self._kinds[context.job.kind]
        work = asyncio.ensure_future(
            kind.run(context) if inspect.iscoroutinefunction(kind.run) else self._in_thread(kind.run, context)
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
                context.asked(await self._in_thread(self.store.renew, context.job, self._lease_s))
            except LeaseLostError:
                context.owned = False
                work.cancel()
                return
            except StorageError as error:
                log.warning("the lease of job %s could not be renewed: %s", context.job.id, error.detail)

    async def _in_thread(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        return await in_context(self._threads, function, *arguments)


def _machine() -> str | None:
    """Where and while a process id means something: this host since its start, and this container of it; None where
    that cannot be told."""
    try:
        known = f"{socket.gethostname()}\0{BOOT_ID.read_text().strip()}\0{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return None
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def has_ended(owner: str) -> bool:
    """Whether a job's owner is a process of this machine that is no more; False where that cannot be told."""
    machine, _, process = owner.rpartition(":")[0].rpartition(":")[0].rpartition(":")
    if machine != _machine() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False

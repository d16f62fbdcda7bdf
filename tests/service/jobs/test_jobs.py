"""A job is run by one process at a time, from where the last one left off, and its end is always told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kith import Kith, KithClientError
from models.vision.recognition import l2_normalize
from service.core.errors import GalleryChangedError, GalleryNotFoundError, ImageError, OverloadedError
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.jobs import runner as runner_module
from service.jobs.runner import LEASE_S, MAX_ATTEMPTS, JobContext, JobKind, Runner
from service.operations.housekeeping import Housekeeping
from service.settings import Settings
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.db.tables import jobs
from service.storage.privacy.backup import back_up, restore
from service.storage.privacy.retention import Retention
from service.storage.repositories.jobs import ARCHIVE_KINDS, ItemOutcome, Job, JobStore, LeaseLostError
from service.storage.repositories.store import Store
from tests.conftest import is_eventually
from tests.databases import ON_BOTH, open_database
from tests.faults.killing import Process
from tests.refusals import raises_code

PROBLEM = ImageError("low_quality", "out of bounds: sharpness").document()
WAIT_S = 60


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def gallery(database: Database) -> Gallery:
    return Store(database).galleries.create("g", "f" * 32, 8, GallerySettings())


def taken(store: JobStore, process: str = "p", lease_s: float = 60) -> Job:
    job = store.claim(process, lease_s)
    assert job is not None
    return job


def test_a_job_goes_its_way(store: JobStore, gallery: Gallery) -> None:
    made = store.create(gallery, "work", {"from": "x"})
    assert (made.state, made.gallery, made.parameters, made.progress.total) == ("queued", "g", {"from": "x"}, None)
    job = taken(store)
    assert (job.id, job.state) == (made.id, "running")
    assert store.claim("other", 60) is None
    store.record(job, [], 0.5, total=3)
    store.record(job, [ItemOutcome("a", "done"), ItemOutcome("b", "low_quality", PROBLEM)], 1.5, where="here")
    # What is recorded again keeps its first outcome, and counts once.
    store.record(job, [ItemOutcome("b", "done"), ItemOutcome("c", "done")], 2)
    progress = store.job(job.id).progress
    assert (progress.total, progress.done, progress.failed, progress.seconds) == (3, 3, 1, 2)
    assert (progress.counts, progress.details) == ({"done": 2, "low_quality": 1}, {"where": "here"})
    assert len(store.done(job).lookups) == 3
    assert all(item in store.done(job) for item in "abc")
    (first,) = store.items(job, None, 1)
    assert [item.item for item in (first, *store.items(job, first.pk, 1))] == ["a", "b"]
    (failed,) = store.items(job, None, 9, failed_only=True)
    assert (failed.item, failed.problem and failed.problem.model_dump(exclude_none=True)) == ("b", PROBLEM)
    store.finish(job, "succeeded")
    assert store.job(job.id).state == "succeeded"
    assert store.unfinished([job.id]) == set()
    with pytest.raises(LeaseLostError):
        store.record(job, [ItemOutcome("d", "done")], 3)


@ON_BOTH
def test_an_effect_and_its_record_happen_together_and_once(
    store: JobStore, database: Database, gallery: Gallery, rng: np.random.Generator
) -> None:
    galleries, vectors = Store(database), l2_normalize(rng.normal(size=(3, 8)))
    first, second, third = (NewTemplate(f"{i:032x}", v, "photo") for i, v in enumerate(vectors))
    store.create(gallery, "work", {})
    job = taken(store)
    refusal = ItemOutcome("c", "low_quality", PROBLEM)
    assert not store.enroll(job, gallery, "ada", [("a", first), ("b", first), ("d", second)], [refusal], 1)
    assert store.job(job.id).progress.counts == {"enrolled": 2, "already_enrolled": 1, "low_quality": 1}
    with pytest.raises(GalleryChangedError):  # the templates were checked before the first ones were stored
        store.enroll(job, gallery, "bob", [("e", second), ("f", third)], [], 2)
    assert galleries.galleries.get("g").templates == 2 and "e" not in store.done(job)
    # Of another subject's, too: where it was moved to, it stays.
    store.enroll(job, galleries.galleries.get("g"), "bob", [("e", second), ("f", third)], [], 2)
    assert [len(galleries.templates.list_page(gallery, name)) for name in ("ada", "bob")] == [2, 1]
    store.finish(job, "canceled")
    gallery = galleries.galleries.get("g")
    late = [("g", NewTemplate("f" * 32, vectors[0], "photo"))]
    with pytest.raises(LeaseLostError):
        store.enroll(job, gallery, "eve", late, [], 3)
    assert (galleries.galleries.get("g").subjects, "g" in store.done(job)) == (2, False)
    galleries.galleries.delete("g")
    with pytest.raises(GalleryNotFoundError):
        store.enroll(job, gallery, "eve", late, [], 3)


def test_one_process_holds_a_job(store: JobStore, gallery: Gallery) -> None:
    made = store.create(gallery, "work", {})
    late = taken(store, "late", lease_s=-1)
    heir = taken(store, "heir")
    assert (heir.id, heir.attempts) == (late.id, 1)
    for attempt in (
        lambda: store.record(late, [ItemOutcome("a", "done")], 1),
        lambda: store.renew(late, 60),
        lambda: store.finish(late, "failed", PROBLEM),
        lambda: store.release(late),
    ):
        with pytest.raises(LeaseLostError):
            attempt()
    assert not store.done(heir).lookups
    store.record(heir, [ItemOutcome("a", "done")], 1)
    assert store.job(heir.id).attempts == 0
    # A lease is kept by renewing it. One from a wrong clock is ignored.
    assert store.renew(heir, -1) is False
    assert store.renew(heir, 60) is False
    assert store.claim("other", 60) is None
    store.release(heir)
    assert taken(store, lease_s=400 * 86400).attempts == 0
    job = taken(store, "one")
    # A failed attempt counts once, whichever process goes on. A late renewal does not extend the wait for the next one.
    for attempts, process in enumerate(("two", "one", "two"), start=job.attempts + 1):
        assert store.retry(job, 0.0, 9)
        with pytest.raises(LeaseLostError):
            store.renew(job, 60)
        job = taken(store, process)
        assert job.attempts == attempts
    store.release(job)
    taken(store, lease_s=400 * 86400)
    assert store.cancel(made.id).state == "canceled"


def test_canceling(store: JobStore, database: Database, gallery: Gallery) -> None:
    waiting = store.create(gallery, "work", {})
    assert store.cancel(waiting.id).state == "canceled"
    assert store.claim("p", 60) is None
    store.create(gallery, "work", {})
    job = taken(store)
    assert (store.cancel(job.id).state, store.job(job.id).cancel) == ("running", True)
    assert store.renew(job, 60)
    assert store.record(job, [], 1)
    store.finish(job, "canceled")
    assert store.cancel(job.id).state == "canceled"
    lines = listed_lines(database, AuditFilter(gallery.pk), None, 9)
    assert [line.details["job"] for line in lines if line.event == "job_canceled"] == [job.id, waiting.id]
    with raises_code("job_not_found"):
        store.cancel("0" * 32)


def test_a_job_that_no_server_can_run_can_be_canceled(store: JobStore, gallery: Gallery) -> None:
    left = store.create(gallery, "of no process", {})
    taken(store, lease_s=-1)
    assert store.cancel(left.id).state == "canceled"
    # Called off while its process lived, which then died.
    for kind in ("work", "of no process"):
        left = store.create(gallery, kind, {})
        job = taken(store, lease_s=60)
        assert store.cancel(left.id).state == "running"
        assert store.renew(job, -1)
        assert run_until(store, left, runner(store, print, ready=lambda job: False)).state == "canceled"


def test_a_restored_job_whose_archive_no_backup_holds_fails(
    store: JobStore, database: Database, gallery: Gallery, tmp_path: Path
) -> None:
    kinds = ("migrate", *ARCHIVE_KINDS, "album")
    made = [store.create(gallery, kind, {}) for kind in kinds]
    store.cancel(made[-1].id)
    claimed = store.claim("p", 60, lambda job: job.id == made[1].id)
    assert claimed is not None
    back_up(database, tmp_path / "backup")
    restore(database, tmp_path / "backup", replace=True)
    ended = [store.job(job.id) for job in made]
    assert [job.state for job in ended] == ["queued", "failed", "failed", "canceled"]
    assert [(job.problem or {}).get("code") for job in ended] == [None, "job_unrunnable", "job_unrunnable", None]
    with pytest.raises(LeaseLostError):
        store.record(claimed, [], 1)


def test_lists_and_what_is_forgotten(store: JobStore, database: Database, gallery: Gallery) -> None:
    other = Store(database).galleries.create("other", "f" * 32, 8, GallerySettings())
    made = [store.create(g, "work", {}) for g in (gallery, other, gallery)]
    store.cancel(made[0].id)
    assert [j.id for j in store.list_jobs(None, (), None, 2)] == [made[2].id, made[1].id]
    assert [j.id for j in store.list_jobs(None, (), made[1].pk, 2)] == [made[0].id]
    assert [j.id for j in store.list_jobs(gallery, ["queued"], None, 9)] == [made[2].id]
    yesterday, tidied = datetime.now(UTC) - timedelta(days=1), list[JobStore]()
    store.create(gallery, "album", {}, beginning=Store(database).albums.beginning(gallery, 0.01, yesterday))
    for count in (3, 2):  # the album has expired, and then a job; the others are not finished
        Housekeeping(Store(database), Retention(database), tidy=tidied.append).look()
        assert len(store.list_jobs(None, (), None, 9)) == count
        with database.write(GalleryNotFoundError("")) as connection:
            connection.execute(jobs.update().values(updated_at=datetime.now(UTC) - timedelta(days=15)))
    assert len(tidied) == 2
    Store(database).galleries.delete("g")
    assert [j.id for j in store.list_jobs(None, (), None, 9)] == [made[1].id]


@ON_BOTH
def test_of_many_claims_at_once_each_job_gets_one(url: str, store: JobStore, gallery: Gallery) -> None:
    made = {store.create(gallery, "work", {}).id for _ in range(12)}
    processes = [JobStore(open_database(url)) for _ in range(4)]
    start = threading.Barrier(len(processes))

    def claim_all(number: int) -> list[str]:
        start.wait(WAIT_S)
        found, misses = [], 0
        while misses < 3:  # a row that another one is about to take is passed over
            job = processes[number].claim(f"p{number}", 60)
            misses = misses + 1 if job is None else 0
            found += [] if job is None else [job.id]
        return found

    with ThreadPoolExecutor(len(processes)) as pool:
        claimed = [job for jobs in pool.map(claim_all, range(len(processes))) for job in jobs]
    assert sorted(claimed) == sorted(made)
    for process in processes:
        process._database.close()


# The runner


def run_until(store: JobStore, job: Job, runner: Runner, during: Callable[[], Awaitable[None]] | None = None) -> Job:
    """Run until the job is finished, or ``during`` returns; return the job."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), runner:
            await (during() if during else finished())

    async def finished() -> None:
        await asyncio.to_thread(is_eventually, lambda: not store.unfinished([job.id]))

    asyncio.run(main())
    return store.job(job.id)


def runner(store: JobStore, run: Callable[[JobContext], Any], lease_s: float = LEASE_S, **kind: Any) -> Runner:
    return Runner(store, {"work": JobKind(run, **kind)}, lease_s, poll_s=0.01)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)
    monkeypatch.setattr(runner_module, "STOP_S", 0.05)


@pytest.mark.parametrize(
    ("fault", "code", "attempts"),
    [
        (ImageError("low_quality", "out of bounds: sharpness"), "low_quality", 1),
        (ZeroDivisionError("a secret"), "job_crashed", MAX_ATTEMPTS + 1),
    ],
)
def test_an_exception_becomes_the_problem_of_the_job(
    store: JobStore, gallery: Gallery, fault: Exception, code: str, attempts: int
) -> None:
    runs = list[str]()

    async def work(context: JobContext) -> None:
        runs.append(context.job.id)
        raise fault

    job = run_until(store, store.create(gallery, "work", {}), runner(store, work))
    assert (job.state, (job.problem or {}).get("code"), len(runs)) == ("failed", code, attempts)
    assert "secret" not in str(job.problem)


def test_a_fault_is_over_at_a_later_attempt(store: JobStore, gallery: Gallery) -> None:
    """Each finished item allows MAX_ATTEMPTS further attempts."""
    attempts = 0

    def work(context: JobContext) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == MAX_ATTEMPTS:
            context.record([ItemOutcome("a", "done")])
        if attempts < 2 * MAX_ATTEMPTS:
            raise OverloadedError("the service is closing")
        context.record([ItemOutcome("b", "done")])

    discarded: list[str] = []
    running = runner(store, work, discard=lambda job: discarded.append(job.id))
    job = run_until(store, store.create(gallery, "work", {}), running)
    assert (job.state, job.problem, job.progress.counts) == ("succeeded", None, {"done": 2})
    assert (attempts, discarded) == (2 * MAX_ATTEMPTS, [job.id])


def test_a_job_that_is_cancelled_ends_between_items(store: JobStore, gallery: Gallery) -> None:
    items = 0

    async def endless(context: JobContext) -> None:
        nonlocal items
        while True:
            context.check()
            items += 1
            await context.run(context.record, [ItemOutcome(str(items), "done")])
            if items == 3:
                await context.run(store.cancel, context.job.id)

    discarded: list[str] = []
    running = runner(store, endless, discard=lambda job: discarded.append(job.id))
    job = run_until(store, store.create(gallery, "work", {}), running)
    assert (job.state, discarded) == ("canceled", [job.id])
    assert job.progress.done == items == 4  # the record after it tells


def test_a_service_that_stops_gives_its_jobs_back_at_once(store: JobStore, gallery: Gallery) -> None:
    begun = asyncio.Event()

    async def work(context: JobContext) -> None:
        done = await context.run(context.done)
        for item in ("a", "b"):
            if item in done:
                continue
            context.check()
            await context.run(context.record, [ItemOutcome(item, "done")])
            if not done.lookups:
                begun.set()
                await asyncio.sleep(WAIT_S)  # cut off when the service stops, which waits a little

    job = store.create(gallery, "work", {})

    async def until_begun() -> None:
        await begun.wait()

    stopped = run_until(store, job, runner(store, work), during=until_begun)
    assert (stopped.state, stopped.owner, stopped.progress.done) == ("queued", None, 1)
    resumed = run_until(store, job, runner(store, work))
    assert (resumed.state, resumed.progress.counts, resumed.attempts) == ("succeeded", {"done": 2}, 0)


def test_a_job_whose_process_died_is_taken_over_and_given_up_if_it_kills_them_all(
    store: JobStore, gallery: Gallery
) -> None:
    def work(context: JobContext) -> None:
        context.record([ItemOutcome("a", "done")])

    job = store.create(gallery, "work", {})
    taken(store, "dead", lease_s=-1)
    assert run_until(store, job, runner(store, work)).state == "succeeded"
    poison = store.create(gallery, "work", {})
    for number in range(MAX_ATTEMPTS + 1):
        taken(store, f"dead{number}", lease_s=-1)
    ended = run_until(store, poison, runner(store, work))
    assert ended.problem is not None
    assert (ended.state, ended.problem["code"], ended.progress.done) == ("failed", "job_crashed", 0)


def run_blocked(url: str, _pipe: object) -> None:
    runner_module.STOP_S, begun = 0.1, threading.Event()  # type: ignore[misc]

    def blocked(_: JobContext) -> None:
        begun.set()
        threading.Event().wait()

    async def until_begun() -> None:
        await asyncio.to_thread(begun.wait)

    store = JobStore(open_database(url))
    (job,) = store.list_jobs(None, (), None, 9)
    run_until(store, job, runner(store, blocked), until_begun)


def test_a_blocked_job_keeps_no_process_from_exiting(url: str, store: JobStore, gallery: Gallery) -> None:
    """Its lease is given back, so that another process goes on at once."""
    job = store.create(gallery, "work", {})
    assert Process(run_blocked, url).ended() == []
    assert (store.job(job.id).state, store.job(job.id).owner) == ("queued", None)


@pytest.mark.parametrize("lost", [False, True])
def test_a_job_outlives_a_lease_that_could_not_be_renewed_unless_another_claims_it(
    store: JobStore, gallery: Gallery, lost: bool
) -> None:
    """The process' own next look for jobs does not start it a second time."""
    runs, ended = list[str](), threading.Event()

    def expire() -> bool:
        with store._database.write(GalleryNotFoundError("")) as connection:
            connection.execute(jobs.update().values(lease_until=datetime.now(UTC) - timedelta(seconds=1)))
        return not lost or store.claim("heir", 60) is not None

    async def work(context: JobContext) -> None:
        runs.append(context.job.id)
        while not await context.run(expire):
            pass  # renewed in between
        try:
            await asyncio.sleep(WAIT_S if lost else 0.1)
        finally:
            ended.set()

    async def until_ended() -> None:
        await asyncio.to_thread(ended.wait, WAIT_S)

    running = runner(store, work, lease_s=0.2 if lost else 20)
    job = run_until(store, store.create(gallery, "work", {}), running, until_ended if lost else None)
    assert ended.is_set() and len(runs) == 1
    assert (job.state, (job.owner or "")[:4]) == (("running", "heir") if lost else ("succeeded", ""))


def test_a_job_of_another_kind_or_not_ready_here_waits(store: JobStore, gallery: Gallery) -> None:
    store.create(gallery, "unknown", {})
    elsewhere, here = (store.create(gallery, "work", {"node": node}) for node in ("other", "here"))
    running = runner(store, lambda _: None, ready=lambda job: job.parameters["node"] == "here")
    assert run_until(store, here, running).state == "succeeded"
    assert store.job(elsewhere.id).state == "queued"


# Over HTTP


def test_jobs_over_http(kith: Kith, settings: Settings) -> None:
    name = kith.create_gallery("jobs-over-http").name
    with closing(open_database(settings.sql_url)) as database:
        store, found = JobStore(database), Store(database).galleries.get(name)
        made = [store.create(found, "of no process", {}) for _ in range(2)]
        job = store.claim("p", 60, lambda job: job.kind == "of no process")
        assert job is not None
        store.record(job, [ItemOutcome("a", "low_quality", PROBLEM), ItemOutcome("b", "done")], 4, total=8)
        shown = kith.job(job.id)
        assert (shown.state, shown.done_count, shown.failed_count, shown.total_count) == ("running", 2, 1, 8)
        assert (shown.rate, shown.remaining_s) == (0.5, 12)
        assert [item.item for item in kith.job_items(job.id, failed=True)] == ["a"]
        assert kith.cancel_job(job.id).canceling
        store.finish(job, "canceled")
        assert kith.wait_for(job.id).state == "canceled"
        assert [j.id for j in kith.jobs(name, ["canceled"])] == [job.id]
        with pytest.raises(TimeoutError):
            kith.wait_for(made[1].id, timeout_s=0)
        kith.delete_gallery(name)
        with pytest.raises(KithClientError, match="job_not_found"):
            kith.job(job.id)

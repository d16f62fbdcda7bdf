"""Retention erases exactly the templates and subjects past their period, by one process at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from kith import Kith, KithClientError
from service import wiring
from service.cli.main import app
from service.core.clock import Clock
from service.domain.gallery import Gallery, IdempotentResponse
from service.index.follower import Followers, in_process
from service.operations import housekeeping
from service.operations.housekeeping import SWEEP_INTERVAL, Housekeeping
from service.operations.status import RecentState
from service.server import embedded
from service.settings import load_settings
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import idempotency, subjects, templates, vectors
from service.storage.privacy import retention as retention_module
from service.storage.privacy.retention import Retention
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.store import Store
from tests.conftest import is_eventually
from tests.databases import ON_BOTH, ON_POSTGRESQL, open_database
from tests.refusals import raises_code
from tests.service.storage.scene import made, some

NOW = datetime.now(UTC)


class Clocks(Clock):
    """Manual clocks. ``jump``: set only the wall clock."""

    def __init__(self, now: datetime = NOW) -> None:
        self._wall, self._boot_s = now, 1000.0
        super().__init__(lambda: self._wall, lambda: self._boot_s)

    def jump(self, by: timedelta) -> None:
        self._wall += by

    def advance(self, by: timedelta) -> None:
        self._wall += by
        self._boot_s += by.total_seconds()


def keeping(database: Database, clock: Clock, told: Callable[[Gallery], None] = lambda gallery: None) -> Housekeeping:
    """Disable the clock of the PostgreSQL server, which tests cannot set."""
    database.server_time = lambda: None  # type: ignore[method-assign]
    return Housekeeping(Store(database), Retention(database), changed=told, clock=clock)


def limited(database: Database, days: int | None, name: str = "g") -> Gallery:
    made(database, name)
    return Store(database).galleries.update(name, lambda current: replace(current, retention_days=days))


def aged(database: Database, ids: list[str], days: float) -> None:
    with database.engine.begin() as connection:
        made_at = {"created_at": NOW - timedelta(days=days)}
        connection.execute(templates.update().where(templates.c.id.in_(ids)).values(**made_at))


@ON_BOTH
def test_due_templates_and_then_empty_subjects_are_erased(
    database: Database, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "BATCH_ROWS", 1)
    store, gallery, other = Store(database), limited(database, 30), limited(database, None, "for-ever")
    followers = Followers(in_process(store))
    old, young = some(rng, 5), some(rng, 2)
    store.templates.enroll(gallery, "old", old[:3], None)
    store.templates.enroll(gallery, "both", [*old[3:], young[0]], IdempotentResponse("k", "d", "an answer"))
    store.templates.enroll(gallery, "young", young[1:], None)
    store.templates.enroll(other, "old", kept := some(rng), None)
    aged(database, [t.id for t in (*old, *kept)], 31)
    aged(database, [t.id for t in young], 29)
    assert followers.catch_up_blocking(gallery).search(old[0].vector[None], 9)[1] == 3

    swept = Retention(database).sweep(NOW)
    assert [g.name for g in swept.galleries] == ["g"]
    assert swept.removed == {"templates": 5, "subjects": 1}
    now = store.galleries.get("g")
    assert (now.subjects, now.templates, store.galleries.get("for-ever").templates) == (2, 2, 1)
    assert {t.id for s in ("both", "young") for t in store.templates.list_page(now, s)} == {t.id for t in young}
    _, compared = followers.catch_up_blocking(now).search(old[0].vector[None], 9)
    assert compared == 2
    listed = listed_lines(database, AuditFilter(now.pk), None, 100)
    lines = [one for one in listed if one.event == "retention_applied"]
    assert sum(line.details["removed"].get("templates", 0) for line in lines) == 5
    assert len(lines) >= 3  # in batches, each with an audit line
    assert ErasureStore(database).list_page(now) == []  # no receipts: these subjects may be enrolled again
    assert Retention(database).sweep(NOW).galleries == []
    store.templates.enroll(gallery, "old", some(rng), None)


def test_what_changes_while_a_sweep_selects_stays(
    database: Database, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subject that gets a template between the two reads, and all if the period is unset."""
    store, gallery, now, change = Store(database), limited(database, 30), datetime.now(UTC), database.change
    for name in ("gone", "back", "renamed"):
        store.subjects.put(gallery, name, None, {}, [])
    for meanwhile, left in (
        (lambda: store.templates.enroll(gallery, "back", some(rng), None), 1),
        (lambda: store.galleries.update("g", lambda settings: replace(settings, retention_days=None)), 2),
    ):

        def changed(of: Gallery, meanwhile: Callable[[], object] = meanwhile, **options: bool) -> Any:
            monkeypatch.setattr(database, "change", change)
            meanwhile()
            return change(of, **options)

        with database.engine.begin() as connection:
            connection.execute(subjects.update().values(updated_at=now - timedelta(days=31)))
        monkeypatch.setattr(database, "change", changed)
        Retention(database).sweep(now)
        assert store.galleries.get("g").subjects == left
        store.subjects.put(gallery, "another", None, {}, [])


def test_empty_subjects_and_idempotent_responses_expire(database: Database, rng: np.random.Generator) -> None:
    store, gallery, today = Store(database), limited(database, 30), datetime.now(UTC)
    store.subjects.put(gallery, "named", "Name", {}, ["tag"])
    store.templates.enroll(made(database, "other"), "a", some(rng), IdempotentResponse("k", "d", "an answer"))
    for days, people, answers in ((13, 1, 1), (15, 1, 0), (29, 1, 0), (31, 0, 0)):
        Retention(database).sweep(today + timedelta(days=days))
        with database.read() as connection:
            assert len(connection.execute(sa.select(idempotency)).all()) == answers
        assert [store.galleries.get(name).subjects for name in ("g", "other")] == [people, 1]


def test_the_service_sweeps_at_its_start_and_then_every_hour(database: Database, rng: np.random.Generator) -> None:
    """Also after a system's sleep, which is no jump of the clock."""
    store, gallery, clock, told = Store(database), limited(database, 30), Clocks(), list[str]()
    for days in (29, 28, 27.47):
        store.templates.enroll(gallery, f"s{days}", new := some(rng), None)
        aged(database, [new[0].id], days)
    house = keeping(database, clock, lambda g: told.append(g.name))
    half = SWEEP_INTERVAL / 2
    for elapsed, left in ((half, 3), (timedelta(days=1.5), 2), (timedelta(days=1), 1), (half, 1), (half, 0)):
        clock.advance(elapsed)
        house.look()
        assert (house.paused, store.galleries.get("g").templates) == (None, left)
    assert told == ["g"] * 3


def test_deleted_rows_leave_the_wal_of_sqlite(tmp_path: Path, rng: np.random.Generator) -> None:
    """Any process may have deleted rows, including one that ended before it could truncate the WAL."""
    url, log = f"sqlite:///{tmp_path / 'kith.db'}", tmp_path / "kith.db-wal"
    with closing(open_database(url)) as database:
        (house := keeping(database, Clocks())).look()
        with closing(open_database(url)) as other:
            Store(other).templates.enroll(limited(other, None), "ada", some(rng), None)
            with database.read() as connection:  # prevents truncation of the WAL
                held = bytes(connection.execute(sa.select(vectors.c.vector)).scalar_one())
                Store(other).galleries.delete("g")
            assert log.stat().st_size > 0
        house.look()
        assert log.stat().st_size == 0
        assert held not in (tmp_path / "kith.db").read_bytes()


def test_names_erased_by_another_process_are_evicted(rng: np.random.Generator, database: Database, url: str) -> None:
    with closing(open_database(url)) as another:
        here, there, gallery = Store(database), Store(another), made(database)
        here.templates.enroll(gallery, "ada", some(rng), None)
        known = there.galleries.get("g")
        pk = there.subjects.get(known, "ada").pk
        assert there.subjects.names(known, [pk])[pk].id == "ada"
        there.galleries.evict_changed()
        assert there.cache.names.get(known, [pk])
        here.subjects.delete(here.galleries.get("g"), "ada")
        there.galleries.evict_changed()
        assert not there.cache.names.get(known, [pk])


def crowd(database: Database, rng: np.random.Generator, people: int, days_old: float, name: str = "g") -> Gallery:
    """Gallery with a retention period of 30 days and subjects that are all past it."""
    gallery = limited(database, 30, name)
    for number in range(people):
        Store(database).templates.enroll(gallery, f"s{number}", new := some(rng), None)
        aged(database, [new[0].id], days_old)
    return Store(database).galleries.get(name)


def test_a_clock_jump_erases_nothing(
    database: Database, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even in a small gallery: no subject and no stored response is erased until the clock is right."""
    store, gallery, clock = Store(database), limited(database, 365), Clocks()
    store.templates.enroll(gallery, "ada", some(rng), IdempotentResponse("k", "d", "an answer"))
    house = keeping(database, clock)
    for by in (timedelta(days=400), timedelta(hours=2)):
        house.look()
        assert house.paused is None
        clock.jump(by)
        clock.advance(SWEEP_INTERVAL)
        house.look()
        assert house.paused is not None
        assert f"{house.paused.detail}" in caplog.text
        assert store.galleries.get("g").templates == 1
        clock.jump(-by)
        house.look()
        assert house.paused is None
    assert store.templates.stored_answer(gallery, "k", "d") == "an answer"
    assert listed_lines(database, AuditFilter(gallery.pk, None, "retention_applied"), None, 9) == []


def test_a_service_tells_of_a_wrong_clock_until_it_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clocks()
    monkeypatch.setattr(housekeeping, "Clock", lambda: clock)
    monkeypatch.setattr(wiring, "RecentState", partial(RecentState, fresh_s=0))
    monkeypatch.setattr(housekeeping, "CHECK_INTERVAL_S", 0.05)
    settings = load_settings(data_dir=tmp_path, log_level="ERROR")
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery("g", retention_days=365)
        kith.put_subject("g", "ada")

        def is_right() -> bool:
            told = kith.status().clock
            return told is not None and told.ok

        for days, right in ((400, False), (-400, True)):
            clock.jump(timedelta(days=days))
            is_eventually(lambda: is_right() == right)  # noqa: B023
            assert f"kith_retention_paused {float(not right)}" in httpx.get(f"{url}/metrics").text
            assert kith.gallery("g").subject_count == 1


@ON_POSTGRESQL
def test_a_server_started_with_a_wrong_clock_erases_nothing(database: Database, rng: np.random.Generator) -> None:
    """The clock of the PostgreSQL server detects it."""
    crowd(database, rng, 1, 0)
    house = Housekeeping(Store(database), Retention(database), clock=Clocks(NOW + timedelta(days=400)))
    house.look()
    assert house.paused is not None and "the database server" in house.paused.detail
    assert Store(database).galleries.get("g").templates == 1


def test_a_new_period_that_erases_a_large_share_needs_the_number(database: Database, rng: np.random.Generator) -> None:
    """More than a tenth of the templates, or of the subjects."""
    retention = Retention(database)
    gallery = crowd(database, rng, 20, 31)
    store = Store(database)
    for number in range(2):
        store.templates.enroll(gallery, f"s{number}", young := some(rng), None)
        aged(database, [young[0].id], 1)
    with raises_code("retention_unconfirmed", match="30 days would erase 20 of 22 templates and 18 of 20") as refused:
        retention.require_confirmation(gallery, 30, NOW, 19)
    assert "confirm=20" in refused.value.remedy
    retention.require_confirmation(gallery, 30, NOW, 20)
    retention.require_confirmation(gallery, 32, NOW, 0)  # nothing is that old
    small = made(database, "small")
    for number in range(10):
        store.subjects.put(small, f"s{number}", "Name", {}, [])  # no templates
    for aging, message in ((1, None), (2, "0 of 0 templates and 2 of 10 subjects")):
        old = subjects.update().where(
            subjects.c.lookup.in_([subject_lookup(small.seal, f"s{n}") for n in range(aging)])
        )
        with database.engine.begin() as connection:
            connection.execute(old.values(updated_at=NOW - timedelta(days=31)))
        if message is None:
            retention.require_confirmation(small, 30, NOW, 0)
        else:
            with raises_code("retention_unconfirmed", match=message) as refused:
                retention.require_confirmation(small, 30, NOW, 0)
            assert refused.value.extra == {"confirm": 2}


def test_a_shorter_period_asks_for_the_number(kith: Kith, server: str, gallery: str, tmp_path: Path) -> None:
    model, long_ago = kith.model(), "2020-01-01T00:00:00Z"
    vectors = np.random.default_rng(0).normal(size=(7, model.dimension))
    items = [{"subject": f"s{i}", "created_at": long_ago, "embedding": v.tolist()} for i, v in enumerate(vectors)]
    file = tmp_path / "people.ndjson"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in items))
    kith.import_gallery(gallery, file, recognizer=model.recognizer)
    for confirm in (None, 6):
        with pytest.raises(KithClientError, match=r"7 of 7 templates and 7 of 7 subjects.*confirm=7") as refused:
            kith.update_gallery(gallery, retention_days=30, keep_crops=True, confirm=confirm)
        assert (refused.value.status, refused.value.code) == (409, "retention_unconfirmed")
        assert refused.value.problem["confirm"] == 7
    now = kith.gallery(gallery)
    assert (now.retention_days, now.keep_crops) == (None, False)
    assert kith.update_gallery(gallery, retention_days=36_500).retention_days == 36_500
    assert kith.update_gallery(gallery, keep_crops=True).retention_days == 36_500
    assert kith.update_gallery(gallery, retention_days=None).retention_days is None

    run, set_to_30 = CliRunner().invoke, ["gallery", "update", gallery, "--retention-days", "30", "--url", server]
    asked = run(app, set_to_30, input="n\n")
    assert "7 of 7 templates and 7 of 7 subjects" in asked.output
    assert (asked.exit_code != 0, kith.gallery(gallery).retention_days) == (True, None)
    assert run(app, [*set_to_30, "--yes"]).exit_code == 0
    for days in (30, 60):  # repeated, longer
        assert kith.update_gallery(gallery, retention_days=days).retention_days == days
    assert kith.update_gallery(gallery, retention_days=30, confirm=7).retention_days == 30

"""One process at a time holds a lease, whatever the clocks of others say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from service.storage.db import leases as module
from service.storage.db.leases import Lease
from tests.databases import open_database
from tests.postgres import DatabaseUrl

HOUR_S = 3600.0
NOW = datetime(2026, 7, 1, tzinfo=UTC)


def test_one_process_holds_a_lease(database_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    url, hours = database_url(), 0.0
    database, another = open_database(url), open_database(url)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: hours * HOUR_S))
    for each in (database, another):
        monkeypatch.setattr(each, "now", lambda connection: NOW + timedelta(hours=hours))
    one, two = Lease(database, "task", HOUR_S), Lease(another, "task", HOUR_S)
    assert one.hold()
    assert not two.hold()
    hours = 0.9
    assert one.hold()
    hours = 1.5
    assert one.is_held
    assert not two.hold()
    hours = 2
    assert two.hold()  # the other process died
    assert not one.is_held and not one.hold()
    two.release()
    hours = 9600
    assert one.hold()  # a server with a wrong clock, which is killed
    hours = 2
    assert two.hold()
    hours -= 1 / 60
    assert not Lease(database, "task", HOUR_S).hold()  # a clock slightly behind
    for each in (database, another):
        each.close()

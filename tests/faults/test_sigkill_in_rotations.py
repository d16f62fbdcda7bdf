"""Kills during a master key rotation: one master key wraps all keys, and opens them."""

from __future__ import annotations

from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import pytest

from service.core.atomic_files import atomic_write
from service.domain.gallery import GallerySettings
from service.security.master_keys import KeyFile, MasterKeys
from service.storage.damage import damage
from service.storage.db.engine import open_database
from service.storage.privacy.master_key_rotation import rewrap, uses
from service.storage.repositories.store import Store
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.tally import Tally
from tests.postgres import DatabaseUrl

pytestmark = pytest.mark.long

ROUNDS = 24 if LONG else 4


def _rotate(url: str, path: Path, pipe: Pipe) -> None:
    """Rotate the keys repeatedly. The two previous keys stay: a killed rotation may have left one of them in use."""
    file = KeyFile(path)
    with closing(open_database(url, MasterKeys(file))) as database:
        pipe.send("begun")
        while True:
            rewrap(database, file.add())
            with atomic_write(path) as kept:
                kept.write("\n".join(path.read_text().split()[:3]).encode())
            pipe.send("rotated")


def test_rotations_that_are_killed(
    some_database_url: DatabaseUrl, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, path, rng = some_database_url(), tmp_path / "master.key", np.random.default_rng()
    master = MasterKeys(KeyFile(path, may_make=True))
    with closing(Store(open_database(url, master))) as store:
        for number in range(20):
            store.galleries.create(f"g{number}", "f" * 32, 8, GallerySettings())
    used = master.first().id
    for _ in range(ROUNDS):
        assert "rotated" in Killed(_rotate, url, path).after(2, rng.uniform(0, 0.1))
        tally.kills["rotation"] += 1
        with tally.judging(), closing(open_database(url, MasterKeys(KeyFile(path)))) as database:
            before = used
            with database.read() as connection:
                (used,) = uses(connection)  # a killed rotation was complete or had no effect
            assert used != before
            assert [*damage(database)] == []

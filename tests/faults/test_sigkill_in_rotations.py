"""Kills during a master key rotation under two busy servers: no request fails, no start fails, and no acknowledged
write is lost.
"""

from __future__ import annotations

import threading
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import pytest

from service.core.atomic_files import atomic_write
from service.security.master_keys import KeyFile, MasterKeys
from service.storage.audit.chain import examine
from service.storage.audit.log import PURPOSE
from service.storage.audit.reader import trail_of
from service.storage.db.engine import open_database
from service.storage.privacy.master_key_rotation import rewrap, uses
from service.storage.repositories.gallery_rows import gallery_of, gallery_rows
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.servers import Server
from tests.faults.tally import Tally
from tests.packs import BUNDLED_DIMENSION
from tests.postgres import DatabaseUrl

pytestmark = pytest.mark.long

ROUNDS = 24 if LONG else 4


def _rotate(url: str, path: Path, pipe: Pipe) -> None:
    """Rotate the keys repeatedly. The two previous keys stay, for readers of older rows."""
    file = KeyFile(path)
    with closing(open_database(url, MasterKeys(file))) as database:
        pipe.send("begun")
        while True:
            rewrap(database, file.add())
            with atomic_write(path) as kept:
                kept.write("\n".join(path.read_text().split()[:3]).encode())
            pipe.send("rotated")


class Load:
    """Create galleries, enroll people and identify them until stopped."""

    def __init__(self, number: int, server: Server) -> None:
        self._number, self._server = number, server
        self._ending = threading.Event()
        self.enrolled: list[tuple[str, str]] = []
        self.failed: list[Exception] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            with self._server.client() as kith:
                while not self._ending.is_set():
                    name = f"g{self._number}-{len(self.enrolled)}"
                    kith.create_gallery(name)
                    subject = f"s{self._number}-{len(self.enrolled)}"
                    kith.enroll(name, subject, embeddings=[vector(subject)])
                    self.enrolled.append((name, subject))
                    found = kith.identify(name, embeddings=[vector(subject)], risk={"threshold": 0.9})
                    assert found.results[0].subject == subject
        except Exception as error:
            self.failed.append(error)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


def vector(subject: str) -> list[float]:
    drawn = np.random.default_rng(list(subject.encode())).normal(size=BUNDLED_DIMENSION)
    return [float(number) for number in drawn / np.linalg.norm(drawn)]


def test_rotations_that_are_killed_under_two_servers(
    some_database_url: DatabaseUrl, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KITH_MASTER_KEY")
    url, path, rng = some_database_url(), tmp_path / "master.key", np.random.default_rng()
    first = KeyFile(path, may_make=True).first().id
    servers = [Server(tmp_path / str(number), url, KITH_MASTER_KEY_FILE=str(path)) for number in range(2)]
    try:
        for server in servers:
            server.wait_until_ready()
        loads = [Load(number, server) for number, server in enumerate(servers)]
        for _ in range(ROUNDS):
            said = Killed(_rotate, url, path).after(2, rng.uniform(0, 0.1))
            assert "rotated" in said
            tally.kills["rotation"] += 1
            with tally.judging():
                assert [load.failed for load in loads] == [[], []]
        servers.append(Server(tmp_path / "late", url, KITH_MASTER_KEY_FILE=str(path)))
        servers[2].wait_until_ready()
        for load in loads:
            load.end()
        with tally.judging():
            assert [load.failed for load in loads] == [[], []]
            enrolled = [pair for load in loads for pair in load.enrolled]
            assert len(enrolled) > 2
            for server in servers:
                with server.client() as kith:
                    for name, subject in enrolled[-20:]:
                        assert [found.id for found in kith.subjects(name)] == [subject]
        with closing(open_database(url, MasterKeys(KeyFile(path)))) as database, database.read() as connection:
            (used,) = uses(connection)  # a killed rotation was complete or had no effect
            assert used != first
            assert used in KeyFile(path).ids()
            for row in connection.execute(gallery_rows()):
                gallery_of(row, database.vault).seal.unlock()
            secret = database.vault.secret(connection, PURPOSE)
        with trail_of(url) as trail:
            assert examine(trail.lines, trail.heads, secret, trail.galleries).faults == []
    finally:
        for server in servers:
            server.kill()

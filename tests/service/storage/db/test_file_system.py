"""SQLite on file systems that cannot hold it: the error names the fault, and the remedy another place."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from service.core.errors import StorageBusyError
from service.storage.db import engine
from tests.databases import open_database
from tests.syscall_faults import (
    Fault,
    failing_folder_locks,
    failing_locks,
    failing_shared_memory,
    full_disk,
    read_only_files,
    run_failing,
)

OPEN = """
import json
from service.core.errors import KithError
from tests.databases import open_database
def attempt(step):
    try:
        step()
    except KithError as error:
        print(json.dumps(error.document()))
"""
AT_START = "install_faults(); attempt(lambda: open_database(URL))"
LATER = """
database = open_database(URL)
later = database.with_own_pool(1)
database.close()  # open connections share their memory with new ones of the process
install_faults()
attempt(lambda: later.read().__enter__())
"""


def opening(folder: Path, *faults: Fault, steps: str = AT_START) -> dict[str, str]:
    """Return the error document of a process that opens the database in a folder."""
    done = run_failing(f"URL = 'sqlite:///{folder / 'kith.db'}'\n{OPEN}\n{steps}", *faults)
    assert done.returncode == 0, done.stderr
    document: dict[str, str] = json.loads(done.stdout)
    return document


NO_LOCKS = "does not lock files, which SQLite needs"
LATE = "the file system does not lock or share files"


@pytest.mark.parametrize(
    ("existing", "faults", "code", "detail", "remedy"),
    [
        *(
            (False, failing_locks(error), "storage_unavailable", f"{NO_LOCKS}: {os.strerror(error)}", "local disk")
            for error in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES)
        ),
        (True, failing_locks(errno.ENOLCK), "storage_unavailable", NO_LOCKS, "PostgreSQL"),
        *(
            (existing, *rest)
            for existing in (False, True)
            for rest in (
                (failing_shared_memory(), "storage_unavailable", "does not share memory, which SQLite's", "local disk"),
                (read_only_files(), "storage_unavailable", "Read-only file system", "must be writable"),
                (full_disk(), "storage_full", "", "Free disk space"),
            )
        ),
        *(
            (False, faults, "storage_unavailable", LATE, "local disk")
            for faults in (failing_locks(errno.EOPNOTSUPP), failing_shared_memory())
        ),
    ],
)
def test_the_fault_of_a_file_system_is_reported(
    tmp_path: Path, existing: bool, faults: list[Fault], code: str, detail: str, remedy: str
) -> None:
    """Failing locks are not taken for locks of others."""
    if existing:
        open_database(f"sqlite:///{tmp_path / 'kith.db'}").close()
    document = opening(tmp_path, *faults, steps=LATER if LATE in detail else AT_START)
    assert document["code"] == code
    assert detail in document["detail"] and remedy in document["remedy"]


def test_a_database_that_another_process_writes_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    open_database(url).close()
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_MS", 50)
    with closing(sqlite3.connect(tmp_path / "kith.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusyError, match="database is locked") as busy:
            open_database(url)
    assert "Another process writes" in busy.value.remedy
    assert "local disk" not in busy.value.remedy
    open_database(url).close()


def test_locks_of_other_files_that_fail_are_reported(tmp_path: Path) -> None:
    """The locks of a model download, of a shared index, and of a new master key."""
    program = f"""
from pathlib import Path
from models.errors import PackError
from models.pack.pull import _locked
from service.core.errors import MasterKeyError, StorageError
from service.security.master_keys import KeyFile, MasterKeys
from service.storage.repositories.shared_indexes import SharedIndexes
from types import SimpleNamespace
install_faults()
folder = Path({str(tmp_path)!r})
try:
    with _locked(folder, "mine"):
        pass
except PackError as error:
    print(error)
try:
    with SharedIndexes(SimpleNamespace(file=folder / "kith.db"))._file_lock():
        pass
except StorageError as error:
    print(error, error.remedy)
try:
    MasterKeys(KeyFile(folder / "key", may_make=True)).first()
except MasterKeyError as error:
    print(error)
"""
    done = run_failing(program, *failing_folder_locks())
    pulled, shared, made = done.stdout.splitlines()
    assert "does not lock folders: Bad file descriptor" in made
    assert pulled == f"models_dir: {tmp_path} does not lock files (Bad file descriptor)"
    assert shared.startswith(f"{tmp_path}/kith.db-turn cannot be locked: Bad file descriptor Put the database")

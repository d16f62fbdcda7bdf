"""SQLite on file systems that cannot hold it: the error names the fault, and the remedy another place."""

from __future__ import annotations

import errno
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Timer

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

OPEN_ALL = """
import json, os
from service.core.errors import KithError
from service.storage.db import engine
from tests.databases import open_database
engine.BUSY_TIMEOUT_MS = 50
for folder, is_late, faults in CASES:
    if os.fork():
        os.wait()
        continue
    url = f"sqlite:///{folder}/kith.db"
    try:
        if is_late:
            database = open_database(url)
            later = database.with_own_pool(1)
            database.close()  # open connections share their memory with new ones of the process
        install(*faults)
        later.read().__enter__() if is_late else open_database(url)
    except KithError as error:
        print(json.dumps(error.document()), flush=True)
    os._exit(0)
"""
LATE = "the file system does not lock or share files"
FAULTS: list[tuple[list[Fault], str, str]] = [
    *((failing_locks(error), "database is locked", "local disk") for error in (errno.ENOLCK, errno.EACCES)),
    (failing_shared_memory(), "cannot be opened, because the file system does not", "local disk"),
    (read_only_files(), "the database cannot be opened: ", "must be writable"),
    (full_disk(), "", "Free disk space"),
    (failing_locks(errno.EOPNOTSUPP), LATE, "local disk"),
    (failing_shared_memory(), LATE, "local disk"),
]
"""Faults, and what the error says of them: ``LATE``, if they begin after the start."""


@pytest.mark.parametrize("existing", [False, True])
def test_the_fault_of_a_file_system_is_reported(tmp_path: Path, existing: bool) -> None:
    folders = [tmp_path / str(number) for number in range(len(FAULTS))]
    for folder in folders:
        folder.mkdir()
        if existing:
            open_database(f"sqlite:///{folder / 'kith.db'}").close()
    cases = [(str(folder), detail == LATE, faults) for folder, (faults, detail, _) in zip(folders, FAULTS, strict=True)]
    done = run_failing(f"CASES = {cases!r}\n{OPEN_ALL}")
    for text, (_, detail, remedy) in zip(done.stdout.splitlines(), FAULTS, strict=True):
        document = json.loads(text)
        codes = {"database is locked": "storage_busy", "": "storage_full"}
        assert document["code"] == codes.get(detail, "storage_unavailable"), done.stderr
        assert detail in document["detail"] and remedy in document["remedy"]


def test_a_database_that_another_process_writes_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    open_database(url).close()
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_MS", 50)
    with closing(sqlite3.connect(tmp_path / "kith.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusyError, match="database is locked"):
            open_database(url)
    open_database(url).close()


def test_a_start_waits_for_a_concurrent_creation_of_the_database(tmp_path: Path) -> None:
    # SQLite reports busy at once, without its timeout, to a process that changes the mode of a file while another
    # writes to it before WAL mode.
    file = tmp_path / "kith.db"
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        done = Timer(0.3, lambda: other.execute("COMMIT"))
        done.start()
        open_database(f"sqlite:///{file}").close()
        done.join()
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_folder_that_cannot_be_locked_gets_no_master_key(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from service.core.errors import MasterKeyError
from service.security.master_keys import KeyFile
install_faults()
try:
    KeyFile(Path({str(tmp_path)!r}) / "key", may_make=True).first()
except MasterKeyError as error:
    print(error)
"""
    done = run_failing(program, *failing_folder_locks())
    assert done.stdout.startswith(f"{tmp_path} cannot be opened and locked: [Errno 9] Bad file descriptor")

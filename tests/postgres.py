"""Test PostgreSQL: Debian's package, a new cluster in a temporary folder, on a Unix socket only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg

DEBIAN: Final = "/usr/lib/postgresql"
OWNER: Final = "postgres"
START_TIMEOUT_S: Final = 120
MIN_MEMORY_BYTES: Final = 2_000_000_000


class Postgres:
    """A cluster that can be stopped and restarted."""

    def __init__(self, folder: Path, durable: bool = False) -> None:
        """``folder``: an empty one. ``durable``: flush commits to the disk, as PostgreSQL does by default; a test that
        kills it does without, for what was written outlives a process.

        Raises:
            RuntimeError: there is no PostgreSQL.
        """
        self._bin = _programs()
        self._durable = durable
        self._data, self._log = folder / "data", folder / "log"
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # which PostgreSQL refuses to run as
            self._as_user = ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"]
            owner = pwd.getpwnam(OWNER)  # created by the package
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        self.folder = folder
        self._run("initdb", "--auth=trust", "--no-sync", "--username=kith", "--encoding=UTF8", "-D", str(self._data))

    def start(self) -> None:
        fast = "" if self._durable else "-c fsync=off -c full_page_writes=off -c max_wal_size=128MB "
        options = f"{fast}-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c max_connections=200"
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._log), "-o", options, "-w", "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server. ``mode``: "fast" ends all connections, "immediate" is a crash."""
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "stop")

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Halt the server: it keeps its connections and accepts new ones, but does not answer."""
        postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children")
        stopped = [postmaster]
        os.kill(postmaster, signal.SIGSTOP)  # no new processes start from here on
        stopped += map(int, children.read_text().split())
        try:
            for process in stopped[1:]:
                os.kill(process, signal.SIGSTOP)
            yield
        finally:
            for process in stopped:
                os.kill(process, signal.SIGCONT)

    def create(self, name: str) -> str:
        """Create an empty database; return its URL."""
        self._execute(f"CREATE DATABASE {name}")
        return f"postgresql://kith@/{name}?host={quote(str(self.folder), safe='')}"

    def drop(self, name: str) -> None:
        """Delete a database, which has 300 files, and end its connections."""
        self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with closing(psycopg.connect(host=str(self.folder), user="kith", dbname="postgres", autocommit=True)) as own:
            own.execute(statement.encode())

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._as_user, str(self._bin / program), *arguments],
            # The server that pg_ctl starts would hold a pipe open.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            timeout=START_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed with {done.returncode}")


def cluster_folder() -> Path:
    """Create a folder for a temporary cluster: in memory if there is room, because disks delete many files slowly."""
    memory = Path("/dev/shm")  # noqa: S108
    in_memory = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > MIN_MEMORY_BYTES
    # The path is short, because a socket path may have 107 bytes.
    return Path(tempfile.mkdtemp(prefix="kith-postgres-", dir=memory if in_memory else None))


def _programs() -> Path:
    on_path = shutil.which("initdb")
    found = [Path(on_path).resolve().parent] if on_path else sorted(Path(DEBIAN).glob("*/bin"))
    if not found or not (found[-1] / "initdb").exists():
        raise RuntimeError("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    return found[-1]


DatabaseUrl = Callable[[], str]
"""Return the URL of a new database at each call."""

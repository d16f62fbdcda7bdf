"""A server whose wall clock is wrong, for its process only, through a preloaded library."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from models.vision.recognition import l2_normalize
from service.storage.db.tables import leases
from tests.databases import open_database
from tests.faults.servers import Server

pytestmark = pytest.mark.long

DAY_S = 86_400
PATIENCE_S = 120
LIBRARY = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    const char *path = getenv("WALL_CLOCK_OFFSET");
    FILE *file = id == CLOCK_REALTIME && path ? fopen(path, "r") : NULL;
    long offset = 0;
    if (file) {
        if (fscanf(file, "%ld", &offset) == 1) at->tv_sec += offset;
        fclose(file);
    }
    return failed;
}
"""


@pytest.fixture
def offset(tmp_path: Path) -> Path:
    """File with the offset of the servers' wall clock. Skips if no C compiler can build the library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "wall.c"
    source.write_text(LIBRARY)
    made = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "wall.so"), str(source)]
    subprocess.run(made, check=True, timeout=60)
    return set_clock(tmp_path / "offset", 0)


def set_clock(offset: Path, days: int) -> Path:
    new = offset.with_suffix(".new")
    new.write_text(f"{days * DAY_S}\n")
    return new.replace(offset)


def start(offset: Path) -> Server:
    settings = {"LD_PRELOAD": str(offset.with_name("wall.so")), "WALL_CLOCK_OFFSET": str(offset)}
    server = Server(offset.with_name("data"), log=offset.with_name("log"), KITH_LOG_LEVEL="WARNING", **settings)
    server.wait_until_ready()
    return server


def metrics(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=60).text


def paused(kith: Kith) -> bool:
    clock = kith.status().clock
    return clock is not None and not clock.ok


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        threading.Event().wait(0.5)


def enroll(kith: Kith, people: int) -> None:
    rng, dimension = np.random.default_rng(0), kith.model().dimension
    kith.create_gallery("staff", retention_days=365)
    for number in range(people):
        (embedding,) = l2_normalize(rng.normal(size=(1, dimension)))
        kith.enroll("staff", f"s{number}", embeddings=[embedding], allow_duplicate=True)


def test_a_clock_400_days_ahead_erases_no_subject(offset: Path) -> None:
    """While the service runs, and after the clock is corrected."""
    server = start(offset)
    try:
        with server.client() as kith:
            enroll(kith, 11)
            set_clock(offset, 400)
            wait_until(lambda: paused(kith))
            assert "kith_retention_paused 1.0" in metrics(server)
            assert kith.gallery("staff").subject_count == 11
            set_clock(offset, 0)
            wait_until(lambda: not paused(kith))
            assert kith.gallery("staff").subject_count == 11
    finally:
        server.terminate(60)
    database = open_database(f"sqlite:///{offset.with_name('data') / 'kith.db'}")
    with database.read() as connection:
        assert connection.execute(leases.select()).all() == []  # released when the service stopped
    database.close()
    assert "retention is paused" in offset.with_name("log").read_text()

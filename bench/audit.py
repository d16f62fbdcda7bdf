"""Measure the processor time of audit records on SQLite.

Measures a write with and without its audit record. For a search, the record is written within half a second, before
the answer (alone, and many at once), or not at all. Figures are processor microseconds of all threads: medians of
interleaved rounds. Prints, and writes bench/results/audit.md.

    python -m bench.audit
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from bench.common import RESULTS
from bench.machine import machine
from service.domain.gallery import Gallery, GallerySettings
from service.storage.audit.log import record
from service.storage.audit.writer import AuditWriter, When
from service.storage.db.engine import Database
from service.storage.repositories.store import Store
from tests.databases import open_database

TABLE: Final = RESULTS / "audit.md"
ROUNDS: Final = 5
WRITES: Final = 200
SEARCHES: Final = 500
TOGETHER: Final = 32
FOUND: Final = [{"outcome": "identified", "subject": "ada"}]


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_database(f"sqlite:///{Path(folder) / 'kith.db'}")) as database,
    ):
        gallery = Store(database).galleries.create("g", "f", 8, GallerySettings())
        kinds: dict[str, Callable[[], float]] = {
            "A change without a line": lambda: write_us(database, gallery, False),
            "A change with its line": lambda: write_us(database, gallery, True),
            "A search's line, `off`": lambda: search_us(database, gallery, "off", 1),
            "A search's line, `soon`": lambda: search_us(database, gallery, "soon", 1),
            f"A search's line, `before`, {TOGETHER} at once": lambda: search_us(database, gallery, "before", TOGETHER),
            "A search's line, `before`, one at a time": lambda: search_us(database, gallery, "before", 1),
        }
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, measure in kinds.items():
                taken[name].append(measure())
    lines = ["# What the audit costs", "", f"`python -m bench.audit` on {machine()}. Core-microseconds.", ""]
    lines += ["| | Median | Least to most |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(each):.0f} | {min(each):.0f} to {max(each):.0f} |"
        for name, each in taken.items()
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def write_us(database: Database, gallery: Gallery, with_line: bool) -> float:
    start = time.process_time()
    for _ in range(WRITES):
        with database.change(gallery) as connection:
            if with_line:
                record(database.vault, connection, "templates_enrolled", gallery, "ada", templates=1)
    return (time.process_time() - start) * 1e6 / WRITES


def search_us(database: Database, gallery: Gallery, when: When, together: int) -> float:
    async def search() -> float:
        writer = AuditWriter(database, when)
        start = time.process_time()
        for _ in range(SEARCHES // together):
            waiting: list[Awaitable[None]] = [writer.searched(gallery, FOUND) for _ in range(together)]
            await asyncio.gather(*waiting)
        await asyncio.to_thread(writer.close)
        return (time.process_time() - start) * 1e6 / (SEARCHES // together * together)

    return asyncio.run(search())


if __name__ == "__main__":
    main()

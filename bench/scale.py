"""Estimate the resources of a gallery with a million, a hundred million and a billion vectors of 512 numbers.

Measures on one machine: bytes per template in SQLite and PostgreSQL and in their logs, and the rate of reading a
gallery from each. ``bench.gallery`` provides the search time for a million vectors, and the time to load them from
SQLite. This file calculates the rest. Prints the tables, writes bench/results/scale.json, and puts the tables into
docs/scale.md. With ``--tables``, it uses the existing figures.

    python -m bench.scale [--templates 20000] [--tables]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import sqlalchemy as sa

from models.vision.recognition import l2_normalize
from service.domain.gallery import GallerySettings, NewTemplate
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.postgres import Postgres

ROOT: Final = Path(__file__).parent.parent
RESULT: Final = ROOT / "bench" / "results" / "scale.json"
SEARCHED: Final = ROOT / "bench" / "results" / "gallery.json"
"""Results of ``bench.gallery``: a million vectors searched, and a gallery of a million templates loaded."""
DOCUMENT: Final = ROOT / "docs" / "scale.md"
BEGIN: Final = "<!-- by bench/scale.py -->"
END: Final = "<!-- end -->"

DIMENSION: Final = 512
COUNTS: Final = {"1 M": 10**6, "100 M": 10**8, "1 B": 10**9}
TEMPLATES_OF_A_SUBJECT: Final = 5
READ_TIMES: Final = 5
M: Final = 32
"""Links of an HNSW node in each layer; twice as many in the lowest."""
EF: Final = 256
SEARCH_LIST: Final = 100
SEGMENT_BYTES: Final = 2**30
"""Size of a segment of vectors; Milvus' default (``dataCoord.segment.maxSize``)."""
LISTS: Final = 1024
PROBED: Final = 128
NODE_BYTES: Final = 128e9
USABLE: Final = 0.7
"""Share of a node's memory for vectors: the rest is for growing segments, index building and queries."""


class Kind(NamedTuple):
    """An index: bytes per vector in memory, on disk, and read by a search. A search reads either a share of all vectors
    or a fixed number in each segment."""

    name: str
    memory: float
    disk: float
    looked: float
    share: float = 0.0
    visited: int = 0


WHOLE: Final = 4 * DIMENSION
LINKS: Final = 4 * (2 * M + M / (M - 1))
"""Bytes of the lowest layer, and of the layers above, each of which has 1/M of the nodes below it."""
KINDS: Final = [
    Kind("in process, `exact`", WHOLE, 0, WHOLE, share=1),
    Kind("in process, `compact`", WHOLE + DIMENSION / 8, 0, DIMENSION / 8, share=1),
    Kind("Milvus `FLAT`", WHOLE, WHOLE, WHOLE, share=1),
    Kind("Milvus `HNSW`", WHOLE + LINKS, 2 * WHOLE + LINKS, WHOLE, visited=EF * M),
    Kind("Milvus `IVF_FLAT`", WHOLE, 2 * WHOLE, WHOLE, share=PROBED / LISTS),
    Kind("Milvus `IVF_SQ8`", DIMENSION, WHOLE + DIMENSION, DIMENSION, share=PROBED / LISTS),
    Kind("Milvus `DISKANN`", DIMENSION / 4, 2 * WHOLE + 4 * 2 * M, DIMENSION / 4, visited=SEARCH_LIST * M),
]


@dataclass(frozen=True)
class Measured:
    """Bytes per template; templates a second, to compare the two databases (the table's rate is for a million)."""

    machine: str
    templates: int
    sqlite_bytes: float
    postgresql_bytes: float
    postgresql_wal_bytes: float
    sqlite_read: float
    postgresql_read: float


@dataclass(frozen=True)
class Whole:
    """A million vectors in process: bytes a second of a search that reads all; ms per search by ``exact`` and by
    ``compact``; seconds from SQLite to the first search and the resulting templates a second; cores."""

    memory_read: float
    exact_ms: float
    compact_ms: float
    first_search_s: float
    loaded: float
    cores: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=int, default=20_000)
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    if not options.tables:
        RESULT.write_text(json.dumps(asdict(measure(options.templates)), indent=2) + "\n")
    text = tables(Measured(**json.loads(RESULT.read_text())), whole())
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")
    print(text)


def whole() -> Whole:
    searched = json.loads(SEARCHED.read_text())
    rows = {row["index"]: row for row in searched["searches"] if row["templates"] == COUNTS["1 M"]}
    exact, log = rows["Kith exact"]["p50_ms"], searched["log"]
    return Whole(
        memory_read=COUNTS["1 M"] * WHOLE / exact * 1000,
        exact_ms=exact,
        compact_ms=rows["Kith compact"]["p50_ms"],
        first_search_s=log["first_search_s"],
        loaded=log["templates"] / log["first_search_s"],
        cores=searched["machine"]["cores"],
    )


def tables(measured: Measured, million: Whole) -> str:
    """Calculate the tables, as Markdown."""
    parts = [_memory(), _nodes(), _cost(million), _database(measured, million), _footing(measured, million)]
    return "\n\n".join(parts) + "\n"


def _memory() -> str:
    rows = [[k.name, f"{k.memory:,.0f}", *(_bytes(n * k.memory) for n in COUNTS.values())] for k in KINDS]
    return _table("Memory for vectors", ["Index", "Bytes per vector", *COUNTS], rows)


def _nodes() -> str:
    usable = NODE_BYTES * USABLE
    rows = []
    for kind in KINDS:
        needed = [n * kind.memory / usable for n in COUNTS.values()]
        if kind.name.startswith("in process"):
            shares = [f"{share:.0%} of each" if share < 1 else "too large" for share in needed]
            rows.append([kind.name, *shares, "—"])
        else:
            rows.append([kind.name, *(f"{math.ceil(n):,}" for n in needed), _bytes(COUNTS["1 B"] * kind.disk)])
    title = f"Nodes of {NODE_BYTES / 1e9:.0f} GB for one replica, with {USABLE:.0%} of memory for vectors"
    return _table(title, ["Index", *COUNTS, "Object storage at 1 B"], rows)


def _cost(million: Whole) -> str:
    def cell(kind: Kind, n: int) -> str:
        read = (n * kind.share + _segments(n) * kind.visited) * kind.looked
        disk = f", {_segments(n) * SEARCH_LIST:,} disk reads" if kind.name.endswith("`DISKANN`") else ""
        return f"{_bytes(read)}, {_seconds(read / million.memory_read)}{disk}"

    rows = [[kind.name, *(cell(kind, n) for n in COUNTS.values())] for kind in KINDS]
    rows.append(["Segments in Milvus", *(f"{_segments(n):,}" for n in COUNTS.values())])
    return _table(f"Bytes read per search, and time on {million.cores} cores", ["Index", *COUNTS], rows)


def _segments(n: int) -> int:
    return math.ceil(n * WHOLE / SEGMENT_BYTES)


def _database(m: Measured, million: Whole) -> str:
    sizes = {
        "SQLite, file": m.sqlite_bytes,
        "PostgreSQL, tables": m.postgresql_bytes,
        "PostgreSQL, WAL of the enrollment": m.postgresql_wal_bytes,
    }
    rows = [[name, f"{size:,.0f}", *(_bytes(n * size) for n in COUNTS.values())] for name, size in sizes.items()]
    slower = m.postgresql_read / m.sqlite_read
    rates = {"Load time, SQLite": million.loaded, "Load time, PostgreSQL": million.loaded * slower}
    rows += [[name, "", *(_seconds(n / rate) for n in COUNTS.values())] for name, rate in rates.items()]
    return _table("Database size and load time", ["", "Bytes per template", *COUNTS], rows)


def _footing(m: Measured, million: Whole) -> str:
    return (
        f"Measured with {m.templates:,} templates on {m.machine}: bytes per template, and PostgreSQL's read speed "
        f"({m.postgresql_read / m.sqlite_read:.2f} of SQLite's). Measured with a million vectors "
        f"([gallery.md](../bench/results/gallery.md)): {million.exact_ms:.0f} ms per `exact` search "
        f"({million.memory_read / 1e9:.1f} GB/s), {million.compact_ms:.1f} ms per `compact` search, and "
        f"{million.first_search_s:.0f} s from startup to the first search with SQLite."
    )


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bytes(size: float) -> str:
    for unit_, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.{0 if size >= 100 * scale else 1}f} {unit_}"
    return f"{size / 1e3:.0f} kB"


def _seconds(seconds: float) -> str:
    for unit_, scale in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:,.0f} {unit_}"
    return f"{seconds * 1000:.{0 if seconds > 0.01 else 1}f} ms" if seconds >= 1e-4 else "under 0.1 ms"


def measure(templates: int) -> Measured:
    folder = Path(tempfile.mkdtemp(prefix="kith-scale-"))
    cluster = Postgres(folder, durable=True)
    cluster.start()
    try:
        url = cluster.create("scale")
        postgresql = _filled(url, templates)
        with tempfile.TemporaryDirectory() as own:
            sqlite = _filled(f"sqlite:///{own}/kith.db", templates)
            size = sum(path.stat().st_size for path in Path(own).iterdir())
    finally:
        cluster.stop("immediate")
        shutil.rmtree(folder)
    return Measured(
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        templates=templates,
        sqlite_bytes=size / templates,
        postgresql_bytes=postgresql["bytes"] / templates,
        postgresql_wal_bytes=postgresql["wal"] / templates,
        sqlite_read=sqlite["read"],
        postgresql_read=postgresql["read"],
    )


def _filled(url: str, templates: int) -> dict[str, float]:
    """Enroll subjects one at a time; return the growth of the database and its read rate."""
    rng = np.random.default_rng(0)
    store = Store(open_database(url))
    gallery = store.galleries.create("scale", "f" * 32, DIMENSION, GallerySettings())
    before = _sizes(url)
    for i in range(templates // TEMPLATES_OF_A_SUBJECT):
        vectors = l2_normalize(rng.normal(size=(TEMPLATES_OF_A_SUBJECT, DIMENSION)))
        new = [
            NewTemplate(uuid.uuid4().hex, v, "photo", {"score": 0.5, "sharpness": 0.5, "size": 80.0}, 0.9)
            for v in vectors
        ]
        store.templates.enroll(gallery, f"subject-{i}", new, None)
    after = _sizes(url)
    seconds = []
    for _ in range(READ_TIMES):
        start = time.perf_counter()
        store.changes.snapshot(gallery)
        seconds.append(time.perf_counter() - start)
    store.close()
    return {"read": templates / statistics.median(seconds), **{name: after[name] - before[name] for name in after}}


def _sizes(url: str) -> dict[str, float]:
    """Return the sizes of a PostgreSQL database; SQLite's size is that of its file."""
    if url.startswith("sqlite"):
        return {}
    queries = {
        "bytes": "SELECT pg_database_size(current_database())",
        "wal": "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn",
    }
    with sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:")).connect() as connection:
        return {name: float(connection.exec_driver_sql(query).scalar_one()) for name, query in queries.items()}


if __name__ == "__main__":
    main()

"""Measure templates a second into and out of durable storage, by format and database, beside SQLite alone.

Uses generated unit vectors of 512 numbers. SQLite's own rate is for the same rows in the same tables and transaction
sizes, by executemany of prepared tuples. The server's rates use the bundled recognizer's dimension and the client.
Prints, and writes bench/results/transfer.json and .md.

    python -m bench.transfer [--templates 200000] [--per-subject 1] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from bench.common import RESULTS, say
from kith import Kith
from models.runtime.onnx_runtime import available_cores
from service.domain.gallery import GallerySettings
from service.domain.gallery_items import GalleryFileHeader, GalleryItems, rows_in_block
from service.server import embedded
from service.settings import load_settings
from service.storage.db.engine import Database
from service.storage.privacy.backup import back_up, restore
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.store import Store
from service.storage.transfer import ndjson, parquet
from service.storage.transfer.importing import Format, Import, export
from tests.databases import open_database
from tests.postgres import Postgres

DIMENSION: Final = 512
FINGERPRINT: Final = "f" * 32
GOAL: Final = 50_000
LISTS_SHARE: Final = 4
"""Divisor for JSON lists, which are slow and large: a quarter of the templates is enough."""
SETTLE_S: Final = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=int, default=200_000)
    parser.add_argument("--per-subject", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        figures: dict[str, Any] = {
            "templates": options.templates,
            "per_subject": options.per_subject,
            "dimension": DIMENSION,
            "cores": available_cores(),
            "sqlite": sqlite3.sqlite_version,
            "python": platform.python_version(),
            "load_before": round(os.getloadavg()[0], 2),
            "disk_mb_per_s": disk_rate(folder),
            "files": files(folder, options.templates, options.per_subject),
        }
        figures["raw_sqlite"] = raw_sqlite(folder, options.templates, options.per_subject)
        figures["in_sqlite"] = judge(lambda: f"sqlite:///{folder / uuid.uuid4().hex}.db", folder, options.templates)
        try:
            cluster_folder = Path(tempfile.mkdtemp(prefix="kith-postgres-", dir=options.folder))
            cluster = Postgres(cluster_folder, durable=True)
            cluster.start()
        except RuntimeError as reason:
            say(f"PostgreSQL left out: {reason}")
        else:
            try:
                figures["in_postgresql"] = judge(
                    lambda: cluster.create(f"k{uuid.uuid4().hex}"), folder, options.templates
                )
            finally:
                cluster.stop("immediate")
        finally:
            shutil.rmtree(cluster_folder, ignore_errors=True)
        figures["server"] = through_server(folder, options.templates)
        figures["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        figures["load_after"] = round(os.getloadavg()[0], 2)
    text = markdown(figures)
    (RESULTS / "transfer.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "transfer.md").write_text(text, encoding="utf-8")
    print(text)


def blocks(count: int, per_subject: int, dimension: int = DIMENSION) -> Iterator[GalleryItems]:
    rng = np.random.default_rng(0)
    size = rows_in_block(dimension)
    for start in range(0, count, size):
        n = min(size, count - start)
        vectors = rng.standard_normal((n, dimension), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        nothing: list[None] = [None] * n
        subjects = [f"subject-{(start + i) // per_subject:09d}" for i in range(n)]
        ids = [rng.bytes(16).hex() for _ in range(n)]
        columns: list[Any] = [subjects, *[nothing] * 5, ids, ["embedding"] * n, *[nothing] * 4]
        columns += [vectors, np.ones(n, np.bool_)]
        yield GalleryItems(range(start + 1, start + n + 1), *columns)


def files(folder: Path, count: int, per_subject: int) -> dict[str, float]:
    """Write each file; return their sizes in MB."""
    header = GalleryFileHeader(FINGERPRINT, DIMENSION)
    writer = parquet.Writer(header)
    with (folder / "parquet").open("wb") as columns, (folder / "base64").open("wb") as base64:
        base64.write(ndjson.header_line(header))
        for block in blocks(count, per_subject):
            columns.write(writer.write(block))
            base64.write(ndjson.lines_of(block))
        columns.write(writer.end())
    with (folder / "lists").open("wb") as lists:
        lists.write(ndjson.header_line(header))
        for block in blocks(count // LISTS_SHARE, per_subject):
            lists.write(ndjson.lines_of(block, as_lists=True))
    return {name: round((folder / name).stat().st_size / 1e6, 1) for name in ("parquet", "base64", "lists")}


def raw_sqlite(folder: Path, count: int, per_subject: int) -> float:
    path = folder / "raw.db"
    database = open_database(f"sqlite:///{path}")
    engine = database.engine
    seal = Store(database).galleries.create("g", FINGERPRINT, DIMENSION, GallerySettings()).seal
    seconds = 0.0
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.execute("PRAGMA cache_size = -65536")
        at = "2026-01-01 00:00:00.000000"
        for block in blocks(count, per_subject):
            sealed = seal.close_vectors(block.vectors, 0)
            keys = list(block.numbers)
            owners = [(key - 1) // per_subject + 1 for key in keys]
            # The first subject may have begun in the previous block.
            begun = (keys[0] - 2) // per_subject + 1
            ids = zip(owners, block.subjects, strict=True)
            subjects = [(o, 1, s, b"", at, at) for o, s in dict(ids).items() if o > begun]
            columns = zip(keys, block.templates, owners, strict=True)
            templates = [(key, id_, 1, owner, "embedding", None, None, at) for key, id_, owner in columns]
            vectors = [(key, 0, value) for key, value in zip(keys, sealed, strict=True)]
            changes = [(key, 1, key, owner) for key, owner in zip(keys, owners, strict=True)]
            start = time.perf_counter()
            driver.execute("BEGIN IMMEDIATE")
            for table, rows in (
                ("subjects (pk, gallery_pk, lookup, sealed, created_at, updated_at)", subjects),
                ("templates", templates),
                ("vectors", vectors),
                ("changes", changes),
            ):
                marks = ", ".join("?" * len(rows[0])) if rows else ""
                driver.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608
            driver.execute("COMMIT")
            seconds += time.perf_counter() - start
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM vectors")).scalar() == count  # noqa: S101
    engine.dispose()
    path.unlink()
    return round(count / seconds)


def judge(url: Callable[[], str], folder: Path, count: int) -> dict[str, float]:
    """Measure rates in templates a second."""
    first = url()
    rates: dict[str, float] = {}
    for name in ("parquet", "base64", "lists"):
        time.sleep(SETTLE_S)  # let earlier writes reach the disk
        place = first if name == "parquet" else url()
        rates[f"import {name}"] = imported(place, folder / name, create=True)
        say(f"  import {name}: {rates[f'import {name}']:,.0f}/s")
    rates["import again"] = imported(first, folder / "parquet", create=False)
    database = open_database(first)
    kinds: tuple[Format, ...] = ("parquet", "ndjson")
    for kind in kinds:
        rates[f"export {kind}"] = exported(database, kind, folder / "out", count)
    start = time.perf_counter()
    back_up(database, folder / "backup")
    rates["backup"] = round(count / (time.perf_counter() - start))
    database.close()
    empty = open_database(url())
    time.sleep(SETTLE_S)
    start = time.perf_counter()
    restore(empty, folder / "backup")
    rates["restore"] = round(count / (time.perf_counter() - start))
    empty.close()
    return rates


def imported(url: str, file: Path, create: bool) -> float:
    database = open_database(url)
    store = Store(database)
    gallery = (
        store.galleries.create("g", FINGERPRINT, DIMENSION, GallerySettings()) if create else store.galleries.get("g")
    )
    taking = Import(BulkStore(database), gallery)
    start = time.perf_counter()
    with file.open("rb") as opened:
        if file.name == "parquet":
            taking.take_all(parquet.Reader(opened))
        else:
            lines = ndjson.Lines()
            while piece := opened.read(8_000_000):
                taking.take_all(lines.feed(piece))
            taking.take_all(lines.end())
    seconds = time.perf_counter() - start
    report = taking.report
    assert not report.refused  # noqa: S101
    assert bool(report.templates) == create  # noqa: S101
    store.close()
    return round((report.templates + report.present) / seconds)


def exported(database: Database, kind: Format, to: Path, count: int) -> float:
    start = time.perf_counter()
    with to.open("wb") as file:
        for piece in export(BulkStore(database), "g", kind, lambda _: {}):
            file.write(piece)
    return round(count / (time.perf_counter() - start))


def through_server(folder: Path, count: int) -> dict[str, float]:
    """Measure over HTTP with the bundled recognizer's dimension, until the answer."""
    with embedded(load_settings(data_dir=folder / "data", api_key=None)) as url, Kith(url) as kith:
        model = kith.model()
        header = GalleryFileHeader(model.recognizer, model.dimension)
        writer = parquet.Writer(header)
        columns, lines = folder / "small.parquet", folder / "small.ndjson"
        with columns.open("wb") as to_columns, lines.open("wb") as to_lines:
            to_lines.write(ndjson.header_line(header))
            for block in blocks(count, 1, model.dimension):
                to_columns.write(writer.write(block))
                to_lines.write(ndjson.lines_of(block))
            to_columns.write(writer.end())
        rates: dict[str, float] = {"dimension": model.dimension}
        for path in (columns, lines):
            start = time.perf_counter()
            kith.import_gallery(path.stem + path.suffix[1:], path, create=True)
            rates[f"import {path.suffix[1:]}"] = round(count / (time.perf_counter() - start))
        start = time.perf_counter()
        for _ in kith.export_gallery("smallparquet", "parquet"):
            pass
        rates["export parquet"] = round(count / (time.perf_counter() - start))
    return rates


def disk_rate(folder: Path, megabytes: int = 500) -> float:
    """Return the MB a second of writing pieces of 16 MB, flushed each."""
    piece, path = os.urandom(16_000_000), folder / "disk"
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(megabytes // 16):
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    rate = megabytes / (time.perf_counter() - start)
    path.unlink()
    return round(rate)


def markdown(figures: dict[str, Any]) -> str:
    kinds = [kind for kind in ("in_sqlite", "in_postgresql") if kind in figures]
    rows = [
        "# Galleries in and out",
        "",
        f"{figures['templates']:,} templates of {DIMENSION} numbers, {figures['per_subject']} a subject; "
        f"{figures['cores']} cores, a disk that takes {figures['disk_mb_per_s']:,} MB/s; load average "
        f"{figures['load_before']} before, {figures['load_after']} after. Templates a second, on disk when counted. "
        f"SQLite {figures['sqlite']} by itself: {figures['raw_sqlite']:,}. The goal for an import: {GOAL:,}.",
        "",
        "| |" + "|".join(kind.removeprefix("in_") for kind in kinds) + "|",
        "|---|" + "---:|" * len(kinds),
    ]
    rows += [
        f"| {name} |" + "|".join(f"{figures[kind][name]:,}" for kind in kinds) + "|" for name in figures["in_sqlite"]
    ]
    server = figures["server"]
    said = ", ".join(f"{name} {rate:,}" for name, rate in server.items() if name != "dimension")
    size = ", ".join(f"{name} {megabytes:,} MB" for name, megabytes in figures["files"].items())
    rows += [
        "",
        f"Through the server and SQLite, {server['dimension']} numbers, one template a subject: {said}. Files: {size} "
        f"(lists: a quarter of the templates). Peak memory of the process, server included: {figures['peak_mb']:,} MB.",
        "",
        "`base64` and `lists` are NDJSON; `again` is a repeated import, which stores nothing.",
        "",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()

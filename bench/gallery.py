"""Measure searches in a large gallery, beside faiss.IndexFlatIP in the same run, and the cost of following the change
log.

Uses simulated people with two photos each, as alike as those of LFW in the bundled recognizer's vectors: photos of
different people have cosines of standard deviation 0.1, those of one person a median of 0.64. Probes are third photos.
Prints, and writes bench/results/gallery.json and .md, except with fewer templates than a million.

    python -m bench.gallery [TEMPLATES]
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from bench.common import RESULTS, figures_table, say, write
from bench.load import Worker, look_at
from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from models.vision.recognition import l2_normalize
from service.domain.gallery import GallerySettings, NewTemplate, SubjectRecord
from service.index.faiss_structures import api as faiss
from service.index.faiss_structures import exact, trainer_for
from service.index.follower import in_process
from service.index.protocol import Kind
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Rows
from service.security.sealing import Seal
from service.storage.db.row_sealing import seal_subject, subject_lookup
from service.storage.db.tables import subjects, templates, vectors
from service.storage.repositories.change_log import ROWS_PER_READ
from service.storage.repositories.store import Store
from tests.databases import open_database

DIMENSION: Final = 512
SPREAD: Final = 0.75
"""Share of what varies within a person in what varies between people."""
DECAY: Final = 51
"""Dimensions in which the variance falls to 1/e. That makes 102 effective ones, as measured on LFW."""
PEOPLE_AT_ONCE: Final = 16_384
PROBES: Final = 1000
LARGE: Final = 1_000_000
BATCH: Final = 64
K: Final = 10
SEED: Final = 11
Row = dict[str, Any]


def main() -> None:
    size = int(sys.argv[1]) if sys.argv[1:] else LARGE
    report = {
        "machine": {"platform": platform.platform(), "cores": available_cores(), "faiss": faiss.__version__},
        "searches": compared(size, ["exact", "compact"]),
        "log": following(size),
    }
    if size >= LARGE:
        write(RESULTS / "gallery.md", text(report), report)
    print(text(report))


# Data


def drawn(count: int, rng: np.random.Generator) -> Float:
    """Return (count, DIMENSION) vectors of mean length 1 with the variances of faces."""
    return rng.standard_normal((count, DIMENSION), np.float32) @ spectrum()


@cache
def spectrum() -> Float:
    """Return the (DIMENSION, DIMENSION) matrix that gives normal numbers the variances of faces, in any direction."""
    variances = np.exp(-np.arange(DIMENSION) / DECAY)
    turn = np.linalg.qr(np.random.default_rng(SEED).standard_normal((DIMENSION, DIMENSION)))[0]
    return np.asarray(np.sqrt(variances / variances.sum())[:, None] * turn, np.float32)


def photos(centers: Float, rng: np.random.Generator) -> Float:
    return l2_normalize(centers + np.float32(SPREAD) * drawn(len(centers), rng))


@cache
def gallery(size: int) -> tuple[Float, Float, NDArray[np.int64]]:
    """Return (size, d) templates, person by person; (PROBES, d) probes from other photos; and the probes' subjects."""
    rng = np.random.default_rng(SEED)
    held, probes, owners = np.empty((size, DIMENSION), np.float32), [], []
    for start in range(0, size // 2, PEOPLE_AT_ONCE):
        centers = drawn(min(PEOPLE_AT_ONCE, size // 2 - start), rng)
        for photo in (0, 1):
            held[2 * start + photo : 2 * (start + len(centers)) : 2] = photos(centers, rng)
        chosen = rng.choice(len(centers), min(len(centers), -(-PROBES * 2 * len(centers) // size)), replace=False)
        probes.append(photos(centers[chosen], rng))
        owners.append(start + chosen)
    order = rng.permutation(sum(map(len, probes)))[:PROBES]
    return held, np.concatenate(probes)[order], np.concatenate(owners)[order]


# Searches beside FAISS


def compared(size: int, kinds: list[Kind]) -> list[Row]:
    held, probes, _ = gallery(size)
    say(f"{size:,} templates; probes' best similarity {float((probes[:50] @ held.T).max(1).mean()):.2f}")
    truth, rows = exact(probes, held, K)[0], list[Row]()
    faiss.omp_set_num_threads(available_cores())
    flat = faiss.IndexFlatIP(DIMENSION)
    built_s = timed(flat.add, held) / 1000
    for name, threshold in (("IndexFlatIP as it comes", 128_000), ("IndexFlatIP with BLAS", 20)):
        faiss.cvar.distance_compute_blas_threshold = threshold
        row = {"index": name, "templates": size, **speed(partial(flat.search, k=K), probes, 30)}
        rows.append({**row, "recall_1": 1.0, "recall_10": 1.0, "GB": held.nbytes / 1e9, "build_s": built_s})
    del flat
    for kind in kinds:
        say(f"building {kind}")
        gc.collect()
        index = loaded(held, kind)
        built_s = timed(index.compact) / 1000
        search = partial(index.view.search, k=K)
        found = np.concatenate([search(probes[i : i + BATCH]).similarities for i in range(0, len(probes), BATCH)])
        row = {
            "index": f"Kith {index.kind}",
            "templates": size,
            **speed(search, probes, 50 if kind == "exact" else 500),
        }
        size_gb = held.nbytes * (33 / 32 if kind == "compact" else 1) / 1e9
        rows.append({**row, **recalls(found, truth), "GB": size_gb, "build_s": built_s})
        del index, search
    return [row | {"times_blas": rows[1]["p50_ms"] / row["p50_ms"]} for row in rows]


def loaded(held: Float, kind: Kind) -> SegmentedIndex:
    """Return an index of two templates a subject, not yet merged."""
    index = SegmentedIndex(DIMENSION, kind, 0.999, trainer_for("cpu"), lambda _: None)
    index.load(Rows(np.arange(len(held)), held), 0)
    return index


def speed(search: Callable[[Float], object], probes: Float, singles: int) -> Row:
    """Measure the latency of one query in ms, and the highest rate of queries in batches."""
    search(probes[:1])
    single = [timed(search, probes[i % len(probes)][None]) for i in range(singles)]
    search(probes[:BATCH])
    batches = [timed(search, probes[i * BATCH : (i + 1) * BATCH]) for i in range(5)]
    return {**times("", single), "batch_qps": BATCH * 1000 / min(batches)}


def times(name: str, taken_ms: list[float]) -> Row:
    """Return median and p99 by the names of their columns."""
    return {f"{name}p{share}_ms": float(np.percentile(taken_ms, share)) for share in (50, 99)}


def recalls(found: Float, truth: Float) -> dict[str, float]:
    """Return the share of probes whose nearest, and whose K nearest, were found; (q, K) similarities, best first."""
    return {
        "recall_1": float((found[:, 0] >= truth[:, 0] - 1e-5).mean()),
        "recall_10": float((found >= truth[:, -1:] - 1e-5).mean()),
    }


def timed(function: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - started) * 1000


# The change log


def following(size: int) -> Row:
    """Measure a gallery in SQLite: initial load, the next search's cost after another process' writes, and writes."""
    say(f"reading the change log of {size:,} templates")
    held, probes, _ = gallery(size)
    with database() as (store, url):
        made = store.galleries.create("large", "f" * 32, DIMENSION, GallerySettings())
        with open_database(url).engine.execution_options(write=True).begin() as connection:
            fill(connection, made.pk, made.seal, held, 2)
        gc.collect()
        found = store.galleries.get("large")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak
        before = look_at(os.getpid()).rss_bytes
        follower = in_process(store)(found)

        def search(some: NDArray[np.float32], k: int) -> object:
            follower.catch_up()
            return follower.search(some, k)

        first = timed(search, probes[:1], K)
        while follower.index.needs_compaction():
            time.sleep(0.2)
        plain = [timed(search, probes[i : i + 1], K) for i in range(100)]
        figures = look_at(os.getpid())
        own = np.random.default_rng(7)
        enrolled, deleted, seen = [], [], []
        for number in range(50):
            new = NewTemplate(uuid.uuid4().hex, photos(np.zeros((1, DIMENSION), np.float32), own)[0], "embedding")
            enrolled.append(timed(store.templates.enroll, found, f"new{number}", [new], None))
            seen.append(timed(search, new.vector[None], K))
            deleted.append(timed(store.subjects.delete, found, f"new{number}"))
            search(probes[:1], K)
        lag = after_another_process(url, search)
        follower.close()
    raw = size * DIMENSION * 4
    sizes = {"resident_of_raw": (figures.rss_bytes - before) / raw, "peak_of_raw": (figures.peak_bytes - before) / raw}
    series = {"search_": plain, "after_own_write_": seen, "after_others_write_": lag}
    series |= {"enroll_": enrolled, "delete_": deleted}
    row: Row = {"templates": size, "first_search_s": first / 1000, **sizes}
    for name, taken in series.items():
        row |= times(name, taken)
    return row


def after_another_process(url: str, search: Callable[[Float, int], Any]) -> list[float]:
    """Return the ms of the first search after each enrollment by another process."""
    taken = []
    with Worker(_enroller, url) as other:
        for seed in range(50):
            other.ask(seed)
            started = time.perf_counter()
            ((best, *_),), _ = search(stranger(seed)[None], K)
            taken.append((time.perf_counter() - started) * 1000)
            if best.similarity < 0.9999:
                raise RuntimeError("what another process enrolled was not found")
    return taken


def _enroller(url: str) -> Callable[[int], None]:
    """Return the function of the other process: enroll one subject for a seed."""
    store = Store(open_database(url))

    def enroll(seed: int) -> None:
        template = NewTemplate(uuid.uuid4().hex, stranger(seed), "embedding")
        store.templates.enroll(store.galleries.get("large"), f"other{seed}", [template], None)

    return enroll


def stranger(seed: int) -> Float:
    return np.asarray(l2_normalize(np.random.default_rng(1000 + seed).standard_normal((1, DIMENSION)))[0], np.float32)


@contextmanager
def database() -> Iterator[tuple[Store, str]]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'kith.db'}"
        store = Store(open_database(url))
        yield store, url
        store.close()


def fill(connection: sa.Connection, gallery_pk: int, seal: Seal, held: Float, each: int) -> None:
    """Write a gallery's rows as enrollment would, ``each`` templates a subject, many rows in one transaction."""
    here, now = {"gallery_pk": gallery_pk}, datetime.now(UTC)
    first_subject, first_template = (
        (connection.execute(sa.select(sa.func.max(table.c.pk))).scalar() or 0) + 1 for table in (subjects, templates)
    )
    count = -(-len(held) // each)
    for start in range(0, count, ROWS_PER_READ):
        rows = []
        for i in range(start, min(count, start + ROWS_PER_READ)):
            one = SubjectRecord(f"s{i}", None, {}, [])
            sealed = {"lookup": subject_lookup(seal, one.id), "sealed": seal_subject(seal, one)}
            rows.append({**here, **sealed, "pk": first_subject + i, "created_at": now, "updated_at": now})
        connection.execute(subjects.insert(), rows)
    for start in range(0, len(held), ROWS_PER_READ):
        closed = seal.close_vectors(held[start : start + ROWS_PER_READ], 0)
        pks = [(first_template + i, first_subject + i // each) for i in range(start, start + len(closed))]
        of_template = {**here, "kind": "embedding", "created_at": now}
        rows = [{**of_template, "pk": t, "id": f"{t:032x}", "subject_pk": s} for t, s in pks]
        connection.execute(templates.insert(), rows)
        rows = [{"template_pk": t, "generation": 0, "vector": v} for (t, _), v in zip(pks, closed, strict=True)]
        connection.execute(vectors.insert(), rows)


# Report


def text(report: Row) -> str:
    machine = report["machine"]
    return f"""# Searching a gallery

`python -m bench.gallery`; {machine["cores"]} cores, faiss {machine["faiss"]}; {DIMENSION} numbers a vector, {K}
results, batches of {BATCH}.

{figures_table(report["searches"])}

## Following SQLite: a search, the first one after a write of this and of another process, and writes

{figures_table([report["log"]])}
"""


if __name__ == "__main__":
    main()

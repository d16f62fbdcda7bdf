"""Measure searches in a large gallery, beside faiss.IndexFlatIP in the same run.

Uses simulated people with two photos each, as alike as those of LFW in the bundled recognizer's vectors: photos of
different people have cosines of standard deviation 0.1, those of one person a median of 0.64. Probes are third photos.
Prints, and writes bench/results/gallery.json and .md.

    python -m bench.gallery
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, figures_table, say, write
from bench.machine import about, in_words
from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from models.vision.recognition import l2_normalize
from service.index.faiss_structures import api as faiss
from service.index.faiss_structures import exact, trainer_for
from service.index.protocol import Kind
from service.index.segmented_index import SegmentedIndex
from service.index.segments import Rows

DIMENSION: Final = 512
SPREAD: Final = 0.75
"""Share of what varies within a person in what varies between people."""
DECAY: Final = 51
"""Dimensions in which the variance falls to 1/e. That makes 102 effective ones, as measured on LFW."""
PEOPLE_AT_ONCE: Final = 16_384
PROBES: Final = 1000
TEMPLATES: Final = 1_000_000
BATCH: Final = 64
K: Final = 10
SEED: Final = 11
Row = dict[str, Any]


def main() -> None:
    report = {**about(), "faiss": faiss.__version__, "searches": compared(TEMPLATES, ["exact", "compact"])}
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
    p50, p99 = np.percentile(single, (50, 99)).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "batch_qps": BATCH * 1000 / min(batches)}


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


# Report


def text(report: Row) -> str:
    return f"""# Searching a gallery

`python -m bench.gallery`; {in_words(report)}, faiss {report["faiss"]};
{DIMENSION} numbers a vector, {K} results, batches of {BATCH}.

{figures_table(report["searches"])}
"""


if __name__ == "__main__":
    main()

"""Measure the cost of encryption: processor microseconds per template of each read and write path, with and without.

Uses generated unit vectors of 512 numbers, one per subject, in SQLite. Runs are interleaved; figures are the minimum of
the rounds. The unencrypted case runs the same code with a seal that does nothing. Figures are the CPU time of the
process, which depends less than wall time on other load. Prints, and writes bench/results/sealed_rows.json and .md.

    python -m bench.sealed_rows [--templates 50000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

import cryptography
import numpy as np

import service.storage.db.key_vault as vaults
from bench.common import RESULTS, say
from bench.transfer import DIMENSION, FINGERPRINT, blocks
from models.runtime.network import Float
from service.domain.gallery import GallerySettings, NewTemplate
from service.security.sealing import PSEUDONYM_DIGITS, VECTOR_TYPE, Seal
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.read_cache import ReadCache
from service.storage.repositories.store import Store
from tests.databases import open_database

NAMED_AT_ONCE: Final = 10
"""Number of candidates of a search."""
ENROLLED: Final = 500
"""Subjects enrolled one at a time, each in its own transaction."""
Row = dict[str, float]


class Clear(Seal):
    """Seal that does not encrypt."""

    def close(self, value: bytes, purpose: str) -> bytes:
        return value

    def open(self, sealed: bytes, purpose: str) -> bytes:
        return sealed

    def close_vectors(self, vectors: Float, generation: int) -> list[bytes]:
        return [row.tobytes() for row in np.ascontiguousarray(vectors, VECTOR_TYPE)]

    def open_vectors(self, sealed: Sequence[bytes], generation: int, dimension: int) -> Float:
        return np.frombuffer(b"".join(sealed), VECTOR_TYPE).reshape(len(sealed), dimension).astype(np.float32)

    def pseudonym(self, kind: str, text: str) -> str:
        return text[-PSEUDONYM_DIGITS:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    kinds: dict[str, type[Seal]] = {"sealed": Seal, "clear": Clear}
    taken: dict[str, list[Row]] = {name: [] for name in kinds}
    for number in range(options.rounds):
        for name, kind in kinds.items():
            say(f"round {number + 1}, {name}")
            with tempfile.TemporaryDirectory() as folder, instead(kind):
                taken[name].append(measured(Path(folder), options.templates))
    figures = {name: {what: min(row[what] for row in rows) for what in rows[0]} for name, rows in taken.items()}
    document = {
        "templates": options.templates,
        "rounds": options.rounds,
        "dimension": DIMENSION,
        "python": platform.python_version(),
        "cryptography": cryptography.__version__,
        **figures,
    }
    text = markdown(figures, options.templates)
    (RESULTS / "sealed_rows.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "sealed_rows.md").write_text(text, encoding="utf-8")
    print(text)


@contextmanager
def instead(kind: type[Seal]) -> Iterator[None]:
    with patch.object(vaults, "Seal", kind):
        yield


def measured(folder: Path, count: int) -> Row:
    """Return microseconds per template; for names, per name."""
    database = open_database(f"sqlite:///{folder / 'kith.db'}")
    store, bulk = Store(database, ReadCache(max_names=0)), BulkStore(database)
    gallery = store.galleries.create("g", FINGERPRINT, DIMENSION, GallerySettings())
    made = list(blocks(count, 1))

    def taken_in() -> None:
        for block in made:
            bulk.add(gallery, block)

    def taken_out() -> None:
        with bulk.open_export("g") as reading:
            for _ in reading.blocks():
                pass

    def named() -> None:
        for start in range(0, len(keys), NAMED_AT_ONCE):
            store.subjects.names(gallery, keys[start : start + NAMED_AT_ONCE])

    def enrolled() -> None:
        for i, vector in enumerate(vectors):
            store.templates.enroll(
                gallery, f"one by one {i}", [NewTemplate(uuid.uuid4().hex, vector, "embedding")], None
            )

    rows = {"import, in blocks": spent(taken_in, count), "import again": spent(taken_in, count)}
    rows["export, in blocks"] = spent(taken_out, count)
    rows["loading an index: all vectors"] = spent(lambda: store.changes.snapshot(gallery), count)
    rows["following the log"] = spent(lambda: store.changes.read_after(gallery, 0), count)
    keys = store.changes.snapshot(gallery).subject_pks[:5000].tolist()
    rows["a search's names, not yet kept"] = spent(named, len(keys))
    vectors = made[0].vectors[:ENROLLED]
    rows["enrollment, one transaction each"] = spent(enrolled, len(vectors))
    store.close()
    return rows


def spent(work: Callable[[], object], count: int) -> float:
    start = time.process_time()
    work()
    return round((time.process_time() - start) / count * 1e6, 2)


def markdown(figures: dict[str, Row], count: int) -> str:
    rows = [
        "# What sealing rows costs",
        "",
        f"Microseconds of one core a template (CPU time, least of the rounds); {count:,} templates of {DIMENSION} "
        "numbers, one a subject, SQLite. In clear: the same code with a seal that does nothing.",
        "",
        "| | sealed | in clear | difference |",
        "|---|---:|---:|---:|",
    ]
    for what, sealed in figures["sealed"].items():
        clear = figures["clear"][what]
        rows.append(f"| {what} | {sealed:.1f} | {clear:.1f} | {sealed - clear:.1f} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    main()

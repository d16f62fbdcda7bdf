"""Measure the FPIR of a client with fixed cut-offs as a gallery grows, through the CompreFace-compatible API.

Enrolls 50, 200 and 610 people of LFW's open-set protocol, one photo each, and searches for all 4,069 strangers and for
one other photo of each enrolled person. The client accepts a face at 60 %, like Double Take. The comparison accepts it
at a fixed cosine: the gallery's threshold at 50 people, which keeps the requested FPIR there.

Photos are embedded once; the server gets embeddings, which it decides like photos. Prints a table, and writes
bench/results/client_cutoffs.md and .json.

    python -m bench.client_cutoffs [--draws 5] [--fpir 0.01] [--cache runs/cache]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx2 as httpx
import numpy as np

from bench.common import RESULTS, say, write
from bench.lfw import arguments, lfw_or_exit
from kith import Kith
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Float
from service.server import embedded
from service.settings import load_settings
from training.evaluation.embedding import Embedder
from training.evaluation.lfw import people_of, read_open_set

SIZES: Final = (50, 200, 610)
MATCH: Final = 0.6
OPERATOR: Final = "the operator of this benchmark alone"
BATCH: Final = 200
SCALE: Final = "double-take"


@dataclass(frozen=True, eq=False)
class Photos:
    """(n, d) enrolled photos, (n, d) other photos of the same people, and (s, d) photos of strangers."""

    enrolled: Float
    mates: Float
    strangers: Float


@dataclass(frozen=True)
class Row:
    """Shares of probes that the client accepts, by its own cut-off and by the fixed cosine."""

    people: int
    fpir: float
    fixed_fpir: float
    accepted_mates: float
    fixed_accepted_mates: float


def client_similarities(url: str, token: str, probes: Float) -> Float:
    """Return the similarity of the first subject for each (d,) probe, as a client of CompreFace reads it."""
    found: list[float] = []
    with httpx.Client(base_url=url, headers={"x-api-key": token}, timeout=300) as http:
        for start in range(0, len(probes), BATCH):
            body = {"embeddings": probes[start : start + BATCH].tolist()}
            response = http.post("/api/v1/recognition/embeddings/recognize", json=body).raise_for_status()
            found += [result["similarities"][0]["similarity"] for result in response.json()["result"]]
    return np.array(found)


def main() -> None:
    parser = arguments()
    parser.add_argument("--draws", type=int, default=5, help="random galleries of each size below the largest")
    parser.add_argument("--fpir", type=float, default=0.01, help="risk of the galleries")
    options = parser.parse_args()
    photos = read_photos(lfw_or_exit(), options.cache)
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(
            data_dir=Path(folder),
            log_level="WARNING",
            database_url=None,
            api_key=OPERATOR,
            compat="compreface",
            compat_cutoffs=SCALE,
            max_embeddings=BATCH,
            embedding_rate=1e9,
        )
        with embedded(settings) as url, Kith(url, OPERATOR) as kith:
            rows = measure(kith, url, photos, options.draws, options.fpir)
    text = table(rows, options.fpir)
    title = "# Client cut-offs in growing galleries\n\n`python -m bench.client_cutoffs`\n\n"
    note = f"{len(photos.strangers):,} strangers; medians of {options.draws} random galleries below the largest.\n\n"
    write(RESULTS / "client_cutoffs.md", f"{title}{note}{text}\n", {"rows": [asdict(row) for row in rows]})
    print(text)


def read_photos(lfw: Path, cache: Path) -> Photos:
    protocol = read_open_set(lfw / "openset_protocol.json")
    others = dict(zip(people_of(protocol.mated), protocol.mated, strict=True))
    mated = [others[person] for person in people_of(protocol.gallery)]
    embedder = Embedder(load_pack(BUNDLED_PACK), cache_dir=cache)
    found = embedder.embeddings([*protocol.gallery, *mated, *protocol.strangers], lfw / "images")
    embedder.save_cache()
    count = len(mated)
    seen = found.found[:count] & found.found[count : 2 * count]
    strangers = found.vectors[2 * count :][found.found[2 * count :]]
    return Photos(found.vectors[:count][seen], found.vectors[count : 2 * count][seen], strangers)


def measure(kith: Kith, url: str, photos: Photos, draws: int, fpir: float) -> list[Row]:
    """Return a row per size, the median of its draws."""
    rows: list[Row] = []
    fixed: float | None = None
    for size in SIZES:
        drawn, thresholds = [], []
        for draw in range(draws if size < len(photos.enrolled) else 1):
            count = min(size, len(photos.enrolled))
            chosen = np.random.default_rng((draw, size)).choice(len(photos.enrolled), count, replace=False)
            name = f"people-{size}-{draw}"
            kith.create_gallery(name, risk={"fpir": fpir})
            for i in chosen.tolist():
                kith.enroll(name, f"{i:04d}", embeddings=[photos.enrolled[i]], allow_duplicate=True)
            thresholds.append(kith.calibrate(name, fpir).threshold)
            token = kith.create_key("client", ["identify"], galleries=[name]).token
            accepted = [
                client_similarities(url, token, probes) >= MATCH for probes in (photos.strangers, photos.mates[chosen])
            ]
            best = [(p @ photos.enrolled[chosen].T).max(1) for p in (photos.strangers, photos.mates[chosen])]
            drawn.append((*(share.mean() for share in accepted), best))
        if fixed is None:
            fixed = float(np.median(thresholds))
        rows.append(_median_row(size, drawn, fixed))
        say(f"{size} people: {rows[-1]}")
    return rows


def _median_row(size: int, drawn: Sequence[tuple[float, float, list[Float]]], fixed: float) -> Row:
    kept = [(strangers, float((best[0] >= fixed).mean())) for strangers, _, best in drawn]
    mates = [(accepted, float((best[1] >= fixed).mean())) for _, accepted, best in drawn]
    fpir, fixed_fpir = np.median(kept, axis=0).tolist()
    accepted, fixed_accepted = np.median(mates, axis=0).tolist()
    return Row(size, fpir, fixed_fpir, accepted, fixed_accepted)


def table(rows: Sequence[Row], fpir: float) -> str:
    lines = [
        f"| People | FPIR of the client, {fpir:.1%} asked | FPIR of a fixed cosine | Mates accepted | Fixed cosine |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.people} | {row.fpir:.1%} | {row.fixed_fpir:.1%} | {row.accepted_mates:.1%} | "
        f"{row.fixed_accepted_mates:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

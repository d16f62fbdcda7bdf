"""Measure how well unlabeled photos are grouped into people: asked and measured risk, beside scikit-learn's HDBSCAN and
agglomerative clustering.

Uses the people of LFW outside the calibration, up to 20 photos of each, without the wrong labels that bench.hygiene
lists. Settings were chosen on half of the people; the other half is reported. "some lookalikes in one photo" puts every
tenth face and its most similar stranger into one photo. Also times the grouping of 100,000 simulated faces. Prints, and
writes bench/results/albums.json and .md.

    python -m bench.albums [--cache runs/cache] [--faces 100000]
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import harmonic_mean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.cluster import HDBSCAN, AgglomerativeClustering

from bench.common import RESULTS, say, table, write
from bench.gallery import gallery
from bench.hygiene import KNOWN_ERRORS, others_than_view1, photos_of
from bench.photos import arguments, lfw_or_exit
from bench.risk_photos import Faces, with_one_name
from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.albums import AlbumRisk, Neighbors, group_faces
from models.risk.calibration import Calibration, Ints
from models.runtime.network import Float
from models.runtime.onnx_runtime import available_cores
from service.index.neighbors import nearest
from training.evaluation.lfw import people_of

RISKS: Final = (0.1, 0.03, 0.01, 0.003, 0.001)
DEFAULT_RISK: Final = 0.01
LOOKALIKE_STEP: Final = 10
MIN_SAMPLES, MIN_SAMPLES_OF_CUT = 3, 2
"""Neighbors of a core point, for HDBSCAN and for its tree cut at a distance: chosen from 1, 2 and 3 on the development
half by BCubed F."""
SEED: Final = 0
Labels = NDArray[np.int64]


def main() -> None:
    parser = arguments()
    parser.add_argument("--faces", type=int, default=100_000, help="of the timing")
    options = parser.parse_args()
    lfw = lfw_or_exit()
    pack = load_pack(BUNDLED_PACK)
    photos = photos_of(pack, lfw, options.cache, others_than_view1(lfw))
    quality = np.zeros((len(photos.files), 8), np.float32)
    faces = with_one_name(Faces(photos.vectors, people_of(photos.files.tolist()), photos.files, quality))
    chosen = reported_half(faces.people) & ~np.isin(faces.photos, list(KNOWN_ERRORS))
    rows = compare(faces.vectors[chosen], faces.people[chosen], photos.calibration)
    speed = timing(options.faces, photos.calibration)
    figures = {
        "half": "reported",
        "faces": int(chosen.sum()),
        "people": len(np.unique(faces.people[chosen])),
        "rows": rows,
        "speed": speed,
    }
    text = markdown(figures)
    write(RESULTS / "albums.md", text, figures)
    print(text)


def reported_half(people: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Return which faces are of the half of the people on which nothing was chosen."""
    names = np.random.default_rng(SEED).permutation(np.unique(people))
    return np.isin(people, names[len(names) // 2 :])


def compare(vectors: Float, people: NDArray[np.str_], pack: Calibration) -> list[dict[str, Any]]:
    """Return the figures of each algorithm at each risk."""
    alone = np.arange(len(vectors))
    near = nearest(vectors)
    risk = AlbumRisk.of(vectors, alone, near, pack)
    together = with_lookalikes(people, near)
    other = AlbumRisk.of(vectors, together, near, pack)
    algorithms: dict[str, Callable[[float], Labels]] = {
        "Kith": lambda asked: kith(vectors, alone, near, risk, asked),
        "Kith, some lookalikes in one photo": lambda asked: kith(vectors, together, near, other, asked),
        "average linkage": lambda asked: linkage(vectors, near, "average", risk.threshold(asked)),
        "complete linkage": lambda asked: linkage(vectors, near, "complete", risk.threshold(asked)),
        "HDBSCAN, cut": lambda asked: hdbscan(vectors, risk.threshold(asked)),
    }
    rows = []
    for name, group in algorithms.items():
        for asked in RISKS:
            say(f"{name} at {asked}")
            rows.append({"algorithm": name, "asked": asked, **judge(group(asked), people)})
    return [*rows, {"algorithm": "HDBSCAN", "asked": None, **judge(hdbscan(vectors), people)}]


def with_lookalikes(people: NDArray[np.str_], near: Neighbors) -> Ints:
    """Return a photo number for each face. Every LOOKALIKE_STEP-th of the most similar pairs of strangers shares a
    photo, no face more than one."""
    names = np.unique(people, return_inverse=True)[1]
    photos = np.arange(len(people))
    first = np.repeat(photos, near.rows.shape[1])
    second = near.rows.ravel()
    order = np.argsort(-near.similarities.ravel(), kind="stable")
    free, pairs = np.ones(len(people), bool), 0
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if names[a] != names[b] and free[a] and free[b]:
            free[[a, b]] = False
            if pairs % LOOKALIKE_STEP == 0:
                photos[b] = a
            pairs += 1
    return photos


def kith(vectors: Float, photos: Ints, near: Neighbors, risk: AlbumRisk, asked: float) -> Labels:
    groups = group_faces(vectors, photos, near, risk.threshold(asked), risk.same_picture)
    labels = np.empty(len(vectors), np.int64)
    labels[np.concatenate(groups)] = np.repeat(np.arange(len(groups)), [len(rows) for rows in groups])
    return labels


def linkage(vectors: Float, near: Neighbors, kind: str, threshold: float) -> Labels:
    first = np.repeat(np.arange(len(vectors)), near.rows.shape[1])
    graph = csr_matrix((np.ones(near.rows.size), (first, near.rows.ravel())), (len(vectors), len(vectors)))
    algorithm = AgglomerativeClustering(
        None,
        metric="cosine",
        linkage=kind,
        distance_threshold=1 - threshold,
        connectivity=graph.maximum(graph.T),
        compute_full_tree=True,
    )
    return np.asarray(algorithm.fit(vectors).labels_, np.int64)


def hdbscan(vectors: Float, threshold: float | None = None) -> Labels:
    """Return the groups of HDBSCAN, or those of its tree, cut at the distance of a similarity."""
    found = HDBSCAN(2, MIN_SAMPLES if threshold is None else MIN_SAMPLES_OF_CUT, copy=True).fit(vectors)
    cut = found.labels_ if threshold is None else found.dbscan_clustering((2 - 2 * threshold) ** 0.5, 2)
    labels = np.array(cut, np.int64)
    loners = np.flatnonzero(labels < 0)
    labels[loners] = labels.max() + 1 + np.arange(len(loners))
    return labels


def judge(labels: Labels, people: NDArray[np.str_]) -> dict[str, float]:
    """Return pairwise and BCubed figures (A. Bagga and B. Baldwin, 1998)."""
    numbers = np.unique(people, return_inverse=True)[1].tolist()
    both = Counter(zip(labels.tolist(), numbers, strict=True))
    groups, persons = Counter(labels.tolist()), Counter(numbers)
    right, grouped, same = _pairs(both), _pairs(groups), _pairs(persons)
    total = len(people) * (len(people) - 1) // 2
    b_precision = sum(n * n / groups[group] for (group, _), n in both.items()) / len(people)
    b_recall = sum(n * n / persons[person] for (_, person), n in both.items()) / len(people)
    return {
        "wrong": (grouped - right) / max(1, grouped),
        "false_match_rate": (grouped - right) / (total - same),
        "precision": right / max(1, grouped),
        "recall": right / max(1, same),
        "f": 2 * right / max(1, grouped + same),
        "bcubed_precision": b_precision,
        "bcubed_recall": b_recall,
        "bcubed_f": harmonic_mean([b_precision, b_recall]),
    }


def _pairs(counts: Counter[Any]) -> int:
    return sum(n * (n - 1) // 2 for n in counts.values())


def timing(faces: int, pack: Calibration) -> dict[str, Any]:
    """Return the processor time and peak memory of grouping simulated people of two photos each."""
    vectors = np.random.default_rng(SEED).permutation(gallery(faces)[0])  # as photos come
    photos = np.arange(len(vectors))
    before_kb, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [time.process_time()]
    near = nearest(vectors)
    times.append(time.process_time())
    risk = AlbumRisk.of(vectors, photos, near, pack)
    times.append(time.process_time())
    groups = group_faces(vectors, photos, near, risk.threshold(DEFAULT_RISK), risk.same_picture)
    times.append(time.process_time())
    return {
        "faces": faces,
        "cores": available_cores(),
        **dict(zip(("neighbors_s", "fit_s", "merging_s"), np.diff(times).tolist(), strict=True)),
        "added_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1000,
        "vectors_mb": vectors.nbytes / 1e6,
        "groups": sum(len(rows) > 1 for rows in groups),
    }


def markdown(figures: Mapping[str, Any]) -> str:
    names = ("recall", "f", "bcubed_precision", "bcubed_recall", "bcubed_f")
    rows = []
    for row in figures["rows"]:
        asked = "" if row["asked"] is None else f"{row['asked']:.1%}"
        got = [f"{row['wrong']:.2%}", f"{row['false_match_rate']:.1e}", *(f"{row[name]:.3f}" for name in names)]
        rows.append([row["algorithm"], asked, *got])
    header = "Algorithm | Risk asked | Risk got | False match rate | Pairs found | Pairwise F | BCubed precision"
    speed = figures["speed"]
    neighbors, fit, merging = (speed[f"{phase}_s"] for phase in ("neighbors", "fit", "merging"))
    return f"""# Albums

`make bench-albums`

{figures["faces"]:,} faces of {figures["people"]:,} people of LFW, the {figures["half"]} half, bundled pack. The risk is
the share of pairs of faces in one group that are two people.

{table(f"{header} | BCubed recall | BCubed F", rows)}

{speed["faces"]:,} simulated faces of 512 dimensions take {neighbors + fit + merging:.0f} s of processor time, of
{speed["cores"]} cores: {neighbors:.0f} s for the neighbors, {fit:.0f} s for the risk, {merging:.0f} s for merging. They
add {speed["added_mb"]:.0f} MB to the vectors' {speed["vectors_mb"]:.0f} MB.
"""


if __name__ == "__main__":
    main()

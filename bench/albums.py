"""Measure how well unlabeled photos are grouped into people: asked and measured risk, beside scikit-learn's HDBSCAN and
agglomerative clustering.

Uses the people of LFW outside the calibration, up to 20 photos of each, without the wrong labels that bench.hygiene
lists. Settings were chosen on half of the people; the other half is reported. "some lookalikes in one photo" puts every
tenth face and its most similar stranger into one photo. Also times the grouping of 100,000 simulated faces. Prints, and
writes bench/results/albums.json and .md.

    python -m bench.albums [--cache runs/cache] [--half reported] [--faces 100000]
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.cluster import HDBSCAN, AgglomerativeClustering

from bench.common import RESULTS, say, write
from bench.gallery import gallery
from bench.hygiene import KNOWN_ERRORS, others_than_view1, photos_of
from bench.lfw import arguments, lfw_or_exit
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
"""Of HDBSCAN, and of its tree cut at a distance: chosen from 1, 2 and 3 on the development half by BCubed F."""
SEED: Final = 0
Labels = NDArray[np.int64]


def main() -> None:
    parser = arguments()
    parser.add_argument("--half", choices=("development", "reported"), default="reported", help="of the people")
    parser.add_argument("--faces", type=int, default=100_000, help="of the timing; 0 skips it")
    options = parser.parse_args()
    lfw = lfw_or_exit()
    pack = load_pack(BUNDLED_PACK)
    photos = photos_of(pack, lfw, options.cache, others_than_view1(lfw))
    quality = np.zeros((len(photos.files), 8), np.float32)
    faces = with_one_name(Faces(photos.vectors, people_of(photos.files.tolist()), photos.files, quality))
    chosen = half_of(faces.people, options.half) & ~np.isin(faces.photos, list(KNOWN_ERRORS))
    rows = compare(faces.vectors[chosen], faces.people[chosen], photos.calibration)
    speed = timing(options.faces, photos.calibration) if options.faces else None
    figures = {
        "half": options.half,
        "faces": int(chosen.sum()),
        "people": len(np.unique(faces.people[chosen])),
        "rows": rows,
        "speed": speed,
    }
    text = markdown(figures)
    if options.half == "reported" and speed is not None:
        write(RESULTS / "albums.md", text, figures)
    print(text)


def half_of(people: NDArray[np.str_], half: str) -> NDArray[np.bool_]:
    """Return which faces belong to the development or the reported half of the people."""
    names = np.random.default_rng(SEED).permutation(np.unique(people))
    cut = len(names) // 2
    return np.isin(people, names[:cut] if half == "development" else names[cut:])


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
    for number, rows in enumerate(groups):
        labels[rows] = number
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
    min_samples = MIN_SAMPLES if threshold is None else MIN_SAMPLES_OF_CUT
    found = HDBSCAN(min_cluster_size=2, min_samples=min_samples, copy=True).fit(vectors)
    if threshold is None:
        labels = np.array(found.labels_, np.int64)
    else:
        labels = np.array(found.dbscan_clustering((2 - 2 * threshold) ** 0.5, min_cluster_size=2), np.int64)
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
    precision, recall = right / max(1, grouped), right / max(1, same)
    b_precision = sum(n * n / groups[group] for (group, _), n in both.items()) / len(people)
    b_recall = sum(n * n / persons[person] for (_, person), n in both.items()) / len(people)
    return {
        "wrong": (grouped - right) / max(1, grouped),
        "false_match_rate": (grouped - right) / (total - same),
        "precision": precision,
        "recall": recall,
        "f": harmonic(precision, recall),
        "bcubed_precision": b_precision,
        "bcubed_recall": b_recall,
        "bcubed_f": harmonic(b_precision, b_recall),
    }


def _pairs(counts: Mapping[Any, int]) -> int:
    return sum(n * (n - 1) // 2 for n in counts.values())


def harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


def timing(faces: int, pack: Calibration) -> dict[str, Any]:
    """Return the processor time and peak memory of grouping simulated people of two photos each."""
    vectors = shuffled(gallery(faces)[0])
    photos = np.arange(len(vectors))
    before = peak_mb()
    started = time.process_time()
    near = nearest(vectors)
    searched = time.process_time()
    risk = AlbumRisk.of(vectors, photos, near, pack)
    fitted = time.process_time()
    groups = group_faces(vectors, photos, near, risk.threshold(DEFAULT_RISK), risk.same_picture)
    ended = time.process_time()
    return {
        "faces": faces,
        "cores": available_cores(),
        "neighbors_s": searched - started,
        "fit_s": fitted - searched,
        "merging_s": ended - fitted,
        "added_mb": peak_mb() - before,
        "vectors_mb": vectors.nbytes / 1e6,
        "groups": sum(len(rows) > 1 for rows in groups),
    }


def shuffled(vectors: Float) -> Float:
    """Return the vectors in a random order, as photos come."""
    return vectors[np.random.default_rng(SEED).permutation(len(vectors))]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def markdown(figures: Mapping[str, Any]) -> str:
    lines = [
        "# Albums",
        "",
        "`make bench-albums`",
        "",
        f"{figures['faces']:,} faces of {figures['people']:,} people of LFW, the {figures['half']} half, bundled pack. "
        "The risk is the share of pairs of faces in one group that are two people.",
        "",
        "| Algorithm | Risk asked | Risk got | False match rate | Pairs found | Pairwise F "
        "| BCubed precision | BCubed recall | BCubed F |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row_of(row) for row in figures["rows"]]
    if (speed := figures["speed"]) is not None:
        neighbors, fit, merging = (speed[f"{phase}_s"] for phase in ("neighbors", "fit", "merging"))
        lines += [
            "",
            f"{speed['faces']:,} simulated faces of 512 dimensions take {neighbors + fit + merging:.0f} s of processor "
            f"time, of {speed['cores']} cores: {neighbors:.0f} s for the neighbors, {fit:.0f} s for the risk, "
            f"{merging:.0f} s for merging. They add {speed['added_mb']:.0f} MB to the vectors' "
            f"{speed['vectors_mb']:.0f} MB.",
        ]
    return "\n".join(lines) + "\n"


def row_of(row: Mapping[str, Any]) -> str:
    asked = "" if row["asked"] is None else f"{row['asked']:.1%}"
    names: Sequence[str] = ("recall", "f", "bcubed_precision", "bcubed_recall", "bcubed_f")
    shares = " | ".join(f"{row[name]:.3f}" for name in names)
    return f"| {row['algorithm']} | {asked} | {row['wrong']:.2%} | {row['false_match_rate']:.1e} | {shares} |"


if __name__ == "__main__":
    main()

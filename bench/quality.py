"""Measure the quality score's prediction of failures: error-versus-reject curves on LFW, and degraded copies.

The bundled pack's detector aligns. The bundled recognizer and the reference one compare, at the threshold of FMR 0.1 %
on the measured photos. Settings were chosen on the people of View 1's training list; all other people are reported.
Prints, and writes bench/results/quality.md, .json and .png.

    python -m bench.quality [--cache runs/cache]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from bench.common import RESULTS, say, write
from bench.lfw import arguments, lfw_or_exit, packs_beside_reference
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.quality import measure_quality
from models.vision.specs import RecognitionSpec
from training.evaluation import plots
from training.evaluation.embedding import Embedder, central_faces
from training.evaluation.embedding_cache import ArrayCache, image_key
from training.evaluation.lfw import PARTS, files_of, people_of, read_pairs
from training.evaluation.metrics import Floats, Ints, bootstrap

MAX_PHOTOS: Final = 20
"""Photos per person: George W. Bush would otherwise have most of the pairs."""
FMR: Final = 1e-3
REJECTED: Final = (0.02, 0.05, 0.1, 0.2)
HEADLINE: Final = REJECTED.index(0.05)
CURVE: Final = tuple(np.linspace(0, 0.3, 61).tolist())
ROUNDS: Final = 1000
CURVE_ROUNDS: Final = 200
DEGRADED_PAIRS: Final = 400
SCORE, EYES = "quality score", "eye distance"
Image = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Evidence:
    """``similarities`` (P,) of mated pairs, ``pairs`` (P, 2) their photos' rows, ``owners`` (P,) the person of each
    pair, ``threshold`` of FMR 0.1 %; ``measures``: values of photos, larger is better."""

    similarities: Floats
    pairs: Ints
    owners: NDArray[np.str_]
    threshold: float
    measures: Mapping[str, Floats]

    def fnmr(self, values: Floats, rejected: Sequence[float], rows: Ints | slice = slice(None)) -> Floats:
        return error_versus_reject(self.similarities[rows], values[self.pairs[rows]], self.threshold, rejected)

    def by_chance(self, rejected: Sequence[float], rounds: int) -> Floats:
        """Return (rounds, shares) FNMR for random values of the photos."""
        rng = np.random.default_rng(0)
        photos = int(self.pairs.max()) + 1
        return np.array([self.fnmr(rng.random(photos), rejected) for _ in range(rounds)])


def main() -> None:
    cache, lfw = arguments().parse_args().cache, lfw_or_exit()
    packs = packs_beside_reference()
    bundled = packs.pop("bundled")
    others = [replace(bundled, model_id=name, recognition=pack.recognition) for name, pack in packs.items()]
    figures: dict[str, Any] = {}
    for judge in (bundled, *others):
        say(judge.model_id)
        files = others_than_view1(lfw)
        found = evidence(judge, lfw, files, cache)
        found = replace(found, measures={**found.measures, **of_the_network(judge, lfw, files, cache)})
        figures[f"{judge.model_id}, LFW"] = summary(found)
        title = f"LFW with the worst photos rejected: {judge.model_id}"
        (RESULTS / "quality.png").write_bytes(plots.png(curves(found, title)))
    kinds, degraded = degraded_copies(bundled, lfw, cache)
    figures[f"{bundled.model_id}, LFW View 1, one photo of each pair degraded"] = summary(degraded)
    text = "\n\n".join([*(f"## {name}\n\n{table(rows)}" for name, rows in figures.items()), kinds_table(kinds)])
    page = f"# The quality score\n\n`python -m bench.quality`\n\n{text}\n"
    write(RESULTS / "quality.md", page, {**figures, "kinds": kinds})
    print(text)


def others_than_view1(lfw: Path) -> list[str]:
    """Return up to twenty photos of each person of LFW's lists outside View 1's training list."""
    chosen_on = read_pairs(lfw / "pairsDevTrain.txt")
    known = set(people_of((*chosen_on.first, *chosen_on.second)).tolist())
    by_person = defaultdict(list)
    for file in sorted(set().union(*(files_of(lfw, part) for part in PARTS))):
        by_person[file.split("/")[0]].append(file)
    return [file for person, files in by_person.items() if person not in known for file in files[:MAX_PHOTOS]]


def evidence(pack: ModelPack, lfw: Path, files: Sequence[str], cache: Path) -> Evidence:
    """Build all mated pairs of the photos in ``files`` that show a face; the threshold is from all non-mated pairs."""
    embedder = Embedder(pack, cache_dir=cache)
    embeddings = embedder.embeddings(files, lfw / "images")
    vectors, people = embeddings.vectors[embeddings.found], people_of(files)[embeddings.found]
    seen = list(central_faces(embedder.detector, files, lfw / "images"))
    measures = {
        SCORE: np.array([face.quality.score for face in seen]),
        EYES: np.array([face.quality.eye_distance_px for face in seen]),
        "yaw": -np.abs([face.quality.yaw for face in seen]),
        "sharpness": np.array([face.quality.sharpness for face in seen]),
        "contrast": np.array([face.quality.contrast for face in seen]),
    }
    embedder.save_cache()
    first, second = np.triu_indices(len(vectors), 1)
    same = people[first] == people[second]
    similarities = (vectors @ vectors.T)[first, second]
    threshold = float(np.quantile(similarities[~same], 1 - FMR))
    pairs = np.stack([first[same], second[same]], 1)
    return Evidence(similarities[same].astype(np.float64), pairs, people[pairs[:, 0]], threshold, measures)


def of_the_network(pack: ModelPack, lfw: Path, files: Sequence[str], cache: Path) -> dict[str, Floats]:
    """Return quality measures of the recognizer itself for the same photos, at the cost of two more runs."""
    embedder = Embedder(pack, cache_dir=cache)
    crops = [face.crop for face in central_faces(embedder.detector, files, lfw / "images")]
    plain, mirrored = (
        np.stack([embedder.recognizer.embed(np.ascontiguousarray(crop[None, :, ::step]))[0] for crop in crops])
        for step in (1, -1)
    )
    embedder.save_cache()
    return {
        "likeness to the mirror image": np.einsum("nd,nd->n", plain, mirrored, dtype=np.float64),
        "length of the embedding": lengths(pack.recognition, crops, cache),
    }


def lengths(spec: RecognitionSpec, crops: Sequence[Image], cache: Path) -> Floats:
    """Return the (n,) norms of the raw embeddings of RGB crops in the network's size."""
    memory = ArrayCache(cache / f"lengths-{spec.fingerprint()[:16]}.npz")
    network = OnnxNetwork(spec.path)
    keys = [image_key(crop) for crop in crops]
    for key, crop in zip(keys, crops, strict=True):
        if key not in memory:
            planes = (
                crop.transpose(2, 0, 1)[None].astype(np.float32) - spec.normalization.mean
            ) / spec.normalization.std
            memory[key] = np.linalg.norm(network.run(np.asarray(planes, np.float32))[0], axis=-1).ravel()
    memory.save()
    return np.array([memory[key][0] for key in keys], np.float64)


def summary(found: Evidence) -> dict[str, Any]:
    """Return FNMR with no rejection and for each rejected share, by measure and by chance. Also returns the score's
    advantage over each at 5 %, with its interval over people."""
    chance = found.by_chance(REJECTED, ROUNDS)
    score = found.measures[SCORE]

    def below(rows: Ints) -> Floats:
        """Return the score's FNMR at 5 %, less the FNMR without rejection (equal to chance), and less the eye
        distance's."""
        at = REJECTED[HEADLINE]
        none, own = found.fnmr(score, (0.0, at), rows)
        (eyes,) = found.fnmr(found.measures[EYES], (at,), rows)
        return np.array([none - own, eyes - own])

    everything = np.arange(len(found.pairs))
    low, high = bootstrap(below, found.owners)
    return {
        "pairs": len(found.pairs),
        "people": len(np.unique(found.owners)),
        "threshold": found.threshold,
        "fnmr": float((found.similarities < found.threshold).mean()),
        "rejected": list(REJECTED),
        "by": {name: found.fnmr(values, REJECTED).tolist() for name, values in found.measures.items()},
        "chance": {
            "mean": chance.mean(0).tolist(),
            "least": np.quantile(chance, 0.025, axis=0).tolist(),
            "most": np.quantile(chance, 0.975, axis=0).tolist(),
        },
        "score below": {
            name: {"points": float(value), "interval": [float(low[i]), float(high[i])]}
            for i, (name, value) in enumerate(zip(("none rejected", EYES), below(everything), strict=True))
        },
    }


def error_versus_reject(
    mated: Floats, quality_P2: NDArray[np.floating], threshold: float, rejected: Sequence[float]
) -> Floats:
    """Return FNMR after rejecting the comparisons of lowest quality, at a fixed threshold.

    P. Grother and E. Tabassi, "Performance of biometric quality measures", PAMI 29(4), 2007. The quality of a
    comparison is the lower of its two photos.

    Args:
        mated: (P,) similarities of same-person pairs.
        quality_P2: (P, 2) quality of both photos, larger is better; ties are rejected in input order.
        threshold: decision threshold.
        rejected: shares in [0, 1).

    Returns:
        FNMR for each share.
    """
    missed = (mated < threshold)[np.argsort(quality_P2.min(1), kind="stable")]
    return np.array([missed[int(share * len(missed)) :].mean() for share in rejected])


def error_against_reject(
    rejected: Floats, fnmr: Mapping[str, Floats], chance: tuple[Floats, Floats], title: str
) -> plots.Figure:
    """Plot FNMR against the share of rejected comparisons, by quality measure, with the 95 % band of chance."""
    figure, axes = plots.single(title, "comparisons rejected", "false non-match rate (FNMR)")
    axes.fill_between(rejected, *chance, color=plots.GRAY, alpha=0.25, linewidth=0, label="chance, 95 %")
    colors = cycle((plots.BLUE, plots.VERMILION, plots.GREEN, plots.GRAY))
    for (name, values), color in zip(fnmr.items(), colors, strict=False):
        axes.plot(rejected, values, color=color, label=name)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False)
    return figure


def curves(found: Evidence, title: str) -> plots.Figure:
    chance = np.quantile(found.by_chance(CURVE, CURVE_ROUNDS), [0.025, 0.975], axis=0)
    drawn = {name: found.fnmr(found.measures[name], CURVE) for name in (SCORE, EYES, "sharpness")}
    return error_against_reject(np.array(CURVE), drawn, (chance[0], chance[1]), title)


def dark(gain: float) -> Callable[[Image], Image]:
    return lambda photo: np.asarray(photo * gain, np.uint8)


def flat(gain: float) -> Callable[[Image], Image]:
    return lambda photo: np.asarray(photo * gain + 127 * (1 - gain), np.uint8)


def bright(gain: float) -> Callable[[Image], Image]:
    return lambda photo: np.asarray(np.clip(photo * float(gain), 0, 255), np.uint8)


def blurred(sigma_px: float) -> Callable[[Image], Image]:
    return lambda photo: np.asarray(cv2.GaussianBlur(photo, (0, 0), sigma_px), np.uint8)


def shrunk(factor: float) -> Callable[[Image], Image]:
    return lambda photo: np.asarray(
        cv2.resize(photo, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA), np.uint8
    )


def noisy(sigma: float) -> Callable[[Image], Image]:
    def change(photo: Image) -> Image:
        values = photo + np.random.default_rng(0).normal(0, sigma, photo.shape)
        return np.asarray(np.clip(values, 0, 255), np.uint8)

    return change


KINDS: Final[Mapping[str, Callable[[Image], Image]]] = {
    "as it is": lambda photo: photo,
    **{f"shrunk to {factor:g}": shrunk(factor) for factor in (0.4, 0.2, 0.14, 0.1)},
    **{f"blurred by {sigma:g} px": blurred(sigma) for sigma in (2, 4, 6)},
    **{f"darkened to {gain:g}": dark(gain) for gain in (0.4, 0.2, 0.1)},
    **{f"contrast {gain:g}": flat(gain) for gain in (0.4, 0.2, 0.1)},
    **{f"brightened by {gain:g}": bright(gain) for gain in (1.5, 2, 3, 5)},
    **{f"noise of {sigma:g} gray levels": noisy(sigma) for sigma in (20, 40, 80)},
}


def degraded_copies(pack: ModelPack, lfw: Path, cache: Path) -> tuple[list[dict[str, Any]], Evidence]:
    """Measure the similarity that remains in View 1's mated pairs (less that of strangers) after each degradation, with
    the score. Also return the same pairs as evidence, each with one degradation in turn. Landmarks are those of the
    original photo."""
    embedder = Embedder(pack, cache_dir=cache)
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    faces = {
        face.file: face
        for face in central_faces(embedder.detector, sorted({*pairs.first, *pairs.second}), lfw / "images")
    }
    seen = [row for row in np.flatnonzero(pairs.same) if pairs.first[row] in faces and pairs.second[row] in faces]
    chosen = [seen[i] for i in np.linspace(0, len(seen) - 1, DEGRADED_PAIRS).astype(int)]
    first, second = ([faces[files[row]] for row in chosen] for files in (pairs.first, pairs.second))
    mates = embedder.recognizer.embed(np.stack([face.crop for face in second]))
    similarities, qualities, strangers = {}, {}, 0.0
    for name, change in KINDS.items():
        changed = [change(face.photo) for face in first]
        points = [f.landmarks_xy * (c.shape[0] / f.photo.shape[0]) for f, c in zip(first, changed, strict=True)]
        crops = np.stack([align(photo, p[None])[0] for photo, p in zip(changed, points, strict=True)])
        cosines = embedder.recognizer.embed(crops).astype(np.float64) @ mates.T
        similarities[name] = np.diagonal(cosines)
        qualities[name] = [measure_quality(crop, p) for crop, p in zip(crops, points, strict=True)]
        if name == "as it is":
            strangers = float((cosines.sum() - np.trace(cosines)) / (cosines.size - len(cosines)))
    embedder.save_cache()
    sound = similarities["as it is"].mean() - strangers
    kinds = [
        {
            "kind": name,
            "similarity kept": float((values.mean() - strangers) / sound),
            "score": float(np.median([q.score for q in qualities[name]])),
            "eye distance": float(np.median([q.eye_distance_px for q in qualities[name]])),
        }
        for name, values in similarities.items()
    ]
    turn = [list(KINDS)[i % len(KINDS)] for i in range(len(chosen))]
    mixed = [qualities[kind][i] for i, kind in enumerate(turn)] + [face.quality for face in second]
    everybody = embedder.embeddings(sorted(faces), lfw / "images")
    people = people_of(everybody.files)
    non_mated = (everybody.vectors @ everybody.vectors.T)[people[:, None] != people[None]]
    threshold = float(np.quantile(non_mated, 1 - FMR))
    count = len(chosen)
    return kinds, Evidence(
        np.array([similarities[kind][i] for i, kind in enumerate(turn)]),
        np.stack([np.arange(count), np.arange(count) + count], 1),
        people_of([face.file for face in first]),
        threshold,
        {SCORE: np.array([q.score for q in mixed]), EYES: np.array([q.eye_distance_px for q in mixed])},
    )


def table(found: Mapping[str, Any]) -> str:
    lines = [["Rejected, worst first by", *(f"{share:.0%}" for share in REJECTED)], ["---"] * (1 + len(REJECTED))]
    lines += [[name, *(f"{value:.2%}" for value in values)] for name, values in found["by"].items()]
    chance = found["chance"]
    spread = zip(chance["mean"], chance["least"], chance["most"], strict=True)
    lines.append(["chance (95 % of draws)", *(f"{m:.2%} ({low:.2%} to {high:.2%})" for m, low, high in spread)])
    below = [
        f"{100 * gain['points']:.2f} points (95 % over people: {100 * gain['interval'][0]:.2f} to "
        f"{100 * gain['interval'][1]:.2f}) below {'that of the eye distance' if name == EYES else name}"
        for name, gain in found["score below"].items()
    ]
    about = (
        f"FNMR at FMR 0.1 % (threshold {found['threshold']:.3f}) is {found['fnmr']:.2%} over {found['pairs']:,} mated "
        f"pairs of {found['people']:,} people. At 5 % rejected by the score it is {', and '.join(below)}."
    )
    return about + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kinds_table(kinds: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "## What damage leaves\n\n| Damage | Similarity kept | Score | Eye distance, px |\n| --- | --- | --- | --- |\n"
    )
    return head + "\n".join(
        f"| {k['kind']} | {k['similarity kept']:.0%} | {k['score']:.2f} | {k['eye distance']:.1f} |" for k in kinds
    )


if __name__ == "__main__":
    main()

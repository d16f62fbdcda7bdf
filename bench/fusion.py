"""Compare fusion rules: FNIR at equal FPIR on LFW with 1, 2, 3 and 5 templates per person.

A draw enrolls 300 people who have enough photos, each with as many random photos. Their other photos are the mated
probes. The people with a single photo are the strangers, drawn with repetition. The threshold is set on these strangers
in hindsight, for each rule separately. Prints, and writes bench/results/fusion.md and .json.

    python -m bench.fusion [--cache runs/cache]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, say, write
from bench.lfw import arguments, lfw_or_exit, packs_beside_reference
from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.vision.alignment import align
from service.domain.fusion import Fusion, fuse_similarities, subject_vectors
from training.evaluation.embedding import Embedder, central_faces
from training.evaluation.lfw import DOUBTFUL_STRANGERS, PARTS, files_of
from training.evaluation.metrics import Ints, fnir_at_fpir

TEMPLATES: Final = (1, 2, 3, 5)
Values = NDArray[np.floating]
FPIR: Final = (0.1, 0.01, 0.001)
HEADLINE: Final = FPIR.index(0.01)
DRAWS: Final = 10
SUBJECTS: Final = 300
MAX_PHOTOS: Final = 20
"""Photos per person, as in LFW's open-set protocol: George W. Bush would otherwise have most of the probes."""
COHORT: Final = 30
RULES: Final[tuple[Fusion, ...]] = get_args(Fusion)
NORMALIZED: Final = ", s-norm"
SPREAD: Final = (0.1, 0.9)
NOTES: Final = f"""FNIR (rank 1), mean over {DRAWS} draws of {SUBJECTS} people and of their templates, with the 10 % and
90 % quantiles; the last column is the difference to `max` in the same draw, in points. Thresholds are set in hindsight
on the strangers: people with one photo, less the {len(DOUBTFUL_STRANGERS)} whose labels are wrong. FPIR 0.1 % is four
of them. `s-norm`: the score in standard deviations from its cohort's mean, averaged over probe and subject; the cohort
are the {COHORT} other enrolled subjects most similar to either. Every pack uses its own detector.
"""


@dataclass(frozen=True, eq=False)
class Photos:
    """``vectors`` (n, d), ``people`` (n,) the person that each shows, ``qualities`` (n,) scores in [0, 1]."""

    vectors: Float
    people: NDArray[np.str_]
    qualities: Float


@dataclass(frozen=True, eq=False)
class Draw:
    """Rows of photos: ``templates`` (m,) of ``subjects`` (m,), ascending from 0; ``probes`` (q,) of subjects ``mates``
    (q,); ``strangers``."""

    templates: Ints
    subjects: Ints
    probes: Ints
    mates: Ints
    strangers: Ints


def main() -> None:
    cache, lfw = arguments().parse_args().cache, lfw_or_exit()
    figures = {}
    for pack in packs_beside_reference().values():
        figures[pack.model_id] = measure(photos_of(pack, lfw, cache))
        say(tables({pack.model_id: figures[pack.model_id]}))
    text = tables(figures)
    write(RESULTS / "fusion.md", f"# Fusion\n\n`make bench-fusion`\n\n{NOTES}\n{text}\n", figures)
    print(text)


def photos_of(pack: ModelPack, lfw: Path, cache: Path) -> Photos:
    """Return up to twenty photos of each person in LFW's lists; photos without a face are left out."""
    by_person = defaultdict(list)
    for file in sorted(set().union(*(files_of(lfw, part) for part in PARTS))):
        by_person[file.split("/")[0]].append(file)
    files = [file for own in by_person.values() for file in own[:MAX_PHOTOS]]
    embedder = Embedder(pack, cache_dir=cache)
    vectors, people, qualities = [], [], []
    for face in central_faces(embedder.detector, files, lfw / "images"):
        crop = align(face.photo, face.landmarks_xy[None], embedder.recognizer.alignment)
        vectors.append(embedder.recognizer.embed(crop)[0])
        people.append(face.file.split("/")[0])
        qualities.append(face.quality.score)
    embedder.save_cache()
    return Photos(np.stack(vectors), np.array(people), np.array(qualities, np.float32))


def measure(photos: Photos) -> dict[int, dict[str, list[list[float]]]]:
    """Measure FNIR by number of templates and rule: one row per draw, one column per FPIR."""
    found: dict[int, dict[str, list[list[float]]]] = {}
    for count in TEMPLATES:
        by_rule = defaultdict(list)
        for seed in range(DRAWS):
            for name, rates in fnir_by_rule(photos, draw(photos.people, count, np.random.default_rng(seed))).items():
                by_rule[name].append(rates)
        found[count] = dict(by_rule)
    return found


def draw(people: NDArray[np.str_], count: int, rng: np.random.Generator, subjects: int = SUBJECTS) -> Draw:
    """Draw ``count`` templates of each of ``subjects`` people (all, if fewer have a photo to spare)."""
    names, photos = np.unique(people, return_counts=True)
    eligible = names[photos > count]
    gallery = rng.choice(eligible, min(subjects, len(eligible)), replace=False)
    owned = [rng.permutation(np.flatnonzero(people == name)) for name in gallery]
    alone = names[(photos == 1) & ~np.isin(names, list(DOUBTFUL_STRANGERS))]
    return Draw(
        np.concatenate([rows[:count] for rows in owned]),
        np.repeat(np.arange(len(owned)), count),
        np.concatenate([rows[count:] for rows in owned]),
        np.repeat(np.arange(len(owned)), [len(rows) - count for rows in owned]),
        rng.choice(np.flatnonzero(np.isin(people, alone)), len(alone)),
    )


def fnir_by_rule(photos: Photos, drawn: Draw) -> dict[str, list[float]]:
    """Return FNIR at each of :data:`FPIR` for each rule, plain and normalized."""
    vectors, qualities = photos.vectors[drawn.templates], photos.qualities[drawn.templates]
    found: dict[str, list[float]] = {}
    for rule in RULES:
        # The cohort and the probes are compared with the same vectors of each subject.
        if rule == "centroid" or rule == "quality_weighted":
            enrolled = subject_vectors(vectors, drawn.subjects, qualities, rule)
            owners: Ints = np.arange(len(enrolled))
        else:
            enrolled, owners = vectors, drawn.subjects
        to_mates, to_strangers, to_enrolled = (
            fuse_similarities(probes, vectors, drawn.subjects, qualities, rule)
            for probes in (photos.vectors[drawn.probes], photos.vectors[drawn.strangers], enrolled)
        )
        found[rule] = rates(to_mates, to_strangers, drawn.mates)
        mean, deviation = cohort_of_subjects(to_enrolled, owners)
        found[rule + NORMALIZED] = rates(
            normalized(to_mates, mean, deviation), normalized(to_strangers, mean, deviation), drawn.mates
        )
    return found


def rates(mated: Values, strangers: Values, mates: Ints) -> list[float]:
    hits = np.where(mated.argmax(1) == mates, mated.max(1), -np.inf).astype(np.float64)
    alarms = strangers.max(1).astype(np.float64)
    return [fnir_at_fpir(hits, alarms, fpir) for fpir in FPIR]


def cohort_of_subjects(similarities: Values, owners: Ints, size: int = COHORT) -> tuple[Values, Values]:
    """Return mean and standard deviation, (s,) each, of a subject's cohort scores. Takes (e, s) fused similarities of
    enrolled vectors to all subjects, and their ``owners`` (e,) ascending. The scores are averaged over the vectors of a
    subject."""
    others = similarities.copy()
    others[np.arange(len(owners)), owners] = -np.inf
    highest = np.partition(others, -size, axis=1)[:, -size:]
    starts = np.unique(owners, return_index=True)[1]
    counts = np.bincount(owners)
    mean, deviation = (np.add.reduceat(v, starts) / counts for v in (highest.mean(1), highest.std(1)))
    return mean, deviation


def normalized(similarities: Values, mean: Values, deviation: Values, size: int = COHORT) -> Values:
    """Normalize (q, s) fused similarities by adaptive s-norm (P. Matejka et al., "Analysis of score normalization in
    multilingual speaker recognition", Interspeech 2017, equation 5). ``mean`` and ``deviation`` (s,) are the subjects'.
    A probe's cohort for a subject are the ``size`` other subjects most similar to the probe.
    """
    highest = np.partition(similarities, -size - 1, axis=1)[:, -size - 1 :]
    # Of the highest size + 1 values, drop the subject itself if it is among them, else the last.
    gone = np.maximum(similarities, highest[:, :1])
    probe_mean = (highest.sum(1, keepdims=True) - gone) / size
    squares = ((highest**2).sum(1, keepdims=True) - gone**2) / size
    probe_deviation = np.sqrt(np.maximum(squares - probe_mean**2, 1e-12))
    return np.asarray(((similarities - probe_mean) / probe_deviation + (similarities - mean) / deviation) / 2)


def tables(figures: Mapping[str, Mapping[int, Mapping[str, list[list[float]]]]]) -> str:
    return "\n\n".join(
        f"## {model}, {count} template{'s' * (count > 1)} a person\n\n{table(found)}"
        for model, counts in figures.items()
        for count, found in counts.items()
    )


def table(found: Mapping[str, list[list[float]]]) -> str:
    lines = [["Rule", *(f"FNIR at FPIR {rate:.1%}" for rate in FPIR), f"less max at {FPIR[HEADLINE]:.0%}"], ["---"] * 5]
    reference = np.array(found["max"])[:, HEADLINE]
    for name, drawn in sorted(found.items(), key=lambda item: NORMALIZED in item[0]):
        values = 100 * np.array(drawn)
        difference = values[:, HEADLINE] - 100 * reference
        lines.append([name, *(spread(column, "", " %") for column in values.T), spread(difference, "+", "")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Values, sign: str, unit: str) -> str:
    """Format the mean and the central 80 % of the draws, for a table cell."""
    low, high = np.quantile(values, SPREAD)
    return f"{values.mean():{sign}.2f}{unit} ({low:{sign}.2f} to {high:{sign}.2f})"


if __name__ == "__main__":
    main()

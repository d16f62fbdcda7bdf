"""Verification and identification metrics in numpy. Larger similarities mean more alike.

Rates follow ISO/IEC 19795-1 and are in [0, 1]. FMR(t) is the share of different-person pairs with similarity >= t,
FNMR(t) the share of same-person pairs below t. FPIR(t) is the share of non-mated searches with a candidate at >= t.
FNIR(t) is the share of mated searches whose mate is not the first candidate at >= t (NIST FRTE 1:N, rank 1). TAR is 1 -
FNMR at an FMR, called FAR in face recognition; TPIR is 1 - FNIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.risk.search_rates import threshold_at_fpir
from training.progress import track

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
MAX_BLOCK_CELLS = 1 << 24
"""Cells of a similarity matrix held in memory: 128 MB."""


@dataclass(frozen=True)
class FoldAccuracy:
    """LFW's protocol: mean and standard deviation over folds, each at the threshold of the other folds; one fold, at
    its own."""

    mean: float
    std: float
    folds: tuple[float, ...]


def best_threshold(similarities: Floats, same: NDArray[np.bool_]) -> float:
    """Return the threshold of highest accuracy (similarity >= t means same): mid-gap, the lowest among ties."""
    order = np.argsort(similarities, kind="stable")
    ordered, labels = similarities[order], same[order]
    # A cut before row i calls the rows below it different.
    correct = np.concatenate([[0], np.cumsum(~labels)]) + labels.sum() - np.concatenate([[0], np.cumsum(labels)])
    edges = np.concatenate([[ordered[0] - 1e-6], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1e-6]])
    # A threshold cannot separate ties.
    correct[1:-1][ordered[1:] == ordered[:-1]] = -1
    return float(edges[int(correct.argmax())])


def fold_accuracy(similarities: Floats, same: NDArray[np.bool_], folds: NDArray[np.int64]) -> FoldAccuracy:
    scores = []
    for fold in np.unique(folds):
        own = folds == fold
        others = own if own.all() else ~own
        threshold = best_threshold(similarities[others], same[others])
        scores.append(float(((similarities[own] >= threshold) == same[own]).mean()))
    return FoldAccuracy(float(np.mean(scores)), float(np.std(scores)), tuple(scores))


def tar_at_far(similarities: Floats, same: NDArray[np.bool_], far: float) -> float:
    """Return the share of same pairs accepted at the lowest threshold that accepts at most ``far`` of others."""
    different = np.sort(similarities[~same])[::-1]
    allowed = int(far * len(different))
    # Strictly above the first impostor to reject.
    return float((similarities[same] > different[allowed]).mean()) if allowed < len(different) else 1.0


def equal_error_rate(similarities: Floats, same: NDArray[np.bool_]) -> float:
    """Return the rate where FMR and FNMR cross, interpolated linearly between thresholds."""
    thresholds = np.unique(similarities)
    impostors, mates = np.sort(similarities[~same]), np.sort(similarities[same])
    fmr = 1 - np.searchsorted(impostors, thresholds, "left") / len(impostors)
    fnmr = np.searchsorted(mates, thresholds, "left") / len(mates)
    crossing = int(np.argmax(fnmr >= fmr))
    if crossing == 0:
        return float((fmr[0] + fnmr[0]) / 2)
    before, after = fmr[crossing - 1] - fnmr[crossing - 1], fnmr[crossing] - fmr[crossing]
    share = before / max(before + after, 1e-12)
    return float(fmr[crossing - 1] + share * (fmr[crossing] - fmr[crossing - 1]))


@dataclass(frozen=True, eq=False)
class Roc:
    """Error rates at every distinct similarity: (k + 1,) descending thresholds, the first inf.

    ``fmr`` against ``tar`` is the ROC, ``fmr`` against ``fnmr`` the DET curve (ISO/IEC 19795-1).
    """

    thresholds: Floats
    fmr: Floats
    tar: Floats

    @property
    def fnmr(self) -> Floats:
        return 1 - self.tar

    @property
    def auc(self) -> float:
        """Return the area under the ROC: the probability that a same pair is more similar, ties counted half."""
        return float(np.trapezoid(self.tar, self.fmr))


def roc(similarities: Floats, same: Bools) -> Roc:
    """Return the ROC of (n,) similarities and (n,) same-person flags; both kinds must occur."""
    order = np.argsort(similarities)[::-1]
    ordered = similarities[order]
    # A threshold cannot separate ties.
    last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    accepted = np.cumsum(same[order])[last]
    falsely = last + 1 - accepted
    return Roc(
        np.concatenate([[np.inf], ordered[last]]),
        np.concatenate([[0.0], falsely / falsely[-1]]),
        np.concatenate([[0.0], accepted / accepted[-1]]),
    )


@dataclass(frozen=True)
class OpenSetRates:
    """FNIR and threshold by requested FPIR, thresholds chosen on the evaluated data, and closed-set rank-1."""

    rank1: float
    fnir: dict[float, float]
    thresholds: dict[float, float]

    def as_array(self) -> Floats:
        """Return rank-1, then FNIR by FPIR."""
        return np.array([self.rank1, *self.fnir.values()])


def measure_open_set(hits: Floats, alarms: Floats, rates: tuple[float, ...] = (0.1, 0.01, 0.001)) -> OpenSetRates:
    """Measure the results of `search_gallery`."""
    thresholds = {rate: threshold_at_fpir(alarms, rate) for rate in rates}
    fnir = {rate: float(1 - (hits >= threshold).mean()) for rate, threshold in thresholds.items()}
    return OpenSetRates(float((hits > -np.inf).mean()), fnir, thresholds)


def fnir_curve(hits: Floats, alarms: Floats) -> Roc:
    """Return FNIR (as ``fnmr``) against FPIR (as ``fmr``), from the results of `search_gallery`."""
    curve = roc(np.concatenate([hits, alarms]), np.repeat([True, False], [len(hits), len(alarms)]))
    # A probe whose mate is not the first candidate is missed at any threshold.
    kept = curve.thresholds > -np.inf
    return Roc(curve.thresholds[kept], curve.fmr[kept], curve.tar[kept])


def distractor_identification(probes: Floats, people: Ints, distractors: Floats, sizes: Sequence[int]) -> Floats:
    """Run MegaFace's identification (I. Kemelmacher-Shlizerman et al., CVPR 2016, section 4).

    Each photo of a person in turn joins the distractors in the gallery, and the other photos of that person search for
    it.

    Args:
        probes: (n, d) unit vectors of the probe set (FaceScrub in MegaFace).
        people: (n,) person of each; people with one photo are skipped.
        distractors: (D, d) unit vectors of other people, in random order.
        sizes: numbers of distractors in the gallery, taken from the first: 10, 100, ...; at most D.

    Returns:
        (sizes,) rank-1: share of searches in which no distractor is at least as similar as the mate.

    Raises:
        ValueError: no person has two photos.
    """
    found, searches = np.zeros(len(sizes)), 0
    for rows in row_blocks(len(probes), len(distractors)):
        similarity_BD = probes[rows] @ distractors.T
        for probe, to_distractors in zip(rows, similarity_BD, strict=True):
            hidden = probes[(people == people[probe]) & (np.arange(len(probes)) != probe)] @ probes[probe]
            searches += len(hidden)
            found += [(hidden > to_distractors[:size].max()).sum() for size in sizes]
    if not searches:
        raise ValueError("no person in the probe set has two photos")
    return found / searches


def distractor_verification(
    probes: Floats, people: Ints, distractors: Floats, fars: Sequence[float] = (1e-4, 1e-6)
) -> Floats:
    """Return `tar_at_far` of same-person probe pairs against all probe-distractor pairs, for each FAR in [0, 1).

    MegaFace's verification. Arguments as of `distractor_identification`. Only the highest similarities stay in memory.
    """
    pairs = len(probes) * len(distractors)
    kept = int(max(fars) * pairs) + 1
    highest = np.empty(0)
    for rows in row_blocks(len(probes), len(distractors)):
        highest = np.sort(np.append(highest, probes[rows] @ distractors.T))[::-1][:kept]
    first, second = mated_pairs(people)
    mated = np.einsum("nd,nd->n", probes[first], probes[second])
    return np.array([(mated > highest[int(far * pairs)]).mean() for far in fars])


def mated_pairs(people: Ints) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return both rows of each pair of one person, given the person of each row."""
    order = np.argsort(people, kind="stable")
    of_people = np.split(order, np.flatnonzero(np.diff(people[order])) + 1)
    pairs = [rows[np.stack(np.triu_indices(len(rows), 1))] for rows in of_people]
    first, second = np.concatenate(pairs, 1)
    return first, second


def build_templates(vectors: NDArray[np.floating], template_ids: Ints, media_ids: Ints) -> tuple[Ints, Floats]:
    """Build IJB's templates (C. Whitelam et al., "IARPA Janus Benchmark-B", CVPRW 2017).

    A template is the normalized mean over media of each medium's mean vector, so that a video counts as one still.

    Args:
        vectors: (n, d) of photos and video frames.
        template_ids: (n,) template of each.
        media_ids: (n,) medium of each: a still, or a video shared by its frames.

    Returns:
        (T,) ascending template ids, and their (T, d) unit vectors.
    """
    media, medium_of_row = np.unique(np.stack([template_ids, media_ids], 1), axis=0, return_inverse=True)
    ids, template_of_medium = np.unique(media[:, 0], return_inverse=True)
    return ids, _unit(_means(_means(vectors, medium_of_row), template_of_medium))


def template_similarities(ids: Ints, vectors: Floats, pairs: Ints) -> Floats:
    """Return (P,) cosines of (P, 2) template id pairs, given ascending ``ids`` (T,) and unit ``vectors`` (T, d). Raises
    ValueError if a pair names an unknown template."""
    rows = np.minimum(np.searchsorted(ids, pairs), len(ids) - 1)
    if (unknown := ids[rows] != pairs).any():
        raise ValueError(f"unknown template {pairs[unknown][0]}")
    similarities = np.empty(len(pairs))
    # IJB-C has 15 million pairs: all their vectors would need 60 GB.
    for block in row_blocks(len(pairs), vectors.shape[1]):
        a, b = vectors[rows[block, 0]], vectors[rows[block, 1]]
        similarities[block] = np.einsum("nd,nd->n", a, b, dtype=np.float64)
    return similarities


def flip_average(vectors: NDArray[np.floating], flipped: NDArray[np.floating]) -> Floats:
    """Return (n, d) normalized sums of the embeddings of crops and of their mirror images."""
    return _unit(vectors + flipped)


@dataclass(frozen=True)
class AngleStatistics:
    """Angle statistics in degrees, as in Table 3 of J. Deng et al., "ArcFace", CVPR 2019.

    A center is the mean of the unit embeddings of a class.

    Attributes:
        w_ec: mean angle between class weight and center.
        w_inter: mean over classes of the smallest angle between two class weights.
        w_intra: mean angle between an embedding and the weight of its class (not in Table 3).
        intra: mean angle between an embedding and the center of its class.
        inter: mean over classes of the smallest angle between two centers.
        Those of weights are None without class weights.
    """

    w_ec: float | None
    w_inter: float | None
    intra: float
    inter: float
    w_intra: float | None = None


def angle_statistics(
    vectors: NDArray[np.floating], labels: Ints, weights_CD: NDArray[np.floating] | None = None
) -> AngleStatistics:
    """Compute angle statistics of (n, d) embeddings with (n,) labels of at least two classes.

    If ``weights_CD`` are given, labels are their rows. Raises ValueError if a vector is zero or not finite.
    """
    embeddings = _unit(vectors)
    present, row = np.unique(labels, return_inverse=True)
    centers = _unit(_means(embeddings, row))
    w_ec = w_inter = w_intra = None
    if weights_CD is not None:
        weights = _unit(weights_CD)
        w_ec = float(_angles_deg(weights[present], centers).mean())
        w_inter = _mean_smallest_angle_deg(weights)
        w_intra = float(_angles_deg(embeddings, weights[labels]).mean())
    intra, inter = float(_angles_deg(embeddings, centers[row]).mean()), _mean_smallest_angle_deg(centers)
    return AngleStatistics(w_ec, w_inter, intra, inter, w_intra)


def bootstrap(
    statistic: Callable[[Ints], Floats], people: Ints | NDArray[np.str_], rounds: int = 1000, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return 95 % percentile intervals of a statistic, resampling whole people with replacement.

    Photos of one person fail together, so people are drawn with all their rows (R. Bolle et al., "Error analysis of
    pattern recognition systems - the subsets bootstrap", CVIU 93(1), 2004). A row of two people counts the product of
    their draws, or one person's draws if both are equal (A. Owen and D. Eckles, "Bootstrapping data arrays of arbitrary
    order", Annals of Applied Statistics 6(3), 2012; R. Fogliato et al., "Confidence intervals for error rates in 1:1
    matching tasks", IJCV 2024). This suits all-against-all comparisons. For sparse pairs it widens intervals by up to
    sqrt(3): assign each pair to its first person instead.

    Args:
        statistic: function from rows, with repetitions, to (k,) figures.
        people: (n,) or (n, 2) person or people of each row.
        rounds: number of resamples.
        seed: random seed.

    Returns:
        (k,) lower and (k,) upper bounds.
    """
    rows = np.arange(len(people))
    draws = track(resample_people(people, rounds, seed), "intervals", "resamples", rounds)
    results = [statistic(np.repeat(rows, times)) for times in draws]
    low, high = np.quantile(results, [0.025, 0.975], axis=0)
    return low, high


def resample_people(people: Ints | NDArray[np.str_], rounds: int, seed: int) -> Iterator[Ints]:
    """Yield the (n,) times that each row counts in each resample of `bootstrap`."""
    owners = np.unique(people.reshape(len(people), -1), return_inverse=True)[1].reshape(len(people), -1)
    first, second = owners[:, 0], owners[:, -1]
    count = int(owners.max()) + 1
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)
        yield drawn[first] * np.where(first == second, 1, drawn[second])


def resampled_tar(
    similarities: Floats, same: Bools, people: Ints, fars: Sequence[float], rounds: int, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return (fars,) lower and upper bounds of `tar_at_far`, as `bootstrap` does. Pairs are sorted only once, since
    there may be millions. Resamples without pairs of either kind are left out.

    Args:
        similarities, same: (P,) of pairs.
        people: (P, 2) people of each.
        fars: rates in [0, 1).
    """
    order = np.argsort(similarities)[::-1]
    ordered, mated = similarities[order], same[order]
    # Pairs above the first one of an equal similarity: a threshold cannot separate ties.
    above = np.searchsorted(-ordered, -ordered, "left")
    results = []
    for times in resample_people(people[order], rounds, seed):
        accepted = np.concatenate([[0], np.cumsum(times * mated)])
        falsely = np.cumsum(times * ~mated)
        if accepted[-1] and falsely[-1]:
            first_rejected = [int(np.searchsorted(falsely, int(far * falsely[-1]), "right")) for far in fars]
            results.append(accepted[above[first_rejected]] / accepted[-1])
    low, high = np.quantile(results, [0.025, 0.975], axis=0)
    return low, high


def row_blocks(count: int, width: int) -> Iterator[NDArray[np.intp]]:
    """Yield blocks of rows 0..count-1 of a matrix that fit in memory."""
    height = max(1, MAX_BLOCK_CELLS // width)
    for start in range(0, count, height):
        yield np.arange(start, min(start + height, count))


def _unit(vectors: NDArray[np.floating]) -> Floats:
    """Normalize as models.vision.recognition does, but in float64: small angles need the digits."""
    wide = np.asarray(vectors, np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or (lengths < 1e-12).any():
        raise ValueError("vectors must be finite and not zero")
    return np.asarray(wide / lengths)


def _means(vectors: NDArray[np.floating], groups: NDArray[np.intp]) -> Floats:
    """Return the (k, d) mean of the rows of each non-empty group 0..k-1."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sums = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64)
    return np.asarray(sums / np.bincount(groups)[:, None])


def _angles_deg(a: Floats, b: Floats) -> Floats:
    """Return (n,) angles between the rows of two (n, d) arrays of unit vectors."""
    return np.asarray(np.degrees(np.arccos(np.clip(np.einsum("nd,nd->n", a, b), -1, 1))))


def _mean_smallest_angle_deg(vectors: Floats) -> float:
    """Return the mean over (k, d) unit vectors of the angle to the nearest other vector."""
    nearest = np.empty(len(vectors))
    for rows in row_blocks(len(vectors), len(vectors)):
        cosines = vectors[rows] @ vectors.T
        cosines[np.arange(len(rows)), rows] = -1
        nearest[rows] = cosines.max(1)
    return float(np.degrees(np.arccos(np.clip(nearest, -1, 1))).mean())

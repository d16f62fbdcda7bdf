"""Verification and identification metrics. Pure numpy; similarities, larger is more alike.

Rates are ISO/IEC 19795-1's and lie in [0, 1]: FMR(t) is the share of different-person pairs with similarity >= t,
FNMR(t) the share of same-person pairs below t; FPIR(t) the share of searches by people not enrolled that return
anyone at >= t, FNIR(t) the share of searches by enrolled people that do not return their mate first and at >= t
(NIST FRTE 1:N, rank 1). TAR is 1 - FNMR at an FMR, which face recognition calls FAR; TPIR is 1 - FNIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
CELLS_AT_ONCE = 1 << 24
"""Of a matrix of similarities: 128 MB."""


@dataclass(frozen=True)
class FoldAccuracy:
    """LFW's protocol: mean and standard deviation over folds, each judged by the threshold of the other nine."""

    mean: float
    std: float
    folds: tuple[float, ...]


def best_threshold(similarities: Floats, same: NDArray[np.bool_]) -> float:
    """The threshold of highest accuracy (similarity >= t means same); the middle of its gap, the lowest of equals."""
    order = np.argsort(similarities, kind="stable")
    ordered, labels = similarities[order], same[order]
    # Cutting before row i: rows below are called different.
    correct = np.concatenate([[0], np.cumsum(~labels)]) + labels.sum() - np.concatenate([[0], np.cumsum(labels)])
    edges = np.concatenate([[ordered[0] - 1e-6], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1e-6]])
    # No threshold can cut between equal similarities.
    correct[1:-1][ordered[1:] == ordered[:-1]] = -1
    return float(edges[int(correct.argmax())])


def fold_decisions(similarities: Floats, same: NDArray[np.bool_], folds: NDArray[np.int64]) -> Bools:
    """(P,) whether each pair is called the same person, by the threshold of the other folds."""
    called_same = np.zeros(len(same), bool)
    for fold in np.unique(folds):
        held_out = folds == fold
        called_same[held_out] = similarities[held_out] >= best_threshold(similarities[~held_out], same[~held_out])
    return called_same


def fold_accuracy(similarities: Floats, same: NDArray[np.bool_], folds: NDArray[np.int64]) -> FoldAccuracy:
    right = fold_decisions(similarities, same, folds) == same
    scores = [float(right[folds == fold].mean()) for fold in np.unique(folds)]
    return FoldAccuracy(float(np.mean(scores)), float(np.std(scores)), tuple(scores))


def tar_at_far(similarities: Floats, same: NDArray[np.bool_], far: float) -> float:
    """Share of same pairs accepted at the lowest threshold that accepts at most ``far`` of the different pairs."""
    different = np.sort(similarities[~same])[::-1]
    allowed = int(far * len(different))
    # Strictly above the first impostor that must be refused.
    return float((similarities[same] > different[allowed]).mean()) if allowed < len(different) else 1.0


def equal_error_rate(similarities: Floats, same: NDArray[np.bool_]) -> float:
    """Where FMR and FNMR cross, linearly between thresholds."""
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
    """Error rates at every distinct similarity, thresholds (k + 1,) descending, the first inf: nobody is accepted.

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
        """Area under the ROC: the probability that a same pair is more alike than a different one, ties half."""
        return float(np.trapezoid(self.tar, self.fmr))


def roc(similarities: Floats, same: Bools) -> Roc:
    """(n,) similarities, (n,) whether each pair shows one person; both kinds must occur."""
    order = np.argsort(similarities)[::-1]
    ordered = similarities[order]
    # No threshold can cut between equal similarities: only the last row of each value counts.
    last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    accepted = np.cumsum(same[order])[last]
    falsely = last + 1 - accepted
    return Roc(
        np.concatenate([[np.inf], ordered[last]]),
        np.concatenate([[0.0], falsely / falsely[-1]]),
        np.concatenate([[0.0], accepted / accepted[-1]]),
    )


def error_versus_reject(
    mated: Floats, quality_P2: NDArray[np.floating], threshold: float, rejected: Sequence[float]
) -> Floats:
    """FNMR of what is left when the comparisons of lowest quality are rejected, the threshold staying (P. Grother and
    E. Tabassi, "Performance of biometric quality measures", PAMI 29(4), 2007): a comparison is as good as the worse of
    its two photos.

    Args:
        mated: (P,) similarities of same-person pairs.
        quality_P2: of both photos of each, larger is better; equals are rejected in the order they come.
        threshold: below it a pair is missed.
        rejected: shares in [0, 1).

    Returns:
        FNMR for each share.
    """
    missed = (mated < threshold)[np.argsort(quality_P2.min(1), kind="stable")]
    return np.array([missed[int(share * len(missed)) :].mean() for share in rejected])


@dataclass(frozen=True)
class OpenSet:
    """``fnir`` at each requested ``fpir``, the thresholds that hindsight chooses for them, and closed-set rank-1."""

    rank1: float
    fnir: dict[float, float]
    thresholds: dict[float, float]


def open_set(
    gallery: Floats,
    mated: Floats,
    mates: NDArray[np.int64],
    strangers: Floats,
    rates: tuple[float, ...] = (0.1, 0.01, 0.001),
) -> OpenSet:
    """(G, d), (m, d) and (s, d) unit vectors; ``mates`` (m,): each mated probe's row in the gallery."""
    hits, alarms = search(gallery, mated, mates, strangers)
    thresholds = {rate: threshold_at_fpir(alarms, rate) for rate in rates}
    fnir = {rate: float(1 - (hits >= threshold).mean()) for rate, threshold in thresholds.items()}
    return OpenSet(float((hits > -np.inf).mean()), fnir, thresholds)


def search(gallery: Floats, mated: Floats, mates: Ints, strangers: Floats) -> tuple[Floats, Floats]:
    """All that an open-set evaluation asks of a 1:N system, for the arguments of :func:`open_set`.

    Returns:
        ``hits`` (m,): the similarity of each mated probe and its mate where the mate is the best candidate, else -inf;
        ``alarms`` (s,): the similarity of each stranger's best candidate.
    """
    scores = mated @ gallery.T
    hits = np.where(scores.argmax(1) == mates, scores.max(1), -np.inf)
    return hits, (strangers @ gallery.T).max(1)


def threshold_at_fpir(alarms: Floats, fpir: float) -> float:
    """The lowest threshold that at most ``fpir`` (in [0, 1)) of the strangers' best similarities reach."""
    return float(np.nextafter(np.sort(alarms)[::-1][int(fpir * len(alarms))], 2.0))


def fnir_at_fpir(hits: Floats, alarms: Floats, fpir: float) -> float:
    """FNIR of :func:`search`'s results at :func:`threshold_at_fpir`."""
    return float(1 - (hits >= threshold_at_fpir(alarms, fpir)).mean())


@dataclass(frozen=True, eq=False)
class FnirCurve:
    """Open-set rates at every distinct finite similarity, thresholds descending, the first inf: nobody is returned."""

    thresholds: Floats
    fpir: Floats
    tpir: Floats

    @property
    def fnir(self) -> Floats:
        return 1 - self.tpir


def fnir_curve(hits: Floats, alarms: Floats) -> FnirCurve:
    """FNIR against FPIR from :func:`search`'s results."""
    curve = roc(np.concatenate([hits, alarms]), np.repeat([True, False], [len(hits), len(alarms)]))
    # A probe whose mate is not the best candidate is missed at any threshold.
    kept = curve.thresholds > -np.inf
    return FnirCurve(curve.thresholds[kept], curve.fmr[kept], curve.tar[kept])


def mate_ranks(similarity_MG: Floats, mates: Ints) -> Ints:
    """(M,) the rank, from 1, of each probe's mate in a gallery of one template a person; among equals it is last."""
    mate = similarity_MG[np.arange(len(mates)), mates]
    return np.asarray((similarity_MG >= mate[:, None]).sum(1), np.int64)


def cmc(similarity_MG: Floats, mates: Ints, ranks: Sequence[int]) -> Floats:
    """Cumulative match characteristic (ISO/IEC 19795-1): share of probes whose mate is among the best k, for each k.

    Args:
        similarity_MG: (M, G) of M probes and a gallery of one template a person.
        mates: (M,) each probe's row in the gallery.
        ranks: the values of k, from 1.
    """
    return np.asarray((mate_ranks(similarity_MG, mates)[:, None] <= np.asarray(ranks)).mean(0))


def distractor_identification(
    probes: Floats, people: Ints, distractors: Floats, sizes: Sequence[int], ranks: Sequence[int] = (1,)
) -> Floats:
    """MegaFace's identification (I. Kemelmacher-Shlizerman et al., CVPR 2016, section 4): for each person each photo
    in turn is hidden among distractors and searched for with the person's other photos.

    Args:
        probes: (n, d) unit vectors of the probe set (FaceScrub's, in MegaFace).
        people: (n,) who each is; a person with one photo is never searched for.
        distractors: (D, d) unit vectors of nobody in the probe set, in random order.
        sizes: how many of them, from the first, are in the gallery: 10, 100, ...
        ranks: the values of k.

    Returns:
        (sizes, ranks) the share of all (hidden photo, probe) pairs in which fewer than k distractors are at least as
        similar to the probe as the hidden photo is.

    Raises:
        ValueError: a size exceeds the distractors, or nobody has two photos.
    """
    if max(sizes) > len(distractors):
        raise ValueError(f"there are {len(distractors)} distractors, not {max(sizes)}")
    found, searches = np.zeros((len(sizes), len(ranks))), 0
    for rows in _blocks(len(probes), len(distractors)):
        similarity_BD = probes[rows] @ distractors.T
        for probe, to_distractors in zip(rows, similarity_BD, strict=True):
            hidden = probes[(people == people[probe]) & (np.arange(len(probes)) != probe)] @ probes[probe]
            searches += len(hidden)
            for i, size in enumerate(sizes):
                above = size - np.searchsorted(np.sort(to_distractors[:size]), hidden, "left")
                found[i] += (above[:, None] < np.asarray(ranks)).sum(0)
    if not searches:
        raise ValueError("nobody in the probe set has two photos")
    return found / searches


def distractor_verification(
    probes: Floats, people: Ints, distractors: Floats, fars: Sequence[float] = (1e-4, 1e-6)
) -> Floats:
    """MegaFace's verification: :func:`tar_at_far` of all same-person pairs of probes against all pairs of a probe and
    a distractor, for each FAR in [0, 1). Arguments as of :func:`distractor_identification`; only the highest
    similarities are kept in memory."""
    pairs = len(probes) * len(distractors)
    kept = int(max(fars) * pairs) + 1
    highest = np.empty(0)
    for rows in _blocks(len(probes), len(distractors)):
        highest = np.sort(np.append(highest, probes[rows] @ distractors.T))[::-1][:kept]
    first, second = np.triu_indices(len(probes), 1)
    same = people[first] == people[second]
    mated = np.einsum("nd,nd->n", probes[first[same]], probes[second[same]])
    return np.array([(mated > highest[int(far * pairs)]).mean() for far in fars])


def templates(vectors: NDArray[np.floating], template_ids: Ints, media_ids: Ints) -> tuple[Ints, Floats]:
    """IJB's templates (C. Whitelam et al., "IARPA Janus Benchmark-B", CVPRW 2017): the mean over a template's media of
    each medium's mean vector, so that a long video counts no more than a still; then unit norm.

    Args:
        vectors: (n, d) of photos and video frames.
        template_ids: (n,) the template of each.
        media_ids: (n,) the medium (a still, or a video whose frames share the number) of each.

    Returns:
        (T,) the template ids, ascending, and their (T, d) unit vectors.
    """
    media, medium_of_row = np.unique(np.stack([template_ids, media_ids], 1), axis=0, return_inverse=True)
    ids, template_of_medium = np.unique(media[:, 0], return_inverse=True)
    return ids, _unit(_means(_means(vectors, medium_of_row), template_of_medium))


def template_similarities(ids: Ints, vectors: Floats, pairs: Ints) -> Floats:
    """(P,) cosines of (P, 2) pairs of template ids, among ``ids`` (T,) ascending with unit ``vectors`` (T, d).

    Raises:
        ValueError: a pair names an unknown template.
    """
    rows = np.minimum(np.searchsorted(ids, pairs), len(ids) - 1)
    if (unknown := ids[rows] != pairs).any():
        raise ValueError(f"there is no template {pairs[unknown][0]}")
    similarities = np.empty(len(pairs))
    # IJB-C has 15 million pairs: their vectors at once would fill 60 GB.
    for block in _blocks(len(pairs), vectors.shape[1]):
        a, b = vectors[rows[block, 0]], vectors[rows[block, 1]]
        similarities[block] = np.einsum("nd,nd->n", a, b, dtype=np.float64)
    return similarities


def flip_average(vectors: NDArray[np.floating], flipped: NDArray[np.floating]) -> Floats:
    """(n, d) unit vectors of the sums of unit embeddings of crops and of their mirror images."""
    return _unit(vectors + flipped)


@dataclass(frozen=True)
class AngleStatistics:
    """Degrees, as Table 3 of J. Deng et al., "ArcFace", CVPR 2019; a centre is the mean of a class's unit embeddings.

    ``w_ec``: mean angle between a class's weight vector and its centre; ``w_inter``: mean over classes of the smallest
    angle between its weight vector and another's; ``intra``: mean angle between an embedding and its class's centre;
    ``inter``: mean over classes of the smallest angle between its centre and another's. The first two are None where
    there are no weight vectors (another benchmark, a metric-learning head).
    """

    w_ec: float | None
    w_inter: float | None
    intra: float
    inter: float


def angle_statistics(
    vectors: NDArray[np.floating], labels: Ints, weights_CD: NDArray[np.floating] | None = None
) -> AngleStatistics:
    """(n, d) embeddings of any length, (n,) labels of two classes or more; where the head's ``weights_CD`` are given,
    labels are rows of them.

    Raises:
        ValueError: an embedding, a centre or a weight vector has no direction.
    """
    embeddings = _unit(vectors)
    present, row = np.unique(labels, return_inverse=True)
    centres = _unit(_means(embeddings, row))
    w_ec = w_inter = None
    if weights_CD is not None:
        weights = _unit(weights_CD)
        w_ec = float(_angles_deg(weights[present], centres).mean())
        w_inter = _mean_smallest_angle_deg(weights)
    return AngleStatistics(
        w_ec, w_inter, float(_angles_deg(embeddings, centres[row]).mean()), _mean_smallest_angle_deg(centres)
    )


def bootstrap(
    statistic: Callable[[Ints], Floats],
    people: Ints | NDArray[np.str_],
    rounds: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[Floats, Floats]:
    """Percentile intervals over people: photos of one person fail together, so whole people are drawn, with
    replacement, and bring their rows along (R. Bolle et al., "Error analysis of pattern recognition systems - the
    subsets bootstrap", CVIU 93(1), 2004).

    A row may belong to two people; it then counts the product of their draws, or one person's draws where both are the
    same (A. Owen and D. Eckles, "Bootstrapping data arrays of arbitrary order", Annals of Applied Statistics 6(3),
    2012; R. Fogliato et al., "Confidence intervals for error rates in 1:1 matching tasks", IJCV 2024). That suits
    everybody compared with everybody. Where few pairs share a person it makes intervals up to sqrt(3) times too wide,
    and a pair had better belong to its first person alone.

    Args:
        statistic: from rows, with repetitions, to a (k,) array of figures.
        people: (n,) or (n, 2) to whom each row belongs.
        rounds: how often everybody is drawn anew.
        seed: of the draws.
        level: share of the rounds that lie within the interval.

    Returns:
        (k,) lower and (k,) upper ends.
    """
    owners = np.unique(people.reshape(len(people), -1), return_inverse=True)[1].reshape(len(people), -1)
    first, second = owners[:, 0], owners[:, -1]
    count, everybody = int(owners.max()) + 1, np.arange(len(people))
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(rounds):
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)
        times = drawn[first] * np.where(first == second, 1, drawn[second])
        results.append(statistic(np.repeat(everybody, times)))
    low, high = np.quantile(results, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _blocks(count: int, width: int) -> Iterator[NDArray[np.intp]]:
    """Rows 0..count-1 of a matrix, as many at a time as memory should hold."""
    height = max(1, CELLS_AT_ONCE // width)
    for start in range(0, count, height):
        yield np.arange(start, min(start + height, count))


def _unit(vectors: NDArray[np.floating]) -> Floats:
    """models.recognition's, in float64: angles near zero need the digits."""
    wide = np.asarray(vectors, np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or (lengths < 1e-12).any():
        raise ValueError("a vector must be finite and must not be zero to have a direction")
    return np.asarray(wide / lengths)


def _means(vectors: NDArray[np.floating], groups: NDArray[np.intp]) -> Floats:
    """(k, d) mean of the rows of each group 0..k-1, none of which is empty."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sums = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64)
    return np.asarray(sums / np.bincount(groups)[:, None])


def _angles_deg(a: Floats, b: Floats) -> Floats:
    """(n,) angles between the rows of two (n, d) arrays of unit vectors."""
    return np.asarray(np.degrees(np.arccos(np.clip(np.einsum("nd,nd->n", a, b), -1, 1))))


def _mean_smallest_angle_deg(vectors: Floats) -> float:
    """Mean over (k, d) unit vectors of the angle to the nearest other one."""
    nearest = np.empty(len(vectors))
    for rows in _blocks(len(vectors), len(vectors)):
        cosines = vectors[rows] @ vectors.T
        cosines[np.arange(len(rows)), rows] = -1
        nearest[rows] = cosines.max(1)
    return float(np.degrees(np.arccos(np.clip(nearest, -1, 1))).mean())

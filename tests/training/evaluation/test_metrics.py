"""Metrics agree with plain loops and with scikit-learn."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from models.risk.search_rates import search_gallery
from training.evaluation import metrics
from training.evaluation.metrics import (
    angle_statistics,
    best_threshold,
    bootstrap,
    build_templates,
    distractor_identification,
    distractor_verification,
    equal_error_rate,
    fnir_curve,
    fold_accuracy,
    measure_open_set,
    roc,
    tar_at_far,
    template_similarities,
)

Pairs = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]


@pytest.fixture
def pairs(rng: np.random.Generator) -> Pairs:
    same = rng.random(2000) < 0.5
    similarities = np.round(rng.normal(np.where(same, 0.4, 0.0), 0.2), 2)  # rounded: ties
    return similarities, same, np.arange(2000) % 10


def test_best_threshold(pairs: Pairs) -> None:
    similarities, same, _ = pairs
    ours = ((similarities >= best_threshold(similarities, same)) == same).mean()
    loop = max(((similarities >= t) == same).mean() for t in [*np.unique(similarities), 9.0])
    assert ours == loop


def test_each_fold_uses_the_threshold_of_the_others(pairs: Pairs) -> None:
    similarities, same, folds = pairs[0][:80], pairs[1][:80], pairs[2][:80]  # so few that thresholds differ
    result = fold_accuracy(similarities, same, folds)
    for fold in range(10):
        threshold = best_threshold(similarities[folds != fold], same[folds != fold])
        right = [(s >= threshold) == k for s, k, f in zip(similarities, same, folds, strict=True) if f == fold]
        assert result.folds[fold] == pytest.approx(np.mean(right))
    assert result.mean == pytest.approx(np.mean(result.folds))
    assert result.std == pytest.approx(np.std(result.folds))
    alone = fold_accuracy(similarities, same, 0 * folds)
    assert alone.folds == (((similarities >= best_threshold(similarities, same)) == same).mean(),)


@pytest.mark.parametrize("far", [0.001, 0.01, 0.1, 1.0])
def test_tar_at_far(pairs: Pairs, far: float) -> None:
    similarities, same, _ = pairs
    best = 0.0
    for t in [*np.unique(similarities), 9.0]:
        if (similarities[~same] >= t).mean() <= far:
            best = max(best, float((similarities[same] >= t).mean()))
    assert tar_at_far(similarities, same, far) == pytest.approx(best)


def test_equal_error_rate(pairs: Pairs) -> None:
    similarities, same, _ = pairs
    rates = [((similarities[~same] >= t).mean(), (similarities[same] < t).mean()) for t in np.unique(similarities)]
    nearest = min(rates, key=lambda r: abs(r[0] - r[1]))
    assert min(nearest) - 0.02 <= equal_error_rate(similarities, same) <= max(nearest) + 0.02
    assert equal_error_rate(np.array([0.0, 0.1, 0.8, 0.9]), np.array([False, False, True, True])) == pytest.approx(
        0, abs=1e-9
    )


def whole_numbers(rng: np.random.Generator, n: int, d: int) -> NDArray[np.float64]:
    """Vectors with exact inner products, many of them equal: ties are ties whatever the order of summation."""
    return rng.integers(-2, 3, (n, d)).astype(np.float64)


def rounded_units(rng: np.random.Generator, n: int, d: int = 3) -> NDArray[np.float64]:
    """Few distinct vectors: many equal similarities."""
    v = rng.integers(-1, 2, (n, d)).astype(np.float64)
    v[(v == 0).all(1), 0] = 1
    return np.asarray(v / np.linalg.norm(v, axis=1, keepdims=True))


def test_roc_equals_scikit_learn(pairs: Pairs) -> None:
    similarities, same, _ = pairs
    ours = roc(similarities, same)
    fmr, tar, thresholds = roc_curve(same, similarities, drop_intermediate=False)
    assert np.array_equal(ours.thresholds, thresholds)
    assert np.array_equal(ours.fmr, fmr)
    assert np.array_equal(ours.tar, tar)
    assert ours.auc == roc_auc_score(same, similarities)
    i = len(thresholds) // 2
    assert ours.fnmr[i] == pytest.approx((similarities[same] < thresholds[i]).mean())


def test_the_open_set_by_its_curve_and_at_rates(rng: np.random.Generator) -> None:
    gallery, strangers = rounded_units(rng, 10, 6), rounded_units(rng, 50, 6)
    mates = rng.integers(10, size=80)
    mated = gallery[mates] + 0.6 * rounded_units(rng, 80, 6)
    mated /= np.linalg.norm(mated, axis=1, keepdims=True)
    hits, alarms = search_gallery(gallery, mated, mates, strangers)
    curve = fnir_curve(hits, alarms)
    scores_MG, scores_SG = mated @ gallery.T, strangers @ gallery.T
    first = [bool(np.argmax(row) == m) for row, m in zip(scores_MG, mates, strict=True)]
    reached = {float(row.max()) for row, right in zip(scores_MG, first, strict=True) if right}
    reached |= {float(row.max()) for row in scores_SG}
    assert curve.thresholds.tolist() == [math.inf, *sorted(reached, reverse=True)]
    for threshold, fpir, fnir in zip(curve.thresholds, curve.fmr, curve.fnmr, strict=True):
        assert fpir == sum(max(row) >= threshold for row in scores_SG) / 50
        missed = sum(not right or max(row) < threshold for row, right in zip(scores_MG, first, strict=True))
        assert fnir == pytest.approx(missed / 80, abs=1e-15)
    assert 0 < curve.fnmr[-1] < 1, "some mates are never the best candidate"
    plain = measure_open_set(hits, alarms, (0.1, 0.02))
    assert plain.rank1 == pytest.approx(np.mean(first))
    for rate, fnir in plain.fnir.items():
        assert fnir == min(curve.fnmr[curve.fmr <= rate])
        assert fnir == pytest.approx(float(np.mean(hits < plain.thresholds[rate])))


def test_identification_among_distractors(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BLOCK_CELLS", 150)  # three probes at a time
    probes, distractors = whole_numbers(rng, 14, 6), whole_numbers(rng, 50, 6)
    people = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4, 0, 1])
    ours = distractor_identification(probes, people, distractors, (2, 5, 50))
    for i, size in enumerate((2, 5, 50)):
        outcomes = []
        for hidden, probe in permutations(range(14), 2):
            if people[hidden] == people[probe]:
                mate = float(probes[hidden] @ probes[probe])
                outcomes.append(all(float(d @ probes[probe]) < mate for d in distractors[:size]))
        assert ours[i] == np.mean(outcomes)
    assert len(np.unique(ours)) == 3
    with pytest.raises(ValueError, match="two photos"):
        distractor_identification(probes[:2], np.array([0, 1]), distractors, (5,))


def test_verification_against_distractors(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BLOCK_CELLS", 150)
    probes, distractors = whole_numbers(rng, 14, 5), whole_numbers(rng, 50, 5)
    people = np.arange(14) // 3
    mated = [probes[i] @ probes[j] for i, j in combinations(range(14), 2) if people[i] == people[j]]
    impostors = [p @ d for p in probes for d in distractors]
    similarities = np.array(mated + impostors)
    same = np.arange(len(similarities)) < len(mated)
    for far, tar in zip(
        (0.3, 0.05, 0.001), distractor_verification(probes, people, distractors, (0.3, 0.05, 0.001)), strict=True
    ):
        assert tar == tar_at_far(similarities, same, far)


def test_templates_weight_media_instead_of_frames(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = rng.normal(size=(40, 8)).astype(np.float32)
    template_ids, media_ids = rng.choice([3, 7, 11, 90], 40), rng.integers(5, size=40)
    ids, ours = build_templates(vectors, template_ids, media_ids)
    assert ids.tolist() == [3, 7, 11, 90]
    for template, vector in zip(ids, ours, strict=True):
        media = np.unique(media_ids[template_ids == template])
        means = [vectors[(template_ids == template) & (media_ids == medium)].mean(0) for medium in media]
        mean = np.mean(means, 0)
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)

    monkeypatch.setattr(metrics, "MAX_BLOCK_CELLS", 16)  # two pairs at a time
    listed = np.array([[3, 90], [7, 7], [90, 11], [11, 3], [3, 7]])
    of = dict(zip(ids.tolist(), ours, strict=True))
    assert template_similarities(ids, ours, listed) == pytest.approx([float(of[a] @ of[b]) for a, b in listed.tolist()])
    with pytest.raises(ValueError, match="unknown template 8"):
        template_similarities(ids, ours, np.array([[3, 8]]))


def test_angle_statistics(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BLOCK_CELLS", 14)  # two or three rows at a time
    labels = np.array([0, 2, 2, 5, 5, 5, 1, 0, 4, 4])  # no row has label 3
    weights = rng.normal(size=(6, 4))
    vectors = weights[labels] + 0.5 * rng.normal(size=(10, 4))

    def angle(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        return math.degrees(math.acos(min(1.0, sum(a * b) / math.hypot(*a) / math.hypot(*b))))

    def nearest(vectors: dict[int, NDArray[np.float64]]) -> float:
        return float(np.mean([min(angle(v, vectors[k]) for k in vectors if k != j) for j, v in vectors.items()]))

    samples = list(zip(vectors, labels.tolist(), strict=True))
    centers = {j: np.mean([v / math.hypot(*v) for v, k in samples if k == j], 0) for j in sorted(set(labels.tolist()))}
    ours = angle_statistics(vectors, labels, weights)
    assert ours.w_ec == pytest.approx(np.mean([angle(weights[j], c) for j, c in centers.items()]))
    assert ours.w_inter == pytest.approx(nearest(dict(enumerate(weights))))
    assert ours.w_intra == pytest.approx(np.mean([angle(v, weights[k]) for v, k in samples]))
    assert ours.intra == pytest.approx(np.mean([angle(v, centers[k]) for v, k in samples]))
    assert ours.inter == pytest.approx(nearest(centers))
    without = angle_statistics(vectors, labels)
    assert (without.w_ec, without.w_inter, without.w_intra) == (None, None, None)
    assert (without.intra, without.inter) == (ours.intra, ours.inter)
    with pytest.raises(ValueError, match="finite and not zero"):
        angle_statistics(np.zeros((2, 4)), np.array([0, 1]))


def test_the_bootstrap_draws_whole_people_with_replacement() -> None:
    seen: list[dict[int, int]] = []

    def count(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        seen.append({row: rows.tolist().count(row) for row in range(6)})
        return np.array([len(rows)])

    # Rows 0 and 1 are Ann's, 2 is Bob's, 3 is Cid's; 4 compares Ann with Bob, 5 Bob with Cid.
    names = [("Ann", "Ann"), ("Ann", "Ann"), ("Bob", "Bob"), ("Cid", "Cid"), ("Ann", "Bob"), ("Bob", "Cid")]
    ends = bootstrap(count, np.array(names), rounds=200)
    for times in seen:
        assert times[0] == times[1]
        assert times[0] + times[2] + times[3] == 3
        assert times[4] == times[0] * times[2]
        assert times[5] == times[2] * times[3]
    assert {times[0] for times in seen} == {0, 1, 2, 3}
    assert len(seen) == 200
    sizes = [sum(times.values()) for times in seen]
    assert [end.item() for end in ends] == [np.quantile(sizes, share) for share in (0.025, 0.975)]

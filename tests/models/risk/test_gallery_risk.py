"""Gallery risk combines impostor pairs of gallery and pack, robust against a few duplicates; odds of pairs are as
frequent as they say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.risk.calibration import (
    BIN_COUNT,
    EDGES,
    Calibration,
    Floats,
    fmr_for_fpir,
    fpir_from_fmr,
    histogram,
)
from models.risk.gallery_risk import GalleryRisk
from models.risk.impostor_evidence import RIVAL_WEIGHT, GenuineProbes, ImpostorEvidence
from models.risk.miss_rate import is_one_sitting
from models.risk.pair_odds import DUPLICATE_SHARE, MAX_ODDS, PairOdds
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from training.export.calibrate import calibrate


def people(
    rng: np.random.Generator, count: int, images: int = 1, dimension: int = 64, common: float | Floats = 1.0
) -> Float:
    """Return (count, images, d) unit vectors; ``common`` is their shared component."""
    centers = rng.normal(size=(count, 1, dimension)) + common
    vectors = centers + 0.4 * rng.normal(size=(count, images, dimension))
    return l2_normalize(vectors.reshape(-1, dimension)).reshape(count, images, dimension)


def evidence_of(vectors: Float) -> ImpostorEvidence:
    """Compute the evidence with a loop over subjects of one template each."""
    n = len(vectors)
    pairs, nearest = np.zeros(BIN_COUNT, np.int64), np.full((n, 2), -1.0)
    for i in range(n):
        others = np.delete(vectors @ vectors[i], i)
        pairs += histogram(others)
        nearest[i, : n - 1] = np.sort(others)[::-1][:2]
    unmated = GenuineProbes(np.full(n, np.nan), np.full(n, np.nan), np.ones(n, np.int64))
    return ImpostorEvidence.of(pairs, nearest, n, n, unmated)


def stranger_scores(strangers: Float, enrolled: Float, evidence: ImpostorEvidence) -> Floats:
    """Return the (q, n) rival-adjusted scores of strangers, best first."""
    assert evidence.rival is not None
    scores = np.sort(np.asarray(strangers @ enrolled.T, np.float64), axis=1)[:, ::-1]
    others = np.broadcast_to(scores[:, :1], scores.shape).copy()
    others[:, 0] = scores[:, 1]
    return np.asarray(np.minimum(1.0, scores - RIVAL_WEIGHT * (others - evidence.rival)))


@pytest.fixture(scope="module")
def pack() -> Calibration:
    rng = np.random.default_rng(1)
    vectors = people(rng, 1500, 2)
    return Calibration.from_document(
        calibrate(vectors.reshape(-1, 64), [str(i // 2) for i in range(3000)], "simulated")
    )


@pytest.mark.parametrize(("subjects", "copies"), [(2, 1), (3, 1), (12, 1), (20, 2)])
def test_small_galleries_and_copies_use_the_curve_of_the_pack(pack: Calibration, subjects: int, copies: int) -> None:
    faces = people(np.random.default_rng(2), subjects)[:, 0].repeat(copies, axis=0)
    gallery = GalleryRisk(evidence_of(faces), pack)
    assert gallery.curve.threshold_at_fmr(1e-4).value == pytest.approx(
        pack.curve.threshold_at_fmr(1e-4).value, abs=0.12
    )


@pytest.mark.parametrize("common", [0.8, 1.0, 1.25])
def test_other_photos_than_the_packs_shift_the_curve(pack: Calibration, common: float) -> None:
    """The measured FPIR matches the target for non-mated probes like the gallery's photos."""
    rng = np.random.default_rng(3)
    ratios: list[float] = []
    for _ in range(8):
        enrolled, strangers = people(rng, 200, common=common)[:, 0], people(rng, 4000, common=common)[:, 0]
        evidence = evidence_of(enrolled)
        best = stranger_scores(strangers, enrolled, evidence)[:, 0]
        gallery = GalleryRisk(evidence, pack)
        threshold = gallery.curve.threshold_at_fmr(fmr_for_fpir(0.01, 200)).value
        ratios.append(float((best >= threshold).mean()) / 0.01)
    assert 0.25 < np.median(ratios) < 1.5
    if common > 1.2:  # the curve of the pack alone misses the target
        alone = pack.curve.threshold_at_fmr(fmr_for_fpir(0.01, 200)).value
        assert ((strangers @ enrolled.T).max(1) >= alone).mean() > 0.03


def test_a_gallery_without_a_pack_uses_its_own_curve() -> None:
    rng = np.random.default_rng(4)
    enrolled, strangers = people(rng, 300)[:, 0], people(rng, 4000)[:, 0]
    gallery = GalleryRisk(evidence_of(enrolled), None)
    assert gallery.gallery_share == 1
    threshold = gallery.curve.threshold_at_fmr(fmr_for_fpir(0.05, 300)).value
    assert 0.025 < (stranger_scores(strangers, enrolled, gallery.evidence)[:, 0] >= threshold).mean() < 0.1


def test_a_few_duplicates_do_not_change_the_threshold(pack: Calibration) -> None:
    rng = np.random.default_rng(5)
    faces = people(rng, 300, 2)
    clean = GalleryRisk(evidence_of(faces[:, 0]), pack)
    planted = GalleryRisk(evidence_of(np.concatenate([faces[:, 0], faces[:15, 1]])), pack)
    assert clean.duplicate_pairs < 2
    assert planted.duplicate_pairs == pytest.approx(15, abs=3)
    wanted = fmr_for_fpir(0.01, 300)
    before, after = clean.curve.threshold_at_fmr(wanted).value, planted.curve.threshold_at_fmr(wanted).value
    assert after == pytest.approx(before, abs=0.015)
    # One of 15, by photos that are less alike: the largest scores would be a bad first guess of strangers.
    few, wanted_of_few = faces[:15, 0], fmr_for_fpir(0.01, 15)
    unlike = l2_normalize(few[:1] + 0.1 * np.random.default_rng(6).normal(size=(1, 64)))
    of_few, of_more = (
        GalleryRisk(evidence_of(some), pack).curve.threshold_at_fmr(wanted_of_few).value
        for some in (few, np.concatenate([few, unlike]))
    )
    assert of_more == pytest.approx(of_few, abs=0.015)
    # 15 duplicates in 45,000 pairs would be ten times the target rate.
    naive = np.sort((faces[:, 0] @ np.concatenate([faces[:, 0], faces[:15, 1]]).T).ravel())
    assert naive[-int(len(naive) * wanted) - 301] > before + 0.05


def test_intervals_cover_the_rate_of_new_probes(pack: Calibration) -> None:
    """Nominal 95 %. In 280 simulated galleries of 30 to 200 people, at FMR 2 % to 0.02 %, it was 90 to 100 %."""
    rng = np.random.default_rng(6)
    held = []
    for _ in range(40):
        enrolled, strangers = people(rng, 60, common=1.1)[:, 0], people(rng, 3000, common=1.1)[:, 0]
        gallery = GalleryRisk(evidence_of(enrolled), pack)
        scores = stranger_scores(strangers, enrolled, gallery.evidence).ravel()
        for rate in (0.02, 0.002):
            found = gallery.curve.fmr(gallery.curve.threshold_at_fmr(rate).value)
            truth = float((scores >= gallery.curve.threshold_at_fmr(rate).value).mean())
            held.append(found.low <= truth <= found.high)
    assert np.mean(held) >= 0.88


@settings(max_examples=25)
@given(st.integers(2, 60), st.integers(0, 10**6), st.floats(1e-7, 0.5))
def test_rates_fall_with_the_threshold_and_rise_with_the_gallery(
    pack: Calibration, subjects: int, seed: int, rate: float
) -> None:
    gallery = GalleryRisk(evidence_of(people(np.random.default_rng(seed), subjects, dimension=64)[:, 0]), pack)
    rates = [gallery.curve.fmr(t) for t in np.linspace(-1, 1, 401)]
    assert all(r.value > 0 for r in rates), "never 0 below a similarity of 1"
    for a, b in itertools.pairwise(rates):
        assert (a.value, a.low, a.high) >= (b.value, b.low, b.high)
    assert all(r.low <= r.value * (1 + 1e-9) and r.value <= r.high * (1 + 1e-9) for r in rates)
    threshold = gallery.curve.threshold_at_fmr(rate)
    assert gallery.curve.fmr(threshold.value).value <= rate * (1 + 1e-9)
    assert threshold.low <= threshold.value <= threshold.high
    fpirs = [fpir_from_fmr(gallery.curve.fmr(0.3).value, n) for n in (1, 10, 1000)]
    assert fpirs == sorted(fpirs)


def test_nearly_orthogonal_vectors_keep_a_high_threshold(pack: Calibration) -> None:
    """Similarities of orthogonal vectors have no spread, unlike those of faces."""
    narrow = GalleryRisk(evidence_of(np.eye(60, 64, dtype=np.float32)), pack)
    threshold = narrow.curve.threshold_at_fmr(fmr_for_fpir(0.01, 60))
    assert threshold.value > 0.1  # ten standard deviations above the mean of 0
    assert threshold.low <= threshold.value <= threshold.high
    assert all(np.isfinite([r.value, r.low, r.high]).all() for r in map(narrow.curve.fmr, np.linspace(-1, 1, 101)))


def test_people_unlike_the_calibration_are_noticed(pack: Calibration) -> None:
    usual, unlike = (people(np.random.default_rng(9), 200, common=common)[:, 0] for common in (1.0, 1.5))
    assert not GalleryRisk(evidence_of(usual), pack).is_unlike_pack()
    assert GalleryRisk(evidence_of(unlike), pack).is_unlike_pack()
    assert not GalleryRisk(evidence_of(unlike), None).is_unlike_pack()
    assert GalleryRisk(evidence_of(unlike), None).fmr_over_pack() is None
    for faces in (usual, unlike):
        ratio = GalleryRisk(evidence_of(faces), pack).fmr_over_pack()
        pairs = (faces @ faces.T)[np.triu_indices(200, 1)]
        counted = float((pairs >= pack.curve.threshold_at_fmr(0.001).value).mean()) / 0.001
        assert ratio is not None
        assert ratio.value == pytest.approx(counted, rel=0.4)
        assert ratio.low < ratio.value < ratio.high


@pytest.mark.parametrize(("single", "one_sitting"), [(0.99, True), (0.8, False)])
def test_photos_of_one_sitting_are_noticed(pack: Calibration, single: float, one_sitting: bool) -> None:
    similarities = np.clip(np.random.default_rng(10).normal(0.5, 0.05, (40, 39)), -1, 1)
    alike = np.full(40, single)
    genuine = GenuineProbes(alike, alike, np.full(40, 2))
    nearest = np.sort(similarities, axis=1)[:, :-3:-1]
    evidence = ImpostorEvidence.of(histogram(similarities), nearest, 40, 80, genuine)
    assert is_one_sitting(evidence, pack) == one_sitting
    assert not is_one_sitting(evidence, None)


SUBJECTS = 200


def gallery() -> Float:
    """Return one vector of each subject; similarities are as in the calibration."""
    return people(np.random.default_rng(3), SUBJECTS, dimension=100, common=0)[:, 0]


@pytest.fixture(scope="module")
def odds(calibration: Calibration) -> PairOdds:
    return PairOdds.of(evidence_of(gallery()), calibration, np.empty(0))


def test_odds_grow_with_the_similarity_and_the_recall_is_the_share_of_pairs_with_them(
    odds: PairOdds, calibration: Calibration
) -> None:
    values = [odds.odds(t) for t in EDGES]
    assert values == sorted(values)
    assert 1 / MAX_ODDS <= values[0] < 1 < values[-1] <= MAX_ODDS
    threshold, found = EDGES[np.searchsorted(values, 1)], odds.recall(1)
    assert found.value == pytest.approx(1 - calibration.fnmr(threshold), abs=0.01)
    assert found.low < found.value < found.high
    assert odds.recall(100).value < found.value
    likely = PairOdds.of(evidence_of(gallery()), calibration, np.full(100, 0.9)).recall(1)
    assert likely.value > found.value
    assert likely.high - likely.low < found.high - found.low


def test_as_many_pairs_as_the_odds_say_are_one_person(odds: PairOdds) -> None:
    """Simulate pairs of one person and of two in the proportion of the prior."""
    rng = np.random.default_rng(5)
    same = rng.normal(0.6, 0.15, 100_000)
    scale = people(rng, 2000, dimension=100, common=0)[:, 0]
    different = (scale[:1000] @ scale[1000:].T).ravel()
    prior = 2 * DUPLICATE_SHARE / (SUBJECTS - 1)
    low, high = ((next(t for t in EDGES if odds.odds(t) >= bound)) for bound in (1 / 20, 1 / 2))
    one = ((same >= low) & (same < high)).mean() * prior
    two = ((different >= low) & (different < high)).mean()
    assert 1 / 20 / 3 < one / two < 1 / 2 * 3

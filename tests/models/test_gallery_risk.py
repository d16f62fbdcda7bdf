"""A gallery's own strangers and the pack's give the gallery's error rates, and a few duplicates do not move them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.gallery_risk import GalleryRisk, ImpostorEvidence
from models.network import Float
from models.recognition import unit
from models.risk import BIN_COUNT, EDGES, Calibration, above, bins, fmr_for_fpir, fpir_from_fmr
from training.calibrate import calibrate


def people(rng: np.random.Generator, count: int, images: int = 1, dimension: int = 64, common: float = 1.0) -> Float:
    """(count, images, d) unit vectors; ``common`` is what all share."""
    centres = rng.normal(size=(count, 1, dimension)) + common
    return unit((centres + 0.4 * rng.normal(size=(count, images, dimension))).reshape(-1, dimension)).reshape(
        count, images, dimension
    )


def evidence_of(vectors: Float) -> ImpostorEvidence:
    """By a loop over subjects, one template each."""
    n = len(vectors)
    counts, best = np.zeros(BIN_COUNT, np.int64), np.zeros(BIN_COUNT, np.int64)
    squares = np.zeros(len(EDGES))
    for i in range(n):
        rows = bins(np.delete(vectors @ vectors[i], i))
        own = np.bincount(rows, minlength=BIN_COUNT)
        counts += own
        squares += above(own) ** 2
        best[rows.max()] += 1
    return ImpostorEvidence(counts, squares, best, n, n)


@pytest.fixture(scope="module")
def pack() -> Calibration:
    rng = np.random.default_rng(1)
    vectors = people(rng, 1500, 2)
    return Calibration.from_document(
        calibrate(vectors.reshape(-1, 64), [str(i // 2) for i in range(3000)], "simulated")
    )


@pytest.mark.parametrize("subjects", [2, 3, 12])
def test_the_smallest_galleries_rest_on_the_pack(pack: Calibration, subjects: int) -> None:
    gallery = GalleryRisk(evidence_of(people(np.random.default_rng(2), subjects)[:, 0]), pack)
    assert gallery.gallery_share < 0.01
    assert gallery.threshold_at_fmr(1e-4).similarity == pytest.approx(pack.threshold_at_fmr(1e-4).similarity, abs=0.12)


@pytest.mark.parametrize("common", [0.8, 1.0, 1.25])
def test_a_gallery_unlike_the_packs_photos_moves_the_curve(pack: Calibration, common: float) -> None:
    """The asked risk is kept for strangers of the gallery's kind, whatever the pack was calibrated on."""
    rng = np.random.default_rng(3)
    ratios: list[float] = []
    for _ in range(5):
        enrolled, strangers = people(rng, 200, common=common)[:, 0], people(rng, 4000, common=common)[:, 0]
        best = (strangers @ enrolled.T).max(1)
        gallery = GalleryRisk(evidence_of(enrolled), pack)
        threshold = gallery.threshold_at_fmr(fmr_for_fpir(0.01, 200)).similarity
        ratios.append(float((best >= threshold).mean()) / 0.01)
    assert 0.5 < np.median(ratios) < 2
    if common > 1.2:  # the pack alone would not keep it
        alone = pack.threshold_at_fmr(fmr_for_fpir(0.01, 200)).similarity
        assert (best >= alone).mean() > 0.03


def test_without_a_pack_the_gallery_stands_alone() -> None:
    rng = np.random.default_rng(4)
    enrolled, strangers = people(rng, 300)[:, 0], people(rng, 4000)[:, 0]
    gallery = GalleryRisk(evidence_of(enrolled), None)
    assert gallery.gallery_share == 1
    threshold = gallery.threshold_at_fmr(fmr_for_fpir(0.05, 300)).similarity
    # Its tail may not end, so that it errs on the side of caution.
    assert 0.01 < ((strangers @ enrolled.T).max(1) >= threshold).mean() < 0.1


def test_a_handful_of_duplicates_does_not_move_the_threshold(pack: Calibration) -> None:
    rng = np.random.default_rng(5)
    faces = people(rng, 300, 2)
    clean = GalleryRisk(evidence_of(faces[:, 0]), pack)
    planted = GalleryRisk(evidence_of(np.concatenate([faces[:, 0], faces[:15, 1]])), pack)
    assert clean.duplicate_pairs < 2
    assert planted.duplicate_pairs == pytest.approx(15, abs=3)
    wanted = fmr_for_fpir(0.01, 300)
    before, after = clean.threshold_at_fmr(wanted).similarity, planted.threshold_at_fmr(wanted).similarity
    assert after == pytest.approx(before, abs=0.015)
    # Left in the counts, they would have: 15 pairs of 45,000 are ten times the rate that is asked for.
    naive = np.sort((faces[:, 0] @ np.concatenate([faces[:, 0], faces[:15, 1]]).T).ravel())
    assert naive[-int(len(naive) * wanted) - 301] > before + 0.05


def test_intervals_hold_the_truth_as_often_as_they_say(pack: Calibration) -> None:
    """The truth: what many strangers, whom the evidence does not know, do in this gallery."""
    rng = np.random.default_rng(6)
    held = []
    for _ in range(40):
        enrolled, strangers = people(rng, 60, common=1.1)[:, 0], people(rng, 3000, common=1.1)[:, 0]
        gallery = GalleryRisk(evidence_of(enrolled), pack)
        scores = (strangers @ enrolled.T).ravel()
        for rate in (0.02, 0.002):
            found = gallery.fmr(gallery.threshold_at_fmr(rate).similarity)
            truth = float((scores >= gallery.threshold_at_fmr(rate).similarity).mean())
            held.append(found.low <= truth <= found.high)
    assert np.mean(held) >= 0.88


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 60), st.integers(0, 10**6), st.floats(1e-7, 0.5))
def test_rates_fall_with_the_threshold_and_rise_with_the_gallery(
    pack: Calibration, subjects: int, seed: int, rate: float
) -> None:
    gallery = GalleryRisk(evidence_of(people(np.random.default_rng(seed), subjects, dimension=64)[:, 0]), pack)
    rates = [gallery.fmr(t) for t in np.linspace(-1, 1, 401)]
    for a, b in itertools.pairwise(rates):
        assert (a.value, a.low, a.high) >= (b.value, b.low, b.high)
    assert all(r.low <= r.value * (1 + 1e-9) and r.value <= r.high * (1 + 1e-9) for r in rates)
    threshold = gallery.threshold_at_fmr(rate)
    assert gallery.fmr(threshold.similarity).value <= rate * (1 + 1e-9)
    assert threshold.low <= threshold.similarity <= threshold.high
    fpirs = [fpir_from_fmr(gallery.fmr(0.3).value, n) for n in (1, 10, 1000)]
    assert fpirs == sorted(fpirs)


def test_vectors_that_are_no_faces_do_not_open_the_gate(pack: Calibration) -> None:
    """Orthogonal vectors hardly differ from each other, which no faces do."""
    narrow = GalleryRisk(evidence_of(np.eye(60, 64, dtype=np.float32)), pack)
    threshold = narrow.threshold_at_fmr(fmr_for_fpir(0.01, 60))
    assert threshold.similarity > 0.1  # ten deviations of such vectors above their mean of 0
    assert threshold.low <= threshold.similarity <= threshold.high
    assert all(np.isfinite([r.value, r.low, r.high]).all() for r in map(narrow.fmr, np.linspace(-1, 1, 101)))


def test_two_subjects_who_are_one_person(pack: Calibration) -> None:
    twice = people(np.random.default_rng(8), 1, 2, common=1.0)[0]
    twin = GalleryRisk(evidence_of(unit(twice + 3 * twice[:1])), pack)
    assert twin.threshold_at_fmr(1e-3).similarity >= pack.threshold_at_fmr(1e-3).similarity - 0.1


def test_evidence_returns_as_it_was_stored() -> None:
    evidence = evidence_of(people(np.random.default_rng(7), 20)[:, 0])
    read = ImpostorEvidence.from_document(evidence.document())
    assert np.array_equal(read.counts, evidence.counts)
    assert np.array_equal(read.squares, evidence.squares)
    assert (read.probes, read.subjects, read.pairs) == (20, 20, 190)

"""Grouping of unlabeled faces: the risk, the merges, the constraints and the ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.albums import AlbumRisk, Neighbors, group_faces, mean_similarities
from models.risk.calibration import UNREACHABLE_SIMILARITY, Calibration, Floats, Ints, fit_tail, histogram
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.risk.albums import nearest

DIMENSION = 128
SPREAD = 0.7
ALONE = 2.0
"""Similarity that no two faces reach: no two faces of a photo are one picture."""


def people(count: int, photos_of_each: int, seed: int, spread: float = SPREAD) -> tuple[Float, Ints]:
    """Return unit vectors of simulated faces, and their people, in a random order."""
    rng = np.random.default_rng(seed)
    owners = rng.permutation(np.repeat(np.arange(count), photos_of_each))
    centers = rng.standard_normal((count, DIMENSION))
    return l2_normalize(centers[owners] + spread * rng.standard_normal((len(owners), DIMENSION))), owners


@pytest.fixture(scope="module")
def pack() -> Calibration:
    """Calibration of the simulated recognizer, from other people."""
    vectors, owners = people(400, 3, seed=99)
    first, second = np.triu_indices(len(owners), 1)
    similarities = (vectors @ vectors.T)[first, second].astype(np.float64)
    same = owners[first] == owners[second]
    impostor = similarities[~same]
    start = float(np.quantile(impostor, 0.99))
    above = impostor[impostor > start]
    tail = fit_tail(above - start, np.ones(len(above)), start, 0.01)
    return Calibration(histogram(impostor), histogram(similarities[same]), tail)


def wrong_share(groups: list[list[int]], owners: Ints) -> tuple[float, float]:
    """Return the share of grouped pairs that are two people, and the share of pairs of one person that is found."""
    grouped = sum(len(rows) * (len(rows) - 1) // 2 for rows in groups)
    right = sum(int((counts * (counts - 1) // 2).sum()) for counts in (np.bincount(owners[rows]) for rows in groups))
    counts = np.bincount(owners)
    return 1 - right / max(1, grouped), right / int((counts * (counts - 1) // 2).sum())


def grouped(vectors: Float, photos: Ints, pack: Calibration, risk: float) -> list[list[int]]:
    near = nearest(vectors)
    album = AlbumRisk.of(vectors, photos, near, pack)
    return group_faces(vectors, photos, near, album.threshold(risk), album.same_picture)


@pytest.mark.parametrize("risk", [0.1, 0.01])
def test_wrong_pairs_are_about_as_rare_as_asked(pack: Calibration, risk: float) -> None:
    wrong, found = zip(
        *(
            wrong_share(grouped(vectors, np.arange(len(owners)), pack, risk), owners)
            for vectors, owners in (people(150, 4, seed, spread=0.9) for seed in range(4))
        ),
        strict=True,
    )
    assert np.mean(wrong) <= 1.5 * risk
    assert np.mean(found) > 0.5


@pytest.mark.parametrize("people_count", [30, 3])
def test_the_threshold_is_for_the_share_of_pairs_of_two_people(pack: Calibration, people_count: int) -> None:
    vectors, owners = people(people_count, 20, seed=4)
    album = AlbumRisk.of(vectors, np.arange(len(owners)), nearest(vectors), pack)
    same = people_count * (20 * 19 // 2)
    assert album.pairs == len(owners) * (len(owners) - 1) // 2
    assert album.repeated_share == pytest.approx(same / album.pairs, rel=0.1)
    for risk in (0.1, 0.01, 1e-3):  # about as many pairs reach the threshold as show one person
        fmr = album.curve.fmr(album.threshold(risk)).value
        assert fmr == pytest.approx(risk * same / (album.pairs - same), rel=0.2)


def test_faces_of_one_photo_are_known_strangers_and_never_grouped(pack: Calibration) -> None:
    base, _ = people(60, 1, seed=6)
    twins = l2_normalize(base[:20] + 0.05 * np.random.default_rng(7).standard_normal((20, DIMENSION)))
    vectors = np.concatenate([base, twins])
    photos = np.concatenate([np.arange(60), np.arange(20)])
    near = nearest(vectors)
    apart = group_faces(vectors, photos, near, 0.5, ALONE)
    assert [len(rows) for rows in apart] == [1] * 80
    assert sum(len(rows) == 2 for rows in group_faces(vectors, np.arange(80), near, 0.5, ALONE)) == 20
    pairs = np.concatenate([base, base[::-1]])
    album = AlbumRisk.of(pairs, np.tile(np.arange(60), 2), nearest(pairs), pack)
    assert album.pairs == 120 * 119 // 2 - 60


def test_a_group_never_gets_two_faces_of_a_photo_through_a_third_face() -> None:
    """The face between two others of one photo goes to the more similar one."""
    angles = np.radians([0, 25, 60])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    photos = np.array([0, 1, 0])
    near = Neighbors(np.array([[1, 2], [0, 2], [1, 0]]), np.zeros((3, 2), np.float32) + 0.9)
    assert group_faces(vectors, photos, near, 0.5, ALONE) == [[0, 1], [2]]
    assert group_faces(vectors, np.arange(3), near, 0.5, ALONE) == [[0, 1, 2]]


def test_a_mirror_image_in_a_photo_is_the_same_person(pack: Calibration) -> None:
    base, _ = people(50, 1, seed=8)
    vectors = np.concatenate([base, base[:1]])
    photos = np.array([*range(50), 0])
    groups = grouped(vectors, photos, pack, 0.01)
    assert [0, 50] in groups


def test_groups_follow_the_definition_of_the_linkage() -> None:
    """Compare with merging that knows all pairs and computes each similarity from all single ones."""
    vectors, _ = people(12, 4, seed=10, spread=0.9)
    threshold = 0.45
    single = (vectors @ vectors.T).astype(np.float64)

    def similarity(a: list[int], b: list[int]) -> float:
        average = single[np.ix_(a, b)].mean()
        lengths = [single[np.ix_(rows, rows)].sum() ** 0.5 for rows in (a, b)]
        centroid = average * len(a) * len(b) / lengths[0] / lengths[1]
        return float((average * centroid) ** 0.5) if average > 0 else -1.0

    groups = [[row] for row in range(len(vectors))]
    while True:
        best, a, b = max((similarity(x, y), i, j) for i, x in enumerate(groups) for j, y in enumerate(groups) if i < j)
        if best < threshold:
            break
        groups[a] = sorted(groups[a] + groups.pop(b))
    found = group_faces(vectors, np.arange(len(vectors)), nearest(vectors, 47), threshold, ALONE)
    assert found == sorted(groups)
    assert any(len(rows) > 2 for rows in found)


def test_a_face_is_certain_by_its_mean_similarity_to_the_others(pack: Calibration) -> None:
    vectors, owners = people(50, 4, seed=11)
    album = AlbumRisk.of(vectors, np.arange(len(owners)), nearest(vectors), pack)
    certainties = [album.certainty(similarity) for similarity in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert certainties == sorted(certainties)
    assert certainties[0] < 0.01
    assert certainties[-1] > 0.99
    rows = np.flatnonzero(owners == 3).tolist()
    others = [np.mean([vectors[row] @ vectors[other] for other in rows if other != row]) for row in rows]
    assert mean_similarities(vectors, rows) == pytest.approx(others, abs=1e-6)
    assert mean_similarities(vectors, rows[:1]) == pytest.approx([0], abs=1e-6)


def test_tiny_albums_have_a_risk() -> None:
    calibration = Calibration.from_document(load_pack(BUNDLED_PACK).calibration or {})
    vectors, _ = people(2, 1, seed=12)
    album = AlbumRisk.of(vectors, np.arange(2), nearest(vectors), calibration)
    assert album.threshold(0.01) == UNREACHABLE_SIMILARITY or album.threshold(0.01) <= float(vectors[0] @ vectors[1])
    twice = np.concatenate([vectors, vectors])
    album = AlbumRisk.of(twice, np.arange(4), nearest(twice), calibration)
    groups = group_faces(twice, np.arange(4), nearest(twice), album.threshold(0.01), album.same_picture)
    assert groups == [[0, 2], [1, 3]]
    in_one_photo = AlbumRisk.of(vectors, np.zeros(2, np.int64), nearest(vectors), calibration)
    assert in_one_photo.pairs == 0
    assert in_one_photo.threshold(0.01) == UNREACHABLE_SIMILARITY


@given(st.integers(1, 8), st.integers(0, 10))
def test_neighbors_are_the_most_similar_others(count: int, copies: int) -> None:
    vectors, _ = people(6, 2, seed=13)
    vectors = np.concatenate([vectors, np.repeat(vectors[:1], copies, 0)])
    near = nearest(vectors, count)
    similarities: Floats = (vectors @ vectors.T).astype(np.float64)
    np.fill_diagonal(similarities, -2)
    best = -np.sort(-similarities, 1)[:, :count]
    assert near.similarities == pytest.approx(best, abs=1e-5)
    assert not (near.rows == np.arange(len(vectors))[:, None]).any()

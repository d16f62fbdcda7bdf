"""Groups contain the right pairs, and worst pairs are ordered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from models.vision.quality import Quality
from training.evaluation.embedding import Embedder
from training.evaluation.pack_evaluation import WORST_PAIR_COUNT, split_pairs, worst_pairs

COUNT = 90


def test_a_photo_without_a_face_has_no_direction_and_no_quality(
    pack: ModelPack, group: NDArray[np.uint8], tmp_path: Path
) -> None:
    cv2.imwrite(str(tmp_path / "group.png"), group)
    cv2.imwrite(str(tmp_path / "black.png"), np.zeros_like(group))
    embedder, names = Embedder(pack), ["black.png", "group.png"]
    found = embedder.embeddings(names, tmp_path)
    assert found.found.tolist() == [False, True]
    assert np.linalg.norm(found.vectors, axis=1) == pytest.approx([0, 1], abs=1e-5)
    assert list(embedder.qualities(names, tmp_path)) == ["group.png"]


def quality(sharpness: float) -> Quality:
    return Quality(40.0 + sharpness, sharpness, 120.0, 50.0, sharpness / 100, 0.0, 0.0)


def test_every_pair_is_in_the_tercile_of_its_worse_photo(rng: np.random.Generator) -> None:
    first = [f"P{i}/P{i}_0001.jpg" for i in range(COUNT)]
    second = [f"P{i}/P{i}_0002.jpg" if i % 2 else f"Q{i}/Q{i}_0001.jpg" for i in range(COUNT)]
    same = np.arange(COUNT) % 2 == 1
    called_same = same ^ (rng.random(COUNT) < 0.3)
    sharp = {file: float(value) for file, value in zip([*first, *second], rng.permutation(2 * COUNT), strict=True)}
    faceless = first[7]
    photos = Counter({f"P{i}": 1 + i % 8 for i in range(COUNT)}) + Counter({f"Q{i}": 1 for i in range(COUNT)})
    qualities = {f: quality(s) for f, s in sharp.items() if f != faceless}
    found = split_pairs(called_same, same, first, second, qualities, photos, min_pairs=1)
    worse = np.array(
        [np.nan if faceless in (a, b) else min(sharp[a], sharp[b]) for a, b in zip(first, second, strict=True)]
    )
    low, high = np.nanquantile(worse, [1 / 3, 2 / 3])
    thirds = [split for split in found if split.by == "sharpness"]
    for split, chosen in zip(thirds, (worse <= low, (worse > low) & (worse <= high), worse > high), strict=True):
        assert split.pairs == chosen.sum()
        assert split.accuracy == pytest.approx((called_same == same)[chosen].mean(), abs=1e-4)
        assert split.fnmr == pytest.approx((~called_same)[chosen & same].mean(), abs=1e-4)
        assert split.fmr == pytest.approx(called_same[chosen & ~same].mean(), abs=1e-4)
        assert split.interval[0] <= split.accuracy <= split.interval[1]
    assert sum(split.pairs for split in thirds) == COUNT - 1
    # For yaw, the larger value is worse.
    yaw = [split for split in found if split.by == "yaw, absolute"]
    worst = np.array([max(sharp[a], sharp[b]) for a, b in zip(first, second, strict=True) if faceless not in (a, b)])
    assert yaw[-1].pairs == (worst > np.quantile(worst, 2 / 3)).sum()
    of_people = {split.part: split.pairs for split in found if split.by == "photos of the person"}
    assert sum(of_people.values()) == COUNT
    assert of_people["1"] == sum(1 for i in range(COUNT) if not same[i] or i % 8 == 0)


def test_pairs_without_faces_are_grouped_by_person_only() -> None:
    first, second = ["A/A_0001.jpg", "B/B_0001.jpg"], ["A/A_0002.jpg", "C/C_0001.jpg"]
    found = split_pairs(np.array([True, True]), np.array([True, False]), first, second, {}, Counter("ABC"), min_pairs=1)
    assert [(split.by, split.pairs, split.fnmr, split.fmr) for split in found] == [("photos of the person", 2, 0, 1)]


def test_worst_pairs_come_first_and_have_faces(rng: np.random.Generator) -> None:
    similarities, same = rng.normal(size=60), np.arange(60) % 2 == 0
    files = [f"{i}.jpg" for i in range(60)]
    seen = np.ones(60, bool)
    seen[similarities.argmin()] = seen[similarities.argmax()] = False
    found = worst_pairs(similarities, same, files, files[::-1], seen)
    mated = sorted((similarities[i], files[i]) for i in range(60) if same[i] and seen[i])[:WORST_PAIR_COUNT]
    non_mated = sorted(((similarities[i], files[i]) for i in range(60) if not same[i] and seen[i]), reverse=True)[
        :WORST_PAIR_COUNT
    ]
    assert [(a, s) for a, _, s in found.mated] == [(file, round(value, 4)) for value, file in mated]
    assert [(a, s) for a, _, s in found.non_mated] == [(file, round(value, 4)) for value, file in non_mated]
    assert found.mated[0][1] == files[59 - int(found.mated[0][0].split(".")[0])]

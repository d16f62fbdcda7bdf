"""The rates of groups are those of counting, their intervals cover the truth, and the whole measurement runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from bench.common import RESULTS
from bench.group_photos import MIN_PHOTOS, Photos, fairface_labels, joined, masked, subset
from bench.group_rates import FalseMatches, share
from bench.groups import FPIR, Protocol, group_rows, measure, page, searched, summary
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.vision.alignment import TEMPLATE_XY
from models.vision.recognition import l2_normalize
from training.evaluation.metrics import bootstrap

THRESHOLD = 0.3


def simulated(rng: np.random.Generator, people: int = 90, alike: float = 1.5) -> Photos:
    """Photos of two groups; those of the first third share a direction. Some people have two photos."""
    centers = rng.normal(size=(people, 24))
    centers[: people // 3] += alike * np.eye(24)[0]
    person = np.sort(np.concatenate([np.arange(people), np.arange(0, people, 4)]))
    vectors = l2_normalize(centers[person] + 0.1 * rng.normal(size=(len(person), 24)))
    return Photos(vectors, person.astype(str), {"kind": np.where(person < people // 3, "alike", "other")})


def counted(photos: Photos, first: np.ndarray, second: np.ndarray) -> float:
    """Count the comparisons of different people one by one."""
    a, b = np.flatnonzero(first), np.flatnonzero(second)
    pairs = list(combinations(a, 2)) if a.tolist() == b.tolist() else list(product(a, b))
    different = [(i, j) for i, j in pairs if photos.people[i] != photos.people[j]]
    return float(np.mean([photos.vectors[i] @ photos.vectors[j] >= THRESHOLD for i, j in different]))


def test_rates_within_and_between_groups_are_those_of_counting(rng: np.random.Generator) -> None:
    photos = simulated(rng)
    matches = FalseMatches(photos.vectors, photos.people, THRESHOLD)
    alike = photos.labels["kind"] == "alike"
    everyone = np.ones(len(alike), bool)
    for first, second in ((alike, alike), (~alike, ~alike), (alike, ~alike), (everyone, everyone)):
        assert matches.rate(first, second).value == pytest.approx(counted(photos, first, second))
    ratio = matches.rate(alike).over(matches.rate(everyone))
    assert ratio.value == pytest.approx(counted(photos, alike, alike) / counted(photos, everyone, everyone))
    assert ratio.interval()[0] < ratio.value < ratio.interval()[1]
    with pytest.raises(ValueError, match="two people"):
        matches.rate(photos.people == "0")


def test_intervals_are_those_of_resampled_rows(rng: np.random.Generator) -> None:
    """The bootstrap of training.evaluation.metrics resamples rows; this one weights them."""
    photos = simulated(rng, 60)
    n = len(photos.people)
    i, j = np.array([(i, j) for i, j in combinations(range(n), 2) if photos.people[i] != photos.people[j]]).T
    reached = np.einsum("nd,nd->n", photos.vectors[i], photos.vectors[j]) >= THRESHOLD
    rows = bootstrap(
        lambda drawn: np.array([reached[drawn].mean()]), np.column_stack([photos.people[i], photos.people[j]])
    )
    found = FalseMatches(photos.vectors, photos.people, THRESHOLD, 1000).rate(np.ones(n, bool))
    assert found.interval() == pytest.approx([float(end[0]) for end in rows], rel=0.08)
    missed = rng.random(n) < 0.3
    rows = bootstrap(lambda drawn: np.array([missed[drawn].mean()]), photos.people)
    assert share(missed, photos.people, 1000).value == pytest.approx(missed.mean())
    assert share(missed, photos.people, 1000).interval() == pytest.approx([float(end[0]) for end in rows], rel=0.08)


def test_intervals_cover_the_rate_of_the_population(rng: np.random.Generator) -> None:
    truth = simulated(rng, 3000, 0.0)
    rate = FalseMatches(truth.vectors, truth.people, THRESHOLD, 1).rate(np.ones(len(truth.people), bool)).value
    covered = 0
    for _ in range(40):
        some = simulated(rng, 80, 0.0)
        low, high = FalseMatches(some.vectors, some.people, THRESHOLD, 200).rate(some.people != "").interval()
        covered += low <= rate <= high
    assert covered >= 34


def test_strangers_are_not_enrolled_and_alarms_are_the_services(rng: np.random.Generator, pack: ModelPack) -> None:
    known = Calibration.from_document(pack.calibration or {})
    photos = simulated(rng, 90)
    protocol = Protocol(enrolled=50, draws=3, rounds=10)
    found = searched(photos, photos, known, protocol)
    assert found is not None
    photos_of = np.unique(photos.people, return_inverse=True)[1]
    for alarms, best in zip(found.alarms, found.best, strict=True):
        absent = np.isnan(alarms)
        assert len(np.unique(photos_of[absent])) == 50
        assert set(photos_of[absent]).isdisjoint(photos_of[~absent])
        assert (np.isnan(best) == absent).all()
    expected = [np.nanmean(alarms) for alarms in found.alarms]
    assert found.fpir(np.ones(len(photos.people), bool)) == pytest.approx(
        [np.mean(expected), min(expected), max(expected)], abs=1e-5
    )
    assert found.fnmr(np.ones(5)) == 0
    assert found.fnmr(-np.ones(5)) == 1
    assert searched(photos, photos, known, replace(protocol, enrolled=61)) is None


def test_a_group_of_lookalikes_has_more_false_matches_and_costs_misses(
    rng: np.random.Generator, pack: ModelPack
) -> None:
    photos = simulated(rng, 240, 2.0)
    mates = simulated(rng, 90, 0.0)
    first = np.unique(mates.people, return_index=True)[1]
    pairs = Photos(
        np.concatenate([mates.vectors[first], l2_normalize(mates.vectors[first] + 0.2)]),
        np.tile(mates.people[first], 2),
        {"photo": np.repeat(["first", "second"], len(first))},
    )
    known = Calibration.from_document(pack.calibration or {})
    rows = {row.group: row for row in group_rows("x", photos, pairs, known, THRESHOLD, Protocol(40, 3, 50))}
    assert set(rows) == {"all", "alike", "other"}
    assert rows["alike"].ratio[1] > 1 > rows["other"].ratio[2]
    assert rows["alike"].across == rows["other"].across
    assert rows["all"].ratio == [1, 1, 1]
    assert rows["all"].own_fnmr_ratio == 1
    assert (rows["alike"].own_fnmr or 0) >= (rows["other"].own_fnmr or 1)
    assert rows["all"].fpir.keys() == {"LFW", "all", "own"}


def test_photos_of_one_person_get_one_name() -> None:
    alike = l2_normalize(np.array([[1.0, 0, 0], [1, 0.2, 0], [0, 1, 0], [0, 0, 1], [0, 0.2, 1]]))
    names = np.array(["a", "b", "c", "d", "c"])
    assert joined(alike, names).tolist() == ["a", "a", "c", "c", "c"]
    assert joined(np.eye(5, dtype=np.float32), np.array(list("edcba"))).tolist() == list("edcba")


def test_small_groups_are_left_out(rng: np.random.Generator) -> None:
    photos = simulated(rng)
    few = np.arange(len(photos.people)) < MIN_PHOTOS - 1
    labels = {"kind": np.where(few, "few", ""), "other": photos.labels["kind"]}
    named = [(kind, name) for kind, name, _ in replace(photos, labels=labels).groups()]
    assert named == [("other", "alike"), ("other", "other")]
    assert len(subset(photos, few).labels["kind"]) == MIN_PHOTOS - 1


def test_labels_name_age_race_and_gender() -> None:
    found = fairface_labels({"age": "more than 70", "gender": "Female", "race": "Latino_Hispanic"})
    assert found == {
        "age": "60 and over",
        "gender": "Female",
        "race": "Latino or Hispanic",
        "race and gender": "Latino or Hispanic, female",
    }


def test_a_drawn_mask_hides_the_mouth_and_leaves_the_eyes(rng: np.random.Generator) -> None:
    crops = rng.integers(0, 256, (8, 112, 112, 3), dtype=np.uint8)
    changed = (masked(crops) != crops).any(3)
    (left, right, _, *mouth) = TEMPLATE_XY.round().astype(int)
    assert not changed[:, : left[1] + 3].any()
    assert all(changed[:, y, x].all() for x, y in mouth)
    assert right[1] < 55


@pytest.mark.long
def test_real_photos_are_measured_and_reported(data: Path, pack: ModelPack, tmp_path: Path) -> None:
    found = measure(pack, data, tmp_path, Protocol(enrolled=20, draws=2, rounds=20, share=0.04))
    misses = {row["photos"]: row for row in found["misses"]}
    assert misses["LFW"]["pairs"] == 40
    assert misses["LFW"]["fnmr"][0] < misses["LFW, one photo with a drawn mask"]["fnmr"][0]
    assert misses["CFP, frontal with frontal"]["fnmr"][0] < misses["CFP, frontal with profile"]["fnmr"][0]
    assert misses["real mask with LFW"]["fnmr"] is None
    groups = [(row["collection"], row["group"]) for row in found["groups"]]
    assert ("FairFace", "all") in groups
    assert ("All-Age-Faces", "all") in groups
    text = page({pack.model_id: found})
    assert text.count("| FairFace |") == sum(name == "FairFace" for name, _ in groups)
    assert f"{FPIR:.0%}" in text


def test_the_page_is_the_measured_one() -> None:
    figures = json.loads((RESULTS / "groups.json").read_text())
    assert summary(figures) in page(figures)
    assert page(figures) == (RESULTS / "groups.md").read_text()

"""Some people and photos are not trained on: the same ones whenever a run resumes, from any source of data."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.training.runs import SIDE
from training.config import DataConfig
from training.data import split as split_module
from training.data.identities import IdentitySet, load_identities
from training.data.split import Split, split_identities

PEOPLE, PHOTOS = 20, 6


def write_photos(root: Path, people: int = PEOPLE, photos: int = PHOTOS) -> Path:
    """Write crops whose color tells person and photo."""
    for person in range(people):
        (root / f"p{person:02}").mkdir(parents=True)
        for i in range(photos):
            cv2.imwrite(str(root / f"p{person:02}" / f"{i}.png"), np.full((SIDE, SIDE, 3), [0, i, person], np.uint8))
    return root


def split(root: Path, cache: Path, people: float = 0.2, photos: float = 0.2, seed: int = 7) -> Split:
    config = DataConfig(root, None, crop_px=SIDE, held_out_people=people, held_out_photos=photos)
    return split_identities(load_identities(config, cache), config, seed)


def members(data: IdentitySet | None) -> set[str]:
    """Names of people and files, checked against the pixels."""
    assert data is not None
    names = {data.photo_name(i) for i in range(len(data))}
    colors = data.crops_NHWC[np.arange(len(data))][:, 0, 0]
    assert names == {f"p{person:02}/{photo}.png" for person, photo, _ in colors.tolist()}
    assert len(names) == len(data)
    assert np.array_equal(np.unique(data.labels), np.arange(data.num_classes))
    assert len(data.class_ids) == data.num_classes
    return names


def people(names: set[str]) -> set[str]:
    return {name.split("/")[0] for name in names}


def test_people_and_photos_are_held_out(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    found = split(root, tmp_path / "cache")
    train, strangers, photos = members(found.train), members(found.people), members(found.photos)
    assert len(people(strangers)) == 4
    assert len(strangers) == 4 * PHOTOS
    assert people(strangers).isdisjoint(people(train))
    held = photos - train
    assert 5 < len(held) < 30
    assert len(train) + len(held) + len(strangers) == PEOPLE * PHOTOS
    # Beside each person's photos that are held out, one that is trained on.
    assert people(photos & train) == people(held)
    assert len(photos & train) == len(people(held))
    assert all(sum(name.startswith(person) for name in train) >= 2 for person in people(train))
    half = split(root, tmp_path / "cache", photos=0.5)
    assert np.bincount(half.train.labels).min() == 2  # of six
    few = split(root, tmp_path / "cache", photos=0.05)
    train, photos = members(few.train), members(few.photos)
    assert people(photos & train) == people(photos - train) < people(train)


def test_the_seed_chooses_and_the_place_of_the_folder_does_not(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    chosen = split(root, tmp_path / "cache")
    shutil.copytree(root, tmp_path / "moved" / "here")
    moved = split(tmp_path / "moved" / "here", tmp_path / "cache")
    for one, other in ((chosen.people, moved.people), (chosen.photos, moved.photos), (chosen.train, moved.train)):
        assert members(one) == members(other)
    assert members(split(root, tmp_path / "cache", seed=8).people) != members(chosen.people)


def test_further_photos_leave_the_split(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    before = split(root, tmp_path / "cache")
    for person in ("p03", "p04", "p11"):
        cv2.imwrite(str(root / person / "9.png"), np.full((SIDE, SIDE, 3), [0, 9, int(person[1:])], np.uint8))
    after = split(root, tmp_path / "cache")
    new = {"p03/9.png", "p04/9.png", "p11/9.png"}
    assert members(after.people) - new == members(before.people)
    assert members(after.train) - new == members(before.train)


def test_zero_holds_out_nothing_and_large_sets_a_limited_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_photos(tmp_path / "photos")
    found = split(root, tmp_path / "cache", 0, 0)
    assert (found.people, found.photos) == (None, None)
    assert len(found.train) == PEOPLE * PHOTOS
    only_people = split(root, tmp_path / "cache", 0.2, 0)
    assert only_people.photos is None
    assert len(only_people.train) == (PEOPLE - 4) * PHOTOS
    monkeypatch.setattr(split_module, "MAX_PEOPLE", 3)
    monkeypatch.setattr(split_module, "MAX_PHOTOS", 20)
    found = split(root, tmp_path / "cache", 0.5, 0.5)
    assert found.people is not None
    assert len(found.people) == 3 * PHOTOS
    assert len(found.train) > 65


@pytest.mark.parametrize(("count", "photos"), [(2, 2), (3, 1), (5, 2), (6, 4), (20, 1)])
def test_small_sets_are_trained_on_whole(tmp_path: Path, count: int, photos: int) -> None:
    root = write_photos(tmp_path / "photos", count, photos)
    config = DataConfig(root, None, crop_px=SIDE, min_images=1)  # with the defaults
    found = split_identities(load_identities(config, tmp_path / "cache"), config, 7)
    assert found.people is None
    assert found.train.num_classes == count
    assert np.bincount(found.train.labels).min() >= min(2, photos)

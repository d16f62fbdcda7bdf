"""A resumed run gives the rows of its classifier to the same people, or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.mxnet_files import write_faces
from tests.training.runs import SIDE, STEPS_PER_EPOCH, tiny_run, write_people
from training.config import ConfigError, DataConfig
from training.data.identities import load_identities
from training.optimization.run_folder import CHECKPOINT, PEOPLE, check_classes
from training.run.train import train_recognizer

People = Mapping[str, list[bytes]]
"""Encoded images by person."""
Write = Callable[[Path, People], DataConfig]


def write_folder(root: Path, people: People) -> DataConfig:
    shutil.rmtree(root, ignore_errors=True)
    for name, images in people.items():
        (root / name).mkdir(parents=True)
        for i, image in enumerate(images):
            (root / name / f"{i}.png").write_bytes(image)
    return DataConfig(root, manifest=None, crop_px=SIDE)


def write_records(root: Path, people: People) -> DataConfig:
    """Number the sorted names, as tools do."""
    root.mkdir(exist_ok=True)
    numbered = [(label, image) for label, name in enumerate(sorted(people)) for image in people[name]]
    labels, images = zip(*numbered, strict=True)
    write_faces(root / "train.rec", images, labels)
    return DataConfig(root / "train.rec", manifest=None, crop_px=SIDE)


@pytest.fixture
def people(tmp_path: Path) -> dict[str, list[bytes]]:
    source = write_people(tmp_path / "source")
    return {folder.name: [file.read_bytes() for file in sorted(folder.iterdir())] for folder in source.iterdir()}


def renamed(people: People) -> People:
    """Rename the first person, who becomes the last."""
    return {"zoe" if name == "p0" else name: images for name, images in people.items()}


def with_one_more(people: People) -> People:
    return {**people, "ada": people["p3"][::-1]}


def without_one(people: People) -> People:
    return {name: images for name, images in people.items() if name != "p2"}


def swapped(people: People) -> People:
    return {**people, "p1": people["p4"], "p4": people["p1"]}


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (write_folder, renamed, r"the 6 of the data: 1 missing \('p0'\), 1 new or changed \('zoe'\)\."),
        (write_folder, without_one, r"the 5 of the data: 1 missing \('p2'\)\."),
        # By number, without names.
        (write_records, with_one_more, "the 7 of the data: .* new or changed"),
        (write_records, swapped, r"the 6 of the data: 2 missing, 2 new or changed \('1', '4'\)"),
    ],
)
def test_other_people_are_refused(
    tmp_path: Path, people: People, write: Write, change: Callable[[People], People], message: str
) -> None:
    before = load_identities(write(tmp_path / "data", people), tmp_path / "cache")
    saved, path = {"classes": torch.from_numpy(before.class_ids)}, tmp_path / CHECKPOINT
    if write is write_folder:
        path.with_name(PEOPLE).write_text(json.dumps(before.names))
    other = load_identities(write(tmp_path / "data", change(people)), tmp_path / "cache")
    with pytest.raises(ConfigError, match=f"was saved with 6 classes that are not {message}.* another --output"):
        check_classes(saved, other, path)
    check_classes(saved, load_identities(write(tmp_path / "copy", people), tmp_path / "cache"), path)
    in_another_order = {"classes": saved["classes"].flip(0)}
    with pytest.raises(ConfigError, match="their order differs"):
        check_classes(in_another_order, before, path)


@pytest.mark.parametrize("settings", [{}, {"class_sampling": 0.5, "sharded_checkpoint": True}], ids=["whole", "shards"])
def test_a_refused_run_is_left_as_it_was(tmp_path: Path, people: People, settings: dict[str, object]) -> None:
    def train(people: People, epochs: int) -> int:
        data = write_folder(tmp_path / "data", people)
        config = tiny_run(data.root, tmp_path / "run", "cosface", epochs=epochs, **settings)
        return train_recognizer(replace(config, data=data)).step

    def written() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (tmp_path / "run").glob("*.*") if file.suffix != ".json"}

    train(people, 1)
    before = written()
    with pytest.raises(ConfigError, match=r"1 missing \('p0'\), 1 new or changed \('zoe'\)"):
        train(renamed(people), 2)
    assert written() == before
    more = {**people, "p0": [people["p0"][1], *people["p0"]]}  # photos of the same people
    assert train(more, 2) == 2 * STEPS_PER_EPOCH

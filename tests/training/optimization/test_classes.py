"""A resumed run gives the rows of its classifier to the same people, or is refused."""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.mxnet_files import write_faces
from tests.training.runs import SIDE, STEPS_PER_EPOCH, losses, tiny_run, write_people
from training.config import ConfigError, DataConfig, RunConfig
from training.data.class_ids import identify_classes
from training.data.identities import load_identities
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


def write_manifest(root: Path, people: People) -> DataConfig:
    write_folder(root, people)
    with (root / "manifest.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("file", "identity"))
        writer.writerows((f"{name}/{i}.png", name) for name, images in people.items() for i in range(len(images)))
    return DataConfig(root, crop_px=SIDE)


def numbered(people: People) -> list[tuple[int, bytes]]:
    """Return label and image, as tools do that number the sorted names."""
    return [(label, image) for label, name in enumerate(sorted(people)) for image in people[name]]


def write_records(root: Path, people: People) -> DataConfig:
    root.mkdir(exist_ok=True)
    labels, images = zip(*numbered(people), strict=True)
    write_faces(root / "train.rec", images, labels)
    return DataConfig(root / "train.rec", manifest=None, crop_px=SIDE)


def write_shards(root: Path, people: People) -> DataConfig:
    root.mkdir(exist_ok=True)
    with tarfile.open(root / "0.tar", "w") as archive:
        for i, (label, image) in enumerate(numbered(people)):
            for suffix, content in (("png", image), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{i:03}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return DataConfig(root, manifest=None, crop_px=SIDE)


@pytest.fixture
def people(tmp_path: Path) -> dict[str, list[bytes]]:
    source = write_people(tmp_path / "source")
    return {folder.name: [file.read_bytes() for file in sorted(folder.iterdir())] for folder in source.iterdir()}


def config(data: DataConfig, output: Path, epochs: int, **loop: object) -> RunConfig:
    return replace(tiny_run(data.root.parent, output, "cosface", epochs=epochs, **loop), data=data)


def renamed(people: People) -> People:
    """Rename the first person, who becomes the last."""
    return {"zoe" if name == "p0" else name: images for name, images in people.items()}


def with_one_more(people: People) -> People:
    return {**people, "ada": people["p3"][::-1]}


def without_one(people: People) -> People:
    return {name: images for name, images in people.items() if name != "p2"}


@pytest.mark.parametrize(
    ("write", "change"),
    [
        (write_folder, renamed),
        (write_manifest, without_one),
        (write_records, renamed),
        (write_records, without_one),
        (write_shards, with_one_more),
    ],
)
def test_a_run_with_other_people_is_refused(
    tmp_path: Path, people: People, write: Write, change: Callable[[People], People]
) -> None:
    output = tmp_path / "run"
    train_recognizer(config(write(tmp_path / "data", people), output, 1))
    before, log = (output / "checkpoint.pt").read_bytes(), losses(output)
    other = write(tmp_path / "data", change(people))
    with pytest.raises(
        ConfigError, match=r"was saved with 6 classes that are not the . of the data: .* another --output"
    ):
        train_recognizer(config(other, output, 2))
    assert (output / "checkpoint.pt").read_bytes() == before
    assert losses(output) == log
    # The same people, written again elsewhere.
    assert train_recognizer(config(write(tmp_path / "copy", people), output, 2)).step == 2 * STEPS_PER_EPOCH


def test_the_message_names_new_and_missing_people(tmp_path: Path, people: People) -> None:
    train_recognizer(config(write_folder(tmp_path / "data", people), tmp_path / "run", 1))
    changed = write_folder(tmp_path / "data", {**renamed(people), "Åsa": people["p1"]})
    with pytest.raises(
        ConfigError, match=r"6 classes .* the 7 of the data: 1 missing \('.*'\), 2 new or changed \('zoe', 'Åsa'\)"
    ):
        train_recognizer(config(changed, tmp_path / "run", 2))


def test_the_message_names_who_left_where_the_next_person_moves_up(tmp_path: Path, people: People) -> None:
    def limited(data: DataConfig) -> RunConfig:
        made = config(data, tmp_path / "run", 1)
        return replace(made, data=replace(made.data, max_identities=4))

    train_recognizer(limited(write_folder(tmp_path / "data", people)))
    left = sorted(people)[1]
    with pytest.raises(ConfigError, match=rf"1 missing \('{left}'\), 1 new or changed \('{sorted(people)[4]}'\)"):
        train_recognizer(limited(write_folder(tmp_path / "data", {k: v for k, v in people.items() if k != left})))


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])
def test_partial_fc_checks_its_classes(tmp_path: Path, people: People, sharded: bool) -> None:
    settings = {"class_sampling": 0.5, "sharded_checkpoint": sharded}
    train_recognizer(config(write_folder(tmp_path / "data", people), tmp_path / "run", 1, **settings))
    kept = sorted(file.name for file in (tmp_path / "run").iterdir())
    for change in (renamed, with_one_more):
        other = write_folder(tmp_path / "data", change(people))
        with pytest.raises(ConfigError, match="new or changed"):
            train_recognizer(config(other, tmp_path / "run", 2, **settings))
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == kept
    same = write_folder(tmp_path / "data", people)
    assert train_recognizer(config(same, tmp_path / "run", 2, **settings)).step == 2 * STEPS_PER_EPOCH


def test_swapped_labels_of_numbered_people_are_found(tmp_path: Path, people: People) -> None:
    train_recognizer(config(write_records(tmp_path / "data", people), tmp_path / "run", 1))
    swapped = {**people, "p1": people["p4"], "p4": people["p1"]}
    with pytest.raises(ConfigError, match=r"2 missing, 2 new or changed \('1', '4'\)"):
        train_recognizer(config(write_records(tmp_path / "data", swapped), tmp_path / "run", 2))


def test_more_photos_of_the_same_people_are_accepted(tmp_path: Path, people: People) -> None:
    train_recognizer(config(write_folder(tmp_path / "data", people), tmp_path / "run", 1))
    more = {**people, "p0": [people["p0"][1], *people["p0"]]}
    train_recognizer(config(write_folder(tmp_path / "data", more), tmp_path / "run", 2))


def test_the_form_of_an_accent_does_not_matter(tmp_path: Path, people: People) -> None:
    data = load_identities(write_folder(tmp_path / "data", people), tmp_path / "cache")
    composed, decomposed = (identify_classes([name], data.labels, None) for name in ("Jos\u00e9", "Jose\u0301"))
    assert composed == decomposed
    assert len(set(data.class_ids.tolist())) == len(people)
    assert identify_classes(["Ren\udce9"], data.labels, None) != identify_classes(["Ren\udce8"], data.labels, None)

"""`kith-train calibrate` on real photos: any pack gets thresholds from any set of people."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.vision.detection import Detector
from tests.conftest import ROOT, photo_array
from tests.training.runs import call
from training.config import ConfigError, DataConfig
from training.data.identities import load_identities
from training.export.calibrate import calibrate, find_distinct_photos

PEOPLE = 80


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return uncalibrated(tmp_path / "pack")


def uncalibrated(folder: Path) -> Path:
    """Copy the bundled pack without its calibration."""
    pack = Path(shutil.copytree(BUNDLED_PACK, folder))
    (pack / "calibration.json").unlink()
    document = json.loads((pack / "manifest.json").read_text())
    del document["calibration"]
    (pack / "manifest.json").write_text(json.dumps(document))
    assert load_pack(pack).calibration is None
    return pack


@pytest.fixture(scope="module")
def people(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder per person: 80 of LFW with two photos each, plus one duplicate, one photo without a face and one
    mislabeled photo."""
    root = tmp_path_factory.mktemp("photos") / "staff"
    named = [d for d in sorted((data / "lfw" / "images").iterdir()) if len(list(d.iterdir())) >= 2][:PEOPLE]
    for person in named:
        (root / person.name).mkdir(parents=True)
        for photo in sorted(person.iterdir())[:2]:
            shutil.copy(photo, root / person.name)
    first, second, third = (sorted((root / person.name).iterdir()) for person in named[:3])
    shutil.copy(first[0], first[0].with_name("copy.jpg"))
    cv2.imwrite(str(second[0].with_name("nothing.png")), photo_array("skimage", "data", "coffee.png")[..., ::-1])
    (root / "Somebody Else").mkdir()
    shutil.copy(third[0], root / "Somebody Else")
    return root


@pytest.fixture(scope="module")
def calibrated(people: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelPack, str]:
    """The pack after `kith-train calibrate`, and what the command printed."""
    folder, printed = uncalibrated(tmp_path_factory.mktemp("calibrated") / "pack"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        call("calibrate", folder, "--data", people, "--folder", "--note", "badges of 2026")
    return load_pack(folder), " ".join(printed.getvalue().split())


def test_a_pack_without_calibration_gets_one(calibrated: tuple[ModelPack, str], people: Path, tmp_path: Path) -> None:
    pack, printed = calibrated
    found = pack.calibration
    assert found is not None
    told = (found["data"], found["note"], found["recognizer"])
    assert told == ("staff", "badges of 2026", pack.recognition.fingerprint())
    assert str(people.parent) not in (pack.directory / "calibration.json").read_text()
    # 160 photos plus the duplicate, the faceless and the mislabeled photo. The duplicate is dropped, and so are both
    # copies of the mislabeled photo.
    assert (found["photos_without_face"], found["copies"]) == (1, 3)
    assert (found["people"], found["images"]) == (PEOPLE, 2 * PEOPLE - 1)
    assert found["genuine_pairs"] == PEOPLE - 1
    assert found["impostor_pairs"] == (2 * PEOPLE - 1) * (2 * PEOPLE - 2) // 2 - (PEOPLE - 1)
    assert found["largest_impostors"][0] < 0.98
    assert all(
        words in printed for words in ("Threshold at FMR 0.01", "(extrapolated)", "Photos without face │ 1", "EER")
    )
    # Close to the shipped evidence, from other people of LFW.
    shipped = load_pack(BUNDLED_PACK).calibration
    assert shipped is not None
    own, others = (Calibration.from_document(document) for document in (found, shipped))
    assert own.curve.threshold_at_fmr(0.01).value == pytest.approx(others.curve.threshold_at_fmr(0.01).value, abs=0.1)


def test_aligned_crops_calibrate_a_directory_without_a_manifest(
    calibrated: tuple[ModelPack, str], people: Path, reference: Path, detector: Detector, tmp_path: Path
) -> None:
    config = DataConfig(people, None, aligned=False, min_images=1)
    faces = load_identities(config, tmp_path / "cache", detector)
    crops, directory = tmp_path / "crops", tmp_path / "byo"
    for i, label in enumerate(faces.labels.tolist()):
        (crops / faces.names[label]).mkdir(exist_ok=True, parents=True)
        cv2.imwrite(str(crops / faces.names[label] / f"{i}.png"), faces.crops_NHWC[i][..., ::-1])
    directory.mkdir()
    shutil.copy(BUNDLED_PACK / "detector.onnx", directory)
    shutil.copy(BUNDLED_PACK / "recognizer.onnx", directory / "mine.onnx")
    call("calibrate", directory, "--data", crops, "--folder", "--aligned", "--max-photos-per-person", 3)
    by_crops, by_photos = load_pack(directory).calibration, calibrated[0].calibration
    assert by_crops is not None
    assert by_photos is not None
    assert by_crops["impostor_pairs"] == by_photos["impostor_pairs"]
    assert by_crops["recognizer"] == load_pack(directory).recognition.fingerprint()
    np.testing.assert_allclose(by_crops["largest_impostors"], by_photos["largest_impostors"], atol=1e-4)
    assert sorted(file.name for file in directory.iterdir()) == ["calibration.json", "detector.onnx", "mine.onnx"]
    with pytest.raises(ConfigError, match="is 250x250, not a 112x112 crop"):
        call("calibrate", directory, "--data", people, "--folder", "--aligned")
    # The evidence does not apply to another recognizer.
    shutil.copy(reference / "recognizer.onnx", directory / "mine.onnx")
    with pytest.raises(PackError, match="another recognizer") as raised:
        load_pack(directory).verify()
    assert raised.value.field == "calibration"


def test_a_failure_leaves_the_pack_unchanged(copy: Path, people: Path, tmp_path: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}

    before = files()
    few = tmp_path / "few"
    for person in sorted(people.iterdir())[:3]:
        shutil.copytree(person, few / person.name)
    with pytest.raises(ConfigError, match=r"too few to calibrate\. The minimum is 10,000 and 30, such as 75 people"):
        call("calibrate", copy, "--data", few, "--folder")
    with pytest.raises(ConfigError, match="pass --folder"):
        call("calibrate", copy, "--data", people)
    with pytest.raises(PackError, match="not a directory"):
        call("calibrate", tmp_path / "none", "--data", people, "--folder")
    assert files() == before


def test_duplicates_do_not_distort_the_calibration() -> None:
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(300, 64))
    # Similar mates; otherwise duplicates would have no effect.
    vectors[1::2] = vectors[::2] + 0.5 * vectors[1::2]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    labels = [str(i // 2) for i in range(300)]
    # The last person's photos twice under the same label, and once under another label: none is left.
    again: Any = np.concatenate([vectors, vectors[298:], vectors[298:]])
    clean, spoilt = (
        calibrate(vectors[:298], labels[:298], "test"),
        calibrate(again, [*labels, "149", "149", "0", "0"], "test"),
    )
    assert spoilt["copies"] == 6
    assert {**spoilt, "copies": 0} == {**clean, "copies": 0}
    # One copy is kept under one label.
    who, (a, b, c) = np.array([0, 0, 1, 2, 2]), np.eye(8, dtype=np.float32)[:3]
    assert find_distinct_photos(np.stack([a, a, b, c, b]), who).tolist() == [0, 3]
    assert find_distinct_photos(np.stack([a, a, b, c, c]), who).tolist() == [0, 2, 3]


def test_the_manifest_of_the_document_makes_a_pack_of_two_files(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    manifest = json.loads(block)
    (tmp_path / "manifest.json").write_text(block)
    for task, network in (("detection", "detector.onnx"), ("recognition", "recognizer.onnx")):
        shutil.copy(BUNDLED_PACK / network, tmp_path / manifest["tasks"][task]["file"])
    pack = load_pack(tmp_path)
    pack.verify()
    assert pack.recognition.path.name == "mine.onnx"
    assert pack.recognition.normalization.color == "BGR"
    assert pack.calibration is None

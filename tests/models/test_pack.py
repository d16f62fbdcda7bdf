"""A manifest is read exactly, and what is wrong with it is said by field."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.alignment import STANDARD, Alignment
from models.errors import PackError
from models.pack import BUNDLED, load_pack, write_pack


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "pack"))


def edit(pack: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((pack / "manifest.json").read_text())
    change(document)
    (pack / "manifest.json").write_text(json.dumps(document))


def with_template(points: list[Any]) -> Callable[[dict[str, Any]], object]:
    return lambda d: d["tasks"]["recognition"].update(alignment={"template": points})


def test_the_bundled_pack_is_whole() -> None:
    pack = load_pack(BUNDLED)
    pack.verify()
    assert pack.calibration is not None
    assert (BUNDLED / "MODEL_CARD.md").is_file()


def test_the_bundled_pack_is_small() -> None:
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 8_000_000


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model_id", lambda d: d.pop("model_id")),
        ("model_id", lambda d: d.update(model_id="../x")),
        ("license", lambda d: d.update(license="LICENSE.txt")),
        ("tasks", lambda d: d.update(tasks=[])),
        ("tasks.detection", lambda d: d["tasks"].pop("detection")),
        ("tasks.recognition.file", lambda d: d["tasks"]["recognition"].update(file="../../etc/passwd.onnx")),
        ("tasks.recognition.file", lambda d: d["tasks"]["recognition"].update(file="gone.onnx")),
        ("tasks.recognition.file", lambda d: d["tasks"]["recognition"].update(file="a\0.onnx")),
        ("tasks.recognition.file", lambda d: d["tasks"]["recognition"].update(file="\ud800.onnx")),
        ("tasks.recognition.file", lambda d: d["tasks"]["recognition"].update(file="x" * 300 + ".onnx")),
        ("tasks.detection.preprocessing.mean", lambda d: d["tasks"]["detection"]["preprocessing"].update(mean=10**400)),
        ("tasks.recognition.file", lambda d: d["tasks"]["recognition"].update(file="detector.onnx")),
        ("tasks.detection.file", lambda d: d["tasks"]["detection"].update(file="manifest.json")),
        ("tasks.recognition.sha256", lambda d: d["tasks"]["recognition"].update(sha256="ABC")),
        ("tasks.recognition.embedding_dimension", lambda d: d["tasks"]["recognition"].update(embedding_dimension=0)),
        ("tasks.recognition.input_size", lambda d: d["tasks"]["recognition"].update(input_size=[112, 96])),
        ("tasks.recognition.alignment", lambda d: d["tasks"]["recognition"].update(alignment="closer")),
        ("tasks.recognition.alignment", lambda d: d["tasks"]["recognition"].update(alignment={"points": []})),
        ("tasks.recognition.alignment.template", with_template([[1, 2]] * 4)),
        ("tasks.recognition.alignment.template", with_template([[1, 2], [3, 4], [5, 6], [7, 8], [9]])),
        ("tasks.recognition.alignment.template", with_template([[1, 2], [3, 4], [5, 6], [7, 8], [9, "x"]])),
        ("tasks.recognition.alignment.template", with_template([[1, 2], [3, 4], [5, 6], [7, 8], [9, float("nan")]])),
        ("tasks.recognition.alignment.template", with_template([[1, 2], [3, 4], [5, 6], [7, 8], [1, 2]])),
        ("tasks.recognition.preprocessing.std", lambda d: d["tasks"]["recognition"]["preprocessing"].update(std=0)),
        ("tasks.recognition.preprocessing", lambda d: d["tasks"]["recognition"].update(preprocessing="guess")),
        ("tasks.detection.head", lambda d: d["tasks"]["detection"].update(head="retina")),
        ("tasks.detection.colour", lambda d: d["tasks"]["detection"].update(colour="GRB")),
        ("calibration", lambda d: d.update(calibration="none.json")),
        ("provenance", lambda d: d.update(provenance="me")),
    ],
)
def test_errors_name_the_field(copy: Path, field: str, change: Callable[[dict[str, Any]], object]) -> None:
    edit(copy, change)
    with pytest.raises(PackError) as raised:
        load_pack(copy)
    assert raised.value.field == field


def test_a_changed_network_is_noticed(copy: Path) -> None:
    with (copy / "recogniser.onnx").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(PackError) as raised:
        load_pack(copy).verify()
    assert raised.value.field == "tasks.recognition.sha256"


def test_a_manifest_that_is_not_json(copy: Path) -> None:
    (copy / "manifest.json").write_text("{")
    with pytest.raises(PackError, match=r"manifest\.json"):
        load_pack(copy)


def test_a_directory_without_networks(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"tasks\.detection"):
        load_pack(tmp_path)


def test_the_fingerprint_depends_on_network_and_input(copy: Path) -> None:
    same = load_pack(copy).recognition.fingerprint()
    assert same == load_pack(BUNDLED).recognition.fingerprint()
    edit(copy, lambda d: d["tasks"]["recognition"]["preprocessing"].update(std=128.0))
    assert load_pack(copy).recognition.fingerprint() != same


def test_the_fingerprint_of_a_standard_crop_is_what_it_was_before_packs_could_have_others(copy: Path) -> None:
    digest = hashlib.sha256((copy / "recogniser.onnx").read_bytes())
    digest.update(b'[127.5, 127.5, "RGB", 112, "insightface-arcface-1"]')
    assert load_pack(copy).recognition.fingerprint() == digest.hexdigest()[:32]
    points = [list(point) for point in STANDARD.template]
    edit(copy, with_template(points))  # the same, said aloud
    assert load_pack(copy).recognition.fingerprint() == digest.hexdigest()[:32]
    points[0][0] += 1
    edit(copy, with_template(points))
    assert load_pack(copy).recognition.fingerprint() != digest.hexdigest()[:32]


def test_what_is_written_is_what_is_read(copy: Path) -> None:
    metrics = {"lfw": 0.9}
    written = write_pack(copy, "mine", "Mine", copy / "detector.onnx", copy / "recogniser.onnx", 256, {}, {}, metrics)
    assert (written.model_id, written.metrics, written.recognition.dimension) == ("mine", metrics, 256)


def test_a_pack_that_would_not_load_is_not_written(copy: Path) -> None:
    with pytest.raises(PackError):
        write_pack(copy, "bad id", "x", copy / "detector.onnx", copy / "recogniser.onnx", 256, {}, {}, {})
    assert not (copy / "manifest.json").exists()


def test_an_alignment_of_its_own_is_written_and_read(copy: Path) -> None:
    alignment = Alignment(150, tuple((2 * x, y + 3) for x, y in STANDARD.template))
    written = write_pack(
        copy,
        "mine",
        "Mine",
        copy / "detector.onnx",
        copy / "recogniser.onnx",
        256,
        {},
        {},
        {},
        alignment=alignment,
        embedded=True,
        preprocessing_version="mine-1",
    )
    assert written.recognition.alignment == alignment
    assert (written.recognition.normalisation.mean, written.recognition.normalisation.std) == (0.0, 1.0)
    assert written.recognition.preprocessing_version == "mine-1"
    standard = write_pack(copy, "mine", "Mine", copy / "detector.onnx", copy / "recogniser.onnx", 256, {}, {}, {})
    assert standard.recognition.alignment == STANDARD
    assert "alignment" not in (copy / "manifest.json").read_text()

"""Manifests are validated strictly, and errors name the field."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.writing import write_pack
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))


def edit(pack: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((pack / "manifest.json").read_text())
    change(document)
    (pack / "manifest.json").write_text(json.dumps(document))


def with_template(points: list[Any]) -> Callable[[dict[str, Any]], object]:
    return lambda d: d["tasks"]["recognition"].update(alignment={"template": points})


def test_the_bundled_pack_is_complete() -> None:
    pack = load_pack(BUNDLED_PACK)
    pack.verify()
    assert pack.calibration is not None
    assert sum(file.stat().st_size for file in BUNDLED_PACK.iterdir()) <= 5_000_000
    assert (BUNDLED_PACK / "MODEL_CARD.md").is_file()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model_id", lambda d: d.pop("model_id")),
        ("model_id", lambda d: d.update(model_id="../x")),
        ("license", lambda d: d.update(license="LICENSE.txt")),
        ("tasks.detection", lambda d: d["tasks"].pop("detection")),
        ("tasks.detection.preprocessing.mean", lambda d: d["tasks"]["detection"]["preprocessing"].update(mean=10**400)),
        ("tasks.detection.file", lambda d: d["tasks"]["detection"].update(file="manifest.json")),
        ("tasks.recognition.sha256", lambda d: d["tasks"]["recognition"].update(sha256="ABC")),
        ("tasks.recognition.sha256", lambda d: d["tasks"]["recognition"].update(sha256="0" * 64)),
        (
            "tasks.recognition.embedding_dimension",
            lambda d: d["tasks"]["recognition"].update(embedding_dimension=10**9),
        ),
        ("tasks.recognition.input_size[1]", lambda d: d["tasks"]["recognition"].update(input_size=[10**6, 10**6])),
        ("tasks.recognition.input_size", lambda d: d["tasks"]["recognition"].update(input_size=[112, 96])),
        ("tasks.recognition.alignment.template", with_template([[1, 2]] * 4)),
        ("tasks.recognition.alignment.template[4][1]", with_template([[1, 2], [3, 4], [5, 6], [7, 8], [9, math.nan]])),
        ("tasks.recognition.preprocessing.std", lambda d: d["tasks"]["recognition"]["preprocessing"].update(std=0)),
        ("tasks.detection.head", lambda d: d["tasks"]["detection"].update(head="retina")),
        ("calibration", lambda d: d.update(calibration="none.json")),
    ],
)
def test_errors_name_the_field(copy: Path, field: str, change: Callable[[dict[str, Any]], object]) -> None:
    edit(copy, change)
    with pytest.raises(PackError) as raised:
        load_pack(copy).verify()
    assert raised.value.field == field


def test_file_names_cannot_leave_the_pack(copy: Path, tmp_path: Path) -> None:
    secret = Path(shutil.copy(BUNDLED_PACK / "recognizer.onnx", tmp_path / "secret.onnx"))
    (copy / "link.onnx").symlink_to(secret)
    (copy / "up").symlink_to(tmp_path)
    inside = ("gone.onnx", "link.onnx", "up/secret.onnx", "a\\b.onnx", "a\0.onnx", "\ud800.onnx", "x" * 300 + ".onnx")
    for name in ("../secret.onnx", str(secret), "https://a/b.onnx", *inside):
        edit(copy, lambda d, name=name: d["tasks"]["recognition"].update(file=name))  # type: ignore[misc]
        with pytest.raises(PackError, match=r"^tasks\.recognition\.file"):
            load_pack(copy)
    foreign = {"file": str(secret), "sha256": "0" * 64, "of": "0" * 64, "engines": {}}
    edit(copy, lambda d: d["tasks"]["recognition"].update(file="recognizer.onnx", int8=foreign))
    assert load_pack(copy).recognition.int8 is None, "INT8 files are listed beside the manifest"


def test_the_fingerprint_excludes_the_standard_template(copy: Path) -> None:
    digest = hashlib.sha256((copy / "recognizer.onnx").read_bytes())
    digest.update(b'[127.5, 127.5, "RGB", 112, "insightface-arcface-1"]')
    assert load_pack(copy).recognition.fingerprint() == digest.hexdigest()[:32]
    points = [list(point) for point in STANDARD_ALIGNMENT.template]
    edit(copy, with_template(points))  # explicit standard template
    assert load_pack(copy).recognition.fingerprint() == digest.hexdigest()[:32]
    points[0][0] += 1
    for change in (with_template(points), lambda d: d["tasks"]["recognition"]["preprocessing"].update(std=128.0)):
        shutil.copy(BUNDLED_PACK / "manifest.json", copy)
        edit(copy, change)
        assert load_pack(copy).recognition.fingerprint() != digest.hexdigest()[:32]


def test_a_written_pack_is_the_one_described(copy: Path) -> None:
    alignment = Alignment(150, tuple((2 * x, y + 3) for x, y in STANDARD_ALIGNMENT.template))
    recognition: dict[str, Any] = {
        "file": "recognizer.onnx",
        "preprocessing": "embedded",
        "preprocessing_version": "mine-1",
        "input_size": [150, 150],
        "alignment": {"template": alignment.template},
        "embedding_dimension": 256,
    }
    tasks: dict[str, dict[str, Any]] = {"detection": {"file": "detector.onnx"}, "recognition": recognition}
    written = write_pack(copy, "mine", "Mine", tasks, {}, {}, {"lfw": 0.9})
    assert (written.model_id, written.metrics, written.recognition.dimension) == ("mine", {"lfw": 0.9}, 256)
    assert written.recognition.alignment == alignment
    assert (written.recognition.normalization.mean, written.recognition.normalization.std) == (0.0, 1.0)
    assert written.recognition.preprocessing_version == "mine-1"
    with pytest.raises(PackError):
        write_pack(copy, "bad id", "Mine", tasks, {}, {}, {})
    assert not (copy / "manifest.json").exists()

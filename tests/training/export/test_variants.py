"""INT8 variants match the fp32 networks and are listed in the manifest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.checksums import sha256_of
from models.engines.selection import EngineChoice, EnginePreference, available_precisions, open_with_engine
from models.errors import PackError
from models.pack.loading import load_pack
from models.pack.manifest import MANIFEST_FILE, ModelPack
from models.pack.writing import update_variants
from models.vision.alignment import align
from models.vision.detection import Detections, Detector
from models.vision.recognition import Recognizer
from tests.packs import pack_with_int8


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_variants_agree_with_fp32(engine: str, pack: ModelPack, group: NDArray[np.uint8]) -> None:
    if engine not in available_precisions():
        pytest.skip(f"{engine} is not installed")
    seen: list[tuple[Detections, NDArray[np.float32]]] = []
    for choice in (EngineChoice("onnxruntime", "fp32", ""), EngineChoice(engine, "int8", "")):  # type: ignore[arg-type]
        detector = Detector(open_with_engine(pack.detection, choice, EnginePreference()), pack.detection)
        (faces,) = detector.detect([group])
        crops = align(group, (seen[0][0] if seen else faces).landmarks_xy)
        seen.append(
            (
                faces,
                Recognizer(open_with_engine(pack.recognition, choice, EnginePreference()), pack.recognition).embed(
                    crops
                ),
            )
        )
    (faces, vectors), (others, other_vectors) = seen
    assert len(faces) == len(others) > 1
    for row in range(len(faces)):
        off = np.linalg.norm(others.landmarks_xy - faces.landmarks_xy[row], axis=2).mean(1).min()
        assert off < 0.05 * np.linalg.norm(faces.landmarks_xy[row, 0] - faces.landmarks_xy[row, 1])
    assert (vectors * other_vectors).sum(1).min() > 0.96


def test_bundled_variants_lose_less_than_allowed(pack: ModelPack) -> None:
    pack.verify()
    for spec in (pack.detection, pack.recognition):
        (rounded,) = spec.variants
        assert (rounded.precision, rounded.of, rounded.path) == ("bf16", sha256_of(spec.path), None)
        assert (lost := rounded.points_lost("openvino")) is not None
        assert lost <= 0.1


def test_variants_of_another_network_are_rejected(tmp_path: Path) -> None:
    directory = pack_with_int8(tmp_path / "pack")
    before = json.loads((directory / MANIFEST_FILE).read_text())
    named = json.loads((directory / MANIFEST_FILE).read_text())["variants"]
    named["recognition"]["int8"]["of"] = "0" * 64
    with pytest.raises(PackError, match=r"variants\.recognition\.int8\.of"):
        update_variants(directory, named)
    assert json.loads((directory / MANIFEST_FILE).read_text()) == before
    assert load_pack(directory).recognition.variants

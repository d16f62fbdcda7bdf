"""INT8 files belong to their networks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.engines.selection import EngineChoice, EnginePreference, available_precisions, open_with_engine
from models.errors import PackError
from models.pack.loading import load_pack
from models.pack.manifest import INT8_FILE, ModelPack
from models.pack.writing import write_verified
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
        detection, recognition = (
            open_with_engine(spec, choice, EnginePreference()) for spec in (pack.detection, pack.recognition)
        )
        (faces,) = Detector(detection, pack.detection).detect([group])
        crops = align(group, (seen[0][0] if seen else faces).landmarks_xy)
        seen.append((faces, Recognizer(recognition, pack.recognition).embed(crops)))
    (faces, vectors), (others, other_vectors) = seen
    assert len(faces) == len(others) > 1
    for row in range(len(faces)):
        off = np.linalg.norm(others.landmarks_xy - faces.landmarks_xy[row], axis=2).mean(1).min()
        assert off < 0.05 * np.linalg.norm(faces.landmarks_xy[row, 0] - faces.landmarks_xy[row, 1])
    assert (vectors * other_vectors).sum(1).min() > 0.96


def test_an_int8_file_of_another_network_is_not_listed(tmp_path: Path) -> None:
    directory = pack_with_int8(tmp_path / "pack")
    before = json.loads((directory / INT8_FILE).read_text())
    with pytest.raises(PackError, match=r"int8\.recognition\.of"):
        write_verified(directory / "int8.json", {"recognition": {**before["recognition"], "of": "0" * 64}})
    assert json.loads((directory / INT8_FILE).read_text()) == before
    assert load_pack(directory).recognition.int8

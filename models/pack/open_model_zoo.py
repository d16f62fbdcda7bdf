"""Pack of a recognizer of Intel's Open Model Zoo, in OpenVINO's format, with YuNet and a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.pack.evidence import read_evidence
from models.pack.manifest import ModelPack
from models.pack.writing import write_pack
from models.runtime.network import weights_file
from models.vision.alignment import Alignment

NAME: Final = "open-model-zoo"
SIDE_PX: Final = 128
TEMPLATE: Final = ((0.3156, 0.4616), (0.6827, 0.4616), (0.5003, 0.6405), (0.3495, 0.8247), (0.6534, 0.8247))
"""Landmarks as shares of the crop's side (README.md of face-reidentification-retail-0095)."""
ALIGNMENT: Final = Alignment(SIDE_PX, tuple((x * SIDE_PX, y * SIDE_PX) for x, y in TEMPLATE))


def build_open_model_zoo_pack(
    directory: Path, xml: Path, weights: Path, detector: Path, provenance: Mapping[str, Mapping[str, str]]
) -> ModelPack:
    """Write the pack into an empty directory.

    Args:
        xml: face-reidentification-retail-0095.xml, and ``weights`` its .bin.
        detector: YuNet.
        provenance: of ``recognizer`` and ``detector``, each with ``from``, ``file``, ``sha256`` and ``license``.

    Raises:
        PackError: the pack does not load.
    """
    measurements = read_evidence(NAME)
    found, recognizer = directory / "detector.onnx", directory / "recognizer.xml"
    found.write_bytes(detector.read_bytes())
    recognizer.write_bytes(xml.read_bytes())
    weights_file(recognizer).write_bytes(weights.read_bytes())
    tasks: dict[str, dict[str, Any]] = {
        "detection": {
            "file": found.name,
            "preprocessing": {"mean": 0.0, "std": 1.0},
            "color": "BGR",
            "head": "yunet",
            "preprocessing_version": "opencv-yunet-1",
        },
        "recognition": {
            "file": recognizer.name,
            "preprocessing": "embedded",
            "color": "BGR",
            "preprocessing_version": "retail-0095-128",
            "input_size": [SIDE_PX, SIDE_PX],
            "alignment": {"template": ALIGNMENT.template},
            "embedding_dimension": 256,
        },
    }
    about = "Open Model Zoo 0095 with YuNet"
    return write_pack(directory, NAME, about, tasks, measurements["calibration"], provenance, measurements["metrics"])

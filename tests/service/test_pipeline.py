"""The largest of several faces is chosen alone, and each recogniser gets the crops it was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.alignment import STANDARD, Alignment, align
from models.detection import Detector
from models.pack import BUNDLED
from models.recognition import Recogniser
from service.client import Kith
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg


def test_only_the_largest_face_is_identified(kith: Kith, gallery: str, group: NDArray[np.uint8]) -> None:
    everyone = kith.detect(jpeg(group)).images[0].faces
    largest = max(everyone, key=lambda f: (f.box[2] - f.box[0]) * (f.box[3] - f.box[1]))
    (result,) = kith.identify(gallery, jpeg(group), faces="largest", check_quality=False).results
    assert result.face is not None
    assert result.face.box == largest.box


def test_a_recogniser_is_given_crops_by_its_own_alignment(
    kith: Kith, tmp_path: Path, detector: Detector, recogniser: Recogniser, astronaut: NDArray[np.uint8]
) -> None:
    closer = Alignment(112, tuple((1.3 * x - 17, 1.3 * y - 30) for x, y in STANDARD.template))
    pack = Path(shutil.copytree(BUNDLED, tmp_path / "closer"))
    manifest = json.loads((pack / "manifest.json").read_text())
    manifest["tasks"]["recognition"]["alignment"] = {"template": closer.template}
    del manifest["calibration"]  # it is that of other crops, and would be refused
    (pack / "manifest.json").write_text(json.dumps(manifest))
    photo = jpeg(astronaut, 100)
    with embedded(load_settings(pack=pack, data_dir=tmp_path, log_level="WARNING")) as url, Kith(url) as own:
        (found,) = own.embed(photo).images[0].faces
    (usual,) = kith.embed(photo).images[0].faces
    assert found.quality == usual.quality
    (faces,) = detector.detect([astronaut])
    (expected,) = recogniser.embed(align(astronaut, faces.landmarks_xy[:1], closer))
    (standard,) = recogniser.embed(align(astronaut, faces.landmarks_xy[:1]))
    assert float(expected @ np.array(found.embedding)) > 0.99
    assert float(expected @ standard) < 0.98

"""InsightFace's routing chooses the networks of a folder without a manifest; other files are ignored by name."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.verification import run_networks
from models.vision.alignment import insightface_alignment, similarity_transforms
from service.cli.tools.doctor import diagnose
from service.settings import load_settings
from tests.networks import color_network

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from insightface.utils.face_align import estimate_norm

Write = Callable[[Path], object]


def images(side: int, batch: int | str = 1) -> list[int | str]:
    return [batch, 3, side, side]


def _damaged(path: Path) -> None:
    path.write_bytes((BUNDLED_PACK / "recognizer.onnx").read_bytes()[:5000])


def _custom(path: Path) -> None:
    model = onnx.load(color_network(path))
    model.graph.node.append(onnx.helper.make_node("Mine", ["images"], ["mine"], domain="own"))
    onnx.save(model, path)


LANDMARKS = partial(color_network, image=images(192), numbers=3309, declared=[1, 3309])
OTHER_FILES: dict[str, tuple[Write, str]] = {
    "landmarks, of InsightFace": (LANDMARKS, "no face crop of 192x192"),
    "a swapper of InsightFace": (
        lambda p: color_network(p, images(128), 3, declared=[1, 3], further_inputs=1),
        "2 inputs and 1 outputs",
    ),
    "a damaged file": (_damaged, "is not an ONNX file"),
    "custom operators": (_custom, "'Mine' of 'own'"),
    "an image per image": (lambda p: color_network(p, images(512), declared=[1, 3, 512, 512]), "are no embedding"),
    "channels last": (lambda p: color_network(p, [1, 112, 112, 3], axes=(1, 2)), "takes no images"),
    "an open size": (lambda p: color_network(p, ["batch", 3, "height", "width"]), "no face crop of 0x0"),
    "pixels as bytes": (lambda p: color_network(p, dtype=TensorProto.INT8), "has another type"),
    "two vectors": (lambda p: color_network(p, outputs=2), "a network with 2 outputs"),
    "a detector without points": (lambda p: color_network(p, images(640), 1, outputs=6), "6 outputs"),
    "an emotion network": (lambda p: color_network(p, numbers=8, declared=["batch", 8]), "a further recognizer"),
}
"""Further networks, named so that they come first."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory laid out like InsightFace's packs."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(BUNDLED_PACK / "detector.onnx", folder / "det_500m.onnx")
    color_network(folder / "w600k_mbf.onnx")
    return folder


@pytest.mark.parametrize("what", OTHER_FILES)
def test_another_network_neither_stops_the_start_nor_replaces_the_recognizer(folder: Path, what: str) -> None:
    write, reason = OTHER_FILES[what]
    write(folder / "a.onnx")
    pack = load_pack(folder)
    pack.verify()
    assert (pack.detection.path.name, pack.recognition.path.name) == ("det_500m.onnx", "w600k_mbf.onnx")
    assert pack.recognition.dimension == 64
    assert reason in pack.ignored["a.onnx"]
    (folder / "w600k_mbf.onnx").unlink()
    if reason == "a further recognizer":  # the only candidate, as in InsightFace
        assert load_pack(folder).recognition.path.name == "a.onnx"
        return
    with pytest.raises(PackError, match=r"no recognizer among mine/\*\.onnx; ignored a\.onnx: ") as refused:
        load_pack(folder)
    assert refused.value.field == "tasks.recognition"
    assert reason in refused.value.problem


def test_the_first_detector_and_recognizer_win(folder: Path) -> None:
    shutil.copy(folder / "det_500m.onnx", folder / "det_more.onnx")
    color_network(folder / "x.onnx")
    (folder / "._det.onnx").write_bytes(b"\0\5\26\7 made by macOS")
    assert load_pack(folder).ignored == {
        "det_more.onnx": "a further detector; det_500m.onnx is used",
        "x.onnx": "a further recognizer; w600k_mbf.onnx is used",
    }


@pytest.mark.parametrize("side", [112, 128, 224, 256, 336, 384])
def test_crops_match_insightface(side: int, rng: np.random.Generator) -> None:
    landmarks: NDArray[np.float32] = rng.uniform(0, 200, (5, 2)).astype(np.float32)
    alignment = insightface_alignment(side)
    assert alignment is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = estimate_norm(landmarks, side)
    np.testing.assert_allclose(similarity_transforms(landmarks[None], alignment)[0], theirs, atol=1e-4 * side)


def test_the_service_names_what_it_ignores(folder: Path, tmp_path: Path) -> None:
    LANDMARKS(folder / "1k3d68.onnx")
    settings = load_settings(pack=folder, data_dir=tmp_path / "data")
    assert run_networks(folder).endswith("embeddings have 64 dimensions; ignored 1k3d68.onnx")
    (said,) = [check.detail for check in diagnose(settings) if check.what == "1k3d68.onnx"]
    assert said.startswith("ignored: InsightFace defines no face crop of 192x192")

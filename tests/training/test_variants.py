"""INT8 variants: made from a pack's own files, the same recogniser and detector, and named in the manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from models.alignment import align
from models.detection import Detector, Faces
from models.engines import Choice, Wish, abilities, open_chosen
from models.errors import PackError
from models.pack import BUNDLED, MANIFEST, ModelPack, load_pack, sha256_of, update_variants
from models.recognition import Recogniser
from training.export import widen
from training.quantisation import delicate, quantise
from training.report import variant_rows


def layers(path: Path) -> dict[str, bool]:
    """Of every layer with weights, whether what it is fed was INT8."""
    graph = onnx.load(str(path)).graph
    made_by = {output: node.op_type for node in graph.node for output in node.output}
    return {
        node.name: made_by.get(node.input[1]) == "DequantizeLinear"
        for node in graph.node
        if node.op_type in ("Conv", "Gemm")
    }


@pytest.mark.parametrize("task", ["detection", "recognition"])
def test_only_the_delicate_layers_keep_their_numbers(task: str, pack: ModelPack, tmp_path: Path) -> None:
    spec = getattr(pack, task)
    widen(spec.path, tmp_path / "wide.onnx")
    kept = delicate(tmp_path / "wide.onnx")
    batches = [np.random.default_rng(0).uniform(-1, 1, (2, 3, 112, 112)).astype(np.float32)] * 2
    if task == "detection":
        batches = [np.random.default_rng(0).uniform(-1, 1, (1, 3, 64, 96)).astype(np.float32)]
    quantise(tmp_path / "wide.onnx", tmp_path / "small.onnx", batches, kept)
    made = layers(tmp_path / "small.onnx")
    assert {name for name, small in made.items() if not small} == kept
    assert layers(next(v.path for v in spec.variants if v.path is not None)) == made
    assert 2 <= len(kept) < len(made) / 2


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_variant_is_the_same_recogniser_and_detector(engine: str, pack: ModelPack, group: NDArray[np.uint8]) -> None:
    if engine not in abilities():
        pytest.skip(f"{engine} is not installed")
    seen: list[tuple[Faces, NDArray[np.float32]]] = []
    for choice in (Choice("onnxruntime", "fp32", ""), Choice(engine, "int8", "")):  # type: ignore[arg-type]
        detector = Detector(open_chosen(pack.detection, choice, Wish()), pack.detection)
        (faces,) = detector.detect([group])
        crops = align(group, (seen[0][0] if seen else faces).landmarks_xy)
        seen.append((faces, Recogniser(open_chosen(pack.recognition, choice, Wish()), pack.recognition).embed(crops)))
    (faces, vectors), (others, other_vectors) = seen
    assert len(faces) == len(others) > 1
    for row in range(len(faces)):
        off = np.linalg.norm(others.landmarks_xy - faces.landmarks_xy[row], axis=2).mean(1).min()
        assert off < 0.05 * np.linalg.norm(faces.landmarks_xy[row, 0] - faces.landmarks_xy[row, 1])
    assert (vectors * other_vectors).sum(1).min() > 0.995


def test_the_bundled_variants_keep_the_promise(pack: ModelPack) -> None:
    pack.verify()
    for spec in (pack.detection, pack.recognition):
        (small,) = (variant for variant in spec.variants if variant.precision == "int8")
        assert small.of == sha256_of(spec.path)
        assert small.path is not None
        assert small.path.parent != spec.path.parent  # FaceAnalysis would open it
    (small,) = (variant for variant in pack.recognition.variants if variant.precision == "int8")
    assert small.points_lost is not None
    assert small.points_lost <= 0.1
    assert {name.split(",")[0] for name, _ in variant_rows(pack)} == {"detector", "recogniser"}


def test_variants_of_another_network_are_not_written(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(BUNDLED, tmp_path / "pack"))
    before = json.loads((directory / MANIFEST).read_text())
    named = json.loads((directory / MANIFEST).read_text())["variants"]
    named["recognition"]["int8"]["of"] = "0" * 64
    with pytest.raises(PackError, match=r"variants\.recognition\.int8\.of"):
        update_variants(directory, named)
    assert json.loads((directory / MANIFEST).read_text()) == before
    assert load_pack(directory).recognition.variants

"""Generated packs, so that tests can distinguish two recognizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import openvino
from onnx import helper, numpy_helper

from models.checksums import sha256_of
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import INT8_FILE, MANIFEST_FILE, ModelPack
from models.pack.writing import replace_calibration
from models.runtime.network import network_sha256
from tests.networks import warmth

BUNDLED_DIMENSION: Final = load_pack(BUNDLED_PACK).recognition.dimension
"""Dimension of the bundled recognizer's embeddings."""
PROJECTED = 96


def pack_with_int8(directory: Path) -> Path:
    """Copy the bundled pack into a new directory, with a copy of its recognizer as an INT8 file of little loss."""
    shutil.copytree(BUNDLED_PACK, directory)
    (directory / "int8").mkdir()
    shutil.copy(directory / "recognizer.onnx", directory / "int8" / "recognizer.onnx")
    own = sha256_of(directory / "recognizer.onnx")
    engines = {engine: {"accepted": True} for engine in ("openvino", "onnxruntime")}
    listed = {"recognition": {"file": "int8/recognizer.onnx", "sha256": own, "of": own, "engines": engines}}
    (directory / INT8_FILE).write_text(json.dumps(listed))
    return directory


def pack_in_openvinos_format(directory: Path) -> Path:
    """Copy the bundled pack into a new directory, with its recognizer in OpenVINO's format, without a calibration."""
    shutil.copytree(BUNDLED_PACK, directory)
    recognizer = directory / "recognizer.xml"
    model = openvino.Core().read_model(directory / "recognizer.onnx")
    openvino.save_model(model, recognizer, compress_to_fp16=False)
    (directory / "recognizer.onnx").unlink()
    document = json.loads((directory / MANIFEST_FILE).read_text())
    del document["calibration"]
    _write(directory, document, "recognition", file=recognizer.name, sha256=network_sha256(recognizer))
    return directory


def judging_pack(folder: Path, **task: object) -> ModelPack:
    """Copy of the bundled pack with the liveness model of ``warmth``."""
    directory = Path(shutil.copytree(BUNDLED_PACK, folder / "judging"))
    path = warmth(directory / "liveness.onnx")
    document = json.loads((directory / MANIFEST_FILE).read_text()) | {"model_id": "judging"}
    _write(directory, document, "liveness", **{"file": path.name, "sha256": sha256_of(path)} | task)
    pack = load_pack(directory)
    pack.verify()
    return pack


def projected_pack(folder: Path, name: str = "projected", dimension: int = PROJECTED, seed: int = 7) -> ModelPack:
    """Copy of the bundled pack with embeddings rotated and projected to ``dimension``. It is nearly as accurate, but
    its vectors are incompatible with all other recognizers. It claims the bundled pack's calibration.
    """
    source = load_pack(BUNDLED_PACK)
    directory = Path(shutil.copytree(BUNDLED_PACK, folder / name))
    path = directory / source.recognition.path.name
    model = onnx.load(path)
    output = model.graph.output[0]
    turned, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(source.recognition.dimension,) * 2))
    matrix = np.ascontiguousarray(turned[:, :dimension], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(matrix, "projection"))
    model.graph.node.append(helper.make_node("MatMul", [output.name, "projection"], ["projected"]))
    output.name = "projected"
    output.type.tensor_type.shape.dim[1].dim_value = dimension
    onnx.save(model, path)
    document = json.loads((directory / MANIFEST_FILE).read_text()) | {"model_id": name, "display_name": name}
    _write(directory, document, "recognition", sha256=sha256_of(path), embedding_dimension=dimension)
    assert source.calibration is not None
    fingerprint = load_pack(directory).recognition.fingerprint()
    replace_calibration(load_pack(directory), {**source.calibration, "recognizer": fingerprint})
    pack = load_pack(directory)
    pack.verify()
    return pack


def _write(directory: Path, manifest: dict[str, Any], task: str, **changes: object) -> None:
    """Write a manifest with changes of a task."""
    manifest["tasks"][task] = manifest["tasks"].get(task, {}) | changes
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))

"""Generated packs, so that tests can distinguish two recognizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import openvino
from onnx import helper, numpy_helper

from models.checksums import sha256_of
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import INT8_FILE, MANIFEST_FILE, ModelPack
from models.pack.writing import replace_calibration
from models.runtime.network import network_sha256

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
    core = openvino.Core()
    recognizer = directory / "recognizer.xml"
    openvino.save_model(core.read_model(directory / "recognizer.onnx"), recognizer, compress_to_fp16=False)
    (directory / "recognizer.onnx").unlink()
    document = json.loads((directory / MANIFEST_FILE).read_text())
    document["tasks"]["recognition"] |= {"file": recognizer.name, "sha256": network_sha256(recognizer)}
    del document["calibration"]
    (directory / MANIFEST_FILE).write_text(json.dumps(document))
    return directory


def warmth(path: Path, batch: int | str = "batch", classes: bool = False, side: int = 80) -> Path:
    """Network that classifies reddish faces as live and bluish ones as pictures. Returns (n,) probabilities, or
    logits of (picture, live).
    """
    weights = np.array([[0, 20], [0, 0], [0, -20]] if classes else [[20], [0], [-20]], np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["color"], keepdims=0),
        helper.make_node("MatMul", ["color", "weights"], ["logits"]),
    ]
    if not classes:
        nodes += [
            helper.make_node("Sigmoid", ["logits"], ["both"]),
            helper.make_node("Reshape", ["both", "flat"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "warmth",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, 3, side, side])],
        [
            helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [batch, 2])
            if classes
            else helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [batch])
        ],
        initializer=[
            numpy_helper.from_array(np.array([2, 3], np.int64), "axes"),
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.array([-1], np.int64), "flat"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def judging_pack(folder: Path, batch: int | str = "batch", **task: object) -> ModelPack:
    """Copy of the bundled pack with the liveness model of ``warmth``."""
    directory = Path(shutil.copytree(BUNDLED_PACK, folder / "judging"))
    path = warmth(directory / "liveness.onnx", batch)
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    manifest["tasks"]["liveness"] = {"file": path.name, "sha256": sha256_of(path)} | task
    manifest |= {"model_id": "judging"}
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
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
    (output,) = model.graph.output
    turned, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(source.recognition.dimension,) * 2))
    matrix = np.ascontiguousarray(turned[:, :dimension], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(matrix, "projection"))
    model.graph.node.append(helper.make_node("MatMul", [output.name, "projection"], ["projected"]))
    batch = output.type.tensor_type.shape.dim[0].dim_param or "batch"
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("projected", onnx.TensorProto.FLOAT, [batch, dimension]))
    onnx.checker.check_model(model)
    onnx.save(model, path)
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    manifest |= {"model_id": name, "display_name": name}
    manifest["tasks"]["recognition"] |= {"sha256": sha256_of(path), "embedding_dimension": dimension}
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
    pack = load_pack(directory)
    assert source.calibration is not None
    replace_calibration(pack, {**source.calibration, "recognizer": pack.recognition.fingerprint()})
    pack = load_pack(directory)
    pack.verify()
    return pack

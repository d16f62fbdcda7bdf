"""Liveness network of two MiniFASNets, joined to one ONNX file.

Minivision, Silent-Face-Anti-Spoofing (Apache-2.0): MiniFASNetV2 sees 2.7 face sizes, MiniFASNetV1SE 4. Both see 80x80
pixels, BGR in 0..255, and return logits; class 1 is a live face, and the score is the mean of its two probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from models.checksums import sha256_of
from models.errors import PackError
from models.pack.manifest import MANIFEST_FILE
from models.runtime.onnx_check import check_model, read_model

NAME: Final = "minifasnet"
SIDE_PX: Final = 80
FACE_SIZES: Final = (2.7, 4.0)
"""Sides of the two crops, in sides of the face's box."""
LIVE_CLASS: Final = 1
THRESHOLD: Final = 0.5


def join_networks(files: Sequence[Path]) -> onnx.ModelProto:
    """Join the ONNX files, in the order of `FACE_SIZES`.

    The result maps ``input`` (batch, 3, 80, 160), the crops side by side, to ``score`` (batch, 1) in [0, 1].

    Raises:
        PackError: a file is damaged, or no such network.
    """
    networks = [read_model(file) for file in files]
    nodes, constants = [], [numpy_helper.from_array(np.array([axis]), f"axis_{axis}") for axis in (LIVE_CLASS, 3)]
    probabilities = []
    for number, network in enumerate(networks):
        check_model(network, files[number].name)
        network = compose.add_prefix(network, f"network_{number}/")
        given, found = network.graph.input[0].name, network.graph.output[0].name
        ends = [numpy_helper.from_array(np.array([SIDE_PX * (number + n)]), f"end_{number}_{n}") for n in (0, 1)]
        constants += [*ends, *network.graph.initializer]
        nodes.append(helper.make_node("Slice", ["input", ends[0].name, ends[1].name, "axis_3"], [given]))
        nodes += network.graph.node
        probabilities.append(f"probabilities_{number}")
        nodes.append(helper.make_node("Softmax", [found], [probabilities[-1]], axis=1))
    nodes.append(helper.make_node("Mean", probabilities, ["mean"]))
    nodes.append(helper.make_node("Gather", ["mean", f"axis_{LIVE_CLASS}"], ["score"], axis=1))
    batch = networks[0].graph.input[0].type.tensor_type.shape.dim[0].dim_value or "batch"
    sides = [batch, 3, SIDE_PX, SIDE_PX * len(networks)]
    graph = helper.make_graph(
        nodes,
        NAME,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, sides)],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [batch, 1])],
        constants,
    )
    versions = {"opset_imports": networks[0].opset_import, "ir_version": max(each.ir_version for each in networks)}
    model = helper.make_model(graph, **versions)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise PackError(NAME, f"the networks do not fit each other ({error})") from error
    return model


def write_minifasnet(directory: Path, files: Sequence[Path]) -> None:
    """Write the network and a manifest with its liveness task into a directory. Raises PackError as `join_networks`."""
    path = directory / "liveness.onnx"
    onnx.save(join_networks(files), str(path))
    task = {
        "file": path.name,
        "sha256": sha256_of(path),
        "preprocessing": {"mean": 0.0, "std": 1.0},
        "color": "BGR",
        "input_size": [SIDE_PX * len(FACE_SIZES), SIDE_PX],
        "face_sizes": list(FACE_SIZES),
        "threshold": THRESHOLD,
    }
    document = {
        "model_id": NAME,
        "tasks": {"liveness": task},
        "provenance": {"liveness": [{"file": file.name, "sha256": sha256_of(file)} for file in files]},
    }
    (directory / MANIFEST_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

"""Writing of ONNX files: weights stored in fp16, metadata, and the way back to fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MIN_FP16_ELEMENTS: Final = 256
"""Smaller tensors stay fp32, since they save nothing."""


def finalize_onnx(source: Path, target: Path, metadata: dict[str, str], fp16_weights: bool = True) -> None:
    """Write a network without the exporter's metadata, optionally with weights in fp16 and casts to fp32.

    Runtimes fold the casts when they load the file: computation, inputs and outputs stay fp32, as readers of
    InsightFace packs expect.
    """
    model = onnx.load(str(source))
    graph = model.graph
    _fuse_slopes(graph)
    casts: list[onnx.NodeProto] = []
    for tensor in list(graph.initializer):
        values = numpy_helper.to_array(tensor)
        # Vectors stay fp32: INT8 scales must be initializers of the nodes that use them.
        small = values.ndim < 2 or values.size < MIN_FP16_ELEMENTS
        if not fp16_weights or tensor.data_type != TensorProto.FLOAT or small:
            continue
        name = f"{tensor.name}.fp16"
        graph.initializer.remove(tensor)
        graph.initializer.append(numpy_helper.from_array(values.astype(np.float16), name))
        # The name must not start with "Sub" or "Mul": readers take such first nodes for a built-in normalization.
        casts.append(helper.make_node("Cast", [name], [tensor.name], name=f"widen_{len(casts)}", to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    # The exporter's metadata contains local paths.
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del graph.metadata_props[:], graph.value_info[:], model.metadata_props[:]
    helper.set_model_props(model, metadata)
    model.producer_name = "kith"
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(target))


def _fuse_slopes(graph: onnx.GraphProto) -> None:
    """Replace each PRelu of one slope by LeakyRelu, which ONNX Runtime fuses into the convolution before it."""
    numbers = (tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT)
    single = {tensor.name: tensor for tensor in numbers if np.prod(tensor.dims) == 1}
    for node in graph.node:
        if node.op_type == "PRelu" and node.input[1] in single:
            slope = numpy_helper.to_array(single[node.input[1]]).item()
            node.op_type = "LeakyRelu"
            del node.input[1]
            node.attribute.append(helper.make_attribute("alpha", float(slope)))
    used = {name for node in graph.node for name in node.input}
    for name, tensor in single.items():
        if name not in used:
            graph.initializer.remove(tensor)


def restore_fp32_weights(source: Path, target: Path) -> None:
    """Write a network of `finalize_onnx` with fp32 weights again, as a runtime does on loading."""
    model = onnx.load(str(source))
    graph = model.graph
    fp16_weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    casts = [node for node in graph.node if node.op_type == "Cast" and node.input[0] in fp16_weights]
    for node in casts:
        tensor = fp16_weights[node.input[0]]
        graph.initializer.append(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), node.output[0])
        )
        graph.initializer.remove(tensor)
        graph.node.remove(node)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(target))

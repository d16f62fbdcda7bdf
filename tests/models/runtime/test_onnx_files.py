"""Networks are written so that runtimes fuse what they can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.runtime.onnx_files import finalize_onnx
from models.runtime.onnx_runtime import OnnxNetwork


@pytest.mark.parametrize("slopes", [[-0.6], [0.2, -1.5]], ids=["one slope", "a slope a channel"])
def test_an_activation_of_one_slope_becomes_one_that_is_fused(
    slopes: list[float], tmp_path: Path, rng: np.random.Generator
) -> None:
    slope = numpy_helper.from_array(np.array(slopes, np.float32).reshape(-1, 1, 1), "slope")
    nodes = [helper.make_node("PRelu", [a, "slope"], [b]) for a, b in (("input", "middle"), ("middle", "output"))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 3, 3]) for name in ("input", "output")]
    model = helper.make_model(
        helper.make_graph(nodes, "activations", ends[:1], ends[1:], [slope]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    onnx.save(model, str(source))
    finalize_onnx(source, target, {})
    written = onnx.load(str(target)).graph
    fused = len(slopes) == 1
    assert {node.op_type for node in written.node} == {"LeakyRelu" if fused else "PRelu"}
    assert len(written.initializer) == (0 if fused else 1)
    x = rng.normal(size=(1, 2, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(OnnxNetwork(target).run(x)[0], OnnxNetwork(source).run(x)[0], rtol=1e-6)

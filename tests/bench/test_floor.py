"""Operation counts match hand calculations, and tables show the measurements."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench import operators, variants
from bench.floor import report
from bench.memory import is_flat, slope
from bench.operations import Work, work_of
from bench.rates import SIDE, core_ms, product
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork


def network(path: Path) -> Path:
    """A grouped convolution of stride 2, followed by a linear layer with 5 outputs."""
    kernels = numpy_helper.from_array(np.ones((4, 1, 3, 3), np.float32), "kernels")
    layer = numpy_helper.from_array(np.ones((5, 4 * 4 * 4), np.float32), "layer")
    nodes = [
        helper.make_node("Conv", ["input", "kernels"], ["seen"], group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["seen"], ["flat"]),
        helper.make_node("Gemm", ["flat", "layer"], ["output"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 2, "h", "w"])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 5])],
        [kernels, layer],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def test_operations(tmp_path: Path) -> None:
    work = work_of(network(tmp_path / "network.onnx"), (2, 8, 8))
    # 4 maps of 4x4, nine products each, for a group has one channel; then 64 products for each of 5.
    assert work == Work(4 * 16 * 9 + 64 * 5, 4 * 9 + 64 * 5)
    assert work.operations == 2 * work.multiply_adds


def test_operations_grow_with_the_canvas() -> None:
    small, large = (work_of(BUNDLED_PACK / "detector.onnx", (3, side, side)) for side in (256, 512))
    assert large.multiply_adds == 4 * small.multiply_adds


@pytest.mark.parametrize("int8", [False, True])
def test_the_product_is_one(tmp_path: Path, int8: bool) -> None:
    onnx.save(product(int8), tmp_path / "product.onnx")
    items = np.random.default_rng(3).random((1, 1, SIDE, SIDE), np.float32)
    (most,) = OnnxNetwork(tmp_path / "product.onnx").run(items)
    weights = numpy_helper.to_array(product(False).graph.initializer[0])
    assert most == pytest.approx((items[0, 0] @ weights).max(), rel=0.05)


def test_processor_time_is_counted_per_item() -> None:
    values = np.ones(100_000)
    one = core_ms(lambda: values.sum(), 1, at_least_s=0.01)
    assert 0 <= one["min"] <= one["median"] <= one["max"]


def test_report_adds_up() -> None:
    stage = {"name": "decoding", "floor_ms": 1.0, "limit": "bytes", "measured": {"median": 2.0, "min": 1.9, "max": 3.0}}
    document = {
        "machine": "m",
        "operations_per_s": {"onnxruntime fp32": 1e11},
        "bytes_per_s": {"1": {"copy": 2e10}},
        "networks": {"detector": "onnxruntime fp32", "recognizer": "onnxruntime fp32"},
        "stages": {"lfw": [stage, stage | {"name": "quality", "floor_ms": 3.0}]},
    }
    text = report(document, {"lfw": 5.0})
    assert "| decoding | 1.000 | bytes | 2.000 (1.900 to 3.000) | 2.0 |" in text
    assert "| **sum** | **4.00** | | **4.00** | **1.0** |" in text
    assert "1.25 times the sum of its stages' floors (the goal is 1.3: met)" in text


def test_the_runtimes_own_profiles_name_convolutions() -> None:
    batch = np.zeros((1, 3, 256, 256), np.float32)
    for network in operators.networks(load_pack(BUNDLED_PACK).detection):
        assert "Conv" in operators.row("detector", network, batch).split(" | ")[3].split(" ")[0]
    assert operators.dearest({"a": 1.0, "b": 3.0}) == "b 75 %, a 25 %"


def test_the_variants_table_shows_the_measurements() -> None:
    assert variants.TABLE.read_text() == variants.markdown(json.loads(variants.RESULT.read_text()))


def test_memory_is_flat_or_not() -> None:
    asked = list(range(0, 100_001, 500))
    warming = [300 + 100 * (1 - 0.999 ** (n / 100)) if n < 40_000 else 400.0 for n in asked]
    leaking = [300 + n / 1000 for n in asked]
    assert slope(asked, warming) == pytest.approx(0, abs=0.01)
    assert slope(asked, leaking) == pytest.approx(10)
    assert is_flat({"slope_mb": 0.1, "statuses": {"200": 9, "422": 1}})
    assert not is_flat({"slope_mb": 10.0, "statuses": {"200": 9}})
    assert not is_flat({"slope_mb": 0.1, "statuses": {"200": 9, "500": 1}})

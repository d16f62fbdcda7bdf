"""Measure the machine's limits: multiply-adds a second in each numeric format, bytes a second from memory.

The runtimes that run the networks also multiply the matrices. A network reaches this rate only if it is one large
product.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.engines.selection import available_precisions
from models.runtime.network import Network
from models.runtime.onnx_runtime import OnnxNetwork, available_cores
from models.runtime.openvino_network import OpenVinoNetwork

SIDE: Final = 1024
BATCH: Final = 8
"""Exceeds most caches, and equals a bucket size, so that no padding is added."""
BYTES: Final = 256_000_000
REPEATS: Final = 7


def matrix_rates() -> dict[str, float]:
    """Return operations a second by engine and numeric format, such as ``openvino bf16``, with all cores. A
    multiply-add counts as two operations."""
    operations = 2 * BATCH * SIDE**3
    items = np.random.default_rng(0).random((BATCH, 1, SIDE, SIDE), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        return {name: operations / best(lambda n=network: n.run(items)) for name, network in _networks(Path(folder))}  # type: ignore[misc]


def _networks(folder: Path) -> Iterator[tuple[str, Network]]:
    for engine, precisions in available_precisions().items():
        for precision in sorted(precisions):
            path = folder / f"{precision}.onnx"
            onnx.save(product(precision == "int8"), path)
            if engine == "openvino":
                yield f"{engine} {precision}", OpenVinoNetwork(path, precision)
            else:
                yield f"{engine} {precision}", OnnxNetwork(path, precision=precision)


def product(int8: bool) -> onnx.ModelProto:
    """Build a model that multiplies (n, 1, SIDE, SIDE) matrices by one constant, in floating point or with both rounded
    to INT8 (QDQ)."""
    weights = (np.random.default_rng(1).random((SIDE, SIDE), np.float32) - 0.5).astype(np.float32)
    nodes, initializers, left, right = [], [], "input", "weights"
    if int8:
        scale = numpy_helper.from_array(np.array(1 / 127, np.float32), "scale")
        zero = numpy_helper.from_array(np.array(0, np.int8), "zero")
        rounded = numpy_helper.from_array(np.round(weights * 127).astype(np.int8), "rounded")
        nodes = [
            helper.make_node("QuantizeLinear", ["input", "scale", "zero"], ["quantized"]),
            helper.make_node("DequantizeLinear", ["quantized", "scale", "zero"], ["left"]),
            helper.make_node("DequantizeLinear", ["rounded", "scale", "zero"], ["right"]),
        ]
        initializers, left, right = [scale, zero, rounded], "left", "right"
    else:
        initializers = [numpy_helper.from_array(weights, "weights")]
    shape: list[str | int | None] = ["batch", 1, SIDE, SIDE]
    # A reduction follows, so that the product is measured, and not the write of its result.
    nodes += [
        helper.make_node("MatMul", [left, right], ["product"]),
        helper.make_node("ReduceMax", ["product"], ["output"], axes=[1, 2, 3], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch"])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def bandwidth(threads: int) -> dict[str, float]:
    """Return bytes a second, read and written, of a copy and of a sum of two arrays into a third (STREAM's *copy*,
    *add*)."""
    each = BYTES // 4 // threads
    sets: list[tuple[Any, ...]] = [tuple(np.ones(each, np.float32) for _ in range(3)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def run(work: Callable[..., Any]) -> Callable[[], Any]:
            return lambda: list(pool.map(lambda arrays: work(*arrays), sets))

        total = each * 4 * threads
        return {
            "copy": 2 * total / best(run(lambda a, b, _: np.copyto(a, b))),
            "add": 3 * total / best(run(lambda a, b, c: np.add(b, c, out=a))),
        }


def best(function: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several runs, which other load on the machine affects least."""
    function()
    return min(seconds(function) for _ in range(REPEATS))


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def core_ms(function: Callable[[], Any], items: int, at_least_s: float = 0.3) -> dict[str, float]:
    """Return processor milliseconds of all threads per item: median, minimum and maximum of several runs."""
    function()
    function()
    runs = max(1, round(at_least_s / REPEATS / max(seconds(function), 1e-6)))
    samples = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(runs):
            function()
        samples.append((time.process_time() - start) * 1000 / runs / items)
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def cores() -> int:
    return available_cores()
